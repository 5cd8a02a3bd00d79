"""`main`: quantize, evaluate, judge and speed for one variant, under one run."""
