"""The main run: progress lines, resuming a failed run, and what is published on the run of one variant."""
