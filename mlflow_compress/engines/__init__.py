"""Engines, one package each: what computes the numbers of a model."""
