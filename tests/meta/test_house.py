"""The packages and their layers: imports go down only."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("backends", "profiler", "solver", "hetero")


def modules() -> Iterator[tuple[str, str, Path]]:
    """(room, dotted name, path) of every module."""
    for room in ROOMS:
        for path in sorted((ROOT / room).rglob("*.py")):
            parts = list(path.relative_to(ROOT).with_suffix("").parts)
            if parts[-1] == "__init__":
                parts.pop()
            yield room, ".".join(parts if room == "hetero" else ["hetero", *parts]), path


@cache
def is_module(name: str) -> bool:
    parts = name.split(".")
    base = ROOT.joinpath(*(parts[1:] if len(parts) > 1 and parts[1] in ROOMS[:3] else parts))
    return base.with_suffix(".py").exists() or (base / "__init__.py").exists()


@cache
@cache
def imports(path: Path) -> list[str]:
    """Return the imported names, those for type checking only and those inside functions too."""
    names: list[str] = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} uses a relative import"
            inner = [f"{node.module}.{alias.name}" for alias in node.names]
            names += [name if is_module(name) else node.module or "" for name in inner]
    return names


LAYERS = (
    ("backends",),
    ("profiler",),
    ("solver",),
    ("errors",),
    ("arguments", "sigint", "terminal"),
    ("models",),
    ("runtime",),
    ("placement", "compiling"),
    ("generation",),
    ("contexts",),
    ("measuring", "serving"),
    ("cache",),
    ("cli",),
    ("__init__", "start"),
    ("__main__",),
)
LEVEL = {package: level for level, layer in enumerate(LAYERS) for package in layer}


def package_of(name: str) -> str | None:
    """Return the package (or module) directly below `hetero`; None for other libraries."""
    top, _, rest = name.partition(".")
    if top != "hetero":
        return None
    first = rest.partition(".")[0]
    return first if first and is_module(f"hetero.{first}") else "__init__"


def test_every_package_has_a_layer() -> None:
    assert {package_of(name) for _, name, _ in modules()} == set(LEVEL)


@pytest.mark.few(100)
@pytest.mark.parametrize("package", LEVEL)
def test_a_package_imports_only_itself_and_lower_layers(package: str) -> None:
    upward = [
        (name, target)
        for _, name, path in modules()
        if package_of(name) == package
        for target in imports(path)
        if package_of(target) not in (package, None)
        and LEVEL[str(package_of(target))] >= LEVEL[package]
    ]
    assert upward == []


def test_there_is_no_import_cycle() -> None:
    names = {name: path for _, name, path in modules()}
    graph = {name: {t for t in imports(path) if t in names} for name, path in names.items()}
    done: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, f"import cycle: {' -> '.join((*trail, name))}"
        if name not in done:
            for target in graph[name] - {name}:
                visit(target, (*trail, name))
            done.add(name)

    for name in names:
        visit(name, ())


def test_importing_hetero_is_cheap_and_probes_nothing() -> None:
    code = (
        "import sys, hetero; "
        "heavy = {'numpy', 'pyopencl', 'onnxruntime', 'pydantic', 'typer'} & set(sys.modules); "
        "print(sorted(heavy), hetero.LLM.__name__)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert (result.returncode, result.stdout.strip()) == (0, "[] LLM"), result.stderr


@pytest.mark.full
def test_child_processes_run_no_code_of_the_current_directory() -> None:
    for _, name, path in modules():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.List | ast.Tuple) and node.elts:
                words = [ast.unparse(word) for word in node.elts]
                assert words[0] != "sys.executable" or "'-P'" in words, f"{name}: {words}"


@pytest.mark.full
def test_tests_are_collected_where_packages_of_some_systems_are_missing() -> None:
    """Those that need one are skipped; the others run."""
    missing = ("onnxruntime_qnn", "torch", "transformers", "atheris", "pyopencl")
    code = (
        f"import sys; sys.modules |= dict.fromkeys({missing})\n"
        "import pytest; sys.exit(pytest.main(['--collect-only', '-q', 'tests']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:]
    assert "tests/backends/test_contract.py" in done.stdout


FILE_LINES, CLASS_LINES, FUNCTION_LINES = 800, 300, 60
# Functions whose parameters are not counted, and why. Their bodies are.
LONG_SIGNATURES = {
    "hetero.cli.": "a command of Typer declares each option as a parameter, over several lines",
}
# Classes and functions that may be longer, and why.
LONG: dict[str, str] = {}


def definitions(name: str, tree: ast.AST) -> Iterator[tuple[str, int, int]]:
    """Yield (qualified name, lines, limit) of every class and function of a module."""
    for node in ast.iter_child_nodes(tree):
        inner = name
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            inner, start, limit = f"{name}.{node.name}", node.lineno, CLASS_LINES
            if not isinstance(node, ast.ClassDef):
                limit = FUNCTION_LINES
                if node.name.endswith("_command") and inner.startswith(tuple(LONG_SIGNATURES)):
                    start = node.body[0].lineno
            yield inner, (node.end_lineno or start) - start + 1, limit
        yield from definitions(inner, node)


@pytest.mark.full
def test_files_classes_and_functions_keep_the_house_sizes() -> None:
    too_long = {}
    for _, name, path in modules():
        text = path.read_text(encoding="utf-8")
        assert text.count("\n") <= FILE_LINES, f"{name} has more than {FILE_LINES} lines"
        too_long |= {
            inner: f"{lines} lines, and the limit is {limit}"
            for inner, lines, limit in definitions(name, ast.parse(text))
            if lines > limit
        }
    assert {inner: lines for inner, lines in too_long.items() if inner not in LONG} == {}
    assert set(LONG) <= set(too_long), "no exemption outlives its reason"


def test_every_package_is_in_the_wheel() -> None:
    with (ROOT / "pyproject.toml").open("rb") as file:
        listed = set(tomllib.load(file)["tool"]["setuptools"]["packages"])
    assert {
        name.rpartition(".")[0] for _, name, path in modules() if path.name != "__init__.py"
    } - {""} <= listed
