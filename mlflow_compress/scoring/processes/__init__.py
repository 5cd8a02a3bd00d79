"""Scoring with several processes: shares of a pass, jobs for other processes, and the team that runs them."""
