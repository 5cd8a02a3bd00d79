"""A gate for CI: exit code 0 if a compressed model is near enough to its baseline, 1 if it is not.

python examples/ci_gate.py --method rtn --bits 8 --limit 20
"""

import argparse
import sys

import mlflow_compress as mc

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", default="demo")
parser.add_argument("--method", default="rtn")
parser.add_argument("--bits", type=int, default=8)
parser.add_argument("--limit", type=int, default=0, help="items per category and task; 0 takes all")
parser.add_argument("--max-kl", type=float, default=0.05)
parser.add_argument("--max-flips-pct", type=float, default=5.0)
parser.add_argument("--store", default="results", help="folder that keeps the runs: the baseline is evaluated once")
asked = parser.parse_args()

variant = mc.compress(asked.model, asked.method, bits=asked.bits, store=asked.store)
found = mc.evaluate(variant, model=asked.model, limit=asked.limit, store=asked.store)
gates = found.check(max_kl=asked.max_kl, max_flips_pct=asked.max_flips_pct)

print(found.verdict)
print(*gates.reasons, sep="\n")
sys.exit(0 if gates.passed else 1)
