"""An interface that prepares an OpenCL implementation: correct, and on the right cores."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hetero.backends.opencl.drivers.levels import GENERIC, Level, processor_levels
from hetero.backends.opencl.self_test.kernel_store import KernelStore


class Driver(ABC):
    """One implementation. Stateless; everything here is called in the process that loads it.

    name            what `--gpu opencl:NAME` takes
    computes_on_cpu its devices are this host's cores: levels, pinning and worker counts apply
    starts_threads_late  its threads appear with the first launch, not when it is loaded
    caches_kernels  it keeps compiled kernels in a folder by itself (`environment` names it);
                    of others the program binaries are kept
    """

    name: str
    computes_on_cpu = False
    caches_kernels = False
    starts_threads_late = False

    @abstractmethod
    def owns_library(self, library: str) -> bool:
        """Return whether a library's path or name is this implementation's."""

    @abstractmethod
    def owns_platform(self, platform_name: str) -> bool:
        """Return whether `CL_PLATFORM_NAME` is this implementation's."""

    def levels(self) -> tuple[Level, ...]:
        """Return levels to try on this machine, the best first."""
        return processor_levels() if self.computes_on_cpu else (GENERIC,)

    def environment(self, *, workers: int, level: Level, folder: Path) -> Mapping[str, str]:
        """Return the variables that it reads when it is loaded or its device is first queried.

        The user's own values win. `workers` threads compute; `folder` is this process's own.
        """
        del workers, level, folder
        return {}

    def library(self, path: str, level: Level, folder: Path, store: KernelStore) -> str:
        """Return what to load so that `path` works at a level.

        May make links in `folder`, and keep in the level's store what takes time to make.
        """
        del level, folder, store
        return path

    def revision(self) -> str:
        """Return the revision of what `library` makes.

        Another one where programs compile to something else, or are under another name: then no
        cached kernel is valid.
        """
        return ""

    def prepare(self, device: Any, level: Level) -> None:  # noqa: B027
        """Make an enumerated device compile for a level. Raises `DeviceUnavailableError`."""

    @abstractmethod
    def family(self, level: Level, device_name: str) -> str:
        """Return the tuning record (`tuning.FAMILIES`) of its kernels at a level."""
