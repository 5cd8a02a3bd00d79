"""The compression methods, one file each: look-ups in `METHODS` import them all."""
