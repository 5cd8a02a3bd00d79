"""Generator of the embedded demonstration: an invented world, its texts and questions, and the model's training."""
