"""Statistics on arrays: bootstrap, intervals, tests, sequential decisions."""
