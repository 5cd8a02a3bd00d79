"""What scoring and answering cost, counted before anything runs."""
