"""Parts of the judge stage."""
