"""Everything that touches MLflow: the store, runs, child projects, the model registry and saved views."""
