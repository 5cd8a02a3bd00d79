"""Take pictures of MLflow's pages and of our reports in headless Chromium, to look at them.

python tools/screenshots.py FOLDER [--store sqlite:///mlflow.db] [--experiment mlflow-compress]

The experiment needs two finished variants or more. Every page is taken 1600 pixels wide, in light and in dark; the
pages over variants also 400 pixels wide. An MLflow server on 127.0.0.1 is started for as long as it takes.
"""

import argparse
import base64
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mlflow.artifacts import download_artifacts
from mlflow.tracking import MlflowClient

from tests.browser import Browser, browser

WIDE, NARROW = 1600, 400
# MLflow shows its assistant beside every page until somebody closes it.
PREPARE = """
localStorage.setItem("mlflow.assistant.panelOpen_v1", "false");
localStorage.setItem("mlflow.assistant.fab.autoOpenedOnFirstLoad_v1", "true");
localStorage.setItem("_mlflow_dark_mode_toggle_enabled", "%s");
localStorage.setItem("databricks-dark-mode-pref", "%s");
"""


@contextmanager
def server(store: str) -> Iterator[str]:
    """Yield the address of an MLflow server for a store, and end the server."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    process = subprocess.Popen(
        [*command, "--backend-store-uri", store],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    address = f"http://127.0.0.1:{port}"
    try:
        for _ in range(120):
            try:
                urllib.request.urlopen(address, timeout=1).close()
                break
            except OSError:
                time.sleep(0.5)
        yield address
    finally:
        os.killpg(process.pid, 15)
        process.wait()


def take(page: Browser, address: str, path: Path, *, width: int, dark: bool, until: str) -> None:
    """Open an address, wait until an expression is true and nothing moves any more, and save a picture."""
    page.send(
        "Page.addScriptToEvaluateOnNewDocument", source=PREPARE % (str(dark).lower(), "dark" if dark else "light")
    )
    page.show(address, width=width, dark=dark)
    page.until(until)
    time.sleep(2)
    height = page.run("Math.min(4000, Math.max(1000, document.documentElement.scrollHeight))")
    page.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
    time.sleep(1)
    path.write_bytes(base64.b64decode(page.send("Page.captureScreenshot", format="png")["data"]))
    print(path)


def pages(client: MlflowClient, experiment: str, address: str) -> dict[str, str]:
    """Return the address of every page of MLflow's UI that people compare variants on, by the name of its picture."""
    found = client.get_experiment_by_name(experiment)
    runs = client.search_runs(
        [found.experiment_id], "tags.stage = 'main' and attributes.status = 'FINISHED'", order_by=["start_time DESC"]
    )
    evaluation = runs[0].data.tags["evaluation"] if runs else ""
    chosen = [run.info.run_id for run in runs if run.data.tags["evaluation"] == evaluation][:3]
    if len(chosen) < 2:
        raise SystemExit(f"Experiment {experiment!r} has fewer than two finished variants of one evaluation")
    shared = f"-{evaluation[:8]}"
    ids = ",".join(f'"{run_id}"' for run_id in chosen).replace('"', "%22").replace(",", "%2C")
    root = f"{address}/#/experiments/{found.experiment_id}"
    view = f"{root}/runs?workflowType=machine_learning&viewStateShareKey"
    named = {
        "runs": f"{root}/runs?workflowType=machine_learning",
        "leaderboard": f"{view}=leaderboard{shared}",
        "charts": f"{view}=charts{shared}&compareRunsMode=CHART",
        "figures": f"{view}=leaderboard{shared}&compareRunsMode=ARTIFACT",
        "compare": f"{address}/#/compare-runs?runs=%5B{ids}%5D&experiments=%5B%22{found.experiment_id}%22%5D",
        "run": f"{root}/runs/{chosen[0]}?workflowType=machine_learning",
    }
    for model in client.search_registered_models():
        for version in client.search_model_versions(f"name = '{model.name}'")[:1]:
            named["model_version"] = f"{address}/#/models/{model.name}/versions/{version.version}"
    return named


def reports(client: MlflowClient, experiment: str) -> dict[str, Path]:
    """Return the newest report of a variant and the newest page of a sweep, by the name of its picture."""
    found = client.get_experiment_by_name(experiment).experiment_id
    named = {}
    for stage, artifact in (("main", "report/report.html"), ("sweep", "report.html")):
        query = f"tags.stage = '{stage}' and attributes.status = 'FINISHED'"
        for run in client.search_runs([found], query, order_by=["start_time DESC"], max_results=1):
            named[f"report_{stage}"] = Path(download_artifacts(run_id=run.info.run_id, artifact_path=artifact))
    return named


def main() -> None:
    """Take every picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--store", default="sqlite:///mlflow.db")
    parser.add_argument("--experiment", default="mlflow-compress")
    asked = parser.parse_args()
    asked.folder.mkdir(parents=True, exist_ok=True)
    os.environ["MLFLOW_TRACKING_URI"] = asked.store
    client = MlflowClient(asked.store)
    text = "document.body && document.body.innerText"
    loaded = f"{text}.length > 200 && !/\\b0\\s+matching runs/.test({text})"
    with server(asked.store) as address, browser() as page:
        for dark in (False, True):
            shade = "dark" if dark else "light"
            for name, where in pages(client, asked.experiment, address).items():
                take(page, where, asked.folder / f"{name}_{shade}.png", width=WIDE, dark=dark, until=loaded)
            for name, file in reports(client, asked.experiment).items():
                for width in (WIDE, NARROW):
                    path = asked.folder / f"{name}_{width}_{shade}.png"
                    take(page, file.as_uri(), path, width=width, dark=dark, until=loaded)


if __name__ == "__main__":
    main()
