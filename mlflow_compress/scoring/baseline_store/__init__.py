"""The baseline's head inputs on disk: written once, read by every variant."""
