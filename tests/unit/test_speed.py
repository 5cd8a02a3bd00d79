"""Speed: formulas by hand, pairing by round, the choice of the runtime, and real models in real processes."""

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import ttest_1samp, ttest_rel

import mlflow_compress as mc
from mlflow_compress.commands.speed.parameters import SpeedConfig
from mlflow_compress.commands.speed.run import are_precise, threads_of
from mlflow_compress.demo import MODEL_DIR
from mlflow_compress.errors import ConfigError, WorkerError
from mlflow_compress.lifetime import as_the_user_set, let_threads_sleep
from mlflow_compress.metrics import MetricInputs, compute_all
from mlflow_compress.records import MetricResult, RunRecords, ServingMemory, Timings
from mlflow_compress.scoring.speed import timing


def timings(rounds: list[list[float]], batch: int = 1, prompt_tokens: int = 10) -> Timings:
    return Timings.from_rows(
        [
            {"batch": batch, "repeat": r, "step": s, "prompt_tokens": prompt_tokens, "seconds": at}
            for r, steps in enumerate(rounds)
            for s, at in enumerate(steps)
        ]
    )


def found(baseline: Timings, variant: Timings) -> dict[str, MetricResult]:
    inputs = MetricInputs(baseline=RunRecords(timings=baseline), variant=RunRecords(timings=variant))
    return {result.name: result for result in compute_all(inputs)}


def test_speed_by_hand() -> None:
    # 10 tokens are read in 2 s; 3 more tokens come within 6 s. The baseline takes twice as long, in both rounds.
    variant = timings([[2.0, 3.0, 5.0, 8.0], [2.0, 3.0, 5.0, 8.0]])
    result = found(timings([[4.0, 6.0, 10.0, 16.0], [4.0, 6.0, 10.0, 16.0]]), variant)
    assert result["speed/prefill_tokens_per_second_batch_1"].value == pytest.approx(5.0)
    assert result["speed/prefill_tokens_per_second_batch_1_baseline"].value == pytest.approx(2.5)
    assert result["speed/decode_tokens_per_second_batch_1"].value == pytest.approx(0.5)
    assert result["speed/first_token_ms"].value == pytest.approx(2000.0)
    assert result["speed/token_gap_ms_p50"].value == pytest.approx(2000.0)  # of 1, 2, 3, 1, 2, 3 s
    ratio = result["speed/decode_ratio_batch_1"]
    assert (ratio.value, ratio.low, ratio.high) == pytest.approx((2.0, 2.0, 2.0))
    assert "speed/decode_ratio_batch_8" not in result  # not timed: missing, not zero


def test_memory_by_hand() -> None:
    """Of two processes with 200 and 800 MiB the geometric mean is 400 MiB, and the interval that of their logarithms."""

    def records(*peaks: int) -> RunRecords:
        rows = [{"process": i, "resident_bytes": 1, "peak_bytes": peak * 2**20} for i, peak in enumerate(peaks)]
        return RunRecords(serving_memory=ServingMemory.from_rows(rows))

    result = {r.name: r for r in compute_all(MetricInputs(baseline=records(800, 800), variant=records(200, 800)))}
    assert result["speed/memory_peak_mb"].value == pytest.approx(400.0)
    assert result["speed/memory_peak_mb_baseline"].value == pytest.approx(800.0)
    ratio = result["speed/memory_peak_ratio"]
    expected = ttest_1samp(np.log([0.25, 1.0]), 0.0).confidence_interval(0.95)
    assert (ratio.value, ratio.low, ratio.high, ratio.n) == pytest.approx((0.5, *np.exp(expected), 2))
    once = {r.name: r for r in compute_all(MetricInputs(baseline=records(800), variant=records(200)))}
    assert (once["speed/memory_peak_ratio"].value, once["speed/memory_peak_ratio"].low) == (0.25, None)


