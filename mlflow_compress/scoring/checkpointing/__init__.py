"""Unfinished work on disk, from which an interrupted run resumes."""
