"""What every metric builds on: inputs, item tables, predictions, the registry."""
