"""Judges of generated answers, one file per judge: sentence embeddings for ConSCompF, and grading as in MT-Bench.

`similarity` is the judge of ConSCompF, with `encoder` for sentence encoders. `mt_bench` is that of MT-Bench, with
`grading`, `prompts`, `parsing` (pure), `endpoint` (the network) and `judgment_cache` (what was already graded).
"""

from mlflow_compress.judges.judge_registry import JUDGES, Judge, Judged, JudgeInputs, chosen_judges

__all__ = ["JUDGES", "Judge", "JudgeInputs", "Judged", "chosen_judges"]
