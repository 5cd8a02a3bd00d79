"""Commands that did not end: noted while they run, and done again by `mlflow-compress resume`."""
