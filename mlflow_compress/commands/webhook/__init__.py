"""`serve-webhook`: MLflow's registry asks for a decision by its webhooks."""
