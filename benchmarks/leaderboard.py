"""Seconds until MLflow's leaderboard of many variants is usable, in headless Chromium.

python benchmarks/leaderboard.py [--variants 200]

A synthetic store of finished main runs, a real MLflow server on 127.0.0.1, a real browser with an empty profile. Usable
means that the first variant's name and KL are on the page, and that it scrolls.
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

import mlflow

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from synthetic_store import make_variant

from mlflow_compress.tracking.tracker import Tracker
from mlflow_compress.tracking.views import save_leaderboard
from tests.browser import browser
from tools.screenshots import server

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--variants", type=int, default=200)
asked = parser.parse_args()

SHOWN = "!!(document.body && document.body.innerText.includes('rtn-000') && document.querySelector('.ag-row'))"

with tempfile.TemporaryDirectory() as folder:
    uri = f"sqlite:///{folder}/mlflow.db"
    mlflow.set_tracking_uri(uri)
    tracker = Tracker()
    made = [make_variant(tracker, number, variants=asked.variants, tasks=20) for number in range(asked.variants)]
    save_leaderboard(tracker, made[-1])
    with server(uri) as address, browser() as page:
        page.show(address)  # the server answers its first request slowly, and its scripts are cached
        page.until("document.body && document.body.innerText.length > 100")
        view = f"{address}/#/experiments/{tracker.experiment_id}/runs?workflowType=machine_learning"
        for attempt in range(3):
            began = time.monotonic()
            page.show(f"{view}&viewStateShareKey=leaderboard")
            page.until(SHOWN)
            seconds = round(time.monotonic() - began, 2)
            print(json.dumps({"variants": asked.variants, "attempt": attempt + 1, "seconds until usable": seconds}))
