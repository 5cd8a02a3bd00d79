"""Blind ratings by people: the sheet, its key, what raters send back, and what it says."""

import csv
import io
import json
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import mlflow_compress as mc
from mlflow_compress.cli import main
from mlflow_compress.commands.rate.run import RatingKey, drawn_sheet, rating_results, read_ratings
from mlflow_compress.errors import ConfigError, DataError
from mlflow_compress.metrics.core.metric_inputs import MetricSettings
from mlflow_compress.reporting.answers_page import CHOICES, ComparedAnswer, as_jsonl, rating_csv, rating_page
from mlflow_compress.tracking import run_names
from mlflow_compress.tracking.folder_store import FolderStore
from mlflow_compress.tracking.tracker import Tracker
from tests.report_results import Page
from tests.unit.test_report_page import hostile


def pairs(n: int, *, identical: int = 0, turns: int = 1) -> list[ComparedAnswer]:
    """Return answers to n instructions, best grade of the variant first, as the judge's file has them."""
    return [
        ComparedAnswer(
            item_id=f"q{i}",
            turn=turn,
            category="writing" if i % 2 else "math",
            question=f"Question {i}.{turn}",
            baseline=f"text {i}.{turn}",
            variant=f"text {i}.{turn}" if i < identical else f"other {i}.{turn}",
            grades_baseline={"": 5.0},
            grades_variant={"": 5.0},
        )
        for i in range(n)
        for turn in range(turns)
    ]


def sheet_of(found: list[ComparedAnswer], *, seed: int = 0, limit: int = 0):  # type: ignore[no-untyped-def]
    return drawn_sheet(found, run="0" * 32, baseline="llama-x", variant="awq-4bit", seed=seed, limit=limit)


def filled(folder: Path, rater: str, choices: Mapping[str, str]) -> Path:
    path = folder / f"{rater}.csv"
    path.write_text("id,choice\n" + "".join(f"{row},{choice}\n" for row, choice in choices.items()), encoding="utf-8")
    return path


def test_the_key_alone_tells_whose_answer_is_where() -> None:
    found = pairs(40, turns=2)
    sheet, rows, key = sheet_of(found, seed=3)
    texts = {(pair.item_id, pair.turn): pair for pair in found}
    assert len(rows) == len(key.rows) == 80 and not key.identical
    for row, told in zip(rows, key.rows, strict=True):
        pair = texts[told.item_id, told.turn]
        assert row.id == told.id and row.questions[-1] == pair.question and len(row.questions) == told.turn + 1
        shown = {"A": row.a[-1], "B": row.b[-1]}
        assert shown.pop(told.variant) == pair.variant and [*shown.values()] == [pair.baseline]
        assert len(row.a) == len(row.b) == told.turn + 1  # the turns before it, of the same model
    # Both sides, in an order that is not that of the file; ids are numbers in the order of the sheet.
    assert 20 < sum(told.variant == "A" for told in key.rows) < 60
    assert [told.item_id for told in key.rows] != [pair.item_id for pair in found]
    assert [row.id for row in rows] == [f"{sheet}-{n:03}" for n in range(1, 81)]


def test_what_raters_get_names_neither_model_nor_run_nor_grade() -> None:
    sheet, rows, _ = sheet_of(pairs(20, turns=2), seed=123456789)
    for text in (rating_page(sheet, rows).partition("</style>")[2], rating_csv(rows)):
        assert "Question 3.1" in text and "other 3.1" in text
        for secret in ("q1", "llama-x", "awq-4bit", "variant", "baseline", "0" * 32, "123456789", "grade"):
            assert secret not in text.lower(), secret


def test_a_row_is_as_likely_the_variants_on_either_side_and_at_any_place() -> None:
    found = pairs(8)
    keys = [sheet_of(found, seed=seed)[2].rows for seed in range(400)]
    for place in range(8):
        first = sum(rows[place].variant == "A" for rows in keys)
        assert 140 < first < 260  # 200 expected, six standard deviations
    of_item = [row.variant for rows in keys for row in rows if row.item_id == "q0"]
    assert 140 < of_item.count("A") < 260
    assert len({tuple(row.item_id for row in rows) for rows in keys}) > 390


