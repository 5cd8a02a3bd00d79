"""Scoring with several processes: what each takes, how jobs reach them, and how their results come together."""
