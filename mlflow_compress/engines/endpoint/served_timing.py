"""Times a model where it is served: when each token of its stream arrives."""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import httpx

from mlflow_compress.engines.endpoint.routes import LLAMA_CPP_ROUTE, require_model
from mlflow_compress.engines.endpoint.served_model import ServedModel
from mlflow_compress.engines.interface import AnyEngineModel
from mlflow_compress.errors import EndpointError
from mlflow_compress.scoring.speed.timing import BATCHES, ModelTimes, TimingPlan, timings_in_turn
from mlflow_compress.transport.replies import WrongReplyError

_NEVER = -100
_DATA, _END = "data: ", "[DONE]"


class _ServedStream(AbstractContextManager["_ServedStream"]):
    """A served model that streams what it writes. Use it as a context manager.

    It must take prompts as token ids, so that their length is ours.
    """

    def __init__(self, model: ServedModel) -> None:
        endpoint = model.endpoint
        headers = {"Authorization": f"Bearer {endpoint.key}", **endpoint.headers}
        self._model, self._threads = model, ThreadPoolExecutor(max(BATCHES))
        self._client = httpx.Client(headers=headers, timeout=endpoint.timeout)

    def generate(self, prompts: Sequence[Sequence[int]], n_new: int) -> list[float]:
        """Continue all prompts together by `n_new` tokens; return the seconds until all of them had each token."""
        begin = time.perf_counter()
        each = list(self._threads.map(lambda prompt: self._arrivals(prompt, n_new), prompts))
        return [max(arrivals[step] for arrivals in each) - begin for step in range(n_new)]

    def _arrivals(self, prompt: Sequence[int], n_new: int) -> list[float]:
        """Return the clock's time at which each token of one answer came."""
        path, body = self._request(prompt, n_new)
        where, times = self._model.endpoint.where, list[float]()
        try:
            with self._client.stream("POST", path, json=body) as answer:
                if answer.status_code != httpx.codes.OK:
                    answer.read()
                    said = self._model.endpoint.clean(answer.text)
                    raise EndpointError(f"{where} does not stream: HTTP {answer.status_code}: {said}")
                for event in _events(answer):
                    times += [time.perf_counter()] * self._n_tokens(event)
        except httpx.HTTPError as error:
            reason = self._model.endpoint.clean(str(error)) or type(error).__name__
            raise EndpointError(f"{where} broke off a stream: {reason}") from None
        if len(times) != n_new:
            raise EndpointError(
                f"{where} wrote another number of tokens than asked", allowed=str(n_new), got=len(times)
            )
        return times

    def _request(self, prompt: Sequence[int], n_new: int) -> tuple[str, dict[str, Any]]:
        """Return address and body of a request for exactly `n_new` tokens, which no cache answers."""
        model, ids = self._model, list(map(int, prompt))
        shared: dict[str, Any] = {"prompt": ids, "temperature": 0, "stream": True}
        if model.can.route == LLAMA_CPP_ROUTE:
            route = {"n_predict": n_new, "ignore_eos": True, "cache_prompt": False}
            return f"{model.endpoint.root}/completion", {**shared, **route}
        end = model.tokenizer.eos_token_id
        goes_on: dict[str, Any] = {"ignore_eos": True} if model.takes_stop_ids else {"logit_bias": {str(end): _NEVER}}
        # Log-probabilities tell how many tokens an event holds.
        own: dict[str, Any] = {"model": model.name, "max_tokens": n_new, "logprobs": 1, **goes_on}
        return f"{model.endpoint.called_url.rstrip('/')}/completions", {**shared, **own}

    def _n_tokens(self, event: Mapping[str, Any]) -> int:
        if self._model.can.route == LLAMA_CPP_ROUTE:
            return len(event.get("tokens") or [])
        try:
            require_model(event, self._model.name, self._model.can.root)
        except WrongReplyError as fault:
            raise EndpointError(f"{self._model.endpoint.where} {fault}") from None
        choices = event.get("choices") or [{}]
        return len((choices[0].get("logprobs") or {}).get("tokens") or [])

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown(wait=True, cancel_futures=True)
        self._client.close()


def _events(answer: httpx.Response) -> Iterator[Mapping[str, Any]]:
    for line in answer.iter_lines():
        if not line.startswith(_DATA) or line == _DATA + _END:
            continue
        try:
            event = json.loads(line.removeprefix(_DATA))
        except ValueError:
            event = None
        if not isinstance(event, dict) or "error" in event:
            raise EndpointError(f"The server of models streams something else than tokens: {line[:80]!r}")
        yield event


def served_times(models: Mapping[str, AnyEngineModel], plan: TimingPlan) -> dict[str, ModelTimes] | str:
    """Return when each token came, of each served model in turn; or the reason why that cannot be measured.

    Neither memory nor load time is seen from here. Models that no server has are left out.
    """
    served = {name: model for name, model in models.items() if isinstance(model, ServedModel)}
    for model in served.values():
        if not model.can.ids_in:
            return f"{model.can.server} takes prompts as text alone, so that their tokens are not ours to count"
    with ExitStack() as stack:
        streams = {name: stack.enter_context(_ServedStream(model)) for name, model in served.items()}
        timings = timings_in_turn(streams, plan)
    return {
        name: ModelTimes(
            timings=timings[name],
            load_seconds=None,
            memory=(),
            described={"runtime": model.can.server, "device": "endpoint", "dtype": "served"},
        )
        for name, model in served.items()
    }
