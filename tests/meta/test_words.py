"""The product's words: the field's where it has one, and one name for one thing."""

from __future__ import annotations

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cache

import pytest

from tests.meta.test_house import modules

BANNED = frozenset({
    "anew", "asunder", "barred", "bell", "beside", "doorbell", "doubt", "foreseen", "held", "lies",
    "nobody", "settle", "settled", "somebody", "tell", "tells", "told", "uncut", "verdict",
    "verdicts", "whoever",
})  # fmt: skip
# Occurrences in packages that still have some. A number may only fall: lower it with the code.
BANNED_LEFT: dict[str, int] = {}
# Functions that assign a variable `found` instead of naming what it holds. May only fall.
FOUND_LEFT: dict[str, int] = {}
# Names in use by several public classes. May only lose members.
SHARED_CLASS_NAMES = frozenset[str]()
# Identifiers and docstrings that keep a banned word, and why.
ALLOWED = {
    "FOLDER": "the folder of self-tests' results on disk keeps its name",
    "held": "a key of `hetero cache --json`",
    "verdict": "a key of `hetero reproduce --json`",
}
# Modules of one name in several packages, and why. At most ten.
SHARED_MODULE_NAMES = {
    "cache": "a command's module is named for the command (`hetero cache`)",
    "constants": "defaults that the command line shows without importing the package",
    "device": "a backend's `Device`",
    "errors": "a package's errors",
    "graphs": "the ONNX graph of each operation, for each backend of ONNX Runtime",
    "kernels": "a backend's kernel classes, and those that the runtime prepares",
    "options": "a package's options, checked",
    "plan": "a command's module is named for the command (`hetero plan`)",
    "session": "a backend's ONNX Runtime sessions; the profiler's session",
    "tokenizer": "the tokenizer of a GGUF file is read next to its other parts",
}
# Words that begin a noun clause; a docstring is a sentence or names what it documents.
CLAUSE = re.compile(r"(What|Whether|Of|As|How|Why|Who|Whose|Which|Those|Where|From)\b")
# Docstrings that begin so, in packages that still have some. May only fall.
CLAUSES_LEFT: dict[str, int] = {}
WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")
Function = ast.FunctionDef | ast.AsyncFunctionDef


def package(name: str) -> str:
    """Return the part of a module's name below `hetero`."""
    return [*name.split("."), "hetero"][1]


@cache
def trees() -> tuple[tuple[str, ast.Module], ...]:
    return tuple((x, ast.parse(path.read_text(encoding="utf-8"))) for _, x, path in modules())


def defined(tree: ast.Module) -> Iterator[str]:
    """Names that a module defines: functions, classes, arguments, variables and attributes."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield node.name
            case ast.arg():
                yield node.arg
            case ast.Name(ctx=ast.Store()):
                yield node.id
            case ast.Attribute(ctx=ast.Store()):
                yield node.attr


def docstrings(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | Function):
            yield re.sub(r"`[^`]*`", "", ast.get_docstring(node) or "")


def banned(tree: ast.Module) -> Iterator[str]:
    """Banned words in a module: once for each name, and once for each use in a docstring."""
    for name in sorted(set(defined(tree)) - set(ALLOWED)):
        parts = [part.lower() for part in WORD.findall(name)]
        yield from (f"{part} in {name}" for part in parts if part in BANNED)
    for text in docstrings(tree):
        words = re.findall(r"[a-z]+", text.lower())
        yield from (f"{word} in: {text[:60]}" for word in words if word in BANNED)


def assigns_found(function: Function) -> bool:
    arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
    return any(argument.arg == "found" for argument in arguments) or any(
        isinstance(node, ast.Name) and node.id == "found" and isinstance(node.ctx, ast.Store)
        for node in ast.walk(function)
    )


@pytest.mark.full
def test_words_of_the_house_are_the_fields() -> None:
    """Packages that are clean stay clean; in others the count only falls."""
    found: dict[str, list[str]] = defaultdict(list)
    for name, tree in trees():
        found[package(name)] += [f"{name}: {word}" for word in banned(tree)]
    more = {
        place: words for place, words in found.items() if len(words) > BANNED_LEFT.get(place, 0)
    }
    assert more == {}, "say it in the field's words (docs/explanation, CONTRIBUTING.md)"
    counts = {place: len(words) for place, words in found.items() if words}
    assert counts == BANNED_LEFT, "fewer are left: lower BANNED_LEFT"


@pytest.mark.full
def test_docstrings_are_sentences() -> None:
    counts = Counter(
        package(name) for name, tree in trees() for text in docstrings(tree) if CLAUSE.match(text)
    )
    assert dict(counts) == CLAUSES_LEFT, "write a sentence, and lower CLAUSES_LEFT"


@pytest.mark.full
def test_variables_are_named_for_what_they_hold() -> None:
    counts = Counter(
        package(name)
        for name, tree in trees()
        for node in ast.walk(tree)
        if isinstance(node, Function) and assigns_found(node)
    )
    assert dict(counts) == FOUND_LEFT, "name what it holds instead of `found`, and lower FOUND_LEFT"


@pytest.mark.full
def test_no_two_public_classes_have_one_name() -> None:
    homes: dict[str, list[str]] = defaultdict(list)
    for name, tree in trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].append(name)
    shared = {name: places for name, places in homes.items() if len(places) > 1}
    new = {name: places for name, places in shared.items() if name not in SHARED_CLASS_NAMES}
    assert new == {}, "two public classes of one name"
    assert set(shared) == SHARED_CLASS_NAMES, "take names that are no longer shared off the list"


def test_modules_are_named_for_what_they_hold() -> None:
    homes: dict[str, set[str]] = defaultdict(set)
    for _, name, path in modules():
        if path.stem not in ("__init__", "__main__"):
            homes[path.stem].add(name)
    shared = {stem: names for stem, names in homes.items() if len(names) > 1}
    new = {stem: names for stem, names in shared.items() if stem not in SHARED_MODULE_NAMES}
    assert new == {}, "two modules of one name: name each for what it holds"
    assert set(shared) == set(SHARED_MODULE_NAMES), "take names no longer shared off the list"
    assert len(SHARED_MODULE_NAMES) <= 10


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("def tell(): ...", ["tell in tell"]),
        ("is_held = 1", ["held in is_held"]),
        (
            "class Verdict:\n    '''Nobody, `held`.'''",
            ["verdict in Verdict", "nobody in: Nobody, ."],
        ),
        ("withheld = settlement = 1", []),
    ],
)
def test_banned_words_are_seen(source: str, words: list[str]) -> None:
    assert list(banned(ast.parse(source))) == words
