"""What every reader makes of malformed inputs: clear errors, inputs that are accepted, and raw exceptions.

    python benchmarks/malformed_inputs.py            # 40 drawn inputs per reader, and the corpus: over 1,500 cases
    python benchmarks/malformed_inputs.py --drawn 500 --seed 7

An input is a valid one with one damage in its bytes or in one value, or one that is no reader's. A damage can leave an
input valid (a letter of a text), so some are accepted. Ends non-zero if an exception is raw.
"""

import argparse
import logging
import sys
import time
import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from hypothesis import HealthCheck, given, seed, settings

from tests.malformed_inputs import CORPUS, Reader, damaged, outcome, readers

_OF_SLOW_READERS = 10  # one in ten of the others' cases


def cases(reader: Reader, drawn: int, start: int) -> list[bytes]:
    """Return the inputs of a reader."""
    found = list(CORPUS)

    @seed(start)
    @settings(max_examples=drawn, database=None, deadline=None, suppress_health_check=list(HealthCheck))
    @given(damaged(reader))
    def collect(data: bytes) -> None:
        found.append(data)

    collect()
    return found[::_OF_SLOW_READERS] if reader.slow else found


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--drawn", type=int, default=40, help="drawn inputs per reader [40]")
    parser.add_argument("--seed", type=int, default=0, help="seed of the drawn inputs [0]")
    parser.add_argument("--only", help="this reader alone")
    asked = parser.parse_args(argv)
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
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
