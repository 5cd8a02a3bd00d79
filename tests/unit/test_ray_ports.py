"""Ray's own cluster is for this machine: nothing of it listens on another interface."""

import json
import subprocess
import sys

import pytest

pytest.importorskip("ray", reason="needs the extra 'ray'")

LISTENING = """
import json, psutil
from mlflow_compress.config import EngineConfig
from mlflow_compress.engines.ray.workers import connected

with connected(EngineConfig(engine="ray")) as ray:
    assert ray.get(ray.remote(lambda: 7).remote()) == 7
    this = psutil.Process()
    found = []
    for process in [this, *this.children(recursive=True)]:
        for one in process.net_connections(kind="inet"):
            if one.status == psutil.CONN_LISTEN:
                found.append((process.name(), one.laddr.ip))
print(json.dumps(found))
"""


@pytest.mark.ci
def test_its_processes_listen_on_the_loopback_alone() -> None:
    done = subprocess.run([sys.executable, "-c", LISTENING], capture_output=True, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    assert {"gcs_server", "raylet"} <= {name for name, _ in found}
    assert {address.removeprefix("::ffff:") for _, address in found} == {"127.0.0.1"}, found
