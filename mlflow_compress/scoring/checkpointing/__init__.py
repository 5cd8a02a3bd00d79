"""Unfinished work on disk, from which an interrupted run goes on."""
