"""`evaluate`: the variant against its baseline on the same items."""
