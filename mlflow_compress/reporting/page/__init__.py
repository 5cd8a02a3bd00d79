"""The page over variants: one file that compares what every variant changed. Pure: records in, text out."""
