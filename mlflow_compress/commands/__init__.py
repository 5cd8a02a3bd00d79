"""Commands, one package each: parameters, what it does, its result, and how that reads as text."""
