"""`diagnose`: how far each group of weights alone moves the model."""
