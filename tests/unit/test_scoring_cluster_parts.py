"""Parts of scoring on a cluster, without one: shards of a plan, results as Arrow tables, the loop that hands out tasks."""

import pickle
import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, repeat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mlflow_compress.config import EngineConfig, SourceConfig
from mlflow_compress.engines.interface import ModelRequest
from mlflow_compress.engines.ray import workers as head_watch
from mlflow_compress.engines.ray import workers as workers_module
from mlflow_compress.engines.ray.cluster_worker import ShardResult, cut_into_shards, shards_by_layer, shards_for
from mlflow_compress.engines.ray.remote_model import RayEngine
from mlflow_compress.engines.ray.workers import WorkerCall, Workers, connected
from mlflow_compress.errors import ConfigError, DataError, MissingDependencyError, StoreAwayError, WorkerError
from mlflow_compress.scoring import baseline_store
from mlflow_compress.scoring.engine import Scorer, ScoringConfig
from mlflow_compress.scoring.forward.body import split_body_and_head
from mlflow_compress.scoring.forward.by_layer import StateSizes
from mlflow_compress.scoring.journal import PassParts, joined_arrays
from mlflow_compress.scoring.plan.packing import NO_PREFIX, PackedBatch, Plan, group_units, plan_batches, plan_packs
from mlflow_compress.scoring.scoring_pass import ModelRunner, ScoringPass, Targets
from tests.unit.scoring_models import VOCAB, load_random, mixed_requests
from tests.unit.test_scoring_plan import tries


def targets_of(plan: Plan) -> Targets:
    """One or two targets a row."""
    rows = np.sort(np.concatenate([np.arange(len(plan.keys)), np.arange(0, len(plan.keys), 3)]))
    return Targets(rows, np.arange(len(rows)) % VOCAB)


@settings(max_examples=150)
@given(tries(), st.integers(1, 40), st.integers(1, 6), st.integers(1, 5), st.booleans(), st.randoms())
def test_shards_are_what_is_missing_of_a_plan_and_whole_in_themselves(
    given_tries: tuple[list[np.ndarray], list[int]],
    batch_tokens: int,
    head_rows: int,
    n: int,
    packed: bool,
    random: Any,
) -> None:
    sequences, counts = given_tries
    plan = (
        plan_packs(sequences, counts, batch_tokens=batch_tokens, min_shared=1)
        if packed
        else plan_batches(sequences, counts, batch_tokens=batch_tokens)
    )
    targets, groups = targets_of(plan), group_units(plan, head_rows)
    missing = [number for number in range(len(groups)) if random.random() < 0.8]
    shards = cut_into_shards(plan, targets, head_rows, missing, n)
    assert [number for shard in shards for number in range(shard.first, shard.stop)] == missing
    for shard in shards:
        part = groups[shard.first : shard.stop]
        wanted = plan.units[part[0].units.start : part[-1].units.stop]
        assert [id(u) for u in shard.plan.units] == [id(u) for u in wanted]
        assert np.array_equal(shard.plan.keys, plan.keys[shard.rows])
        assert shard.n_tokens == sum(g.n_tokens for g in part)
        assert [g.n_tokens for g in group_units(shard.plan, head_rows)] == [g.n_tokens for g in part]
        inside = (targets.row >= shard.rows.start) & (targets.row < shard.rows.stop)
        assert np.array_equal(shard.targets.row + shard.rows.start, targets.row[inside])
        assert np.array_equal(shard.targets.token, targets.token[inside])
        every = (*shard.plan.before, *shard.plan.units)
        made = {u.keep for u in every if isinstance(u, PackedBatch)} | {NO_PREFIX}
        assert {u.prefix for u in every if isinstance(u, PackedBatch)} <= made
        own = {id(u) for u in shard.plan.units}
        assert not any(id(u) in own for u in shard.plan.before)


def subjects(n_headers: int) -> tuple[list[np.ndarray], list[int]]:
    """A few questions behind each of some headers of 40 tokens."""

    def header(n: int, first: int) -> np.ndarray:
        return (np.arange(n, dtype=np.int32) * 7 + first) % VOCAB

    sequences = [
        np.concatenate([header(40, 3 * h), header(12, 11 * q + h)]).astype(np.int32)
        for h in range(n_headers)
        for q in range(5)
    ]
    return sequences, [3] * len(sequences)


