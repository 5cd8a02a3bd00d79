"""What several commands need: inputs, past runs, unfinished work, progress, result tables."""
