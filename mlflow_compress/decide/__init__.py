"""Decisions from numbers alone: gates, ranks, reasons."""
