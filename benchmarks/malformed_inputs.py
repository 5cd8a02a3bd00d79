"""What every reader makes of malformed inputs: clear errors, inputs that are accepted, and raw exceptions.

    python benchmarks/malformed_inputs.py            # 40 drawn inputs per reader, and the corpus: over 1,500 cases
    python benchmarks/malformed_inputs.py --drawn 500 --seed 7
    python benchmarks/malformed_inputs.py --folders 480        # so many damages of each file of a model's folder
    python benchmarks/malformed_inputs.py --environment        # values of variables that MLflow and others read

An input is a valid one with one damage in its bytes or in one value, or one that is no reader's. A damage can leave an
input valid (a letter of a text), so some are accepted. A folder that is accepted is evaluated and compressed; it must
give the same numbers, or be another model for whoever looks for its evaluation. Ends non-zero if an exception is raw,
or if numbers change and nothing says so.
"""

import argparse
import json
import logging
import os
import shutil
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from benchmarks import malformed_environment as variables

if TYPE_CHECKING:
    from tests.malformed_inputs import Reader
    from tests.malformed_model import Damage, Evaluated

_OF_SLOW_READERS = 10  # one in ten of the others' cases


def _places(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the way to every value within a JSON value."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [at, *(place for key, part in inner for place in _places(part, (*at, key)))]


def _replaced(value: Any, at: tuple[Any, ...], text: str) -> str:
    """Return JSON with the value at a place replaced by a text."""
    if not at:
        return text
    if isinstance(value, dict):
        parts = (
            json.dumps(k) + ": " + (_replaced(v, at[1:], text) if k == at[0] else json.dumps(v))
            for k, v in value.items()
        )
        return "{" + ", ".join(parts) + "}"
    return (
        "[" + ", ".join(_replaced(v, at[1:], text) if i == at[0] else json.dumps(v) for i, v in enumerate(value)) + "]"
    )


@st.composite
def damaged(draw: st.DrawFn, reader: "Reader") -> bytes:
    """Draw an input of a reader with one damage: in its bytes, or in one of its values."""
    from tests.malformed_inputs import CORPUS, NASTY

    data = reader.valid
    kinds = ["cut", "flipped", "inserted", "deleted", "doubled", "corpus"] + [
        "replaced",
        "left out",
    ] * 4 * reader.structured
    kind = draw(st.sampled_from(kinds))
    if kind == "corpus":
        return draw(st.sampled_from(CORPUS) | st.binary(max_size=200))
    if kind in ("replaced", "left out"):
        rows = data.splitlines(keepends=True) if reader.file.endswith(".jsonl") else [data]
        row = draw(st.integers(0, len(rows) - 1))
        value = json.loads(rows[row])
        at = draw(st.sampled_from(_places(value)))
        if kind == "replaced" or not at:
            rows[row] = _replaced(value, at, draw(st.sampled_from(NASTY))).encode() + b"\n"
        else:
            owner = value
            for key in at[:-1]:
                owner = owner[key]
            del owner[at[-1]]
            rows[row] = json.dumps(value).encode() + b"\n"
        return b"".join(rows)
    start = draw(st.integers(0, len(data) - 1))
    end = draw(st.integers(start, min(len(data), start + 64)))
    changed = bytes([data[start] ^ draw(st.integers(1, 255))])
    return {
        "cut": data[:start],
        "flipped": data[:start] + changed + data[start + 1 :],
        "inserted": data[:start] + draw(st.binary(min_size=1, max_size=16)) + data[start:],
        "deleted": data[:start] + data[end:],
        "doubled": data[:end] + data[start:],
    }[kind]


def cases(reader: "Reader", drawn: int, start: int) -> list[bytes]:
    """Return the inputs of a reader."""
    from tests.malformed_inputs import CORPUS

    found = list(CORPUS)

    @seed(start)
    @settings(max_examples=drawn, database=None, deadline=None, suppress_health_check=list(HealthCheck))
    @given(damaged(reader))
    def collect(data: bytes) -> None:
        found.append(data)

    collect()
    return found[::_OF_SLOW_READERS] if reader.slow else found


_RESULTS = ("equal", "another identity", "refused", "raw", "silent")
_BATCH = 40  # folders per process, so that one which dies takes few with it
_MEMORY = 12 << 30  # bytes


def folders(number: int, start: int, only: str | None) -> int:
    """Print what becomes of damaged folders, by file; return how many end badly."""
    import torch

    from benchmarks import damaged_folders
    from tests import malformed_model as model

    torch.set_num_threads(1)  # a fork would wait for ever for threads that only its parent has
    scratch = Path(tempfile.mkdtemp())
    plain, packed, foreign = (scratch / name for name in ("plain", "packed", "foreign"))
    with model.quiet():
        damaged_folders.make_compressed(packed, model.make_model(plain))
    shutil.copytree(packed, foreign)
    (foreign / "compression.json").unlink()
    files = [(plain, file.name, None) for file in sorted(plain.iterdir()) if not file.name.startswith("model-0000")]
    files += [(plain, "model-00001-of-00003.safetensors", None)]
    files += [(foreign, "config.json", "quantization_config"), (packed, "compression.json", None)]
    counts: Counter[str] = Counter()
    bad: list[str] = []
    print(f"| file | inputs | {' | '.join(_RESULTS)} |\n|---|{'--:|' * (1 + len(_RESULTS))}")
    model.pipeline.reload_in_fresh_process = model.reload_here
    for source, file, within in files:
        if only not in (None, file):
            continue
        with model.quiet():
            untouched = model.evaluate(source, scratch)
        of_file: Counter[str] = Counter()
        inputs = damaged_folders.damages(file, (source / file).read_bytes(), number, start, within=within)
        for damage, (found, words) in _in_forks(inputs, source, scratch, untouched):
            of_file[found] += 1
            if found in ("raw", "silent"):
                bad.append(f"{found}: {source.name}/{file}, {damage.what}: {words[:300]}")
        counts += of_file
        shown = (of_file.total(), *(of_file[name] for name in _RESULTS))
        print(f"| {source.name}/{file} {within or ''} | {' | '.join(map(str, shown))} |", flush=True)
    shown = (counts.total(), *(counts[name] for name in _RESULTS))
    print(f"| all | {' | '.join(map(str, shown))} |")
    shutil.rmtree(scratch)
    print(*bad, sep="\n", file=sys.stderr)
    return len(bad)


def _in_forks(
    inputs: "Sequence[Damage]", source: Path, scratch: Path, untouched: "Evaluated"
) -> "Iterator[tuple[Damage, tuple[str, str]]]":
    """Iterate over damages and what became of each; a process that dies is raw for the damage that it was at."""
    from benchmarks.damaged_folders import limit_memory
    from tests import malformed_model as model

    done = 0
    while done < len(inputs):
        read, write = os.pipe()
        if (child := os.fork()) == 0:
            limit_memory(_MEMORY)
            for damage in inputs[done : done + _BATCH]:
                shutil.rmtree(scratch / "damaged", ignore_errors=True)
                folder = damage.apply(source, scratch / "damaged")
                os.write(write, json.dumps(model.outcome_of(folder, scratch, untouched)).encode() + b"\n")
            os._exit(0)
        os.close(write)
        with os.fdopen(read, "rb") as pipe:
            results: list[tuple[str, str]] = [tuple(json.loads(line)) for line in pipe]
        _, status = os.waitpid(child, 0)
        if status:
            results.append(("raw", f"the process died: {status}"))
        yield from zip(inputs[done : done + len(results)], results, strict=True)
        done += len(results)


def environment(names: Iterable[str]) -> int:
    """Print what becomes of values of variables; return how many end badly."""
    scratch = Path(tempfile.mkdtemp())
    folder = Path(__file__).resolve().parents[1] / "mlflow_compress" / "demo" / "model"
    bad: list[str] = []
    total: Counter[str] = Counter()
    print("| variable | values | accepted | refused | raw |\n|---|--:|--:|--:|--:|")
    for name in names:
        counts: Counter[str] = Counter()
        values = {**variables.OF_LIBRARIES, **variables.OF_MLFLOW}[name]
        use = partial(variables.use_model, folder) if name in variables.OF_LIBRARIES else variables.use_store
        for number, value in enumerate(values):
            found, words = variables.outcome_with(name, value, use, scratch / f"{name}-{number}")
            counts[found] += 1
            if found == "raw":
                bad.append(f"raw: {name}={value[:60]!r}: {words[:300]}")
        shown = (counts.total(), counts["accepted"], counts["refused"], counts["raw"])
        print(f"| {name} | {' | '.join(map(str, shown))} |", flush=True)
        total += counts
    shown = (total.total(), total["accepted"], total["refused"], total["raw"])
    print(f"| all | {' | '.join(map(str, shown))} |")
    shutil.rmtree(scratch)
    print(*bad, sep="\n", file=sys.stderr)
    return len(bad)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--drawn", type=int, default=40, help="drawn inputs per reader [40]")
    parser.add_argument("--seed", type=int, default=0, help="seed of the drawn inputs [0]")
    parser.add_argument("--only", help="this reader, file or variable alone")
    parser.add_argument("--folders", type=int, metavar="N", help="instead: N damages of each file of a model's folder")
    parser.add_argument("--environment", action="store_true", help="instead: values of environment variables")
    asked = parser.parse_args(argv)
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    if asked.folders:
        return 1 if folders(asked.folders, asked.seed, asked.only) else 0
    if asked.environment:
        names = [*variables.OF_LIBRARIES, *variables.OF_MLFLOW] if asked.only is None else [asked.only]
        return 1 if environment(names) else 0
    from tests.malformed_inputs import outcome, readers

    total: Counter[str] = Counter()
    begin = time.perf_counter()
    print("| reader | cases | clear errors | accepted | raw |\n|---|--:|--:|--:|--:|")
    raw: dict[str, bytes] = {}
    for name, reader in readers().items():
        if asked.only not in (None, name):
            continue
        assert outcome(reader, reader.valid)[0] == "accepted", f"{name} does not take its own input"
        counts: Counter[str] = Counter()
        for data in cases(reader, asked.drawn, asked.seed):
            found, error = outcome(reader, data)
            counts[found] += 1
            if found == "raw":
                raw.setdefault(f"{name}: {type(error).__name__}: {str(error)[:150]}", data)
        total += counts
        shown = (counts.total(), counts["clear error"], counts["accepted"], counts["raw"])
        print(f"| {name} | {' | '.join(map(str, shown))} |", flush=True)
    shown = (total.total(), total["clear error"], total["accepted"], total["raw"])
    print(f"| all | {' | '.join(map(str, shown))} |\n\n{time.perf_counter() - begin:.0f} s")
    for what, data in raw.items():
        print(f"raw: {what}\n    {data[:160]!r}", file=sys.stderr)
    return 1 if raw else 0


if __name__ == "__main__":
    sys.exit(main())
