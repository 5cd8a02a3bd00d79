"""The saved leaderboard view of an experiment, and links to it."""

import base64
import colorsys
import itertools
import json
import shlex
import time
import zlib
from collections.abc import Collection, Iterator, Sequence
from urllib.parse import urlsplit

from mlflow.entities import Run
from mlflow.utils.mlflow_tags import MLFLOW_PARENT_RUN_ID

from mlflow_compress.decide.gates import DECODE_SPEEDUP, DELTA, FLIPS, KL, MEMORY_RATIO, RATIO
from mlflow_compress.decide.scoreboard import BITS
from mlflow_compress.tracking import run_names
from mlflow_compress.tracking.artifacts import artifacts_place
from mlflow_compress.tracking.experiment import search_runs, tags_filter
from mlflow_compress.tracking.waiting import PatientClient, shown_store
from mlflow_compress.transport.endpoint import shown_url

LEADERBOARD = "leaderboard"  # of the newest evaluation; `leaderboard-<id8>` is that of a given evaluation
_CHARTS = "charts"
_RUN_COLOUR = "mlflow.runColor"  # tag by which MLflow's UI draws a run

_COSTS = (BITS, DECODE_SPEEDUP, MEMORY_RATIO)
_BARS = (KL, FLIPS, DELTA, RATIO, DECODE_SPEEDUP, MEMORY_RATIO)
_SCATTERS = {
    "KL by bits per weight": (BITS, KL),
    "Flips by bits per weight": (BITS, FLIPS),
    "KL by decode speedup": (DECODE_SPEEDUP, KL),
    "KL by peak memory": (MEMORY_RATIO, KL),
}


def _view_tag(key: str) -> str:
    """Return the experiment tag that holds a saved view for MLflow's UI."""
    return f"mlflow.sharedViewState.{key}"


def _table(metrics: Sequence[str], *, description: int) -> dict[str, object]:
    """Return the state of the table: the default policy's answer, metrics, and the verdict in full, in this order.

    `description` is the width of its column in pixels. Releases of MLflow that know no order sort columns by name.
    """
    answer = f"params.`{run_names.DEFAULT_POLICY}`"
    columns = [answer, *(f"metrics.`{name}`" for name in metrics), "attributes.`Description`"]
    # Wide enough for the whole answer, and for the name of each metric.
    widths = {"attributes.`Run Name`": 190, "attributes.`Description`": description, answer: 310}
    return {
        "selectedColumns": columns,
        "columnOrder": ["0", "attributes.`Run Name`", *columns, "runDateAndNestInfo", "duration"],
        "columnWidths": {
            "0": 73,
            "runDateAndNestInfo": 120,
            **widths,
            **{f"metrics.`{name}`": max(110, 30 + 7 * len(name)) for name in metrics},
        },
        "compareRunsMode": "TABLE",
    }


def _charts(measured: Collection[str]) -> dict[str, object]:
    """Return the state of the charts of what was measured: size, speed and memory against distance, then bars."""
    section = "size-and-distance"
    common = {"metricSectionId": section, "deleted": False, "isGenerated": False, "runsCountToCompare": 100}
    scatters = [
        {
            **common,
            "uuid": f"scatter-{across}-{up}",
            "type": "SCATTER",
            "displayName": name,
            "xaxis": {"key": across, "type": "METRIC"},
            "yaxis": {"key": up, "type": "METRIC"},
        }
        for name, (across, up) in _SCATTERS.items()
        if across in measured and up in measured
    ]
    bars = [{**common, "uuid": f"bar-{name}", "type": "BAR", "metricKey": name} for name in _BARS if name in measured]
    sections = [{"uuid": section, "name": "Size, speed, memory and distance", "display": True, "isReordered": True}]
    return {
        "compareRunsMode": "CHART",
        "compareRunCharts": [*scatters, *bars],
        "compareRunSections": sections,
        "isAccordionReordered": True,
        "runsHiddenMode": "SHOW_ALL",
        "hideEmptyCharts": True,
    }


def _colours() -> Iterator[str]:
    """Yield colours without end; of the first 16, no two are nearer than 24 in CIELAB."""
    for number in itertools.count():
        channels = colorsys.hls_to_rgb(0.137 * number % 1, (0.5, 0.35, 0.68)[number % 3], 0.75)
        yield "#" + "".join(f"{round(255 * channel):02x}" for channel in channels)


