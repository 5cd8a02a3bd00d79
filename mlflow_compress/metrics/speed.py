"""Speed: tokens per second of reading and writing, waits between tokens, and peak memory, beside the baseline's."""

from functools import partial

import numpy as np
from scipy import special

from mlflow_compress.metrics.core.metric_inputs import MetricInputs
from mlflow_compress.metrics.core.metric_registry import MetricKey, keys_of, metric
from mlflow_compress.metrics.core.requirements import SERVING_MEMORY, TIMINGS, VARIANT
from mlflow_compress.metrics.stats.arrays import Float
from mlflow_compress.records import MetricResult, Timings

_BATCHES = (1, 8)
_PERCENTILES = (50, 95, 99)

_key = keys_of("speed", by_category=False, counted="rounds", on_request=True)
_rate_key = partial(_key, unit="tokens per second")
_time_key = partial(_key, unit="milliseconds")
_memory_key = partial(_key, unit="MB", counted="processes")


def _rates(batch: int) -> dict[str, tuple[MetricKey, MetricKey, MetricKey]]:
    """Return the keys of the variant, the baseline and their ratio, for reading and for writing."""
    rates = {}
    for what, doing in (("prefill", "prompt tokens read"), ("decode", "tokens written after the first")):
        name, many = f"{what}_tokens_per_second_batch_{batch}", "sequence" if batch == 1 else "sequences"
        meaning = f"The variant's {doing}, per second, {batch} {many} at a time."
        ratio, title = f"{what}_ratio_batch_{batch}", what.capitalize()
        # Two rows: a run shows few numbers. The others are on the run of the stage.
        shown = batch == 1
        rates[what] = (
            _rate_key(
                name,
                "higher",
                meaning,
                label=f"{title}, tokens/s (batch {batch})",
                headline={"decode": 170, "prefill": 171}[what] if shown else None,
                difference=f"speed/{ratio}",
            ),
            _rate_key(f"{name}_baseline", "neither", "The baseline's."),
            _key(
                ratio,
                "higher",
                f"{title} speed relative to the baseline in the same runtime, {batch} {many} at a time.",
                unit="times",
                unchanged=1.0,
                label=f"{title} speedup (batch {batch})",
                leaderboard=shown,
                gate_label="decode speedup" if shown and what == "decode" else "",
            ),
        )
    return rates


_RATES = {batch: _rates(batch) for batch in _BATCHES}
FIRST_TOKEN = _time_key("first_token_ms", "lower", "The variant's time to the first token of one prompt.")
_FIRST_BASELINE = _time_key("first_token_ms_baseline", "neither", "The baseline's.")
_GAPS = {
    q: (
        _time_key(
            f"token_gap_ms_p{q}",
            "lower",
            f"{q} % of the variant's waits between two tokens of one sequence are at most as long.",
        ),
        _time_key(f"token_gap_ms_p{q}_baseline", "neither", "The baseline's."),
    )
    for q in _PERCENTILES
}


@metric(
    "speed",
    keys=(
        *(key for rates in _RATES.values() for keys in rates.values() for key in keys),
        FIRST_TOKEN,
        _FIRST_BASELINE,
        *(key for keys in _GAPS.values() for key in keys),
    ),
    requires=(VARIANT, TIMINGS),
    source="Time to first token and inter-token latency as serving benchmarks define them (vLLM's `bench latency` and "
    "`bench serve`); ratios are paired by round",
)
def serving_speed(inputs: MetricInputs) -> list[MetricResult]:
    """Speed of the variant and its baseline, which were timed in turn.

    With B prompts of P tokens, N new tokens, and t_s the time at which step s was done: prefill = B P / t_0, and
    decode = B (N - 1) / (t_(N-1) - t_0), both in tokens per second. Each is the geometric mean over the rounds, with
    Student's t interval of the logarithms; a ratio is that of the rounds' ratios, so it equals the ratio of the two
    means, and what slows both models in one round cancels out. Waits between tokens are pooled over all rounds.
    Where the baseline was not timed (a served variant whose baseline is not served) there is no ratio.
    """
    ours, theirs = inputs.subject.timings, inputs.baseline.timings
    assert ours is not None  # required
    results = []
    for batch, rates in _RATES.items():
        variant, baseline = _by_round(ours, batch), _by_round(theirs, batch)
        if variant is None:
            continue
        for what, (key, of_baseline, ratio) in rates.items():
            a = _rate(variant, what)
            results.append(_mean(key, a, inputs))
            if baseline is not None:
                b = _rate(baseline, what)
                results += [_mean(of_baseline, b, inputs), _mean(ratio, a / b, inputs)]
        if batch == 1:
            for times, first, which in ((variant, FIRST_TOKEN, 0), (baseline, _FIRST_BASELINE, 1)):
                if times is None:
                    continue
                results.append(_mean(first, 1000 * times.seconds[:, 0], inputs))
                gaps = 1000 * np.diff(times.seconds, axis=1).ravel()
                results += [
                    MetricResult(name=keys[which].name, value=float(np.percentile(gaps, q)), n=len(gaps))
                    for q, keys in _GAPS.items()
                ]
    return results


