"""What was decided: promotions, moves of aliases, verdicts of gates."""
