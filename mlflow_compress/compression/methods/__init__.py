"""The compression methods, one file each. Every look-up in `METHODS` imports them all."""
