"""Reduce millions of token records to all corpus statistics: seconds and peak memory, from Parquet files.

Example
-------
python benchmarks/corpus_statistics.py --tokens 10000000
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from mlflow_compress.metrics.perplexity import statistics
from mlflow_compress.records import TokenDistances, TokenScores

WINDOW = 256
PART = 262_144
"""Tokens of a row group."""

FILES = ("baseline", "variant", "distances")


def table(kind: Any, keys: dict[str, Any], **columns: Any) -> pa.Table:
    """Return a table in the schema of `kind`."""
    given = {**keys, **{name: pa.array(values) for name, values in columns.items()}}
    return pa.table([given[field.name].cast(field.type) for field in kind.SCHEMA], schema=kind.SCHEMA)


def write(folder: Path, tokens: int) -> None:
    """Write synthetic records of baseline, variant and distances, part by part."""
    rng = np.random.default_rng(0)
    schemas = dict(zip(FILES, (TokenScores.SCHEMA, TokenScores.SCHEMA, TokenDistances.SCHEMA), strict=True))
    writers = {name: pq.ParquetWriter(folder / f"{name}.parquet", schemas[name]) for name in FILES}
    for start in range(0, tokens, PART):
        n = min(PART, tokens - start)
        index = np.arange(start, start + n)
        keys = {
            "task": pa.array(["corpus"]).take(pa.array(np.zeros(n, dtype=np.int64))),
            "item_id": pa.array(index // WINDOW).cast(pa.string()),
            "position": pa.array((index % WINDOW).astype(np.int32)),
        }
        target, nll, kl = rng.integers(0, 32_000, n, dtype=np.int32), rng.exponential(2.0, n), rng.exponential(0.05, n)
        for name, x in (("baseline", nll), ("variant", nll + 0.1 * rng.standard_normal(n) ** 2)):
            scores = table(TokenScores, keys, target=target, nll=x, p_target=np.exp(-x), argmax=target, entropy=nll)
            writers[name].write_table(scores)
        near = np.exp(-kl)
        distances = table(
            TokenDistances,
            keys,
            kl=kl,
            kl_reverse=kl,
            js=kl / 4,
            tv=1 - near,
            same_top=kl < 0.2,
            top10=near,
            rbo10=near,
        )
        writers["distances"].write_table(distances)
    for writer in writers.values():
        writer.close()


def reduce(folder: Path) -> None:
    """Reduce, and print one JSON line."""
    start = time.perf_counter()
    baseline, variant, distances = (pq.read_table(folder / f"{name}.parquet") for name in FILES)
    found = statistics(TokenScores(baseline), TokenScores(variant), TokenDistances(distances))
    seconds = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(json.dumps({"tokens": found.n, "seconds": round(seconds, 2), "peak_memory_gb": round(peak, 3)}))


def main() -> None:
    """Write the records in this process, reduce them in a fresh one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=10_000_000, help="tokens (default: %(default)s)")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.folder:
        reduce(arguments.folder)
        return
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), arguments.tokens)
        subprocess.run([sys.executable, __file__, "--folder", folder], check=True)


if __name__ == "__main__":
    main()
