"""`mlflow-compress compare` on files, as a user calls it."""

import json
from pathlib import Path

import pytest

from mlflow_compress import cli
from mlflow_compress.commands.shared.stored import write_metadata
from mlflow_compress.tracking.tracker import Tracker
from tests import metric_records
from tests.task_files import write_rows as write


def rows(predictions: str) -> list[dict[str, object]]:
    return [{"id": i, "pred": p, "gold": "A"} for i, p in enumerate(predictions)]


def test_counts_by_hand(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # A is right everywhere. Baseline AAABBC, variant AABACC: item 2 right to wrong, item 3 wrong to right,
    # item 4 from B to C, both wrong; 4 right before (no: 3), 3 right after.
    paths = write(tmp_path / "b.jsonl", rows("AAABBC")), write(tmp_path / "q.jsonl", rows("AABACC"))
    assert cli.main(["compare", *paths, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["n"], found["c2w"], found["w2c"], found["w2w"]) == (6, 1, 1, 1)
    assert found["accuracy_baseline"] == found["accuracy_variant"] == 0.5 and found["accuracy_delta"] == 0
    assert found["flips_pct"] == pytest.approx(100 / 3) and found["all_flips_pct"] == pytest.approx(50)
    assert found["mcnemar_p"] == pytest.approx(0.75)  # 1 - P(X = 1)/2 with X ~ Binomial(2, 1/2)


def test_readable_without_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = write(tmp_path / "b.jsonl", rows("AB")), write(tmp_path / "q.jsonl", rows("BA"))
    assert cli.main(["compare", *paths]) == 0
    out = capsys.readouterr().out
    assert "flips      100.00 %" in out
    assert out.startswith("q.jsonl against b.jsonl: fails the default policy: flips 100 % > 5.\n")
    same = write(tmp_path / "many.jsonl", rows("A" * 200))
    assert cli.main(["compare", same, same]) == 0
    assert capsys.readouterr().out.startswith(
        "many.jsonl against many.jsonl: passes the default policy in flips and accuracy.\n"
    )


@pytest.mark.parametrize(("part", "value"), [("tokenizer", "b" * 64), ("shots", 0)])
def test_records_of_another_tokenizer_or_number_of_shots_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], part: str, value: object
) -> None:
    full = metric_records.inputs(12)
    known: dict[str, object] = {"tokenizer": "a" * 64, "shots": 5}
    folders = tmp_path / "b", tmp_path / "q"
    for folder, run, beside in zip(
        folders, (full.baseline, full.variant), (known, {**known, part: value}), strict=True
    ):
        run.write(folder)
        write_metadata(folder, beside)
    assert cli.main(["compare", *map(str, folders)]) == 1
    assert f"differ in their {part}" in capsys.readouterr().err
    write_metadata(folders[1], known)
    assert cli.main(["compare", *map(str, folders)]) == 0


def test_run_ids_stand_for_their_records(tracker: Tracker, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    full = metric_records.inputs(12)
    ids = []
    for name, run in (("b", full.baseline), ("q", full.variant)):
        run.write(tmp_path / name)
        with tracker.run(f"evaluate {name}", "evaluate", {}) as tracked:
            tracked.log_folder(tmp_path / name, "records")
        ids.append(tracked.run_id)
    assert cli.main(["compare", *ids, "--json"]) == 0
    by_id = json.loads(capsys.readouterr().out)
    assert cli.main(["compare", str(tmp_path / "b"), ids[1], "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == by_id
    assert by_id["n"] == 24 and by_id["tasks"]["mmlu"]["n"] == 12
    assert cli.main(["compare", ids[0], "0" * 32]) == 1
    assert "0" * 32 in capsys.readouterr().err


def test_harness_sample_logs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # As lm-evaluation-harness 0.4.13 writes them; per character -3/3 against -5/10, choice 1, and -1/3 against -5/10.
    def line(values: tuple[float, float], right: float) -> dict[str, object]:
        arguments = {f"gen_args_{i}": {"arg_0": "Q", "arg_1": f" {c}"} for i, c in enumerate(("one", "a long one"))}
        scored = {
            "filtered_resps": [[str(v), "False"] for v in values],
            "filter": "none",
            "acc": 0.0,
            "acc_norm": right,
        }
        return {"doc_id": 0, "target": "1", "arguments": arguments, "doc_hash": "d", "prompt_hash": "p", **scored}

    paths = [
        write(tmp_path / f"samples_arc_easy_{name}.jsonl", [line(*content)])
        for name, content in (("b", ((-3.0, -5.0), 1.0)), ("q", ((-1.0, -5.0), 0.0)))
    ]
    assert cli.main(["compare", *paths]) == 0
    out = capsys.readouterr().out
    assert "right to wrong 1" in out and "scored by  acc_norm" in out


def test_an_unknown_source_lists_what_is_accepted(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["compare", "nowhere", "nothing"]) == 2
    assert "a run id, a folder of Parquet records" in capsys.readouterr().err
