"""Calibration text: named sets, and files."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

from mlflow_compress import demo
from mlflow_compress.config import EMBEDDED
from mlflow_compress.errors import CheckpointError, DataError
from mlflow_compress.items.named.corpora import ARTICLE, read_pile, read_wikitext2
from mlflow_compress.items.sources.data_dir import load_split, read_data_file, reader_of
from mlflow_compress.items.sources.question_files import read_jsonl, read_text
from mlflow_compress.models.model_files import render_template

Conversation = list[dict[str, str]]  # messages with "role" and "content"

_DOCUMENTS = 2_500  # of C4 or the Pile: over a million tokens, 512 samples of 2,048
_CONVERSATIONS = 2_500


@dataclass(frozen=True, kw_only=True)
class CalibrationSet:
    """Calibration texts or conversations."""

    name: str  # The name or path that the user gave
    texts: tuple[str, ...] = field(default=(), repr=False)
    conversations: tuple[Conversation, ...] = field(default=(), repr=False)  # Rendered in the model's chat template
    longest: int | None = None  # Longest text in tokens; longer ones are left out. None for no limit.

    def plain(self) -> list[str]:
        """Return all texts and messages without a template, for the check against the evaluation's items."""
        return [*self.texts, *(message["content"] for turns in self.conversations for message in turns)]

    def rendered(self, tokenizer: Any) -> list[str]:
        """Return the texts, with conversations rendered in the chat template."""
        texts = list(self.texts)
        if self.longest is not None:
            texts = [t for t in texts if len(tokenizer(t, verbose=False)["input_ids"]) <= self.longest]
        return texts + [_in_template(tokenizer, conversation) for conversation in self.conversations]


def _in_template(tokenizer: Any, conversation: Conversation) -> str:
    if not getattr(tokenizer, "chat_template", None):
        raise CheckpointError("The calibration set holds conversations, and the model's tokenizer has no chat template")
    return render_template(tokenizer, conversation)


def _wikitext2(data_dir: str) -> CalibrationSet:
    articles = ARTICLE.split(read_wikitext2(data_dir, "train", "calibration=wikitext2"))
    return CalibrationSet(name="wikitext2", texts=tuple(text for text in articles if text.strip()))


def _c4(data_dir: str) -> CalibrationSet:
    """Return the first documents of the training file that GPTQ, SparseGPT and Wanda use."""
    rows = read_data_file("allenai/c4", "en/c4-train.00000-of-01024.json.gz", data_dir=data_dir, task="calibration=c4")
    return CalibrationSet(name="c4", texts=tuple(rows[:_DOCUMENTS]["text"]))


def _pile(data_dir: str) -> CalibrationSet:
    """Return AWQ's calibration set: validation documents in its seeded order, stripped, of at most 512 tokens."""
    texts = (text.strip() for text in read_pile(data_dir, "calibration=pile").shuffle(seed=42)[:_DOCUMENTS]["text"])
    return CalibrationSet(name="pile", texts=tuple(text for text in texts if text), longest=512)


def _ultrachat(data_dir: str) -> CalibrationSet:
    """Return the first conversations of the training split, as in llm-compressor's examples."""
    rows = load_split(
        "HuggingFaceH4/ultrachat_200k", None, "train_sft", data_dir=data_dir, task="calibration=ultrachat"
    )
    return CalibrationSet(name="ultrachat", conversations=tuple(rows[:_CONVERSATIONS]["messages"]))


CALIBRATION_SETS: dict[str, Callable[[str], CalibrationSet]] = {
    EMBEDDED: lambda _: _text_file(EMBEDDED, demo.DATA_DIR / "calibration.txt"),
    "wikitext2": _wikitext2,
    "c4": _c4,
    "pile": _pile,
    "ultrachat": _ultrachat,
}
"""Functions that read a set, by name. Their argument is the folder of data sets."""


def load_calibration(name_or_file: str, *, model: str, data_dir: str) -> CalibrationSet:
    """Return a named set, or that of a file: paragraphs of a .txt file, "text" or "messages" of a .jsonl file.

    `name_or_file` is a name of `CALIBRATION_SETS`, a file, or "auto": the demo's set for an embedded model.
    """
    fix = "Give calibration=NAME or FILE"
    if (
        read := reader_of("calibration", name_or_file, CALIBRATION_SETS, model=model, data_dir=data_dir, fix=fix)
    ) is not None:
        return read(data_dir)
    path = Path(name_or_file)
    return _rows_file(name_or_file, path) if path.suffix == ".jsonl" else _text_file(name_or_file, path)


def _text_file(name: str, path: Path) -> CalibrationSet:
    paragraphs = read_text(path).split("\n\n")
    return CalibrationSet(name=name, texts=tuple(text for text in paragraphs if text.strip()))


def _rows_file(name: str, path: Path) -> CalibrationSet:
    texts: list[str] = []
    conversations: list[Conversation] = []
    for row in read_jsonl(path):
        text, messages = row.get("text"), row.get("messages")
        if isinstance(text, str) and text.strip() and messages is None:
            texts.append(text)
        elif _is_conversation(messages) and text is None:
            conversations.append(messages)
        else:
            raise DataError(
                f"{path}, line {row['line']}: neither a text nor a conversation",
                allowed='"text", or "messages": a list of {"role", "content"}',
                got=sorted(set(row) - {"line"}),
            )
    return CalibrationSet(name=name, texts=tuple(texts), conversations=tuple(conversations))


def _is_conversation(messages: object) -> TypeGuard[Conversation]:
    return (
        isinstance(messages, list)
        and bool(messages)
        and all(isinstance(m, dict) and isinstance(m.get("role"), str) for m in messages)
        and all(isinstance(m.get("content"), str) for m in messages)
    )
