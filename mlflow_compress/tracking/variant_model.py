"""The pyfunc model of a variant, which generates and scores (MLflow: "models from code").

MLflow runs this file also when a model is logged. So torch and the scoring engine are imported only to load a model.
"""

import logging
import re
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlflow
import numpy as np
import pandas as pd
from mlflow.exceptions import MlflowException
from mlflow.models import Model
from mlflow.pyfunc import PythonModel, PythonModelContext
from mlflow.pyfunc.context import get_prediction_context
from mlflow.types.llm import ChatChoice, ChatCompletionResponse, ChatMessage, TokenUsageStats

if TYPE_CHECKING:
    from mlflow_compress.scoring.generation.generation_rows import GenerationRow


class VariantModel(PythonModel):  # type: ignore[misc]
    """A compressed checkpoint with MLflow's interface `predict`.

    `predict` takes a table. With a column "prompt" alone, it generates and returns "text". With a second column
    "continuation", it scores each row and returns "loglik", "n_tokens" and "greedy". With a column "messages" alone,
    each a conversation of {"role", "content"}, it returns the next answer in MLflow's chat response form (OpenAI's
    "chat.completion"): one dictionary for one conversation, a list of them for several. Parameters of generation:
    `max_new_tokens` (default 128), `temperature` (default 0: greedy) and `seed`. Other columns and parameters are
    errors.
    """

    def load_context(self, context: PythonModelContext) -> None:
        """Check the checkpoint against its recorded hashes and load it."""
        from mlflow_compress.compression.checkpoint_manifest import MANIFEST_FILE, CheckpointManifest
        from mlflow_compress.errors import CheckpointError
        from mlflow_compress.files import read_json_object
        from mlflow_compress.models.loading import LoadConfig, load_model

        description = Path(context.artifacts["variant"])
        variant = read_json_object(description, error=CheckpointError)
        if variant["weights"] == "served":
            served = variant["served"]
            raise CheckpointError(
                "This model was evaluated where it is served, and has no weights here",
                got=served["served_model"],
                fix=f"Ask the server at {served['endpoint']} for it",
            )
        folder = description.parent / variant["checkpoint"]  # an absolute path stays what it is
        if variant["weights"] == "reference" and not (folder / MANIFEST_FILE).is_file():
            raise CheckpointError(
                "This model was registered by reference, and its checkpoint is not on this machine",
                allowed="the folder that the quantize stage wrote",
                got=str(folder),
                fix="Copy the folder here, or run the main job again with log_weights=true",
            )
        manifest = CheckpointManifest.read(folder)
        if manifest.weight_files != variant["weight_files"]:
            raise CheckpointError("The checkpoint has changed since it was registered", got=str(folder))
        self.checkpoint = folder  # the evaluator "compress" reads the files
        self._loaded = load_model(LoadConfig(path=str(folder), dtype=variant["dtype"]))
        meta = Model.load(str(description.parents[1]))
        self._name = variant["name"]
        self._defaults = {spec.name: spec.default for spec in meta.get_params_schema().params}
        _refuse_unknown_fields(meta)

    # MLflow reads the type hint of `model_input` as a schema, except for a DataFrame.
    def predict(
        self, context: PythonModelContext, model_input: pd.DataFrame, params: dict[str, Any] | None = None
    ) -> pd.DataFrame | dict[str, Any] | list[dict[str, Any]]:
        """Generate after each prompt, answer each conversation, or score each continuation."""
        from mlflow_compress.records import Request
        from mlflow_compress.scoring.engine import Scorer, ScoringConfig
        from mlflow_compress.scoring.generation.chat_format import chat_format
        from mlflow_compress.scoring.generation.generate import generate, generate_replies
        from mlflow_compress.scoring.generation.generation_rows import GenerationConfig

        frame = pd.DataFrame(model_input)
        settings = {**self._defaults, **(params or {})}
        chats = _conversations(frame)
        if chats:
            chat, config = chat_format(self._loaded.tokenizer), GenerationConfig(samples=1, **settings)
            prompts = [chat.prompt(turns, system=system) for system, turns in chats]
            rows = generate_replies(self._loaded, prompts, config, chat)
            replies = [self._reply(row, config.max_new_tokens) for row in rows]
            return replies[0] if len(replies) == 1 else replies
        frame = _rows(frame)
        if "continuation" not in frame:
            texts = generate(self._loaded, list(frame["prompt"]), GenerationConfig(samples=1, **settings))
            return pd.DataFrame({"text": [samples[0] for samples in texts]})
        if settings != self._defaults:
            raise _refusal(f"Scoring a continuation takes no parameters. Allowed: none. Got: {settings}")
        requests = [
            Request.of("predict", str(row), prompt, text, text)
            for row, (prompt, text) in enumerate(zip(frame["prompt"], frame["continuation"], strict=True))
        ]
        scores, _ = Scorer(self._loaded, ScoringConfig()).score(requests)
        table = scores.table.to_pandas().set_index("item_id").loc[[str(row) for row in range(len(frame))]]
        return table[["loglik", "n_tokens", "greedy"]].reset_index(drop=True)

    def _reply(self, row: "GenerationRow", limit: int) -> dict[str, Any]:
        n_read, n_written = len(row.prompt), len(row.tokens)
        whole = bool(row.end) or n_written < limit
        message = ChatMessage(role="assistant", content=row.text.strip())
        response = ChatCompletionResponse(
            choices=[ChatChoice(message=message, finish_reason="stop" if whole else "length")],
            usage=TokenUsageStats(n_read, n_written, n_read + n_written),
            id=f"chatcmpl-{uuid.uuid4().hex}",
            model=self._name,
        )
        return dict(response.to_dict())


