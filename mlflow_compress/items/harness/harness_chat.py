"""Prompts of harness tasks in a model's chat template, as the harness's Hugging Face backend renders them."""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Any

from mlflow_compress import demo
from mlflow_compress.config import EMBEDDED
from mlflow_compress.errors import CheckpointError, ConfigError
from mlflow_compress.items.task import TaskSettings

Messages = list[dict[str, str]]


def chat_arguments(settings: TaskSettings) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the chat arguments for a harness task's `fewshot_context` and `construct_requests`, if they are asked for.

    Raises
    ------
    ConfigError
        The tokenizer has no chat template.
    """
    if not settings.apply_chat_template:
        return {}, {}
    request = {"apply_chat_template": True, "chat_template": partial(render, _tokenizer(settings.model))}
    context = {
        **request,
        "system_instruction": settings.system_prompt or None,
        "fewshot_as_multiturn": settings.fewshot_as_multiturn,
    }
    return context, request


def render(tokenizer: Any, chat_history: Messages, add_generation_prompt: bool = True) -> str:
    """Return a conversation as text. Without a generation prompt, its last message is the beginning of the answer.

    Raises
    ------
    CheckpointError
        The template fails, for example on a system prompt. (The harness would drop the system prompt.)
    """
    from jinja2 import TemplateError

    try:
        return str(
            tokenizer.apply_chat_template(
                chat_history,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
            )
        )
    except (TemplateError, ValueError) as error:
        raise CheckpointError(f"The tokenizer's chat template fails: {error}", got=chat_history[0]) from error


@lru_cache(maxsize=2)
def _tokenizer(model: str) -> Any:
    from transformers.models.auto import AutoTokenizer

    path = str(demo.MODEL_DIR) if model == EMBEDDED else model
    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"The tokenizer cannot be loaded: {error}", got=model) from error
    if not getattr(tokenizer, "chat_template", None):
        fix = "Give a model that has one, or -P apply_chat_template=false"
        raise ConfigError("The model's tokenizer has no chat template", got=model, fix=fix)
    return tokenizer
