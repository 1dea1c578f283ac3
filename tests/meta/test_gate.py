"""The pinned versions of the gate fit what pyproject.toml asks for, and name no registry."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
LINES = [
    line
    for line in (ROOT / ".ci" / "constraints.txt").read_text(encoding="utf-8").splitlines()
    if not line.startswith("#")
]
PINS = {canonicalize_name(name): version for name, _, version in (x.partition("==") for x in LINES)}


def test_every_line_is_a_name_and_a_public_version() -> None:
    assert len(PINS) == len(LINES) > 50
    for line in LINES:
        assert re.fullmatch(r"[A-Za-z0-9_.-]+==[0-9][0-9a-z.]*", line), line


@pytest.mark.parametrize(
    "text",
    [
        *PROJECT["dependencies"],
        *PROJECT["optional-dependencies"]["serve"],
        *PROJECT["optional-dependencies"]["dev"],
        *PROJECT["optional-dependencies"]["docs"],
    ],
)
def test_what_the_package_asks_for_is_pinned_within_its_bounds(text: str) -> None:
    requirement = Requirement(text)
    if requirement.name == "hetero":
        return  # its own extra, listed above
    if requirement.marker is not None and not requirement.marker.evaluate(
        {"sys_platform": "linux", "platform_machine": "x86_64"}
    ):
        return
    version = PINS[canonicalize_name(requirement.name)]
    assert requirement.specifier.contains(Version(version), prereleases=True)


def test_every_package_of_the_tree_is_built() -> None:
    """Folders are not import paths here, so that the build needs them by name."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    named = tomllib.loads(text)["tool"]["setuptools"]["packages"]
    there = {
        ".".join(folder.parts if folder.parts[0] == "hetero" else ("hetero", *folder.parts))
        for room in ("backends", "profiler", "solver", "hetero")
        for folder in (x.parent.relative_to(ROOT) for x in (ROOT / room).rglob("__init__.py"))
    }
    assert named == sorted(there)


def test_few_modules_lie_outside_rooms() -> None:
    assert len(list((ROOT / "hetero").glob("*.py"))) <= 7


def test_hooks_are_pinned_as_the_gate_is() -> None:
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))
    revisions = {x["repo"].rpartition("/")[2]: x.get("rev") for x in config["repos"]}
    assert revisions["ruff-pre-commit"] == f"v{PINS[canonicalize_name('ruff')]}"
    assert all(re.fullmatch(r"v[0-9.]+", x) for name, x in revisions.items() if name != "local")
