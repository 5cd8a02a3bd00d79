"""`export` and `verify`: a receipt of an evaluation, which others check without its store and without a model."""
