"""`report`: one page over the variants of an evaluation."""
