"""What an evaluation consists of: baseline, noise sample, one model's records, their files."""
