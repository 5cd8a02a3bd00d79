"""`sweep`: many variants of one baseline, and a scoreboard of all."""