class _Rounds:
    """Times of one model and batch: `seconds` has a row per round and a column per step."""

    def __init__(self, batch: int, prompt_tokens: int, seconds: Float) -> None:
        self.batch, self.prompt_tokens, self.seconds = batch, prompt_tokens, seconds


def _by_round(timings: Timings | None, batch: int) -> _Rounds | None:
    if timings is None:
        return None
    table = timings.where(batch=batch).table.sort_by([("repeat", "ascending"), ("step", "ascending")])
    if not table.num_rows:
        return None
    rounds = len(set(table.column("repeat").to_pylist()))
    seconds = table.column("seconds").to_numpy().reshape(rounds, -1)
    return _Rounds(batch, int(table.column("prompt_tokens")[0].as_py()), seconds)


def _rate(times: _Rounds, what: str) -> Float:
    """Return tokens per second of every round."""
    seconds = times.seconds
    if what == "prefill":
        return np.asarray(times.batch * times.prompt_tokens / seconds[:, 0])
    return np.asarray(times.batch * (seconds.shape[1] - 1) / (seconds[:, -1] - seconds[:, 0]))


def _mean(key: MetricKey, values: Float, inputs: MetricInputs) -> MetricResult:
    """Return the geometric mean, with Student's t interval of the logarithms; of one value without interval."""
    if len(values) == 1:
        return MetricResult(name=key.name, value=float(values[0]), n=1)
    logs, level = np.log(values), inputs.settings.level
    half = float(special.stdtrit(len(logs) - 1, 0.5 + level / 2) * logs.std(ddof=1) / np.sqrt(len(logs)))
    low, value, high = (float(np.exp(logs.mean() + shift)) for shift in (-half, 0.0, half))
    return MetricResult(name=key.name, value=value, low=low, high=high, level=level, n=len(logs))


_MB = 2**20

_PEAK_RATIO = _memory_key(
    "memory_peak_ratio",
    "lower",
    "The variant's peak memory while serving, relative to the baseline's in the same runtime.",
    unit="times",
    label="Peak memory (to baseline)",
    gate_label="peak memory to the baseline's",
    leaderboard=True,
    unchanged=1.0,
)
_PEAK = _memory_key(
    "memory_peak_mb",
    "lower",
    "Peak memory of the variant, from loading to the last token, without the imported libraries.",
    label="Peak memory, MB",
    headline=172,
    difference=_PEAK_RATIO.name,
)
_PEAK_BASELINE = _memory_key("memory_peak_mb_baseline", "neither", "The baseline's.")


@metric(
    "serving_memory",
    keys=(_PEAK, _PEAK_BASELINE, _PEAK_RATIO),
    requires=(VARIANT, SERVING_MEMORY),
    source="Peak resident set size (Linux's VmHWM), and on an accelerator the peak that torch's allocator reports",
)
def serving_memory(inputs: MetricInputs) -> list[MetricResult]:
    """Peak memory of variant and baseline in MiB, and the variant's over the baseline's.

    Every model is loaded and serves the same prompts in several fresh processes. Within a process the peak hardly moves
    from round to round; between processes it does, as memory is laid out otherwise. Each value is the geometric mean
    over the processes, with Student's t interval of the logarithms; the ratio is that of the processes' ratios.
    """
    ours, theirs = inputs.subject.serving_memory, inputs.baseline.serving_memory
    assert ours is not None and theirs is not None  # required
    variant, baseline = (records.table.column("peak_bytes").to_numpy() / _MB for records in (ours, theirs))
    values = {_PEAK: variant, _PEAK_BASELINE: baseline, _PEAK_RATIO: variant / baseline}
    return [_mean(key, peaks, inputs) for key, peaks in values.items()]
