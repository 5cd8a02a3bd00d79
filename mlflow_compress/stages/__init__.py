"""The stages: a configuration and the parts below, put together. Each runs alone or as a child of `main`."""
