"""`judge`: answers of both models to the same instructions, compared and graded."""
