"""Our scoring engine as a model for lm-evaluation-harness.

Importing this module registers the model "mlflow-compress" for `lm_eval.simple_evaluate`. The harness's own command
(0.4.13) cannot find models of other packages, so this module is also a command, with the same arguments::

    python -m mlflow_compress.lm_eval_model --model mlflow-compress --model_args pretrained=FOLDER --tasks piqa
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from lm_eval.api.model import LM
from lm_eval.api.registry import register_model

from mlflow_compress.errors import DataError, UnsupportedError
from mlflow_compress.items.harness_build import generation_settings, render
from mlflow_compress.models.loading import LoadConfig, load_model
from mlflow_compress.records import OptionScores, Request
from mlflow_compress.scoring.engine import Scorer
from mlflow_compress.scoring.generation.generate import generate_until

_HARNESS_DEVICE = "cuda:0"


@register_model("mlflow-compress")
class EngineLM(LM):  # type: ignore[misc]  # the harness has no types
    """Computes shared prefixes once, and log-softmax in float32 for every dtype of the model.

    - `pretrained`: Folder or hub id, as in `models.loading.LoadConfig`.
    - `dtype`, `device`: As there. The harness's default "cuda:0" means the first GPU, or the CPU where there is none.
    - `trust_remote_code`: Allow code that comes with the checkpoint.
    - `batch_size`, `max_batch_size`: Accepted and ignored: the size of our batches does not depend on them.
    """

    def __init__(
        self,
        pretrained: str,
        dtype: str = "float32",
        device: str | None = None,
        trust_remote_code: bool = False,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
    ) -> None:
        super().__init__()
        # The harness's command passes this device when the user gave none; its own backend then takes what exists, too.
        place = "auto" if device in (None, _HARNESS_DEVICE) else str(device)
        config = LoadConfig(path=pretrained, dtype=dtype, device=place, trust_remote_code=trust_remote_code)
        self.loaded = load_model(config)
        self.scorer = Scorer(self.loaded)
        self.option_scores: OptionScores | None = None

    def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
        asked = []
        for instance in requests:
            task, item, (context, continuation) = str(instance.task_name), str(instance.doc_id), instance.args[:2]
            asked.append(Request.of(task, item, context, continuation, continuation.lstrip(), instance.idx))
        self.option_scores, _ = self.scorer.score(asked)
        loglik, greedy = (self.option_scores.table.column(name).to_pylist() for name in ("loglik", "greedy"))
        for request, value in zip(asked, loglik, strict=True):
            if value is None:
                raise DataError(
                    f"Option {request.option} of document {request.item_id} of task {request.task!r} is longer than "
                    f"the model's context of {self.loaded.max_length} tokens",
                    fix="Leave the document out (--samples), or run the task with `mlflow-compress`, which counts it",
                )
        answers = list(zip(loglik, greedy, strict=True))
        for instance, answer in zip(requests, answers, strict=True):
            self.cache_hook.add_partial("loglikelihood", instance.args, answer)
        return answers

    def loglikelihood_rolling(self, requests: Sequence[Any]) -> list[float]:
        scores, _ = self.scorer.score_corpus("rolling", [instance.args[0] for instance in requests])
        number = np.asarray([int(name.split(".")[0]) for name in scores.column("item_id")])
        sums = -np.bincount(number, weights=scores.column("nll"), minlength=len(requests))
        for instance, total in zip(requests, sums.tolist(), strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", instance.args, total)
        return [float(total) for total in sums]

    def generate_until(self, requests: Sequence[Any]) -> list[str]:
        groups: dict[tuple[tuple[str, ...], int], list[int]] = {}
        for number, instance in enumerate(requests):
            groups.setdefault(generation_settings(instance.args[1], instance.task_name), []).append(number)
        texts = [""] * len(requests)
        for (until, length), numbers in groups.items():
            prompts = [requests[number].args[0] for number in numbers]
            answers = generate_until(self.loaded, prompts, until=until, max_new_tokens=length)
            for number, text in zip(numbers, answers, strict=True):
                texts[number] = text
                self.cache_hook.add_partial("generate_until", requests[number].args, text)
        return texts

    @property
    def tokenizer_name(self) -> str:
        return str(self.loaded.tokenizer.name_or_path).replace("/", "__")

    def chat_template(self, chat_template: bool | str = False) -> str:
        if isinstance(chat_template, str):
            raise UnsupportedError("Only the tokenizer's own chat template is supported", got=chat_template)
        return str(self.loaded.tokenizer.chat_template or "")

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        return render(self.loaded.tokenizer, chat_history, add_generation_prompt)


def main() -> None:
    """Run the harness's own command with this model registered."""
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()


if __name__ == "__main__":
    main()