def test_a_variant_alone_has_its_own_figures_a_batch_counts_all_sequences_and_equal_models_have_ratio_one() -> None:
    ours = timings([[1.0, 1.5, 2.0], [1.0, 1.5, 2.0]])
    beside, alone = found(ours, ours), found(Timings.from_rows([]), ours)
    assert alone and {name: beside[name] for name in alone} == alone
    assert {name for name in beside if name not in alone} == {
        n for n in beside if n.endswith("_baseline") or "ratio" in n
    }
    times = timings([[2.0, 3.0, 4.0]] * 2, batch=8)
    result = found(times, times)
    assert result["speed/prefill_tokens_per_second_batch_8"].value == pytest.approx(40.0)
    assert result["speed/decode_tokens_per_second_batch_8"].value == pytest.approx(8.0)
    times = timings([[1.0, 2.0, 3.5], [2.0, 3.0, 4.0], [1.5, 2.0, 2.25]])
    result = found(times, times)
    for what in ("prefill", "decode"):
        ratio = result[f"speed/{what}_ratio_batch_1"]
        assert ratio.value == pytest.approx(1.0) and ratio.low == pytest.approx(1.0) == ratio.high


def test_the_interval_of_a_ratio_is_that_of_the_paired_t_test() -> None:
    rng = np.random.default_rng(0)
    slow = rng.lognormal(0, 1, 6)  # what else the machine does slows both models of a round
    ours, theirs = slow * rng.lognormal(0, 0.05, 6), 1.3 * slow * rng.lognormal(0, 0.05, 6)
    result = found(timings([[t, 2 * t] for t in theirs]), timings([[t, 2 * t] for t in ours]))
    expected = ttest_rel(-np.log(ours), -np.log(theirs)).confidence_interval(0.95)
    ratio = result["speed/decode_ratio_batch_1"]
    assert (ratio.low, ratio.high) == pytest.approx((np.exp(expected.low), np.exp(expected.high)))
    one = result["speed/decode_tokens_per_second_batch_1"]
    assert ratio.high / ratio.low < one.high / one.low  # pairing takes the machine's moods out


@pytest.mark.parametrize(("noise", "rounds"), [(0.0, 3), (0.03, 4), (1.0, 12)])
def test_there_are_more_rounds_until_every_ratio_is_known_within_ten_percent(noise: float, rounds: int) -> None:
    """At least the three that are asked for, at most four times as many; both models run in each."""

    class Model:
        def __init__(self, seconds: float) -> None:
            self.draw, self.seconds = np.random.default_rng(int(10 * seconds)), seconds

        def generate(self, prompts: Sequence[Sequence[int]], n_new: int) -> list[float]:
            return np.cumsum(self.seconds * np.exp(noise * self.draw.normal(size=n_new))).tolist()

    plan = timing.TimingPlan(tokens=range(9), prompt_tokens=2, new_tokens=3, repeats=3, enough=are_precise)
    timed = timing.timings_in_turn({"baseline": Model(1.0), "variant": Model(0.5)}, plan)
    assert [len(times) for times in timed.values()] == [2 * rounds * 3] * 2  # batches, rounds, steps
    assert are_precise(timed) is (noise < 1.0)


@pytest.mark.parametrize(
    ("config", "runtime", "reason"),
    [
        ({}, "transformers", ""),
        ({"quantization_config": {"quant_method": "compressed-tensors"}}, "vllm", ""),
        ({"quantization_config": {"quant_method": "hqq_packed"}}, None, "only simulated"),
        ({"quantized_cache": {"0": {}}}, None, "only simulated"),
        ({"text_config": {"quantized_cache": {"0": {}}}, "quantization_config": {}}, None, "only simulated"),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, None, "on a CPU"),
        ({"quantization_config": {"quant_method": "torchao"}}, "transformers", ""),
        ({"quantization_config": {"quant_method": "brand-new"}}, None, "not known"),
    ],
)
def test_a_format_has_the_runtime_that_computes_with_it(
    tmp_path: Path, config: dict[str, object], runtime: str | None, reason: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **config}))
    (tmp_path / "model.safetensors").write_bytes(b"")
    choice = timing.runtime_of(tmp_path, "cpu")
    assert choice.runtime == runtime and reason in choice.reason


