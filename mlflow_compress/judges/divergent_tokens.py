"""Where answers part: no judge model, only both models' greedy answers, and the variant on the baseline's."""

from mlflow_compress.judges.judge_registry import JUDGES, Judge, Judged

JUDGES.register("divergent_tokens")(
    Judge(
        open=lambda settings, folder: lambda inputs: Judged(records=inputs.greedy),
        greedy=True,
        requires="Nothing but both models: each answers every instruction greedily, and scores the baseline's answers.",
        source="Divergent Token Metrics, arXiv 2311.01544",
    )
)
