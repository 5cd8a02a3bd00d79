"""One tracking store for several processes and machines: who makes it, who works on what, who died, who waits."""
