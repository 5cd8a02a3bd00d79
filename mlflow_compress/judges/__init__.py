"""Judges of generated answers, one file per judge: `similarity` for ConSCompF, `mt_bench` for MT-Bench.

`encoder` loads the sentence encoders of `similarity`. `grading`, `prompts`, `parsing`, `endpoint` and `judgment_cache`
are parts of `mt_bench`.
"""

from mlflow_compress.judges.judge_registry import JUDGES, Judge, Judged, JudgeInputs, chosen_judges

__all__ = ["JUDGES", "Judge", "JudgeInputs", "Judged", "chosen_judges"]
