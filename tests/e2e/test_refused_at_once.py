"""Wrong inputs are refused at once, all of them together, in the words of where they were said."""

import cProfile
import re
import sqlite3
import sys
from collections import Counter
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

import mlflow_compress as mc
from mlflow_compress.errors import ConfigError, MlflowCompressError
from mlflow_compress.files import read_yaml
from mlflow_compress.models.placement import certainly_without_gpu
from tests.conftest import Fork

ROWS = """{"id": "a", "category": "c", "context": "x", "choices": ["one"], "answer": 0}
{"id": "b", "context": "x"}
not json
{"id": "a", "category": "c", "context": "x", "choices": ["one", "two"], "answer": 7}
"""

CASES = {
    "a bound": (["promote", "--max_kl", "-1"], 2, "Parameter 'max_kl' is too small. Allowed: 0.0 or more. Got: '-1'."),
    "capitals": (["main", "--method", "AWQ"], 2, "Unknown compression method. .* Did you mean 'awq'?"),
    "a parameter": (["evaluate", "--Limit", "2"], 2, "Unknown parameter. .* Did you mean 'limit'?"),
    "several tasks": (
        ["main", "--method", "rtn", "--tasks", "nosuchtask,mmlu,wikitxt"],
        2,
        "2 things are wrong:\n.*'nosuchtask'.*\n.*'wikitxt'. Did you mean 'wikitext' or 'wikitext2'?$",
    ),
    "several rows": (
        ["evaluate", "--checkpoint", ".", "--tasks", "bad.jsonl"],
        1,
        "4 things are wrong:\n.*line 1: 'choices' must be.*\n.*line 2: the field 'category' is missing.\n"
        ".*line 3: not JSON.*\n.*line 4: .*",
    ),
    "no task": (
        ["main", "--method", "rtn", "--tasks", "demo,"],
        2,
        "Parameter 'tasks' has an empty name. Got: 'demo,'.",
    ),
    "no default": (["plan", "--model", "."], 2, "Parameter 'tasks' .*Give --tasks NAMES or files."),
    "a type": (["quantize", "--bits", "two"], 2, "Parameter 'bits' has the wrong type or size. .*Got: 'two'."),
    "no tokenizer": (
        ["main", "--model", "half", "--method", "rtn", "--tasks", "mmlu"],
        1,
        "The model has no tokenizer files. Allowed: a folder with tokenizer.json.*Got: '.*half'. Copy them from .*",
    ),
    "merged letters": (
        ["main", "--model", "merged", "--method", "rtn", "--tasks", "mmlu"],
        1,
        "The tokenizer merges an option into the prompt: 'Answer:' has as many tokens as 'Answer: A'.*Got: '.*merged'.*",
    ),
    "a cast without effect": (
        ["quantize", "--model", "whole", "--method", "fp16"],
        2,
        "The model is already stored in float16: .*Got: '.*whole'. Use --method none for the control.",
    ),
    "no id": (["report", "abc"], 2, "This is not the id of a run. Allowed: 6 to 32 hexadecimal digits. Got: 'abc'."),
    "no such run": (["report", "abcdef"], 1, "The store sqlite:///.*mlflow.db has no such run. Got: 'abcdef'."),
    "a run to resume": (["main", "--resume", "0" * 32], 1, "The store .* has no such run. Got: '0{32}'."),
    "no such side": (["compare", "abcdef", "abcdef"], 1, "The store .* has no such run. Got: 'abcdef'."),
    "an evaluation": (
        ["promote", "--evaluation", "abcd"],
        2,
        "Parameter 'evaluation' .*Allowed: auto, or 6 .*Got: 'abcd'.",
    ),
    "no such evaluation": (
        ["promote", "--model", "llama", "--evaluation", "abcdef12"],
        2,
        "The store .* has no such evaluation. Allowed: 0123456789abcdef. Got: 'abcdef12'.",
    ),
    "no such baseline": (
        ["promote", "--model", "nosuch"],
        2,
        "The store .* has no such baseline. Allowed: llama. Got: 'nosuch'.",
    ),
    "a rollback of nothing": (
        ["promote", "rollback", "--model", "nosuch"],
        2,
        "The store .* has no such baseline. Allowed: .*",
    ),
    "a history of nothing": (
        ["promote", "history"],
        2,
        "The store .* has no such baseline. Allowed: llama. Got: 'demo'.",
    ),
    "a setting": (["main", "--method", "gptq", "--group_size", "0"], 2, "Parameter 'group_size' .*Got: 0."),
    "a target": (
        ["main", "--method", "hqq", "--target", "vllm"],
        2,
        "vLLM does not read the format of hqq-4bit-g64. .*",
    ),
    "bits of a target": (
        ["quantize", "--method", "rtn", "--bits", "2", "--target", "vllm"],
        2,
        "vLLM has no kernel for rtn-2bit-g128: .*",
    ),
    "a target of llama.cpp": (
        ["main", "--method", "nvfp4", "--target", "llama.cpp"],
        2,
        "llama.cpp does not read the format of nvfp4. .*",
    ),
    "a set": (
        ["quantize", "--method", "gptq", "--calibration", "x"],
        2,
        "Parameter 'calibration' names neither a set nor .*'x'.",
    ),
    "instructions": (
        ["main", "--method", "rtn", "--instructions", "x"],
        2,
        "Parameter 'instructions' names neither a set nor .*'x'.",
    ),
    "no checkpoint": (["judge", "--checkpoint", "x"], 2, "Parameter 'checkpoint' names no folder .*Got: 'x'. Give .*"),
    "a style": (["main", "--method", "rtn", "--prompt_style", "x"], 2, "Unknown prompt style. .*Got: 'x'."),
    "an engine": (["main", "--method", "rtn", "--engine", "x"], 2, "Unknown engine. .*Got: 'x'."),
    "a judge": (["main", "--method", "rtn", "--judges", "x"], 2, "Unknown judge. .*Got: 'x'."),
    "prices": (["main", "--method", "rtn", "--judge_args", "prices=x"], 2, "Parameter 'judge_prices' .*Got: 'x'."),
    "judge prompts": (
        ["main", "--method", "rtn", "--judge_args", "prompts=x"],
        2,
        "judge_args: prompts cannot .*Got: 'x'.",
    ),
    "a method of many": (["sweep", "--methods", "rtn,nosuch"], 2, "Unknown compression method. .*Got: 'nosuch'."),
    "a policy": (["promote", "--policy", "x"], 2, "Parameter 'policy' names no YAML file .*Got: 'x'."),
    "no checkpoint given": (["evaluate", "--tasks", "demo"], 2, "Parameter 'checkpoint' must be given. Allowed: .*"),
    "no served name": (
        ["speed", "--checkpoint", "endpoint:http://127.0.0.1:1/v1"],
        2,
        "Parameter 'served_model' must be given. Allowed: the model's name at that server.",
    ),
    "no vLLM": (
        ["main", "--method", "rtn", "--engine", "vllm", "--engine_args", f"vllm_python={sys.executable}"],
        1,
        "vLLM is not installed in this environment. Got: '.*python.*'. Run: .* Then give --engine_args vllm_python=.*",
    ),
    "no Python": (
        ["evaluate", "--checkpoint", "whole", "--engine", "vllm", "--engine_args", "vllm_python=/bin/true"],
        1,
        "The Python of vLLM's environment does not work: it says nothing. Got: '/bin/true'. Run: .*",
    ),
    "no grid": (["sweep", "--grid", "x"], 2, "Parameter 'grid' names no YAML file that can be read: .*Got: 'x'."),
    "an axis": (["sweep", "--methods", "rtn", "--bits", "x"], 2, "Parameter 'bits' must be a whole number. .*"),
    "a format": (["search", "--formats", "rtn:4,nosuch:3", "--max_kl", "1"], 2, "Unknown .*Got: 'nosuch'."),
    "bits of a format": (
        ["search", "--formats", "rtn:4,rtn:99", "--max_kl", "1"],
        2,
        "Method 'rtn' does not support these bits. .*Got: 99.",
    ),
    "one format": (["search", "--formats", "rtn:4", "--max_kl", "1"], 2, "A search needs two different .*"),
    "no limit": (["search"], 2, "A search needs one kind of limit. Allowed: .*Got: 'none'."),
    "an encoder": (
        ["main", "--method", "rtn", "--answer_args", "encoder=nosuch"],
        2,
        "Parameter 'encoder': The model is neither a folder nor a hub id .*Got: 'nosuch'. Give .*",
    ),
    "no encoder": (
        ["main", "--method", "rtn", "--answer_args", "encoder=half"],
        1,
        "The sentence encoder .*no modules.json, .*",
    ),
    "BERTScore": (
        ["main", "--method", "rtn", "--answer_args", "bertscore_model=./nosuch"],
        2,
        "Setting 'bertscore_model' of 'answer_args' names no folder.*",
    ),
    **{
        f"no GPU for {arguments[0]}": (
            [*arguments, "--device", "cuda"],
            2,
            "torch finds no GPU on this machine. Got: 'cuda'. Use 'auto' or 'cpu'.",
        )
        for arguments in (
            ["main", "--method", "rtn"],
            ["quantize", "--method", "rtn"],
            ["sweep"],
            ["search", "--max_kl", "1"],
            ["gate", "--checkpoint", "whole"],
            ["diagnose", "--method", "rtn"],
        )
    },
    "a long name": (["promote", "policy", "x" * 50_000], 2, "Parameter 'policy' names no YAML file .*"),
    "nothing to compare": (["compare", "aaa", "bbb"], 2, "Nothing to compare by this name.*Got: 'aaa'."),
}

