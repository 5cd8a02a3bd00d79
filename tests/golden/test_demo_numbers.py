"""Every number of one run on the demo, as it was before the code was rearranged.

`tests/golden/demo_rtn.json` holds the results of `main --method rtn --bits 4` on the demo, at full precision, from the
last commit before. On the machine that made it the numbers are equal; elsewhere the last bits differ, and with
them what is nearly a tie.
"""

import json
from pathlib import Path

import pytest

import mlflow_compress as mc

STORED = Path(__file__).parent / "demo_rtn.json"
# Measured, not derived: what rounding does to a log-probability is bounded in test_demo_records.py, but where two answers
# or ranks are nearly alike a share moves by a whole token, and an end of its interval by a step: by 9e-4 of itself at
# most, with the default kernels as with AVX-512. The distance of the demo from itself is nothing but rounding.
RELATIVE, ABSOLUTE = 1e-3, 1e-6


@pytest.mark.slow
@pytest.mark.ci
def test_every_number_of_a_demo_run_is_as_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    before = {(name, task, category): rest for name, task, category, *rest in json.loads(STORED.read_text())}
    variant = mc.compress("demo", "rtn", bits=4, store=tmp_path)
    found = mc.evaluate(variant, store=tmp_path).results
    now = {(r.name, r.task, r.category): [r.value, r.low, r.high, r.n, r.n_unscored] for r in found}
    assert now.keys() == before.keys()
    for key, (value, low, high, n, n_unscored) in before.items():
        assert now[key][3:] == [n, n_unscored], key
        assert now[key][:3] == [
            x if x is None else pytest.approx(x, rel=RELATIVE, abs=ABSOLUTE) for x in (value, low, high)
        ], key