@pytest.mark.ci
@pytest.mark.usefixtures("forked_checks")
def test_both_models_are_timed_in_their_own_processes(tmp_path: Path) -> None:
    shorter = mc.compress("demo", "layer-drop", method_args={"layers": "1"}, store=tmp_path)
    measured = mc.speed(
        shorter, speed_args={"repeats": 2, "prompt_tokens": 8, "new_tokens": 3, "threads": 1}, store=tmp_path
    )
    rounds = measured["speed/decode_ratio_batch_8"].n
    assert 2 <= rounds <= 8 and ("noisy" not in measured.summary or rounds == 8)
    assert measured["speed/token_gap_ms_p50"].n == rounds * 2  # two waits in each
    assert measured.described["dtype"] == "bfloat16" and measured.described["runtime"].startswith("transformers")
    assert f"in {measured.described['runtime']} (bfloat16, 1 thread): decode" in measured.summary
    assert measured.values["speed/load_seconds"] > 0
    assert measured["speed/memory_peak_mb"].value > 0 < measured.values["speed/memory_resident_mb"]
    ours, theirs = (measured[f"speed/memory_peak_mb{suffix}"].value for suffix in ("", "_baseline"))
    ratio = measured["speed/memory_peak_ratio"]
    assert ratio.value == pytest.approx(ours / theirs) and ratio.low is not None and ratio.low < ratio.value
    memory = measured.records().serving_memory
    assert memory is not None and len(memory) == timing.PROCESSES == ratio.n
    assert min(peaks := memory.table.column("peak_bytes").to_pylist()) <= ours * 2**20 <= max(peaks)
    table = measured.records().timings
    assert table is not None and len(table) == 2 * rounds * 3  # batches, rounds, steps
    every = table.table.to_pylist()
    for batch in (1, 8):
        seconds = [row["seconds"] for row in every if row["batch"] == batch and row["repeat"] == 0]
        assert seconds == sorted(seconds) and seconds[0] > 0


@pytest.mark.parametrize(("given", "environment", "threads"), [("auto", "3", 3), (2, "3", 2), ("auto", "many", None)])
def test_threads_of_the_environment_win_over_the_cores(
    given: object, environment: str, threads: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", environment)
    config = SpeedConfig().with_values(speed_threads=given)
    assert threads_of(config) == (threads or len(os.sched_getaffinity(0)))


@pytest.mark.ci
@pytest.mark.usefixtures("forked_checks")
def test_a_simulated_format_gets_no_speed(tmp_path: Path) -> None:
    measured = mc.speed(mc.compress("demo", "hqq", bits=4, store=tmp_path), store=tmp_path)
    assert not measured.results and set(measured.not_computed) == {"speed", "serving_memory"}
    assert "only simulated" in measured.not_computed["speed"] and measured.summary.count("only simulated") == 1
    with pytest.raises(ConfigError, match="only simulated"):
        measured["speed/decode_ratio_batch_1"]


@pytest.mark.slow
@pytest.mark.usefixtures("forked_checks")
def test_longer_than_the_context_is_refused(tmp_path: Path) -> None:
    halved = mc.compress("demo", "fp16", store=tmp_path)
    with pytest.raises(ConfigError, match="at most 1024"):
        mc.speed(halved, speed_args={"prompt_tokens": 1000, "new_tokens": 100}, store=tmp_path)


def call_of(runtime: str, folder: Path) -> timing.RuntimeCall:
    more = {"dtype": "auto", "device": "cpu", "n_threads": 1, "n_context": 8, "n_batch": 1}
    return timing.RuntimeCall(runtime=runtime, python=sys.executable, folder=str(folder), **more)


def test_a_runtime_that_cannot_load_says_why(tmp_path: Path) -> None:
    with (
        timing.MeasuredModel(call_of("transformers", tmp_path)) as model,
        pytest.raises(WorkerError, match="Not a model folder"),
    ):
        model.open()


def test_a_process_that_ends_is_one_error() -> None:
    with timing.MeasuredModel(call_of("vllm", MODEL_DIR)) as model:
        model.process.kill()
        with pytest.raises(WorkerError, match="ended with code -9"):
            model.open()


def test_threads_sleep_while_they_wait_but_not_where_speed_is_measured_or_the_user_has_set_how(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OPENBLAS_THREAD_TIMEOUT", "20")
    with monkeypatch.context() as patch:
        patch.setenv("GOMP_SPINCOUNT", "100")
        let_threads_sleep()
        assert "OMP_WAIT_POLICY" not in os.environ
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    assert as_the_user_set(os.environ)["OMP_WAIT_POLICY"] == "PASSIVE"
    monkeypatch.delenv("OMP_WAIT_POLICY")
    let_threads_sleep()
    assert os.environ["OMP_WAIT_POLICY"] == "passive" and "OMP_WAIT_POLICY" not in as_the_user_set(os.environ)
    assert os.environ["OPENBLAS_THREAD_TIMEOUT"] == "20"
    monkeypatch.delenv("OPENBLAS_THREAD_TIMEOUT")
    let_threads_sleep()
    assert os.environ["OPENBLAS_THREAD_TIMEOUT"] == "4"
