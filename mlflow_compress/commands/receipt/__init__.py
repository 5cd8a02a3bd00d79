"""Receipts of evaluations, which others check without their store and without a model: written, shown, compared."""
