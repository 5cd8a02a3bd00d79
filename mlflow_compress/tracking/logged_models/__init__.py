"""Variants as MLflow models: the logged model, the code and packages that it needs, and its registered versions."""
