"""Scoring and generation by the workers of a Ray cluster: shards of a pass, the actors that run them, their results.

`connection` starts Ray or finds it. `workers` hands out tasks and replaces actors that are lost. `cluster_worker` is
what an actor holds: a model. `remote_model` is such a model as the stages see it.
"""
