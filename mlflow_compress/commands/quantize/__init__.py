"""`quantize`: makes a compressed checkpoint."""
