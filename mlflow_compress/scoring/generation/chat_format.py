"""Formats conversations as prompts: with the tokenizer's chat template, or in a plain format where it has none."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from mlflow_compress.errors import CheckpointError
from mlflow_compress.models.model_files import render_template
from mlflow_compress.tool_calls import Call, CallForm, read_calls

logger = logging.getLogger(__name__)

PLAIN = "plain"
_MARK = "mark-of-an-answer"
_TOOL = "name-of-a-tool"
_PLAIN_UNTIL = "\nUser:"  # ends an answer in the plain format: here the model begins the user's next turn


@dataclass(frozen=True)
class ChatFormat:
    """How a conversation becomes a prompt."""

    name: str  # "chat_template" or "plain". Log it: scores of the two are not comparable.
    tokenizer: Any
    end_tokens: frozenset[int]  # Special tokens with which the template closes an answer

    @property
    def until(self) -> tuple[str, ...]:
        """Texts at which an answer is cut; none where an end token ends it."""
        return (_PLAIN_UNTIL,) if self.name == PLAIN else ()

    @property
    def adds_special_tokens(self) -> bool:
        """Whether the tokenizer must add its BOS; a chat template writes its own."""
        return self.name == PLAIN

    def messages(self, turns: Sequence[str], *, system: str = "") -> tuple[dict[str, str], ...]:
        """Return the conversation that `prompt` renders; nothing in the plain format, which no server knows."""
        return () if self.name == PLAIN else tuple(_messages(turns, system))

    def prompt(self, turns: Sequence[str], *, system: str = "", **variables: Any) -> str:
        """Return the prompt for alternating user and assistant turns; the last turn is the user's.

        `variables` are what the chat template reads besides, such as `enable_thinking`.
        """
        if self.name == PLAIN:
            lines = [f"System: {system}"] if system else []
            lines += [f"{'Assistant' if i % 2 else 'User'}: {text}" for i, text in enumerate(turns)]
            return "\n".join([*lines, "Assistant:"])
        rendered = render_template(self.tokenizer, _messages(turns, system), add_generation_prompt=True, **variables)
        if system.strip() not in rendered:
            raise CheckpointError("The tokenizer's chat template omits the system prompt", got=system)
        return rendered

    def conversation(
        self, messages: Sequence[Mapping[str, Any]], *, system: str = "", tools: Sequence[Any] | None = None
    ) -> str:
        """Return the prompt for messages that were logged, and tools, up to where the answer begins.

        `system` stands for their own system prompt where they have none.
        """
        if system and not any(message["role"] in ("system", "developer") for message in messages):
            messages = [{"role": "system", "content": system}, *messages]
        if self.name == PLAIN:
            return "\n".join([*(f"{m['role'].capitalize()}: {m['content']}" for m in messages), "Assistant: "])
        shown = list(tools) if tools else None
        return render_template(self.tokenizer, messages, add_generation_prompt=True, tools=shown)

    def call_form(self) -> CallForm:
        """Return how the template writes calls, read off an answer that it renders with a call and one with text.

        Raises `CheckpointError`: it shows no tools, or its calls are no JSON.
        """
        tool = {"type": "function", "function": {"name": _TOOL, "parameters": {"type": "object", "properties": {}}}}
        asked = [{"role": "user", "content": "question"}]
        call = {"type": "function", "function": {"name": _TOOL, "arguments": {"a": "b"}}}
        answers = (
            {"role": "assistant", "content": _MARK},
            {"role": "assistant", "content": "", "tool_calls": [call]},
        )
        with_tool = partial(render_template, self.tokenizer, tools=[tool])
        if self.name == PLAIN or _TOOL not in with_tool(asked, add_generation_prompt=True):
            raise CheckpointError(
                "The baseline cannot be asked with tools: its chat template shows none",
                allowed="a template that uses the variable `tools`",
                fix="Take another model, or leave out the tasks with tools",
            )
        texts = [with_tool([*asked, answer], add_generation_prompt=False) for answer in answers]
        begin = next(n for n, (one, other) in enumerate(zip(*texts, strict=False)) if one != other)
        ids = self.tokenizer(texts[1][begin:], add_special_tokens=False)["input_ids"]
        shown = str(self.tokenizer.decode(ids, skip_special_tokens=True))
        mark = shown[: next((n for n, sign in enumerate(shown) if sign in "{["), 0)].strip()
        if read_calls(shown, mark)[:1] != (Call(_TOOL, {"a": "b"}),):
            raise CheckpointError(
                "The chat template writes calls of tools in a form that is not read here",
                allowed="JSON objects with name and arguments (or parameters)",
                got=shown[:200],
            )
        return CallForm(mark, str(self.tokenizer.decode(ids[:1])), self.end_tokens)


def chat_format(tokenizer: Any) -> ChatFormat:
    """Return the format that fits a tokenizer: plain ``User: ...`` and ``Assistant:`` lines without a chat template."""
    if not getattr(tokenizer, "chat_template", None):
        logger.warning(
            "The tokenizer has no chat template: conversations are rendered as 'User:' and 'Assistant:' lines"
        )
        return ChatFormat(PLAIN, tokenizer, frozenset())
    rendered = render_template(tokenizer, _messages(["question", _MARK], ""), add_generation_prompt=False)
    if rendered.count(_MARK) != 1:
        raise CheckpointError("The chat template drops or repeats the assistant's answer")
    tail = tokenizer(rendered.split(_MARK)[1], add_special_tokens=False)["input_ids"]
    special = set(tokenizer.all_special_ids) | set(getattr(tokenizer, "added_tokens_decoder", {}))
    # A template ends an answer with one special token; what follows is layout.
    ends = next(([token] for token in tail if token in special), [])
    return ChatFormat("chat_template", tokenizer, frozenset(ends))


def _messages(turns: Sequence[str], system: str) -> list[dict[str, str]]:
    first = [{"role": "system", "content": system}] if system else []
    return first + [{"role": "assistant" if i % 2 else "user", "content": text} for i, text in enumerate(turns)]
