"""What the missing judgments will take, said before the first call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mlflow_compress.judges.asking import Asker, Question
from mlflow_compress.judges.parsing import Read
from mlflow_compress.transport.spending import BYTES_PER_TOKEN, Price, prompt_bytes


def estimate(asker: Asker, questions: Sequence[Question], read: Read, prices: Mapping[str, Price]) -> str:
    """Return a sentence: how many judgments are kept, how many calls are made, and their tokens and cost, about.

    Tokens follow from the kept replies of the same judge model. Without any, a token of the prompt is four bytes, and
    a reply counts as long as it may be.
    """
    model, past = asker.config.model, asker.past_usage()
    missing = asker.missing(questions, read)
    n_unique = len({asker.key(question) for question in questions})
    said = f"[judge] {model}: {n_unique} judgments, {n_unique - len(missing)} of them kept"
    if not missing:
        return f"{said}; no calls"
    n_bytes = sum(prompt_bytes(question.prompt.messages) for question in missing)
    known = [row for row in past if row.get("prompt_bytes")]
    if known:
        bytes_per_token = sum(row["prompt_bytes"] for row in known) / max(sum(_used(known, "prompt")), 1)
        per_reply = sum(_used(known, "completion")) / len(known)
        basis = f"as in {len(known):,} kept replies"
    else:
        bytes_per_token, per_reply = BYTES_PER_TOKEN, asker.config.max_tokens
        basis = "with replies as long as they may be"
    prompt, completion = n_bytes / bytes_per_token, per_reply * len(missing)
    price = prices.get(model)
    cost = f", cost {price.of(prompt, completion):.4g}" if price else ""
    return (
        f"{said}; {len(missing):,} calls: about {prompt:,.0f} prompt tokens and {completion:,.0f} tokens of replies"
        f"{cost} ({basis}; retries of unreadable replies not counted)"
    )


def _used(rows: Sequence[object], kind: str) -> list[int]:
    return [row["usage"][kind] for row in rows]  # type: ignore[index]