CALL = """
import os, sys
for name in os.environ.get("ABSENT", "").split():
    sys.modules[name] = None  # neither `import` nor `find_spec` finds it
from mlflow_compress.cli import main
code = main(sys.argv[1:])
imported = {name.partition(".")[0] for name, module in sys.modules.items() if module and name[:1] != "_"}
print(*sorted(imported - sys.stdlib_module_names))
sys.exit(code)
"""
# The packages that a refusal may import: users are promised one within 2 seconds. None of them is torch, transformers,
# mlflow, pandas, datasets or another one that loads models, opens a store or draws.
LIGHT = {
    *("annotated_types", "cloudpickle", "cython_runtime", "mlflow_compress", "numpy", "pyarrow", "pydantic"),
    *("pydantic_core", "safetensors", "sitecustomize", "tqdm", "typing_extensions", "typing_inspection", "yaml"),
    # Some refusals read a tokenizer, ask whether the cache of hubs has a model, or know what a report is made of.
    *("anyio", "certifi", "charset_normalizer", "click", "filelock", "h11", "httpcore", "httpx", "huggingface_hub"),
    *("idna", "jinja2", "markupsafe", "pygments", "rich", "scipy", "tokenizers", "zstandard"),
}


WITHOUT = {  # the package that is not installed -> arguments, who needs it, and the extra that has it
    "lm_eval": [
        (["main", "--method", "rtn", "--tasks", "demo,mmlu"], "Task 'mmlu'", "harness"),
        (["evaluate", "--tasks", "paper"], "Task 'paper'", "harness"),
    ],
    "bitsandbytes": [(["main", "--method", "bnb-nf4"], "Method 'bnb-nf4'", "bitsandbytes")],
}