_refusal = MlflowException.invalid_parameter_value


def _refuse_unknown_fields(meta: Model) -> None:
    """From now on, raise where MLflow would ignore a column or parameter of this model's input.

    MLflow takes them away before `predict`, and only logs a warning. Other models' warnings stay what they are.
    """
    columns, parameters = meta.get_input_schema().input_names(), [s.name for s in meta.get_params_schema().params]
    model_id = meta.model_id

    def refuse(record: logging.LogRecord) -> bool:
        call = get_prediction_context()
        if call is not None and call.model_id == model_id and record.levelno >= logging.WARNING:
            names = re.search(r"\[.*?\]", record.getMessage())
            raise _refusal(
                f"The input has fields that this model does not know. Allowed: columns {', '.join(columns)}; "
                f"parameters {', '.join(parameters)}. Got: {names[0] if names else record.getMessage()}"
            )
        return True

    logger = logging.getLogger("mlflow.models.utils")
    logger.addFilter(refuse)
    logger.setLevel(min(logger.getEffectiveLevel(), logging.WARNING))  # filters see nothing below the level


def _conversations(frame: pd.DataFrame) -> list[tuple[str, list[str]]]:
    """Return the system's text and the turns of each conversation of the column "messages"; empty without one."""
    if "messages" not in frame or frame["messages"].isna().all():
        return []
    cells = [list(cell) if isinstance(cell, list | np.ndarray) else [cell] for cell in frame["messages"]]
    if all(isinstance(cell, Mapping) for cell in frame["messages"]):
        cells = [list(frame["messages"])]  # a dictionary with one conversation comes as a row for each message
    elif len(cells) == 1 and cells[0] and all(isinstance(one, list | np.ndarray) for one in cells[0]):
        cells = [list(one) for one in cells[0]]  # a dictionary with several comes as one row
    conversations = []
    for row, cell in enumerate(cells):
        turns = [one for one in cell if _is_message(one)]
        whole = len(turns) == len(cell)
        system = turns.pop(0)["content"] if turns and turns[0]["role"] == "system" else ""
        in_turn = [*["user", "assistant"] * (len(turns) // 2), "user"]
        if not whole or [one["role"] for one in turns] != in_turn:
            raise _refusal(
                f"The messages of row {row} are no conversation. Allowed: a list of {{'role', 'content'}}, with a "
                f"system message first or none, then user and assistant in turn, the user last. Got: {cell!r:.200}"
            )
        conversations.append((system, [one["content"] for one in turns]))
    if not frame.drop(columns="messages").isna().all(axis=None):
        raise _refusal(f"Conversations stand alone. Allowed: the column messages. Got: columns {', '.join(frame)}")
    return conversations


def _is_message(message: object) -> bool:
    if not isinstance(message, Mapping) or message.keys() != {"role", "content"}:
        return False
    return all(isinstance(text, str) for text in message.values())


def _rows(frame: pd.DataFrame) -> pd.DataFrame:
    """Return one row per prompt: a dictionary of lists comes as one row of lists. What is no text is refused."""
    if len(frame) == 1:
        lengths = {name: len(value) for name, value in frame.iloc[0].items() if isinstance(value, list | np.ndarray)}
        if lengths and (len(lengths) < frame.shape[1] or len(set(lengths.values())) > 1):
            raise _refusal(
                "The lists of the input do not belong together. Allowed: a text in every column, or lists of the same "
                f"length in all columns. Got: lists {lengths} in columns {', '.join(frame)}"
            )
        frame = frame.explode(list(frame), ignore_index=True) if lengths else frame
    if "prompt" not in frame:
        raise _refusal("The input has nothing to go on from. Allowed: a column prompt, or messages. Got: neither")
    frame = frame[[name for name in frame if name == "prompt" or not frame[name].isna().all()]]
    for name in frame:
        wrong = [row for row, value in enumerate(frame[name]) if not isinstance(value, str)]
        if wrong:
            raise _refusal(
                f"Column '{name}' of row {wrong[0]} holds no text. Allowed: a prompt in every row, and a continuation "
                f"in every row or in none. Got: {frame[name][wrong[0]]!r}"
            )
    return frame


mlflow.models.set_model(VariantModel())
