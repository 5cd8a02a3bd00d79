"""vLLM in an environment of its own: serves a checkpoint on this machine, and says which Python engine=vllm needs.

Nothing of mlflow_compress is imported: its environment has other versions.
"""

import argparse
import os
import shlex
import sys
from pathlib import Path


def server_command(options: argparse.Namespace) -> list[str]:
    """Return the command of the server: its module, as the CPU build's command `vllm` does not find its version."""
    given = ["--model", options.checkpoint, "--served-model-name", options.name, "--dtype", options.dtype]
    place = ["--host", "127.0.0.1", "--port", str(options.port)]
    return [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *given, *place, *shlex.split(options.more)]


def main(arguments: list[str] | None = None) -> int:
    """Run the project."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("checkpoint", "name", "dtype", "more"):
        parser.add_argument(f"--{name}", nargs="?", const="", default="")
    parser.add_argument("--port", type=int, required=True)
    options = parser.parse_args(arguments)
    sys.stdout.write(f"Score with it: -P engine=vllm -P engine_args=vllm_python={sys.executable}\n")
    if not options.checkpoint:
        return 0
    folder = Path(options.checkpoint).expanduser()
    if not (folder / "config.json").is_file():
        sys.stderr.write(f"Error: Not a model folder. Allowed: a folder with a config.json. Got: '{folder}'.\n")
        return 1
    options.checkpoint = str(folder.resolve())
    sys.stdout.write(f"Its server: http://127.0.0.1:{options.port}/v1, model {options.name!r}\n")
    sys.stdout.flush()
    environment = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", **os.environ}
    command = server_command(options)
    os.execve(command[0], command, environment)


if __name__ == "__main__":
    raise SystemExit(main())