def heavy(printed: str) -> set[str]:
    """Return the packages that a refused command has imported and could do without; it prints them last."""
    return {*printed.splitlines()[-1].split()} - LIGHT


@pytest.mark.parametrize(
    ("package", "case"), [(package, case) for package, cases in WITHOUT.items() for case in range(len(cases))]
)
def test_a_missing_extra_is_one_line_with_the_command_that_installs_it(
    package: str, case: int, tmp_path: Path, light_python: Fork
) -> None:
    arguments, by, extra = WITHOUT[package][case]
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    done = light_python("-c", CALL, *arguments, cwd=tmp_path, MLFLOW_TRACKING_URI=uri, ABSENT=package)
    assert done.stderr == (
        f"mlflow-compress: {by} needs packages that are not installed: {package}. Run: pip install 'mlflow-compress[{extra}]'.\n"
    )
    assert (done.returncode, heavy(done.stdout)) == (1, set()) and not list(tmp_path.iterdir())


def test_without_the_harness_its_tasks_are_listed_with_their_extra(light_python: Fork) -> None:
    done = light_python("-c", CALL, "list", "tasks", ABSENT="lm_eval")
    assert (done.returncode, done.stderr) == (0, "")
    shown = re.sub(r"\n  ", " ", done.stdout)
    assert re.search(r"(?m)^piqa .*; extra: harness$", shown) and re.search(r"(?m)^demo .*; definition: \w{12}$", shown)


