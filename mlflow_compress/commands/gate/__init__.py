"""`gate`: evaluates a checkpoint in blocks of items until a policy's verdict is sure."""