def test_a_seed_repeats_the_sheet_and_identical_answers_are_ties_unless_another_turn_differs() -> None:
    found = pairs(10, identical=4)
    sheet, rows, key = sheet_of(found, seed=1)
    assert (sheet, rows, key) == sheet_of(found[::-1], seed=1) and sheet_of(found, seed=2)[2].rows != key.rows
    assert len(rows) == 6 and {pair.item_id for pair in key.identical} == {"q0", "q1", "q2", "q3"}
    _, some, key = sheet_of(found, seed=1, limit=5)
    assert len(some) + len(key.identical) == 5
    first, second = pairs(1, turns=2)
    same = ComparedAnswer(**{**vars(second), "variant": second.baseline})
    assert len(sheet_of([first, same])[1]) == 2
    alike = ComparedAnswer(**{**vars(first), "variant": first.baseline})
    assert len(sheet_of([alike, same])[2].identical) == 2


def test_hostile_text_is_escaped_on_the_page_and_no_formula_in_the_table() -> None:
    attack = ComparedAnswer(
        item_id="q",
        turn=0,
        category=hostile("category"),
        question=hostile("question"),
        baseline=hostile("one"),
        variant='=HYPERLINK("http://x")',
    )
    sheet, rows, _ = sheet_of([attack])
    page = rating_page(sheet, rows)
    parsed = Page(page)
    assert page.count("<script") == 1 and not {"iframe", "object", "link", "img"} & set(parsed.tags)
    assert not [name for name, _ in parsed.attributes if name.startswith("on")]
    for place in ("category", "question", "one"):
        assert hostile(place) in parsed.text
    [row] = csv.DictReader(io.StringIO(rating_csv(rows)))
    assert hostile("one") in (row["answer_a"], row["answer_b"])
    assert '\'=HYPERLINK("http://x")' in (row["answer_a"], row["answer_b"]) and row["choice"] == ""


@given(st.lists(st.text(st.characters(codec="utf-8"), min_size=1), min_size=2, max_size=2, unique=True))
def test_the_table_holds_every_text(texts: list[str]) -> None:
    found = ComparedAnswer(item_id="q", turn=0, category="c", question="Q", baseline=texts[0], variant=texts[1])
    _, rows, _ = sheet_of([found])
    [row] = csv.DictReader(io.StringIO(rating_csv(rows), newline=""))
    assert {row["answer_a"].removeprefix("'"), row["answer_b"].removeprefix("'")} == {
        t.removeprefix("'") for t in texts
    }


def test_the_win_rate_by_hand() -> None:
    _, rows, key = sheet_of(pairs(6, identical=1), seed=4)
    variant = {row.id: row.variant for row in key.rows}
    other = {row: "AB".replace(side, "") for row, side in variant.items()}
    ids = [row.id for row in rows]
    # Wins, wins, loses, tie, both bad; and one pair of identical answers: (1 + 1 + 0 + 0.5 + 0.5 + 0.5) / 6.
    anna = {ids[0]: variant[ids[0]], ids[1]: variant[ids[1]], ids[2]: other[ids[2]], ids[3]: "tie", ids[4]: "both bad"}
    found = {(r.name, r.task): r for r in rating_results(key, {"anna": anna}, MetricSettings()) if r.category is None}
    values = {name: result.value for (name, _), result in found.items()}
    assert values == pytest.approx(
        {"human/win_rate": 3.5 / 6, "human/wins": 2 / 6, "human/losses": 1 / 6, "human/both_bad": 1 / 6}
    )
    rate = found["human/win_rate", None]
    assert (rate.n, rate.n_unscored) == (6, 0) and rate.low is not None and rate.low < rate.value < rate.high
    # Ben rates three rows, one of them otherwise: two are missing, and every rating counts alike.
    ben = {ids[0]: variant[ids[0]], ids[1]: variant[ids[1]], ids[2]: variant[ids[2]]}
    both = {
        (r.name, r.task): r for r in rating_results(key, {"anna": anna, "ben": ben}, MetricSettings()) if not r.category
    }
    assert both["human/win_rate", None].value == pytest.approx((3.5 + 3.5) / 10)
    assert (both["human/win_rate", None].n, both["human/win_rate", None].n_unscored) == (10, 2)
    assert both["human/win_rate", "ben"].value == pytest.approx(3.5 / 4) and both["human/win_rate", "anna"] != rate
    assert both["human/win_rate", "anna"].value == rate.value
    # (1, 1, 0) and (1, 1, 1): mean square of the difference 1/3; of independent draws 1/3 as well: kappa is 0.
    assert both["human/agreement_kappa", "anna and ben"].value == pytest.approx(0.0)
    assert both["human/agreement_kappa", None].n == 3


