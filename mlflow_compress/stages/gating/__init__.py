"""Parts of the gate: items in random blocks, what is known after each, and the files of the verdict."""
