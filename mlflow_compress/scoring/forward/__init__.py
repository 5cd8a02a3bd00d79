"""The forward pass: body, tree attention, head."""
