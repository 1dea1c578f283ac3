"""Measure the sizes and names of the product's Python code: one row a figure.

`python bench/house.py` reads the sources and runs nothing. Layers and cycles are what
`tests/meta/test_house.py` asserts, file, class and function sizes too.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from common import table

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("backends", "profiler", "solver", "hetero")
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def length(node: ast.AST) -> int:
    return (getattr(node, "end_lineno", 0) or 0) - getattr(node, "lineno", 0) + 1


def assigns(function: ast.AST, name: str) -> bool:
    return any(
        isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Store)
        for node in ast.walk(function)
    )


def takes(function: ast.FunctionDef | ast.AsyncFunctionDef, kind: str) -> bool:
    return any(
        argument.annotation is not None and kind in ast.unparse(argument.annotation)
        for argument in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)
    )


def measures(sources: Iterator[str]) -> Iterator[tuple[str, str]]:
    """Yield (figure, value) rows of the modules whose source texts are given."""
    lines = 0
    functions: list[ast.FunctionDef | ast.AsyncFunctionDef] = []
    classes: list[ast.ClassDef] = []
    for source in sources:
        lines += source.count("\n")
        nodes = list(ast.walk(ast.parse(source)))
        functions += [node for node in nodes if isinstance(node, FUNCTIONS)]
        classes += [node for node in nodes if isinstance(node, ast.ClassDef)]
    names = Counter(node.name for node in classes if not node.name.startswith("_"))
    longest_class = max(classes, key=length)
    longest_function = max(functions, key=length)
    requests = sum(takes(function, "PlacementRequest") for function in functions)
    yield "lines", f"{lines:,}"
    yield "classes", f"{len(classes):,}"
    yield "functions", f"{len(functions):,}"
    yield "public class names used twice", str(sum(count > 1 for count in names.values()))
    yield "longest class", f"{longest_class.name} ({length(longest_class)} lines)"
    yield "longest function", f"{longest_function.name} ({length(longest_function)} lines)"
    yield "functions that assign `found`", str(sum(assigns(f, "found") for f in functions))
    yield "functions that take a PlacementRequest", str(requests)


def main() -> None:
    paths = [path for room in ROOMS for path in sorted((ROOT / room).rglob("*.py"))]
    table("figure|value", measures(path.read_text(encoding="utf-8") for path in paths))


if __name__ == "__main__":
    main()
