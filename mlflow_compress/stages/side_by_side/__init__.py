"""The page over many variants of one evaluation: what it reads from their runs, and where it is written."""
