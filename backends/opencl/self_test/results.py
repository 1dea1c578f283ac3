"""Results of self-tests: a small JSON file for each driver on this processor, checked when read."""

from __future__ import annotations

import contextlib
import hashlib
import os
from functools import cache
from pathlib import Path
from typing import Final, Literal, TypeAlias

import pydantic
import pyopencl as cl

from hetero.backends.host import time_limits
from hetero.backends.host.processor import cpu_flags, cpu_name
from hetero.backends.host.versions import installed_version
from hetero.backends.opencl.drivers.icd import DEVICE_NODES, DriverCandidate
from hetero.backends.opencl.drivers.levels import Level
from hetero.backends.opencl.kernel_files import sources_digest
from hetero.backends.opencl.self_test.kernel_store import write_whole

SCHEMA_VERSION: Final = 1
FOLDER: Final = "verdicts"
# Beginnings of variables that decide which devices a driver has or how it computes, and ours of how
# long it may take.
READ_BY_DRIVERS: Final = (
    "POCL_", "OCL_ICD_", "CL_CONFIG_", "RUSTICL_", "GALLIUM_DRIVER", "MESA_LOADER_", "LIBGL_ALWAYS",
    "CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL", "ZE_AFFINITY_MASK",
    "ONEAPI_DEVICE_SELECTOR", time_limits.VARIABLE,
)  # fmt: skip
# What a driver may miss, and find at another start.
NODES: Final = (*(f"dev/{glob}" for glob in DEVICE_NODES), "dev/dma_heap/*", "dev/shm")
SYSTEM: Final = ("sys/class/drm/*", "sys/class/kgsl/*", "sys/devices/system/cpu", "proc/cpuinfo")
BOOT: Final = "proc/sys/kernel/random/boot_id"
SEARCHED: Final = ("LD_LIBRARY_PATH", "LD_PRELOAD")
ROOT: Path = Path("/")
CODE: Final = tuple(Path(__file__).parents[2] / name for name in ("opencl", "reference"))
SET_BY_US: Final = ("POCL_CACHE_DIR", "POCL_MAX_PTHREAD_COUNT", "OCL_ICD_VENDORS")

Outcome: TypeAlias = Literal["passed", "crashed", "hung", "wrong", "failed"]


class _Record(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(defer_build=True, frozen=True, extra="forbid")


class Attempt(_Record):
    """A self-test of one level. `lasting`: it would end the same way again."""

    level: str
    outcome: Outcome
    detail: str = ""
    seconds: float = 0.0
    lasting: bool = True

    @property
    def sentence(self) -> str:
        """Return the outcome in words."""
        verb = {"wrong": "computed wrongly", "failed": "failed"}.get(self.outcome, self.outcome)
        return f"level {self.level} {verb}{f' ({self.detail})' if self.detail else ''}"


class DeviceResult(_Record):
    """A device as its driver describes it, and how its levels did."""

    platform: str
    platform_version: str
    name: str
    version: str
    driver_version: str
    kind: Literal["gpu", "cpu", "other"]
    attempts: tuple[Attempt, ...] = ()

    def attempt(self, level: Level) -> Attempt | None:
        """Return the self-test of a level, None if it was not tried."""
        return next((a for a in self.attempts if a.level == level.name), None)

    @property
    def title(self) -> str:
        """Return platform and device, as `--gpu opencl:PART` finds them."""
        return f"{self.platform} / {self.name}"


class SelfTestResult(_Record):
    """A driver's devices.

    `problem` says why there is none, `lasting` that it will be so again as long as `circumstances`
    are the same.
    """

    schema_version: Literal[1] = 1
    key: str
    library: str
    origin: str
    driver: str
    problem: str = ""
    lasting: bool = True
    circumstances: str = ""
    devices: tuple[DeviceResult, ...] = ()


def circumstances() -> str:
    """Return a digest of what may keep any driver from its devices.

    Nodes and the right to open them, the system's folders, where libraries are looked for, and the
    boot (kernel modules).
    """
    nodes = sorted({path for glob in NODES for path in ROOT.glob(glob)})
    system = sorted({path for glob in SYSTEM for path in ROOT.glob(glob)})
    boot = ""
    with contextlib.suppress(OSError):
        boot = (ROOT / BOOT).read_text(encoding="ascii")
    facts = [
        *(f"{path} {os.access(path, os.R_OK | os.W_OK)}" for path in nodes),
        *map(str, system),
        *(os.environ.get(name, "") for name in SEARCHED),
        boot,
    ]
    return hashlib.sha256("\0".join(facts).encode(errors="surrogateescape")).hexdigest()


def result_key(candidate: DriverCandidate) -> str:
    """Return everything that a result depends on."""
    environment = sorted(
        f"{name}={value}"
        for name, value in os.environ.items()
        if name.startswith(READ_BY_DRIVERS) and name not in SET_BY_US
    )
    facts = [
        str(SCHEMA_VERSION),
        candidate.fingerprint(),
        cpu_name(),
        *sorted(cpu_flags()),
        sources_digest(),
        code_digest(CODE),
        installed_version("hetero") or "unknown",
        str(cl.VERSION_TEXT),
        *environment,
    ]
    return hashlib.sha256("\0".join(facts).encode(errors="surrogateescape")).hexdigest()


@cache
def code_digest(folders: tuple[Path, ...]) -> str:
    """Return the identity of the code that launches kernels, and that judges their results.

    A checkout changes without a new version, and what was wrong before may have been the judge.
    """
    files = (path for folder in folders for path in sorted(folder.rglob("*.py")))
    return hashlib.sha256(b"\0".join(path.read_bytes() for path in files)).hexdigest()


def result_path(root: Path, key: str) -> Path:
    """Return where a result is kept."""
    return root / FOLDER / f"{key[:32]}.json"


def read_result(path: Path, key: str) -> SelfTestResult | None:
    """Return the result of this key.

    None where there is none that is whole, or where a driver had no device in other circumstances.
    """
    try:
        result = SelfTestResult.model_validate_json(path.read_bytes())
    except (OSError, ValueError):
        return None
    if result.key != key or (result.problem and result.circumstances != circumstances()):
        return None
    with contextlib.suppress(OSError):
        os.utime(path)  # when it was last used
    return result


def write_result(path: Path, result: SelfTestResult) -> None:
    """Keep what would end the same way again. Raises `OSError`."""
    devices = [
        device.model_copy(update={"attempts": tuple(a for a in device.attempts if a.lasting)})
        for device in result.devices
    ]
    content = result.model_copy(update={"devices": tuple(devices)}).model_dump_json(indent=1)
    write_whole(path, content.encode())


def drop_results(paths: list[Path]) -> None:
    """Forget results: what they say is tried again."""
    for path in paths:
        if path.parent.name == FOLDER and path.suffix == ".json":
            with contextlib.suppress(OSError):
                path.unlink()
