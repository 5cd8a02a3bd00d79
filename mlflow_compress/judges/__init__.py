"""Judges of generated answers: sentence embeddings for ConSCompF, and GPT-4 grading as in MT-Bench.

`encoder` opens a sentence encoder, `similarity` turns answers into arrays, `mt_bench` asks an OpenAI-compatible
endpoint for grades, with `prompts`, `parsing` (pure), `endpoint` (the network) and `cache` (what was already graded).
"""

from mlflow_compress.judges.judge_registry import JUDGES, Judge

__all__ = ["JUDGES", "Judge"]