def cut(plan: Plan, head_rows: int, n: int) -> list[Any]:
    return cut_into_shards(plan, targets_of(plan), head_rows, range(len(group_units(plan, head_rows))), n)


def test_cuts_lie_between_subjects_and_one_subject_is_divided_all_the_same() -> None:
    plan = plan_packs(*subjects(3), batch_tokens=30, min_shared=8)
    first, second = cut(plan, 1, 2)
    # Half of three headers is in the middle of the second; there its header would be computed twice.
    assert first.plan.before == [] and second.plan.before == []
    assert abs(first.n_tokens - second.n_tokens) == plan.n_tokens / 3
    plan = plan_packs(*subjects(1), batch_tokens=30, min_shared=8)
    assert [pack.n_tokens for pack in cut(plan, 1, 2)[1].plan.before] == [40]


def test_shards_are_few_where_small_ones_would_compute_much_twice() -> None:
    # 4 headers of 40 tokens and 5 questions of 12 each: any cut within a subject computes 40 of 400 tokens again.
    plan = plan_packs(*subjects(4), batch_tokens=30, min_shared=8)
    every = range(len(group_units(plan, 1)))
    found = shards_for(plan, targets_of(plan), 1, every, 2)
    assert len(found) == 4 and [shard.plan.before for shard in found] == [[]] * 4
    # Texts share nothing: nothing is computed twice, and there are as many shards as groups.
    texts = [np.full(12, i, dtype=np.int32) for i in range(20)]
    plain = plan_batches(texts, [3] * 20, batch_tokens=12)
    assert len(shards_for(plain, targets_of(plain), 1, range(20), 2)) == 20


@pytest.mark.parametrize("share", [0.01, 0.2, 0.4, 1.0])
def test_shards_of_a_model_that_does_not_fit_are_as_few_as_the_room_allows(share: float) -> None:
    plan = plan_packs(*subjects(4), batch_tokens=30, min_shared=8)
    groups = group_units(plan, 1)
    sizes = StateSizes(width=8, row=8, waiting=0)
    taken = [sizes.taken_by(plan, group) for group in groups]
    room = int(share * sum(taken))
    shards = shards_by_layer(plan, targets_of(plan), 1, range(len(groups)), 2, sizes, room)
    assert [n for shard in shards for n in range(shard.first, shard.stop)] == list(range(len(groups)))
    alone = len(shards) == len(groups)
    assert alone or all(sum(taken[shard.first : shard.stop]) <= room for shard in shards)
    fewer = cut(plan, 1, len(shards) - 2) if len(shards) > 2 else []
    assert not fewer or max(sum(taken[shard.first : shard.stop]) for shard in fewer) > room


def test_workers_that_spread_a_model_are_told_how_much_memory_is_theirs() -> None:
    request = ModelRequest(address="demo", source=SourceConfig(device="balanced"))
    started = RayEngine()
    started._workers = SimpleNamespace(device="cpu")  # type: ignore[assignment]
    with pytest.raises(ConfigError, match="each worker's share must be given"):
        started.open(request)


def run(runner: ModelRunner, plan: Plan, targets: Targets) -> dict[str, np.ndarray]:
    scoring = ScoringPass(runner=runner, head_rows=4, entropy=True)
    return joined_arrays([arrays for _, arrays in scoring.run(plan, targets)])


