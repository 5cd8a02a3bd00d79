"""The costs of a job, before it runs."""
