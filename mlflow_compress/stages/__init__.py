"""The stages of the pipeline. Each takes a configuration, and runs alone or as a child of the main run."""