@pytest.mark.parametrize("name", CASES)
def test_it_is_refused_before_anything_heavy_is_imported(name: str, tmp_path: Path, light_python: Fork) -> None:
    arguments, code, message = CASES[name]
    if "no GPU" in name and not certainly_without_gpu():
        pytest.skip("this machine may have a GPU")
    (tmp_path / "bad.jsonl").write_text(ROWS)
    for folder in (tmp_path / "half", tmp_path / "whole", tmp_path / "merged"):
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        save_file({"weight": np.ones((2, 2), dtype=np.float16)}, folder / "model.safetensors")
    (tmp_path / "whole" / "tokenizer.json").write_text("{}")
    Tokenizer(WordLevel({"?": 0}, unk_token="?")).save(str(tmp_path / "merged" / "tokenizer.json"))
    database = tmp_path / "mlflow.db"
    if "no such" in name or "nothing" in name:
        with closing(sqlite3.connect(database)) as store, store:
            store.execute("CREATE TABLE runs (run_uuid, status, lifecycle_stage)")
            store.execute("CREATE TABLE tags (key, value, run_uuid)")
            # Of "broken" the variant failed, of "alone" there is the baseline only: neither is offered.
            runs = [("0", "FINISHED", "active"), ("1", "FAILED", "active"), ("2", "FINISHED", "active")]
            store.executemany("INSERT INTO runs VALUES (?, ?, ?)", runs)
            rows = [("base_model", "llama", "0"), ("evaluation", "0123456789abcdef", "0"), ("stage", "main", "0")]
            rows += [("base_model", "broken", "1"), ("stage", "main", "1")]
            rows += [("base_model", "alone", "2"), ("stage", "baseline", "2")]
            store.executemany("INSERT INTO tags VALUES (?, ?, ?)", rows)
    before = {path.name for path in tmp_path.iterdir()}
    asked = {"MLFLOW_TRACKING_URI": f"sqlite:///{database}", "HF_HUB_OFFLINE": "1"}  # no hub is waited for
    done = light_python("-c", CALL, *arguments, cwd=tmp_path, **asked)
    assert re.fullmatch(f"mlflow-compress: {message.replace('?', chr(92) + '?')}", done.stderr.strip()), done.stderr
    assert (done.returncode, heavy(done.stdout)) == (code, set())
    written = [path.name for path in tmp_path.iterdir() if path.name not in before]
    assert written == []  # no half-written result
    assert len(done.stderr) <= 3000


VALUES = "with its aliases it stands for more than 10,000 values"
BYTES = "it has more than 1,048,576 bytes"
BOMBS = {  # what the file holds, and the limit that it meets; without one, the command itself finds the value wrong
    "aliases": (
        "a0: &a0 [x,x,x,x,x,x,x,x,x]\n"
        + "\n".join(f"a{level}: &a{level} [{','.join([f'*a{level - 1}'] * 9)}]" for level in range(1, 9)),
        VALUES,
    ),
    "keys": ("a: &a {x: 1}\nb: " + "{<<: *a, c: " * 90 + "1" + "}" * 90, None),
    "size": ("a: " + "[x,x]," * 2_000_000, BYTES),
    "flat": ("[" + "x," * 500_000 + "]", VALUES),  # within the bytes
    "deep": ("[" * 500_000, "it is nested too deeply"),
    "text": ("a: " + "x" * 1_000_000, None),
    "names": ("{" + ",".join(f"a{number}: 1" for number in range(80_000)) + "}", VALUES),
    "lines": ("\n" * 1_000_000 + "a: 1", None),
    "anchors": ("[" + ",".join(f"&a{number} x" for number in range(90_000)) + "]", VALUES),
}
MOST_BYTES = 100e6


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_yaml_bomb_is_met_by_a_limit_before_a_value_is_made(bomb: str, tmp_path: Path) -> None:
    """Work is counted in calls: a line break takes PyYAML eight, and no byte more, in at most 2^20 bytes."""
    content, limit = BOMBS[bomb]
    (tmp_path / "bomb.yaml").write_text(content)
    profile, reason = cProfile.Profile(), None
    try:
        profile.runcall(read_yaml, tmp_path / "bomb.yaml", parameter="grid")
    except ConfigError as error:
        reason = str(error)
    assert reason is None if limit is None else f"names no YAML file that can be read: {limit}." in str(reason)
    calls: Counter[str] = Counter()
    for entry in profile.getstats():
        calls[getattr(entry.code, "co_name", "built-in")] += entry.callcount
    assert calls["construct_object"] <= (10_000 if limit is None else 0)
    assert calls.total() <= 10 * 2**20


