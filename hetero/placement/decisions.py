"""A cache of `auto`'s decisions: the next start reads the same one from a small file.

`~/.cache/hetero/decisions/KEY.json`. KEY is a hash of all that the choice depends on: hetero's
version and the files of the code that decides, the model's operations in its formats, what was
asked for, the profile's bytes with the factors that scale it here, and the machine (processor,
flags, cores, packages, the variables that choose devices, the driver and how many cores it would
have). Choices that come with a plan for two devices are not kept, for their solver would have to be
prepared all the same. What is broken, or of another question, is decided again.

Next to them is a file `prepared-KEY.json` for each model and options of a start that ended: its
kernels are compiled, its times scaled and its weights packed, so the next start waits for nothing.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final, get_args

from hetero import backends, placement, profiler, runtime, solver
from hetero.backends.host.files import atomic_write
from hetero.backends.host.folders import cache_folder
from hetero.backends.protocol import DeviceKind
from hetero.placement.device_times import DeviceTimes
from hetero.placement.first_start import Machine
from hetero.placement.phase_choice import PhaseChoice
from hetero.profiler.environment import hetero_version

VERSION: Final = 1  # of the files
MAX_DECISIONS: Final = 128  # that are kept: those that were used last
LARGEST_BYTES: Final = 1 << 16
DECIDING: Final = (backends, placement, profiler, runtime, solver)


@dataclass(frozen=True)
class Decision:
    """One device alone: its kind and backend, the reason, the notices, and the compared seconds.

    The backend is None for the requested one. `phases` say what each phase takes there, `alone` how
    long steps of this device and of the next best one take.
    """

    mode: DeviceKind
    gpu: str | None
    reason: str
    notes: tuple[str, ...]
    seconds: Mapping[str, float]
    phases: tuple[PhaseChoice, ...] = ()
    alone: tuple[DeviceTimes, ...] = ()


def folder() -> Path:
    """Return where decisions are."""
    return cache_folder() / "decisions"


def key_of(question: Mapping[str, object]) -> str:
    """Return the key of all that a decision depends on; its values must be of JSON."""
    facts = {"version": VERSION, "hetero": hetero_version(), "code": code_stamp(), **question}
    text = json.dumps(facts, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def load_cached(key: str) -> Decision | None:
    """Return the decision of a key, None where there is none that is whole."""
    path = folder() / f"{key[:40]}.json"
    try:
        if path.stat().st_size > LARGEST_BYTES:
            return None
        decision = _read(path.read_bytes(), key)
    except (OSError, ValueError, TypeError, LookupError, RecursionError):
        return None
    if decision is not None:
        with contextlib.suppress(OSError):  # a cache that can only be read
            os.utime(path)
    return decision


def keep(key: str, decision: Decision) -> None:
    """Keep it, where the cache can be written."""
    content = _content(key, decision) | {"code": code_stamp()}
    with contextlib.suppress(OSError):  # the next start decides again
        folder().mkdir(parents=True, exist_ok=True)
        text = json.dumps({**content, "check": _check(content)}, indent=1)
        atomic_write(folder() / f"{key[:40]}.json", text + "\n", durable=False)
        _keep_newest()


def prepared_key(model: str, request: Sequence[str]) -> str:
    """Return the key of a model (its fingerprint) that is opened with these options here."""
    return key_of(
        {"prepared": model, "request": list(request), "machine": Machine.here().model_dump()}
    )


def is_prepared(key: str) -> bool:
    """Return whether a start of this key has ended, so that the next one compiles nothing."""
    path = _prepared_path(key)
    with contextlib.suppress(OSError):
        os.utime(path)
    return path.is_file()


def note_prepared(key: str) -> None:
    """Note that a start of this key has ended, where the cache can be written."""
    if not is_prepared(key):
        with contextlib.suppress(OSError):
            folder().mkdir(parents=True, exist_ok=True)
            text = json.dumps({"code": code_stamp(), "prepared": key}) + "\n"
            atomic_write(_prepared_path(key), text, durable=False)
            _keep_newest()


def can_note() -> bool:
    """Return whether the cache can be written."""
    try:
        folder().mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(folder(), os.W_OK | os.X_OK)


def _prepared_path(key: str) -> Path:
    return folder() / f"prepared-{key[:40]}.json"


def is_reachable(path: Path) -> bool:
    """Return whether this state of the code could load a decision: other code has other keys."""
    try:
        content = json.loads(path.read_bytes())
        return bool(content["code"] == code_stamp())
    except (OSError, ValueError, RecursionError, LookupError, TypeError):
        return False


@cache
def code_stamp() -> str:
    """Return a hash of all files of the deciding code.

    A version stands for many states of a checkout.
    """
    lines = []
    for package in DECIDING:
        for module in sorted(Path(next(iter(package.__path__))).rglob("*.py")):
            state = module.stat()
            lines.append(f"{module} {state.st_size} {state.st_mtime_ns}")
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _content(key: str, decision: Decision) -> dict[str, Any]:
    return {
        "key": key,
        "mode": decision.mode,
        "gpu": decision.gpu,
        "reason": decision.reason,
        "notes": list(decision.notes),
        "seconds": dict(decision.seconds),
        "phases": [asdict(x) for x in decision.phases],
        "alone": [asdict(x) for x in decision.alone],
    }


def _check(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def _read(data: bytes, key: str) -> Decision | None:
    content = json.loads(data)
    if not isinstance(content, dict) or content.pop("check", None) != _check(content):
        return None
    if content.pop("key", None) != key or content.get("mode") not in get_args(DeviceKind):
        return None
    content.pop("code", None)
    content["notes"] = tuple(content["notes"])
    content["phases"] = tuple(PhaseChoice(**x) for x in content["phases"])
    content["alone"] = tuple(DeviceTimes.of(x) for x in content["alone"])
    return Decision(**content)


def _keep_newest() -> None:
    files = sorted(folder().glob("*.json"), key=lambda x: x.stat().st_mtime)
    for old in files[:-MAX_DECISIONS]:
        old.unlink()