def test_shards_that_were_sent_away_and_come_back_in_any_order_are_the_pass(tmp_path: Path) -> None:
    runner = ModelRunner(*split_body_and_head(load_random("llama").model)[:2])
    plan = plan_packs(*subjects(3), batch_tokens=30, min_shared=8)
    shards = pickle.loads(pickle.dumps(cut(plan, 4, 5)))  # noqa: S301 - our own bytes
    assert len(shards) == 5 and any(shard.plan.before for shard in shards)
    resume = tmp_path / "pass", {"weights": "w"}
    n_groups = len(group_units(plan, 4))
    for number in (3, 0, 4):
        found = ShardResult.of(run(runner, shards[number].plan, shards[number].targets), [], 0)
        parts = PassParts(n_groups, resume, None, label="t")
        parts.add(shards[number].first, shards[number].stop, found.arrays, None)
    again = PassParts(n_groups, resume, None, label="t")
    missing = again.missing()
    assert missing == [n for number in (1, 2) for n in range(shards[number].first, shards[number].stop)]
    for shard in cut_into_shards(plan, targets_of(plan), 4, missing, 3):
        again.add(shard.first, shard.stop, run(runner, shard.plan, shard.targets), None)
    whole, joined = run(runner, plan, targets_of(plan)), again.joined()
    assert joined.keys() == whole.keys()
    for name, values in whole.items():
        assert joined[name].dtype == values.dtype and np.array_equal(joined[name], values), name


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_states_come_back_as_they_were(dtype: str) -> None:
    rows = torch.randn(7, 5).to(getattr(torch, dtype))
    keys = np.arange(7 * 16, dtype=np.uint8).reshape(7, 16)
    given_parts = [
        baseline_store.CapturedRows(0, rows[:4], keys[:4], np.arange(4, dtype=np.int32), "log_probs", "a reason"),
        baseline_store.CapturedRows(4, rows[4:], keys[4:], np.arange(4, 7, dtype=np.int32), "log_probs", "a reason"),
    ]
    arrays = {"logprob": np.zeros(9), "argmax": np.arange(7), "same_top": np.arange(7) % 2 == 0}
    result = pickle.loads(pickle.dumps(ShardResult.of(arrays, given_parts, 2)))  # noqa: S301 - our own bytes
    found = result.captured
    assert found is not None and result.n_splits == 2
    assert torch.equal(found.rows, rows) and found.rows.dtype == rows.dtype
    assert np.array_equal(found.keys, keys) and np.array_equal(found.targets, np.arange(7))
    assert (found.row, found.kind, found.reason) == (0, "log_probs", "a reason")
    assert all(np.array_equal(result.arrays[name], values) for name, values in arrays.items())
    assert torch.equal(baseline_store.from_bytes(baseline_store.as_bytes(rows), dtype, (7, 5)), rows)


def test_a_part_of_a_store_that_was_sent_gives_the_stores_logits(tmp_path: Path) -> None:
    loaded = load_random("llama", path=tmp_path / "model")
    with baseline_store.StateWriter(tmp_path / "store", loaded, shard_bytes=3000) as writer:
        Scorer(loaded, ScoringConfig(progress=False)).score(mixed_requests(), capture=writer)
    store = baseline_store.StateStore.open(tmp_path / "store")
    rows, device = np.arange(3, 40), torch.device("cpu")
    head = pickle.loads(pickle.dumps(baseline_store.SentHead.of(store)))  # noqa: S301
    sent = baseline_store.SentStates(head, baseline_store.as_bytes(store.states(rows)))
    here = sent.rows_of(np.zeros((len(rows), 16), np.uint8))
    assert torch.equal(sent.logits(here[5:9], device), store.logits(rows[5:9], device))


class LostError(Exception):
    """What Ray raises when an actor is gone."""


class FailedError(LostError):
    """What Ray raises when a task has raised."""

    def __init__(self, cause: Exception) -> None:
        super().__init__(str(cause))
        self.cause = cause


@dataclass(eq=False)
class Reference:
    """A result that is there: it is returned, or the error that its fate is."""

    fate: str
    result: Any


class FakeRay:
    """Answers as Ray does, at once and in this process: actors that live, die or fail as told."""

    exceptions = SimpleNamespace(RayError=LostError, RayTaskError=FailedError)

    def __init__(self, script: list[str]) -> None:
        self.script = script  # what happens to each task, in the order in which tasks are handed out
        self.killed = self.made = 0

    def make(self) -> Any:
        self.made += 1
        return SimpleNamespace(
            describe=SimpleNamespace(remote=lambda: Reference("ok", {"processor": "p"})),
            work=SimpleNamespace(remote=lambda n: Reference(self.script.pop(0) if self.script else "ok", n)),
        )

    def wait(self, references: list[Any], **_: Any) -> tuple[list[Any], list[Any]]:
        return [references[-1]], references[:-1]  # the last one first

    def get(self, reference: Reference) -> Any:
        if reference.fate == "lost":
            raise LostError("The actor died")
        if reference.fate == "fails":
            raise FailedError(DataError("A file is broken"))
        return reference.result

    def kill(self, handle: Any) -> None:
        self.killed += 1


