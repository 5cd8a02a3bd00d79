"""The sweep: many variants of one baseline in one process, each with a main run of its own."""
