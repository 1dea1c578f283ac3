"""Prepares everything that a model needs at its first start: what `hetero warm` does.

Kernels are compiled and self-tested, a shipped profile's times are scaled to this machine, devices
are chosen and weights are packed, each into hetero's cache, where later starts find them. As a
script it does so for the options on standard input, for `hetero.generation.late_plan`.
"""

from __future__ import annotations

import json
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hetero.backends.errors import DeviceError
from hetero.backends.host.folders import cache_folder
from hetero.errors import FallbackWarning, UserError, one_sentence
from hetero.generation.llm import LLM


@dataclass(frozen=True)
class Warmed:
    """What was prepared.

    `made` are the files that were written to the cache, by the folder in it, with their bytes;
    empty where all was there. `devices` are the backends that will compute, by kind.
    """

    model: str
    devices: dict[str, str]
    choice: str
    plan_id: str
    made: dict[str, tuple[int, int]]


def warm(model: str, **options: Any) -> Warmed:
    """Open a model as `LLM` does with these options, wait for its plan, and close it again.

    Raises what `LLM` does.
    """
    before = _files()
    with LLM(model, **{**options, "wait_for_plan": True}) as llm:
        devices = {kind: x.info.backend for kind, x in llm.devices.devices.items()}
        facts = llm.model.name, devices, llm.choice.reason, llm.plan.plan_id
    made: dict[str, tuple[int, int]] = {}
    for path, nbytes in _files().items():
        if path not in before:
            kind = path.relative_to(cache_folder()).parts[0]
            files, total = made.get(kind, (0, 0))
            made[kind] = files + 1, total + nbytes
    return Warmed(*facts, made)


def _files() -> dict[Path, int]:
    """Return the cached files that stay, and their bytes."""
    root, found = cache_folder(), {}
    for path in root.rglob("*"):
        parts = path.relative_to(root).parts
        if "runs" not in parts and path.suffix not in (".lock", ".partial"):
            try:
                if path.is_file():
                    found[path] = path.stat().st_size
            except OSError:  # removed meanwhile
                continue
    return found


def main() -> None:
    """Warm what standard input names; one sentence on standard error where that fails."""
    question = json.load(sys.stdin)
    warnings.simplefilter("ignore", FallbackWarning)  # the parent meets the same
    try:
        warm(question["model"], **question["options"])
    except (UserError, DeviceError, OSError, MemoryError) as error:
        print(one_sentence(str(error) or type(error).__name__), file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
