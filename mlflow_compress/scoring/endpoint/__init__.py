"""Models that a server computes: what it can, what is asked, how it is asked, and the records that come of it.

`server_probe` finds out what the server can, `questions` are what is asked, `routes` puts them into requests and reads
the answers, `served_answers` asks each of them once, and `endpoint_scorer` is the `Scorer` of such a model.
"""
