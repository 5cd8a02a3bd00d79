"""All code that uses MLflow: the store, runs, child projects, the model registry and saved views."""
