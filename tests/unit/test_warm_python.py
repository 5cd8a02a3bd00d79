"""The interpreter that stages are forked from: what a fork sees, says and returns is that of a new interpreter."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from mlflow_compress.warm_python import WarmPython
from tests.waiting import until

LATE = """
import atexit, os, threading
done = []
threading.Thread(target=lambda: (threading.main_thread().join(), done.append(1))).start()
atexit.register(lambda: os._exit(4 + len(done)))
"""


@pytest.fixture(params=[True, False], ids=["forked", "new"])
def python(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> WarmPython:
    """Return what starts Python here, and as it does where there is no safe fork."""
    if not request.param:
        monkeypatch.setattr(sys, "platform", "other")
    elif sys.platform != "linux":
        pytest.skip("there are no forks here")
    return WarmPython(["json.tool"])


def test_it_runs_files_and_modules_in_their_folder_with_their_environment_and_says_what_they_say(
    python: WarmPython, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "beside.py").write_text("print('a module beside it')\n")
    (tmp_path / "run.py").write_text(
        "import atexit, os, sys, beside\natexit.register(print, 'at exit')\n"
        "print(sys.argv, os.getcwd(), sorted(os.environ), __name__)\nprint('wrong', file=sys.stderr)\nsys.exit(7)\n"
    )
    with python:
        assert python.run(["run.py", "-x", "1"], environment={"A": "b"}, folder=tmp_path) == 7
        assert python.run(["-m", "beside"], environment={}, folder=tmp_path) == 0
    said = capfd.readouterr()
    first, second, *rest = said.out.splitlines()
    assert first == "a module beside it" and "at exit" in rest and rest[-1] == "a module beside it"
    assert second.startswith(f"['run.py', '-x', '1'] {tmp_path} ['A'") and second.endswith("__main__")
    assert "wrong" in said.err


@pytest.mark.parametrize(
    ("code", "expected"),
    [("1 / 0", 1), ("", 0), ("import os; os.kill(os.getpid(), 9)", -9), ("raise SystemExit('no')", 1), (LATE, 5)],
)
def test_it_returns_the_exit_code_or_the_signal(python: WarmPython, code: str, expected: int, tmp_path: Path) -> None:
    (tmp_path / "run.py").write_text(code)
    with python:
        assert python.run(["run.py"], environment=dict(os.environ), folder=tmp_path) == expected


@pytest.mark.skipif(sys.platform != "linux", reason="there are no forks here")
def test_what_was_imported_beforehand_is_there_and_nothing_else_is_shared(tmp_path: Path) -> None:
    (tmp_path / "run.py").write_text(
        "import sys, threading\nassert 'json.tool' in sys.modules and 'left' not in vars(sys)\n"
        "assert threading.active_count() == 1\nsys.left = True\n"
    )
    with WarmPython(["json.tool"]) as python:
        for _ in range(2):
            assert python.run(["run.py"], environment={}, folder=tmp_path) == 0


@pytest.mark.skipif(sys.platform != "linux", reason="there are no forks here")
def test_where_the_imports_fail_every_command_fails_and_the_reason_is_shown(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with WarmPython(["no_such_module"]) as python:
        python.server.wait()  # otherwise it may be asked before
        assert python.run(["run.py"], environment={}, folder=tmp_path) == 1
    assert "No module named 'no_such_module'" in capfd.readouterr().err


@pytest.mark.skipif(sys.platform != "linux", reason="there are no forks here")
def test_nothing_outlives_the_process_that_started_it(tmp_path: Path) -> None:
    (tmp_path / "run.py").write_text(
        "import os, signal\nfrom mlflow_compress import lifetime\nlifetime.end_with_parent()\n"
        "print(os.getpid(), os.getppid(), flush=True)\nsignal.pause()\n"
    )
    code = (
        "import os, sys\nfrom pathlib import Path\nfrom mlflow_compress.warm_python import WarmPython\n"
        "WarmPython([]).run(['run.py'], environment=dict(os.environ), folder=Path(sys.argv[1]))\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    pids = [int(number) for number in parent.stdout.readline().split()]
    assert all(Path(f"/proc/{pid}").exists() for pid in pids)
    parent.send_signal(signal.SIGKILL)
    assert parent.stdout.read() == ""  # the end of the last process that holds it


WAITS = """
import signal, sys
from pathlib import Path
from mlflow_compress.lifetime import end_with_parent
end_with_parent()
Path("began").touch()
signal.pause()
"""
# It ends when it is allowed to.
ENDS_LATE = """
import signal, sys, time
from pathlib import Path

def end(*_):
    Path("ending").touch()
    while not Path("may end").exists():
        time.sleep(0.01)
    Path("ended").touch()
    sys.exit(1)

