"""`plan`: what every stage would cost."""
