"""Parts of an evaluation: the baseline, the noise sample, the records of one model, and their files."""
