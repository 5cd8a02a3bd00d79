"""The speed stage: the variant in the runtime that it is meant for, timed in turn with its baseline."""