def _colour(client: PatientClient, variants: Sequence[Run]) -> None:
    """Give each variant without one a colour that no other has: MLflow takes one of few, by the run's id."""
    given = [run.data.tags.get(_RUN_COLOUR) for run in variants]
    free = (colour for colour in _colours() if colour not in given)
    taken = set()
    for run in sorted(variants, key=lambda run: (run.info.start_time, run.info.run_id)):
        own = run.data.tags.get(_RUN_COLOUR)
        if own is None or own in taken:
            own = next(free)
            client.set_tag(run.info.run_id, _RUN_COLOUR, own)
        taken.add(own)


def save_leaderboard(client: PatientClient, run_id: str) -> None:
    """Store the views of a run's evaluation on the experiment, and give each of its variants a colour of its own.

    A saved view filters by fixed values, so each evaluation needs its own; the plain names are the newest one's.
    """
    run = client.get_run(run_id)
    evaluation = run.data.tags.get(run_names.EVALUATION)
    if evaluation is None:
        return
    rows = {run_names.STAGE: "main", run_names.EVALUATION: evaluation, run_names.ON_LEADERBOARD: "shown"}
    variants = search_runs(client, tags_filter(rows))
    _colour(client, variants)
    measured = {name for variant in variants for name in variant.data.metrics}
    page = {
        "searchFilter": tags_filter(rows),
        "orderByKey": f"metrics.`{KL}`",
        "orderByAsc": True,
        "startTime": "ALL",
        "lifecycleFilter": "Active",
        "modelVersionFilter": "All Runs",
    }
    views = {
        LEADERBOARD: ("Leaderboard", _table((FLIPS, KL, DELTA, RATIO, *_COSTS), description=250)),
        f"{LEADERBOARD}-all": (
            "All headline metrics",
            _table([*run_names.leaderboard(), run_names.N_ITEMS], description=200),
        ),
        _CHARTS: ("Size against distance", _charts(measured)),
    }
    for view, (name, state) in views.items():
        content = json.dumps({**page, **state}).encode()
        packed = f"deflate;{base64.b64encode(zlib.compress(content)).decode()}"
        newest = (view, f"{name} (newest)")
        for key, shown in ((f"{view}-{evaluation[:8]}", f"{name} {evaluation[:8]}"), newest):
            # As MLflow's own button stores a view, under a name that its list of views shows.
            envelope = {"name": shown, "createdAt": int(time.time() * 1000), "state": packed}
            client.set_experiment_tag(run.info.experiment_id, _view_tag(key), json.dumps(envelope))


def _page(uri: str, experiment_id: str) -> str:
    """Return an experiment's address in the UI; for a local store, in that of the command that `how_to_open` shows."""
    root = shown_url(uri).rstrip("/") if uri.startswith("http") else "http://127.0.0.1:5000"
    return f"{root}/#/experiments/{experiment_id}"


def _run_address(uri: str, experiment_id: str, run_id: str) -> str:
    return f"{_page(uri, experiment_id)}/runs/{run_id}?workflowType=machine_learning"


def shared_run_address(uri: str, experiment_id: str, run_id: str) -> str:
    """Return a run's address for a file that is passed on; empty where only this machine reaches the store."""
    host = urlsplit(uri).hostname or ""
    alone = not uri.startswith("http") or host in ("localhost", "::1") or host.startswith("127.")
    return "" if alone else _run_address(uri, experiment_id, run_id)


def how_to_open(client: PatientClient, uri: str, run_id: str) -> str:
    """Return the lines that say where results are; none for a child run, because its parent prints them."""
    run = client.get_run(run_id)
    tags, experiment = run.data.tags, run.info.experiment_id
    if MLFLOW_PARENT_RUN_ID in tags:
        return ""
    lines = [f"Artifacts:     {artifacts_place(run.info.artifact_uri)}"]
    if not uri.startswith("http"):
        without_password = "" if shown_store(uri) == uri else "  (with the user and password of the store)"
        store = shlex.quote(shown_store(uri))
        lines.append(f"Start the UI:  mlflow server --host 127.0.0.1 --backend-store-uri {store}{without_password}")
    lines.append(f"This run:      {_run_address(uri, experiment, run_id)}")
    ending = f"-{tags[run_names.EVALUATION][:8]}" if run_names.EVALUATION in tags else ""
    if _view_tag(f"{LEADERBOARD}{ending}") in client.get_experiment(experiment).tags:
        view = f"{_page(uri, experiment)}/runs?workflowType=machine_learning&viewStateShareKey="
        lines += [
            f"Leaderboard:   {view}{LEADERBOARD}{ending}",
            f"Charts:        {view}{_CHARTS}{ending}&compareRunsMode=CHART",
        ]
    return "\n".join(lines)
