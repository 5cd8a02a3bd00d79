"""MLflow traces: how single answers and judgments are shown."""
