"""Frozen, typed stage configurations and the strict reader that fills them from strings.

Every stage is configured by one dataclass; each field carries its one-line help. MLflow passes all parameters as
strings and checks neither types nor names, so `parse` does: unknown names are refused with the nearest match, and each
value is converted to the field's type or refused with what would have been accepted.
"""

from __future__ import annotations

import difflib
import re
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, TypeVar

from mlflow_compress.errors import ConfigError

C = TypeVar("C")

DTYPES = ("auto", "float32", "bfloat16", "float16")
DEVICES = ("auto", "cpu", "cuda")
SYSTEM_PROMPT = "system prompt of judged answers and of tasks in the chat template; empty: none"
_NAME_BYTES, _PATH_BYTES = 255, 4095  # longest name of a file or folder, longest path
EMBEDDED = "demo"  # the model, tasks and texts that ship with the package


def option(
    default: Any,
    doc: str,
    *,
    choices: tuple[str, ...] = (),
    low: float | None = None,
    path: Literal["", "file", "folder", "either", "files"] = "",
) -> Any:
    """Declare a field: its default, its one-line help, what it accepts beyond its type, and what path it may hold.

    `path` is "files" for a comma-separated list; `mlflow_compress.paths` reads it.
    """
    return field(default=default, metadata={"help": doc, "choices": choices, "low": low, "path": path})


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Which baseline, where it runs, and the seed of everything random."""

    model: str = option(
        EMBEDDED, "baseline model: 'demo' (embedded), a folder, or a Hugging Face hub id", path="folder"
    )
    device: str = option("auto", "where models run", choices=DEVICES)
    seed: int = option(42, "seed of shuffles, splits, samples, calibration and bootstrap", low=0)
    trust_remote_code: bool = option(False, "run code that a checkpoint brings along (off: such models are refused)")
    data_dir: str = option("", "folder of data sets in hub layout, looked in before the hub", path="folder")


@dataclass(frozen=True, kw_only=True)
class QuantizeConfig(ModelConfig):
    """The quantize stage: which method, with which settings, calibrated on what."""

    method: str = option("awq", "compression method (mlflow-compress methods lists them)")
    bits: str = option("auto", "bits per weight; 'auto' takes the method's default")
    group_size: str = option("auto", "weights that share one scale; 'auto' takes the method's default")
    calibration: str = option(
        "auto",
        "wikitext2, c4, pile, ultrachat, demo, or a file (.txt, .jsonl); 'auto' is the demo's, for the demo",
        path="file",
    )
    calibration_samples: str = option("auto", "calibration samples; 'auto' takes the method's default")
    calibration_length: int = option(256, "tokens a calibration sample", low=8)
    settings: str = option("none", "the method's further settings: name=value,name=value (sparsity=0.5,pattern=2:4)")
    checkpoint: str = option(
        "none", "for method=checkpoint: folder, hub id or GGUF file of what others compressed", path="either"
    )
    out: str = option(
        "auto",
        "folder that receives one sub-folder per variant; 'auto' is checkpoints/ in the folder that keeps state "
        "(beside the database, or MLFLOW_COMPRESS_HOME)",
    )


@dataclass(frozen=True, kw_only=True)
class EvaluateSettings(ModelConfig):
    """What is evaluated and how, whichever the variant."""

    tasks: str = option(
        "auto", "comma-separated task names and files (.jsonl, .txt); 'auto' is 'demo' for the demo", path="files"
    )
    shots: int = option(5, "few-shot examples in lettered multiple choice", low=0)
    shuffles: int = option(2, "answer shuffles for the order-robustness metric; 0 turns it off", low=0)
    shuffle_examples: bool = option(
        False, "shuffle the answers of the few-shot examples too (off: they stay, as in the published metric)"
    )
    all_orders: int = option(
        0, "items a lettered task that are also scored in all orders of up to 4 answers; 0 turns it off", low=0
    )
    prompt: str = option(
        "auto", "prompt styles of lettered tasks, comma-separated: the first asks, all of them ask with options E and F"
    )
    limit: int = option(0, "items per category and task after a seeded shuffle; 0 takes all", low=0)
    apply_chat_template: bool = option(
        False, "show lettered tasks and those of lm-evaluation-harness in the model's chat template"
    )
    fewshot_as_multiturn: bool = option(
        True, "few-shot examples of lm-evaluation-harness's tasks are turns of their own there (off: one turn)"
    )
    system_prompt: str = option("", SYSTEM_PROMPT)
    dtype: str = option("float32", "dtype in which both models are evaluated", choices=DTYPES)
    noise_items: int = option(
        200, "items per task, and windows per corpus, that the baseline is scored on twice; 0 takes all", low=0
    )


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig(EvaluateSettings):
    """The evaluate stage: the variant against its baseline on the same items."""

    checkpoint: str = option("", "folder of the compressed checkpoint (what quantize wrote)", path="folder")


@dataclass(frozen=True, kw_only=True)
class JudgeSettings(ModelConfig):
    """What is answered, compared and graded, whichever the variant."""

    instructions: str = option(
        "auto",
        "mt_bench, vicuna_bench, alpaca, demo, or a JSONL file; 'auto' is the demo's, for the demo",
        path="file",
    )
    system_prompt: str = option("", SYSTEM_PROMPT)
    limit: int = option(0, "instructions per category after a seeded shuffle; 0 takes all", low=0)
    dtype: str = option("float32", "dtype in which both models generate", choices=DTYPES)
    samples: int = option(5, "sampled answers an instruction for ConSCompF", low=2)
    max_new_tokens: int = option(128, "tokens a sampled answer", low=1)
    encoder: str = option(
        "embedded", "sentence encoder: 'embedded' (all-MiniLM-L6-v2), a folder or a hub id", path="folder"
    )
    bertscore: str = option(
        "", "model of BERTScore: 'embedded', a folder or a hub id such as roberta-large; empty: none", path="folder"
    )
    judge_model: str = option("gpt-4", "model asked for MT-Bench grades (needs OPENAI_API_KEY)")
    judge_base_url: str = option(
        "auto", "OpenAI-compatible endpoint; 'auto' is OPENAI_BASE_URL or the client's default"
    )
    judge_repeats: int = option(1, "gradings an answer", low=1)
    judge_max_tokens: str = option(
        "auto", "tokens an answer to be graded; 'auto' is 1024, or a quarter of a shorter context"
    )

    def __post_init__(self) -> None:
        """Refuse what is neither 'auto' nor a number of tokens."""
        tokens = self.judge_max_tokens
        if tokens != "auto" and not (tokens.isdecimal() and int(tokens) > 0):
            raise ConfigError(
                "Parameter 'judge_max_tokens' is no number of tokens", allowed="'auto', or 1 or more", got=tokens
            )


@dataclass(frozen=True, kw_only=True)
class JudgeConfig(JudgeSettings):
    """The judge stage: answers of both models to the same instructions, compared and graded."""

    checkpoint: str = option("", "folder of the compressed checkpoint (what quantize wrote)", path="folder")


@dataclass(frozen=True, kw_only=True)
class PromoteConfig:
    """The promote stage: gates on interval bounds, rank by size, move the alias."""

    model: str = option(EMBEDDED, "baseline whose variants compete: 'demo', a folder, or a name that runs show")
    evaluation: str = option(
        "auto", "evaluation id whose variants compete (6 or more digits of it); 'auto' is the one with the most items"
    )
    max_kl: float = option(0.05, "largest KL (nats): upper end of its 95 % interval", low=0)
    max_kl_outliers_pct: float = option(
        1.0,
        "largest share of items above the KL clip limit in percent: upper end; read where KL has no valid interval",
        low=0,
    )
    max_flips_pct: float = option(5.0, "largest share of flipped answers in percent: upper end of its interval", low=0)
    max_accuracy_drop_pct: float = option(2.0, "largest accuracy drop in points: upper end of its interval", low=0)
    alias: str = option("champion", "registry alias that moves to the winner")


@dataclass(frozen=True, kw_only=True)
class MainConfig(JudgeSettings, EvaluateSettings, QuantizeConfig):
    """quantize -> evaluate -> judge for one variant, under one parent run."""

    judge: bool = option(True, "run the judge stage")
    log_weights: str = option(
        "auto",
        "store the checkpoint with the registered model; 'auto' does up to 2 GiB, larger ones are referred to by path",
        choices=("auto", "true", "false"),
    )
    resume: str = option("none", "id of a main run that failed: run only the stages that it lacks, then publish")


def _convert(name: str, text: str, wanted: type) -> Any:
    """Convert one string to `wanted`, or raise the one clear error."""
    if wanted is bool:
        if text.lower() in ("true", "false"):
            return text.lower() == "true"
        raise ConfigError(f"Parameter '{name}' is a switch", allowed=("true", "false"), got=text)
    if wanted in (int, float):
        try:
            return wanted(text)
        except ValueError:
            kind = "a whole number" if wanted is int else "a number"
            raise ConfigError(f"Parameter '{name}' must be {kind}", got=text) from None
    return text


def check_text(name: str, text: str) -> None:
    """Refuse what no file system and no hub has a name for, before something is looked up by it.

    Parameters
    ----------
    name : str
        The parameter.
    text : str
        Its value: names, paths, or several of them separated by commas.

    Raises
    ------
    ConfigError
        For a NUL character, and for a path, or a name in it, that is longer than file systems allow.
    """
    if "\0" in text:
        raise ConfigError(f"Parameter '{name}' holds a NUL character", got=text[:_NAME_BYTES])
    for most, separators in ((_NAME_BYTES, "[/,]"), (_PATH_BYTES, ",")):
        n_bytes = max(len(part.encode()) for part in re.split(separators, text))
        if n_bytes > most:
            what = "name" if most == _NAME_BYTES else "path"
            raise ConfigError(
                f"Parameter '{name}' holds a {what} that is too long", allowed=f"{most} bytes", got=f"{n_bytes:,} bytes"
            )


def parse(cls: type[C], values: Mapping[str, str]) -> C:
    """Build a configuration from strings, strictly.

    Parameters
    ----------
    cls : type
        One of the dataclasses above.
    values : mapping of str to str
        Parameter names and values; names left out keep their defaults.

    Raises
    ------
    ConfigError
        Unknown name (with the nearest known one), a value of the wrong type, outside its choices or below its bound, or
        one that can be no name.
    """
    known = {f.name: f for f in fields(cls)}  # type: ignore[arg-type]
    kinds = typing.get_type_hints(cls)
    parsed: dict[str, Any] = {}
    for name, text in values.items():
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            raise ConfigError(
                "Unknown parameter", allowed=known, got=name, fix=f"Did you mean '{near[0]}'?" if near else None
            )
        if name != "system_prompt":  # the one parameter that is prose
            check_text(name, text)
        value = _convert(name, text, kinds[name])
        meta = known[name].metadata
        if meta.get("choices") and value not in meta["choices"]:
            raise ConfigError(f"Parameter '{name}' has an unknown value", allowed=meta["choices"], got=value)
        if meta.get("low") is not None and not value >= meta["low"]:
            raise ConfigError(f"Parameter '{name}' is too small", allowed=f"{meta['low']} or more", got=value)
        parsed[name] = value
    return cls(**parsed)


def subset(config: Any, cls: type[C]) -> C:
    """Return the part of a larger configuration that `cls` declares."""
    return cls(**{f.name: getattr(config, f.name) for f in fields(cls)})  # type: ignore[arg-type]


def as_strings(config: Any) -> dict[str, str]:
    """Return every field as the string that `parse` reads back."""
    return {
        f.name: str(value).lower() if isinstance(value := getattr(config, f.name), bool) else str(value)
        for f in fields(config)
    }
