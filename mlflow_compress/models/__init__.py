"""Everything that knows a checkpoint folder: loading, placement, hashes, architectures."""
