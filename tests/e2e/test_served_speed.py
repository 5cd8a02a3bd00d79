"""The speed of served models: tokens as they arrive, in turn with a served baseline, alone beside one in this process."""

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mlflow_compress as mc
from mlflow_compress import demo
from mlflow_compress.engines.endpoint import served_timing
from mlflow_compress.errors import ConfigError, EndpointError
from mlflow_compress.models.loading import LoadedModel
from mlflow_compress.records import RunRecords
from tests.judge_server import Raw
from tests.served_demo import NAME, ServedDemo, served_demo

FEW = {"speed_args": {"repeats": 2, "prompt_tokens": 16, "new_tokens": 4}}


class TokenClock:
    """The clock of the client: every token takes a server some seconds, and is noted before the next one is written."""

    def __init__(self) -> None:
        self._now, self._is_noted = 0.0, threading.Event()
        self._is_noted.set()
        self._one = threading.Lock()

    def perf_counter(self) -> float:
        now = self._now
        if threading.current_thread() is not threading.main_thread():  # which notes when a request begins
            self._is_noted.set()
        return now

    def each(self, seconds: float) -> Callable[[], None]:
        """Return what a server does before it writes a token."""

        def wait() -> None:
            with self._one:
                self._is_noted.wait()
                self._is_noted.clear()
                self._now += seconds

        return wait


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> TokenClock:
    clock = TokenClock()
    monkeypatch.setattr(served_timing, "time", clock)
    return clock


@pytest.fixture
def server(loaded: LoadedModel) -> Iterator[ServedDemo]:
    with served_demo(loaded) as found:
        yield found


def timed(server: ServedDemo, store: Path, **more: Any) -> mc.SpeedMeasurement:
    asked = {"endpoint_args": {"served_model": NAME}, **FEW, **more}
    return mc.speed(f"endpoint:{server.base_url}", store=store, **asked)


def seconds_of(records: Path, batch: int) -> np.ndarray:
    """Return when each of the four tokens was read, a row for each round."""
    timings = RunRecords.read(records).timings
    table = timings.where(batch=batch).table.sort_by([("repeat", "ascending"), ("step", "ascending")])
    return table.column("seconds").to_numpy().reshape(-1, 4)


def test_a_served_variant_alone_has_no_ratio(server: ServedDemo, clock: TokenClock, tmp_path: Path) -> None:
    server.before_token = clock.each(0.01)
    found = timed(server, tmp_path)
    assert found["speed/decode_tokens_per_second_batch_1"].value == pytest.approx(100)
    assert found["speed/first_token_ms"].value == pytest.approx(10)
    assert found["speed/token_gap_ms_p50"].value == pytest.approx(10)
    one, eight = (seconds_of(found.records_folder, batch) for batch in (1, 8))
    assert len(one) == len(eight) == 2 and one == pytest.approx(np.tile(0.01 * np.arange(1, 5), (2, 1)))
    # Eight at once: each of the 32 tokens takes 10 ms, and the slowest of eight streams counts.
    assert (eight >= 0.08 * np.arange(1, 5) - 1e-9).all() and eight[:, -1] == pytest.approx(0.32)
    assert "speed/decode_ratio_batch_1" not in found.metrics and not found.values
    assert found.described["runtime"] == "vLLM 0.0.1"
    assert "without its baseline" in found.summary
    asked = [body for body in server.bodies if body.get("stream")]
    assert len(asked) == 3 * (1 + 8)  # a round to warm up and two that count, one and eight at a time
    assert {len(body["prompt"]) for body in asked} == {16} and all(body["ignore_eos"] for body in asked)
    assert len({json.dumps(body["prompt"]) for body in asked}) > 20  # no cache has read them before


def test_a_served_baseline_is_timed_in_turn(
    loaded: LoadedModel, server: ServedDemo, clock: TokenClock, tmp_path: Path
) -> None:
    server.before_token = clock.each(0.01)
    with served_demo(loaded, before_token=clock.each(0.05)) as slow:
        found = timed(
            server,
            tmp_path,
            model=f"endpoint:{slow.base_url}",
            endpoint_args={"served_model": NAME, "baseline_served_model": NAME, "tokenizer": str(demo.MODEL_DIR)},
        )
    assert found["speed/decode_ratio_batch_1"].value == pytest.approx(5)  # 10 ms before each token against 50
    written = seconds_of(found.records_folder.parent / "baseline", 1)
    # Which of eight streams is served first decides how many rounds are enough.
    assert len(written) >= 2 and written == pytest.approx(np.tile(0.05 * np.arange(1, 5), (len(written), 1)))
    assert found["speed/first_token_ms_baseline"].value == pytest.approx(50)
    assert found["speed/token_gap_ms_p50_baseline"].value == pytest.approx(50)
    assert found.baseline == NAME and "decode (batch 1)" in found.summary


@pytest.mark.parametrize(
    ("stream", "said"),
    [
        (Raw(b'{"error": {"message": "no streams here"}}', 400), "does not stream: HTTP 400.*no streams here"),
        (Raw(b'data: {"choices": [{"logprobs": {"tokens": ["a"]}}]}\n\n'), "another number of tokens.*4.*1"),
        (Raw(b"data: <html>\n\n"), "streams something else than tokens"),
        (Raw(b'data: {"model": "another", "choices": []}\n\n'), "answered as the model 'another'"),
        (Raw(b'data: {"choices": []}\n\n', cut=9), "broke off a stream"),
        (Raw(status=0), "broke off a stream"),
    ],
)
def test_a_stream_that_breaks_gives_no_number(stream: Raw, said: str, server: ServedDemo, tmp_path: Path) -> None:
    server.fault = lambda number, body: stream if body.get("stream") else None
    with pytest.raises(EndpointError, match=said):
        timed(server, tmp_path)


def test_text_alone_has_no_speed_and_a_served_baseline_needs_a_served_variant(
    loaded: LoadedModel, tmp_path: Path
) -> None:
    with served_demo(loaded, kind="text") as server:
        found = timed(server, tmp_path)
    assert not found.results and "takes prompts as text alone" in found.summary
    with pytest.raises(ConfigError, match="names a served model, and this command needs one in a folder"):
        mc.speed(
            tmp_path,
            model="endpoint:http://127.0.0.1:1/v1",
            endpoint_args={"baseline_served_model": "x"},
            store=tmp_path,
        )
