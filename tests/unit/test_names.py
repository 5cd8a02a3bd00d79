"""One name, one meaning; nothing private is taken from another module; no circle of imports."""

import ast
from collections import defaultdict
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "mlflow_compress"

MODULES = {
    "command": "what a command is, and the declaration of each in its package",
    "parameters": "what a command is given, in the package of each command",
    "text": "how a result reads, in the package of each command",
    "result": "what a command returns, in the package of each command",
    "run": "what a command does, in the package of each command",
    "divergence": "the metrics, and their figure",
    "uncertainty": "the metrics, and the tasks of the same benchmark",
    "long_context": "the metrics, and the tasks that they read",
}
"""Module names that occur twice, because both are about the same thing or users type the name."""


def test_no_two_public_classes_have_one_name() -> None:
    places = defaultdict(list)
    for path, tree in _trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(f"{path.relative_to(PACKAGE)}:{node.lineno}")
    assert len(places) > 100
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


def test_no_two_modules_have_one_name() -> None:
    places = defaultdict(list)
    for path in sorted(PACKAGE.rglob("*.py")):
        if not path.stem.startswith("__"):
            places[path.stem].append(str(path.relative_to(PACKAGE)))
    assert {name: found for name, found in places.items() if len(found) > 1 and name not in MODULES} == {}


FUNCTIONS = {
    "compare": "the front door's function and the command behind it",
    "judge": "the front door's function and the command behind it",
    "decoder_layers": "the layers of a model; one refuses a model in which it cannot tell them",
    "weight_files": "the weight files of a checkpoint; one refuses a checkpoint without any",
    "compute_row_stats": "the same sums, by compiled loops and by torch",
    "expand": "what each packed format does to its layers",
    "loading_options": "what each packed format gives to transformers",
    "import_libraries": "one of the three runtimes that are timed",
    "health": "the metric of both models, and the scorer of one answer, under the name of the metric",
    "header": "a prompt style's header",
    "question": "a row as a question of its prompt style, or of its task",
    "rows": "the rows of a generated table",
    "load": "what was computed, or a model, is read into memory",
    "main": "what a script does",
}
"""Public functions whose name occurs twice, because both do the same thing for another kind of object."""


@cache
def _trees() -> dict[Path, ast.Module]:
    return {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(PACKAGE.rglob("*.py"))}


def test_no_two_public_functions_have_one_name_with_two_meanings() -> None:
    places = defaultdict(set)
    for path, tree in _trees().items():
        for node in tree.body:
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
                places[node.name].add(str(path.relative_to(PACKAGE)))
    assert len(places) > 500
    assert {name: sorted(found) for name, found in places.items() if len(found) > 1 and name not in FUNCTIONS} == {}


def test_no_module_takes_a_private_name_of_another() -> None:
    taken = []
    for path, tree in _trees().items():
        imports = [n for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and (n.module or "").startswith("mlflow")]
        names = {
            (alias.asname or alias.name): f"{node.module}.{alias.name}" for node in imports for alias in node.names
        }
        modules = {
            name for name, dotted in names.items() if (PACKAGE.parent / f"{dotted.replace('.', '/')}.py").exists()
        }
        taken += [f"{path.name}: {name}" for name, dotted in names.items() if _is_private(dotted.rsplit(".", 1)[-1])]
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules:
                taken += [f"{path.name}: {node.value.id}.{node.attr}"] if _is_private(node.attr) else []
    assert taken == []


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def test_no_modules_import_each_other_in_a_circle() -> None:
    trees = _trees()
    dotted = {".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts): path for path in trees}
    dotted = {name.removesuffix(".__init__"): path for name, path in dotted.items()}
    imports = {}
    for name, path in dotted.items():
        found = [n for n in trees[path].body if isinstance(n, ast.ImportFrom) and n.module]
        names = {
            f"{n.module}.{a.name}" if f"{n.module}.{a.name}" in dotted else n.module for n in found for a in n.names
        }
        imports[name] = names & dotted.keys()
    TopologicalSorter(imports).prepare()  # raises CycleError, which names the circle


def test_only_engines_ask_for_an_engines_class() -> None:
    trees = _trees()
    rooms = {path: path.relative_to(PACKAGE).parts[0] for path in trees}
    classes = {
        node.name
        for p, t in trees.items()
        if rooms[p] == "engines"
        for node in t.body
        if isinstance(node, ast.ClassDef)
    }
    classes |= {"LightModel"}  # what the local engine, and those in other processes, are made of
    asked = []
    for path, tree in trees.items():
        for node in ast.walk(tree) if rooms[path] != "engines" else ():
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Name)
                and node.func.id in ("isinstance", "issubclass")
            ):
                names = {part.id for part in ast.walk(node.args[1]) if isinstance(part, ast.Name)}
                asked += [f"{path.relative_to(PACKAGE)}:{node.lineno}: {name}" for name in sorted(names & classes)]
    assert {"EndpointScorer", "FileModel", "LocalModel", "RemoteModel", "ServedModel", "VllmModel"} <= classes
    assert asked == []
