"""Forward passes: the model's body, tree attention, and the language-model head."""
