"""`compare` and `forecast`: two evaluations from their records, without any model."""
