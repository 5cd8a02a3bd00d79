"""Scoring and generation by vLLM, in a process of vLLM's own environment.

`vllm_worker` is the script that runs there. `vllm_process` is its client. `vllm_model` is a model there as the stages
see it.
"""