@pytest.mark.parametrize("bomb", ["aliases", "size", "deep", "text"])  # of each limit one, and one that meets none
def test_a_yaml_bomb_is_refused_within_100_mb_whichever_file_it_is(
    bomb: str, tmp_path: Path, light_python: Fork
) -> None:
    content, limit = BOMBS[bomb]
    (tmp_path / "bomb.yaml").write_text(content)
    counted = "import resource\nmost = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n" + CALL.replace(
        "imported =", "print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - most) * 1024)\nimported ="
    )
    for arguments in (
        ["main", "--config", "bomb.yaml"],
        ["promote", "--policy", "bomb.yaml"],
        ["promote", "--waiver", "bomb.yaml"],
        ["sweep", "--grid", "bomb.yaml"],
        ["main", "--method", "rtn", "--judge_args", "prices=bomb.yaml"],
    ):
        uri = f"sqlite:///{tmp_path}/mlflow.db"
        done = light_python("-c", counted, *arguments, cwd=tmp_path, MLFLOW_TRACKING_URI=uri)
        assert done.returncode == 2 and len(done.stderr) <= 3000 and [*tmp_path.iterdir()] == [tmp_path / "bomb.yaml"]
        assert (limit or "") in done.stderr and heavy(done.stdout) == set()
        assert float(done.stdout.splitlines()[0]) <= MOST_BYTES


def test_under_mlflow_run_parameters_are_named_as_they_are_typed_there(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    from mlflow_compress import cli

    monkeypatch.setenv("MLFLOW_RUN_ID", "0" * 32)
    monkeypatch.setattr(cli, "_reject", lambda error: None)
    monkeypatch.setattr(cli.lifetime, "end_with_parent", lambda: None)
    assert cli.main(["plan", "--model", str(tmp_path)]) == 2
    assert "Give -P tasks=NAMES or files." in capsys.readouterr().err
    with pytest.raises(mc.MlflowCompressError, match=r"Give tasks=NAMES or files\."):
        mc.plan(model=str(tmp_path))


WRONG = (None, -1, 2.5, float("nan"), "x" * 100_000, b"bytes", ["a", {"b": 1}], {"a": object()}, object(), True)


@pytest.mark.parametrize("parameter", ["model", "method", "bits", "tasks", "limit", "seed", "method_args", "dtype"])
def test_whatever_a_python_user_gives_is_refused_with_our_own_error(parameter: str, tmp_path: Path) -> None:
    for value in WRONG:
        wrong = {"model": str(tmp_path / "nothing"), "method": "rtn", parameter: value}
        with pytest.raises(MlflowCompressError) as raised:
            mc.compress(**wrong, store=tmp_path / "results")  # type: ignore[arg-type]
        assert len(str(raised.value)) <= 3000
        with pytest.raises(MlflowCompressError) as raised:
            mc.evaluate(**{"checkpoint": str(tmp_path), **wrong})  # type: ignore[arg-type]
        assert len(str(raised.value)) <= 3000


@pytest.mark.parametrize("value", [None, -1, 2.5, b"bytes", ["a"], {"a": 1}, object(), "x" * 100_000])
def test_results_and_paths_of_a_wrong_type_are_refused_with_our_own_error(value: object, tmp_path: Path) -> None:
    for call in (
        lambda: mc.report(value, output=tmp_path / "report.html"),  # type: ignore[arg-type]
        lambda: mc.compare(value, value),  # type: ignore[arg-type]
        lambda: mc.load(value, store=tmp_path / "results"),  # type: ignore[arg-type]
    ):
        with pytest.raises(MlflowCompressError) as raised:
            call()
        assert len(str(raised.value)) <= 3000


def test_a_metric_prints_with_its_unit_and_the_digits_of_its_interval(tmp_path: Path) -> None:
    values = {
        "distance/flips_pct": (8.3333333, 1.4807, 25.8149, "8.3 % [1.5, 25.8]"),
        "distance/kl_mean": (0.014123, 0.0124, 0.0170, "0.014 [0.012, 0.017] nats"),
        "quality/accuracy_delta": (-0.006172, -0.023, 0.012, "-0.6 pt [-2.3, 1.2]"),
    }
    results = tuple(mc.MetricResult(name, *numbers[:3], n=24) for name, numbers in values.items())
    found = mc.Evaluation(name="v", results=results, records_folder=tmp_path)
    for name, (*_, text) in values.items():
        assert (str(found[name]), repr(found[name])) == (text, f"{name}: {text}, n = 24")


def test_a_metric_that_is_not_there_is_named_with_the_nearest(tmp_path: Path) -> None:
    result = mc.Evaluation(name="v", results=(), not_computed={"flips": "no variant"}, records_folder=tmp_path)
    with pytest.raises(MlflowCompressError, match=r"Unknown metric key.*Did you mean 'distance/flips_pct'") as raised:
        result["distance/flip_pct"]
    assert len(str(raised.value)) < 600
    with pytest.raises(MlflowCompressError, match=r"This metric was not computed. .*no variant"):
        result["distance/flips_pct"]
