"""Where the movement of a variant comes from: its groups of weights, and the text on which it moves."""
