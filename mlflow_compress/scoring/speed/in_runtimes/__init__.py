"""Models in their runtimes, one file each; `model_process` runs it in the runtime's own environment."""
