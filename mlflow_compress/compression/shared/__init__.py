"""Code that several methods use."""