signal.signal(signal.SIGTERM, end)
"""


@pytest.mark.usefixtures("command_signals")
def test_an_interrupt_ends_what_runs_before_it_goes_on(
    python: WarmPython, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.py").write_text(ENDS_LATE + WAITS)
    returned = threading.Event()
    early: list[bool] = []

    def interrupt() -> None:
        until((tmp_path / "began").exists, ended=returned.is_set, said=capfd.readouterr)
        os.kill(os.getpid(), signal.SIGINT)
        until((tmp_path / "ending").exists, ended=returned.is_set, said=capfd.readouterr)
        early.append(returned.is_set())
        (tmp_path / "may end").touch()

    thread = threading.Thread(target=interrupt)
    try:
        with python, pytest.raises(KeyboardInterrupt):
            thread.start()
            python.run(["run.py"], environment=dict(os.environ), folder=tmp_path)
    finally:
        returned.set()
        thread.join()
    assert early == [False] and (tmp_path / "ended").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="there are no forks here")
def test_a_fork_has_an_interpreter_for_itself_that_was_forked_before_anything_ran(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "inner.py").write_text(
        "import os, sys\nprint('inner', 'left' in vars(sys), os.environ['A'])\nsys.exit(3)\n"
    )
    (tmp_path / "run.py").write_text(
        "import os, sys\nfrom pathlib import Path\nfrom mlflow_compress.warm_python import WarmPython\nsys.left = True\n"
        "for modules in (['json.tool'], ['json.tool'], ['wave']):\n"
        "    with WarmPython(modules) as inner:\n"
        "        code = inner.run(['inner.py'], environment={'A': 'b'}, folder=Path.cwd())\n"
        "        print(code, inner.server is None, flush=True)\n"
    )
    with WarmPython(["json.tool"]) as python:
        assert python.run(["run.py"], environment={"PYTHONUNBUFFERED": "1"}, folder=tmp_path) == 0
    lines = capfd.readouterr().out.splitlines()
    assert lines == ["inner False b", "3 True", "inner False b", "3 True", "inner False b", "3 False"]


@pytest.mark.skipif(sys.platform != "linux", reason="there are no forks here")
def test_what_only_later_forks_need_is_imported_or_called_while_the_first_runs(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "last.py").write_text("from pathlib import Path\nPath(__file__).with_name('imported').touch()\n")
    (tmp_path / "run.py").write_text(
        "import os, sys, time, sysconfig\nfrom pathlib import Path\n"
        "print('wave' in sys.modules, sysconfig._CONFIG_VARS is not None, os.nice(0))\n"
        "while not Path('imported').exists():\n    time.sleep(0.01)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    nice = os.nice(0)
    with WarmPython(["json.tool"], later=["wave", "sysconfig:get_config_vars", "last"]) as python:
        for _ in range(2):
            python.run(["run.py"], environment={"PYTHONUNBUFFERED": "1"}, folder=tmp_path)
        with python.another(nice=3) as second:
            second.run(["run.py"], environment={"PYTHONUNBUFFERED": "1"}, folder=tmp_path)
    assert capfd.readouterr().out.splitlines() == [
        f"False False {nice}",
        f"True True {nice}",
        f"True True {min(19, nice + 3)}",
    ]


def test_two_run_at_once_and_one_of_them_is_ended_from_another_thread(
    python: WarmPython, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.py").write_text(WAITS)
    (tmp_path / "short.py").write_text("raise SystemExit(5)\n")
    raised: list[type[BaseException]] = []

    def wait() -> None:
        try:
            second.run(["run.py"], environment=dict(os.environ), folder=tmp_path)
        except KeyboardInterrupt as error:
            raised.append(type(error))

    with python, python.another() as second:
        thread = threading.Thread(target=wait)
        thread.start()
        until((tmp_path / "began").exists, ended=lambda: not thread.is_alive(), said=capfd.readouterr)
        assert python.run(["short.py"], environment=dict(os.environ), folder=tmp_path) == 5
        second.__exit__()
        thread.join()  # what it has started would wait for ever
        assert raised == [KeyboardInterrupt]


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's allocator is Linux's")
def test_memory_that_is_freed_is_kept_for_the_next_tensors() -> None:
    """Ten arrays of 64 MiB, one after the other: 16,384 pages each, which are zeroed once where they are kept."""
    code = (
        "import resource, sys; from mlflow_compress.lifetime import keep_freed_memory\n"
        "if sys.argv[1] == 'kept': keep_freed_memory()\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt\n"
        "for _ in range(10): bytearray(2**26)[:: 2**12] = bytes(2**14)\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)\n"
    )
    faults = {
        how: int(subprocess.run([sys.executable, "-c", code, how], capture_output=True, text=True, check=True).stdout)
        for how in ("kept", "returned")
    }
    pages = 2**26 // os.sysconf("SC_PAGESIZE")
    assert faults["kept"] < 2 * pages < 9 * pages < faults["returned"]
