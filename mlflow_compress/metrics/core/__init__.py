"""The common base of all metrics: inputs, item tables, predictions, the registry."""