@pytest.mark.parametrize("choice", [*CHOICES, " a ", "TIE", "Both Bad"])
def test_choices_are_read_in_any_case_and_with_any_separator(choice: str, tmp_path: Path) -> None:
    for separator in ",;\t":
        path = tmp_path / "r.csv"
        path.write_bytes(
            f"\ufeffid{separator}question{separator}choice\r\nx-1{separator}\u00e9{separator}{choice}\r\n".encode()
        )
        assert read_ratings([path], ["x-1"]) == {
            "r": {"x-1": {"a": "A", "b": "B"}.get(choice.strip().lower(), choice.strip().lower())}
        }


def test_every_bad_row_is_named_in_one_error(tmp_path: Path) -> None:
    anna = tmp_path / "anna.csv"
    anna.write_text("id,choice\nx-1,A\nx-9,B\nx-2,better\nx-1,B\n,tie\nx-3,\n", encoding="utf-8")
    with pytest.raises(DataError) as raised:
        read_ratings([anna, filled(tmp_path, "ben", {"y": "A"})], ["x-1", "x-2", "x-3"])
    text = str(raised.value)
    assert "5 rows of ratings cannot be used" in text
    for part in (
        "anna.csv, line 3: unknown id 'x-9'",
        "anna.csv, line 4: unknown choice 'better' (allowed: A, tie, B, both bad)",
        "anna.csv, line 5: x-1 is in line 2 already",
        "anna.csv, line 6: unknown id ''",
        "ben.csv, line 2: unknown id 'y'",
    ):
        assert part in text


def test_files_that_cannot_be_ratings_are_refused(tmp_path: Path) -> None:
    empty = filled(tmp_path, "empty", {"x-1": ""})
    with pytest.raises(DataError, match="No row of this file has a choice"):
        read_ratings([empty], ["x-1"])
    (tmp_path / "other.csv").write_text("name,better\na,b\n")
    with pytest.raises(DataError, match="needs the columns id and choice"):
        read_ratings([tmp_path / "other.csv"], ["x-1"])
    with pytest.raises(ConfigError, match="no such file"):
        read_ratings([tmp_path / "none.csv"], ["x-1"])
    (tmp_path / "b").mkdir()
    with pytest.raises(ConfigError, match="one name"):
        read_ratings([filled(tmp_path, "a", {"x-1": "A"}), filled(tmp_path / "b", "a", {"x-1": "A"})], ["x-1"])
    with pytest.raises(ConfigError, match="rater's name"):
        read_ratings([filled(tmp_path, "a b", {"x-1": "A"})], ["x-1"])
    (tmp_path / "key.json").write_text('{"run": 1}')
    with pytest.raises(DataError, match="no key of a blind sheet"):
        RatingKey.read(tmp_path / "key.json")


def judged(store: FolderStore, found: list[ComparedAnswer], stage: str = "judge") -> str:
    """Return a judge run with these answers, as the judge stage leaves it."""
    with store.run("judge it", stage, {"variant": "small", "base_model": "base"}) as run:
        folder = store.root / run.run_id / "answers"
        folder.mkdir()
        (folder / "answers.jsonl").write_text(as_jsonl(found), encoding="utf-8")
    return str(run.run_id)


def test_from_the_run_to_its_metrics(tmp_path: Path) -> None:
    store = FolderStore(tmp_path / "runs")
    run = judged(store, pairs(12, identical=2))
    sheet = mc.blind(run, output=tmp_path / "blind", store=store.root)
    assert (sheet.n_pairs, sheet.n_identical) == (10, 2) and "2 more are identical" in sheet.summary
    key = RatingKey.read(sheet.key)
    assert key.seed > 2**64  # nobody can try all of them
    assert not [path for path in sheet.for_raters.iterdir() if "key" in path.name]
    table = (sheet.for_raters / "answers.csv").read_bytes()
    for rater, choice in (("anna", b"A"), ("ben", b"tie")):
        (tmp_path / f"{rater}.csv").write_bytes(table.replace(b",\r\n", b"," + choice + b"\r\n"))
    files = [tmp_path / "anna.csv", tmp_path / "ben.csv"]
    silent = mc.ratings(*files, key=sheet.key, store=store.root)
    assert silent.run is None and "human/win_rate" not in store.look_up(run).metrics
    found = mc.ratings(*files, key=sheet.key, store=store.root, log=True)
    assert found.results == silent.results and found.missing == {"anna": 0, "ben": 0}
    wins = sum(row.variant == "A" for row in key.rows)
    assert found["human/win_rate"].value == pytest.approx((wins + 12 * 0.5 + 1) / 24)
    logged = store.look_up(run).metrics
    assert {"human/win_rate", "human/win_rate/anna", "human/both_bad/ben", "human/wins"} <= logged.keys()
    assert json.loads((store.root / run / "run.json").read_text())["status"] == "FINISHED"
    rows = store.fetch_json(run, "human_ratings.json")
    assert len(rows) == 20 and {row["choice"] for row in rows} <= {"variant", "baseline", "tie"}
    assert len(found.to_pandas()) == len(found.results) and "win rate" in found.summary


