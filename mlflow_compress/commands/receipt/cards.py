"""What a receipt is shown by: a section of a model card with its `model-index`, a pull request's table, a badge."""

import math
import unicodedata
from dataclasses import replace
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCardData
from jinja2 import Template

from mlflow_compress import files as atomic
from mlflow_compress.commands.receipt.result import Receipt
from mlflow_compress.commands.receipt.run import stated_policy, verify_receipt
from mlflow_compress.commands.shared.stored import results_from_json
from mlflow_compress.config.policy import Requirements
from mlflow_compress.decide.direction import harm_of
from mlflow_compress.decide.gates import CORPUS_KL, KL
from mlflow_compress.errors import ConfigError
from mlflow_compress.metrics.core.account import Account
from mlflow_compress.metrics.core.metric_inputs import headline
from mlflow_compress.metrics.core.metric_registry import all_keys, headline_keys
from mlflow_compress.records import MetricResult
from mlflow_compress.reporting.headline import note_markdown
from mlflow_compress.reporting.numbers import number_text
from mlflow_compress.reporting.tables import escape_markdown

CARD_FILES = ("card.md", "pull-request.md", "badge.svg")
_LONGEST = 40  # characters of a side of the badge
_GREEN, _AMBER, _RED = "#2a7d3f", "#96600a", "#b3261e"  # white text has a contrast of 5 to 1 on each
_BADGE = Template(
    """<svg xmlns="http://www.w3.org/2000/svg" width="{{ left + right }}" height="20" role="img">
<title>{{ name }}: {{ state }}</title>
<rect width="{{ left + right }}" height="20" rx="3" fill="{{ colour }}"/>
<path d="M{{ left }} 0v20H3a3 3 0 0 1-3-3V3a3 3 0 0 1 3-3z" fill="#444"/>
<g fill="#fff" font-family="Verdana,DejaVu Sans,sans-serif" font-size="11">
<text x="6" y="14" textLength="{{ left - 12 }}" lengthAdjust="spacingAndGlyphs">{{ name }}</text>
<text x="{{ left + 6 }}" y="14" textLength="{{ right - 12 }}" lengthAdjust="spacingAndGlyphs">{{ state }}</text>
</g>
</svg>
""",
    autoescape=True,
)


def write_cards(path: Path, folder: Path, key: Path | None) -> Receipt:
    """Check a receipt, and write its model card, its pull request's table and its badge into a folder."""
    receipt = verify_receipt(path, key, recompute=False)
    body = card_body(receipt)
    card = f"---\n{card_metadata(receipt)}\n---\n\n## Distance to the baseline\n\n{body}"
    title = escape_markdown(f"{receipt.stated['variant']} compared with {receipt.stated['baseline']}")
    texts = dict(zip(CARD_FILES, (card, f"### {title}\n\n{body}", badge(receipt)), strict=True))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            atomic.write(folder / name, text.encode())
    except OSError as error:
        raise ConfigError(f"The cards cannot be written: {error}", got=str(folder)) from error
    return replace(receipt, written=tuple(folder / name for name in texts))


def card_body(receipt: Receipt) -> str:
    """Return verdict, account, table and gates as Markdown, and how to check them."""
    stated = receipt.stated
    account = Account.from_dict(stated["account"])
    note = note_markdown(stated["verdict"], headline(results_from_json(stated["figures"])), account=account)
    gates = "kept" if stated["gates"]["passed"] else "**not kept**"
    reasons = [f"- {escape_markdown(reason)}" for reason in stated["gates"]["reasons"]]
    signed = "unsigned" if receipt.signed_by is None else f"signed with the key `{receipt.signed_by}`"
    check = f"Receipt with SHA-256 `{receipt.sha256}`, {signed}; `mlflow-compress receipt verify` checks it."
    return "\n".join([note, "", f"The policy's gates are {gates}:", "", *reasons, "", check, ""])


def card_metadata(receipt: Receipt, **more: Any) -> str:
    """Return the YAML of a model card: an entry for every headline value, and for those by task where there are more.

    An end of an interval, its level and the number of items stand in a metric's `args`. `more` are further entries.
    """
    figures = results_from_json(receipt.stated["figures"])
    tasks = sorted({one.task for one in figures if one.task is not None})
    pooled = [key.name for key in headline_keys()] + [key.difference for key in headline_keys()]
    shown = [one for one in figures if one.task is None and one.category is None and one.name in pooled]
    if len(tasks) > 1:
        by_task = {name for name, key in all_keys().items() if key.by_task and key.label}
        shown += [one for one in figures if one.task is not None and one.category is None and one.name in by_task]
    entries = [_entry(one, tasks) for one in shown if math.isfinite(one.value)]
    data = ModelCardData(model_name=receipt.stated["variant"], eval_results=entries, **more)
    return str(data.to_yaml()).rstrip()


def _entry(result: MetricResult, tasks: list[str]) -> EvalResult:
    declared = all_keys()[result.name]
    ends = {"low": result.low, "high": result.high, "level": result.level} if result.low is not None else {}
    return EvalResult(
        task_type="text-generation",
        dataset_type=result.task or "mlflow-compress",
        dataset_name=result.task or f"all items of {', '.join(tasks)}",
        metric_type="accuracy" if result.name == "quality/accuracy" else result.name,
        metric_name=declared.label or declared.meaning,
        metric_value=result.value,
        metric_args={"n": result.n, **ends},
    )


def badge(receipt: Receipt) -> str:
    """Return a badge as SVG: green where the gates are kept and the variant is no worse, red where it is worse."""
    stated = receipt.stated
    pooled = headline(results_from_json(stated["figures"]))
    account = Account.from_dict(stated["account"])
    harm = harm_of(pooled, stated_policy(stated).margin)
    word: str = "open" if harm is None else harm.word
    if account.unscored_pct > Requirements().max_unscored_pct:
        word = "no verdict"
    kept = stated["gates"]["passed"]
    kl = next((name for name in (KL, CORPUS_KL) if name in pooled), None)
    far = [] if kl is None else [f"KL {number_text(pooled[kl], 'nats', interval=False)}"]
    state = ", ".join([word, *far, f"gates {'kept' if kept else 'not kept'}"])
    colour = _RED if word == "worse" else _GREEN if kept and word == "no worse" else _AMBER
    name = "".join(sign if sign.isprintable() else " " for sign in str(stated["variant"]))  # XML forbids the others
    name = name if len(name) <= _LONGEST else f"{name[: _LONGEST - 1]}…"
    return str(_BADGE.render(name=name, state=state, left=_width(name), right=_width(state), colour=colour))


def _width(text: str) -> int:
    """Return the width of a text of 11 pixels with its margins; a viewer stretches the letters to it."""
    narrow, wide = "iljI.,:;|! '", ("W", "F")

    def one(sign: str) -> float:
        if unicodedata.east_asian_width(sign) in wide:
            return 11.0
        return 4.0 if sign in narrow else 8.5 if sign.isupper() else 6.8

    return 12 + round(sum(map(one, text)))
