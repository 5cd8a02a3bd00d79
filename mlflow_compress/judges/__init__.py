"""Judges of generated answers, one file per judge: `similarity` (ConSCompF), `mt_bench` (MT-Bench), `pairwise`, and
`divergent_tokens` (where greedy answers part).

The package `encoders` has what embeds answers for `similarity`. The judges that ask a model share `session`, `asking`,
`prompts` and `grading`.
"""

from mlflow_compress.judges.judge_registry import JUDGES, Judge, Judged, JudgeInputs, chosen_judges, open_judge

__all__ = ["JUDGES", "Judge", "JudgeInputs", "Judged", "chosen_judges", "open_judge"]