def test_a_sheet_is_never_written_over_and_nothing_is_left_of_a_refused_one(tmp_path: Path) -> None:
    store = FolderStore(tmp_path / "runs")
    run, same = judged(store, pairs(3)), judged(store, pairs(3, identical=3))
    mc.blind(run, output=tmp_path / "blind", store=store.root, seed=7)
    assert RatingKey.read(tmp_path / "blind" / "key.json").seed == 7
    before = sorted(tmp_path.iterdir())
    for bad, message in (
        ({"run": run, "output": tmp_path / "blind"}, "something at this place"),
        ({"run": run, "output": tmp_path / "no" / "blind"}, "does not exist"),
        ({"run": same, "output": tmp_path / "new"}, "All these answers are identical"),
        ({"run": "x", "output": tmp_path / "new"}, "no id of a run"),
        ({"run": "0" * 32, "output": tmp_path / "new"}, "no such run"),
        ({"run": judged(store, pairs(1), "evaluate"), "output": tmp_path / "new"}, "no answers to instructions"),
    ):
        with pytest.raises(mc.MlflowCompressError, match=message):
            mc.blind(store=store.root, **bad)
    assert sorted(tmp_path.iterdir()) == before


def test_in_mlflow_the_results_are_added_to_the_rated_run(
    tracker: Tracker, workdir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with tracker.run("main", "main", {}) as main_run:
        tags = {"variant": "small", "base_model": "base", run_names.PARENT: main_run.run_id}
        with tracker.run("judge it", "judge", tags) as judge_run:
            (workdir / "answers.jsonl").write_text(as_jsonl(pairs(5)), encoding="utf-8")
            judge_run.log_file(workdir / "answers.jsonl", "answers")
    # As `mlflow run -e blind` starts it: with a run for this process, which then says where the sheet is.
    given = tracker.client.create_run(tracker.experiment_id).info.run_id
    monkeypatch.setenv("MLFLOW_RUN_ID", given)
    assert main(["blind", "--run", main_run.run_id, "-o", "sheet"]) == 0
    assert "5 pairs to rate." in capsys.readouterr().out
    assert tracker.client.get_run(given).data.tags["mlflow.note.content"].startswith("Wrote 5 pairs")
    monkeypatch.delenv("MLFLOW_RUN_ID", raising=False)
    table = (workdir / "sheet" / "for_raters" / "answers.csv").read_bytes()
    (workdir / "anna.csv").write_bytes(table.replace(b",\r\n", b",B\r\n").replace(b",B\r\n", b",\r\n", 1))
    assert main(["ratings", "anna.csv", "--key", "sheet/key.json", "--log", "true"]) == 0
    out = capsys.readouterr().out
    assert "small against base: win rate" in out and "anna has not rated 1 of the pairs." in out
    rated = tracker.client.get_run(main_run.run_id)
    assert "human/win_rate" in rated.data.metrics and rated.info.status == "FINISHED"
    assert len(tracker.fetch_json(main_run.run_id, "human_ratings.json")) == 4


def test_the_commands_exit_with_2_on_a_wrong_parameter(workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["blind", "nothing"]) == 2 and "no id of a run" in capsys.readouterr().err
    assert main(["ratings", "a.csv"]) == 2 and "'files' names no file" in capsys.readouterr().err
    Path("a.csv").write_text("id,choice\n")
    assert main(["ratings", "a.csv"]) == 2 and "'key' names no file" in capsys.readouterr().err
    Path("key.json").write_text("{}")
    assert main(["ratings", "--key", "key.json"]) == 2 and "No file of ratings" in capsys.readouterr().err
    assert main(["ratings", "a.csv", "--key", "key.json"]) == 1  # a broken file is no wrong parameter
    assert "no key of a blind sheet" in capsys.readouterr().err
    assert not (workdir / "blind").exists()