def results(script: list[str], n_tasks: int = 9, n: int = 2) -> tuple[list[int], FakeRay]:
    ray, found = FakeRay(script), []
    workers = Workers(ray, n, ray.make)  # type: ignore[arg-type]
    workers.run(
        n_tasks, lambda number: WorkerCall("work", (number,)), lambda number, result: found.append((number, result))
    )
    assert all(number == result for number, result in found)
    return sorted(number for number, _ in found), ray


@pytest.mark.parametrize("script", [[], ["lost"], ["ok", "lost", "ok", "lost", "lost"], ["lost"] * 3])
def test_every_task_is_done_once_whoever_is_lost(script: list[str]) -> None:
    done, ray = results(list(script))
    assert done == list(range(9))
    # Tasks that a lost worker had besides are lost with it, and cost no further worker.
    assert ray.killed <= script.count("lost") and ray.made == 2 + ray.killed
    assert (ray.killed > 0) == ("lost" in script)


def test_a_task_that_takes_every_worker_with_it_is_an_error() -> None:
    with pytest.raises(WorkerError, match=r"4 workers were lost, one after the other, .*: The actor died\. Memory is"):
        results(["lost"] * 4, n_tasks=1, n=1)


def test_a_task_that_takes_every_worker_with_it_is_told_of_where_the_others_go_on() -> None:
    ray, done, told = FakeRay(["ok", *["lost"] * 4]), [], []
    workers = Workers(ray, 1, ray.make)  # type: ignore[arg-type]
    workers.run(
        3,
        lambda number: WorkerCall("work", (number,)),
        lambda number, _: done.append(number),
        at_once=1,
        lost=lambda number, error: told.append((number, str(error))),
    )
    assert done == [0, 2] and [number for number, _ in told] == [1]
    assert told[0][1].startswith("4 workers were lost, one after the other, with the same task: The actor died")


@pytest.mark.parametrize("at_once", [1, 2])
def test_a_worker_has_as_many_tasks_as_are_asked_for(at_once: int) -> None:
    ray, handed, ended, under_way, looks = FakeRay([]), [], [], [], []

    def make(number: int) -> WorkerCall:
        handed.append(number)
        under_way.append(len(handed) - len(ended))
        return WorkerCall("work", (number,))

    workers = Workers(ray, 1, ray.make)  # type: ignore[arg-type]
    workers.run(9, make, lambda n, _: ended.append(n), at_once=at_once, meanwhile=lambda: looks.append(1))
    assert sorted(ended) == list(range(9)) and max(under_way) == at_once
    assert len(looks) >= 9


def test_a_store_that_is_away_from_a_worker_is_away_from_the_command() -> None:
    ray = FakeRay([])
    away = StoreAwayError("The tracking server has not answered")
    ray.get = lambda reference: _raise(FailedError(away)) if reference.fate == "fails" else reference.result  # type: ignore[method-assign]
    ray.script = ["fails"]
    with pytest.raises(StoreAwayError, match=r"^The tracking server has not answered\.$"):
        Workers(ray, 1, ray.make).run(1, lambda n: WorkerCall("work", (n,)), lambda n, _: None)  # type: ignore[arg-type]


def _raise(error: Exception) -> None:
    raise error


def fake_cluster(head: int, here: int) -> Any:
    """A cluster whose head, and whose process on this machine, have these ports."""
    context = SimpleNamespace(gcs_address=f"127.0.0.1:{head}", get_node_id=lambda: "us")
    nodes = [
        {"NodeID": "them", "NodeManagerAddress": "127.0.0.1", "NodeManagerPort": 1},
        {"NodeID": "us", "NodeManagerAddress": "127.0.0.1", "NodeManagerPort": here},
    ]
    return SimpleNamespace(get_runtime_context=lambda: context, nodes=lambda: nodes)


