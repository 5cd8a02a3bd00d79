"""`compare`: two evaluations from their records or prediction files, without any model."""