@dataclass
class Watched:
    """A watch of a cluster whose ports are these sockets, and its clock."""

    watch: head_watch.HeadWatch
    head: socket.socket
    here: socket.socket
    now: list[float]

    def after(self, seconds: float) -> None:
        """Let some time pass, and look again."""
        self.now[0] += seconds
        self.watch.check()


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watched]:
    now = [100.0]
    monkeypatch.setattr(head_watch, "time", SimpleNamespace(monotonic=lambda: now[0]))
    with socket.create_server(("127.0.0.1", 0)) as head, socket.create_server(("127.0.0.1", 0)) as here:
        watch = head_watch.HeadWatch(fake_cluster(head.getsockname()[1], here.getsockname()[1]))
        watch.check()
        yield Watched(watch, head, here, now)


def test_a_head_that_comes_back_is_waited_for(watched: Watched, caplog: pytest.LogCaptureFixture) -> None:
    address = watched.head.getsockname()
    watched.head.close()
    watched.after(0.1)  # it has looked a moment ago
    assert not caplog.records
    watched.after(1.0)
    assert "The head of the Ray cluster does not answer; waiting for it, at most 40 s" in caplog.text
    watched.after(39.9)
    with socket.create_server(address):
        watched.after(1.0)
    watched.after(1.0)
    watched.after(39.9)
    with pytest.raises(WorkerError, match=r"^The head of .*Start the cluster again, then the same command"):
        watched.after(1.0)


def test_a_machine_that_has_lost_its_place_is_an_error_at_once(watched: Watched) -> None:
    watched.here.close()
    with pytest.raises(WorkerError, match=r"^Ray's process on this machine does not"):
        watched.after(1.0)


def test_workers_of_a_cluster_that_is_gone_are_not_spoken_to() -> None:
    ray, checks = FakeRay([]), iter([None, None, None])

    def check() -> None:
        if next(checks, "gone") == "gone":
            raise WorkerError("The head does not answer any more")

    workers = Workers(ray, 2, ray.make, check=check)  # type: ignore[arg-type]
    with pytest.raises(WorkerError, match="head does not answer"):
        workers.run(99, lambda number: WorkerCall("work", (number,)), lambda number, _: None)
    workers.release()
    assert ray.killed == 0 and ray.made == 2


def test_a_task_that_fails_is_an_error_and_ends_what_runs() -> None:
    with pytest.raises(WorkerError, match=r"^A worker failed: A file is broken\.$"):
        results(["ok", "fails"])


@pytest.mark.parametrize(
    ("said", "code", "differs"),
    [(["p", "q"], {}, "processor"), (["p", "p"], {"torch": "2"}, "torch")],
    ids=["of another worker", "of this process"],
)
def test_workers_that_would_compute_other_numbers_are_refused(
    said: list[str], code: dict[str, str], differs: str
) -> None:
    ray = FakeRay([])
    kinds = chain(said, repeat("p"))  # the last ones replace those that are ended

    def make() -> Any:
        handle, processor = ray.make(), next(kinds)
        handle.describe.remote = lambda: Reference("ok", {"processor": processor, **dict.fromkeys(code, "1")})
        return handle

    ray.wait = lambda references, **_: (references[:1], references[1:])  # type: ignore[method-assign]
    workers = Workers(ray, 2, make, code=code)  # type: ignore[arg-type]
    with pytest.raises(WorkerError, match=f"differ in {differs}: records would depend on the worker"):
        workers.run(9, lambda number: WorkerCall("work", (number,)), lambda number, result: None)


def test_a_cluster_without_a_place_is_an_error_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = FakeRay([])
    monkeypatch.setattr(ray, "wait", lambda references, **_: ([], references))
    monkeypatch.setattr(workers_module, "_START_SECONDS", 0.0)
    with pytest.raises(WorkerError, match="The cluster had no room for a worker within 0 seconds"):
        _ = Workers(ray, 2, ray.make).described  # type: ignore[arg-type]


def test_without_ray_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(
        MissingDependencyError,
        match=r"packages that are not installed: ray\. Run: pip install 'mlflow-compress\[ray\]'",
    ):
        connected(EngineConfig(engine="ray")).__enter__()


@pytest.mark.parametrize("address", ["127.0.0.1:9", "nonsense", "127.0.0.1:99999999"])
def test_an_address_where_no_cluster_answers_is_a_clear_error(address: str) -> None:
    pytest.importorskip("ray")
    with pytest.raises(ConfigError, match=r"No Ray cluster answers: .*Got: .*Start one with `ray start --head`"):
        connected(EngineConfig(engine="ray", ray_address=address)).__enter__()
