"""Makes a folder with Debian for arm64, hetero's dependencies and an emulator, and runs in it.

No program of the folder runs while it is made: packages are unpacked, and pip chooses wheels by
their platform.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from packaging.requirements import Requirement

CHECKOUT = Path(__file__).resolve().parents[2]
SUITES, PYTHON = ("trixie main", "trixie-backports contrib"), "3.13"
KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
# `dash` is /bin/sh, which ctypes and tests start; libfastrpc1 calls into a Hexagon.
PACKAGES = ("python3", "dash", "bash", "coreutils", "pocl-opencl-icd", "libfastrpc1")
# Debian 12's emulator shows the host's /proc/cpuinfo, at which ONNX Runtime crashes.
EMULATOR = "qemu-user"
# Markers of the dependencies are evaluated for this machine, not for the one that runs pip.
MARKERS = {
    "sys_platform": "linux", "platform_machine": "aarch64", "platform_system": "Linux",
    "os_name": "posix", "python_version": PYTHON, "python_full_version": f"{PYTHON}.0",
    "implementation_name": "cpython", "platform_python_implementation": "CPython",
}  # fmt: skip
EXTRAS = ("qnn", "serve", "encryption", "hub")
TEST_PACKAGES = ("pip", "pytest", "hypothesis", "safetensors")
PLACES = (
    "usr/bin", "usr/sbin", "usr/lib", "proc", "sys", "dev", "tmp", "root", "opt/no-drivers",
)  # fmt: skip
GLIBC = ("2_34", "2_31", "2_28", "2_27", "2_26", "2_24", "2_17")
# ELF, 64 bits, little-endian, an executable or a shared object, for AArch64. F: the emulator is
# opened here, so that the folder needs no copy; P: programs keep their own names.
BINFMT = (
    r":hetero-arm64:M::\x7fELF\x02\x01\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00\x02\x00\xb7\x00"
    r":\xff\xff\xff\xff\xff\xff\xff\x00\xff\xff\xff\xff\xff\xff\xff\xff\xfe\xff\xff\xff:{}:PF"
)
ENTER = """
set -e
root=$1 emulator=$2; shift 2
mount -t binfmt_misc binfmt_misc /proc/sys/fs/binfmt_misc
printf %s "$emulator" > /proc/sys/fs/binfmt_misc/register
mount -t proc proc "$root/proc"
mount --rbind /sys "$root/sys"
mount -t tmpfs tmpfs "$root/dev"
mkdir "$root/dev/shm"
for node in null zero random urandom; do
  : > "$root/dev/$node"; mount --bind "/dev/$node" "$root/dev/$node"
done
while [ "$1" != -- ]; do
  if [ -d "$1" ]; then mkdir -p "$root$2"; else mkdir -p "$root${2%/*}"; : >> "$root$2"; fi
  mount --bind "$1" "$root$2"; shift 2
done
shift
exec chroot "$root" env -i "$@"
"""


class UnavailableError(Exception):
    """This machine lacks something: one sentence with the remedy."""


def default_folder() -> Path:
    """Return where the root is kept unless it is named."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "hetero-arm64"


def make(folder: Path, mirror: str) -> None:
    """Make the folder again, or leave what was there; `mirror` is Debian's, "" for apt's own.

    Raises `UnavailableError` without apt, Debian's keys or a mirror.
    """
    for program in ("apt-get", "dpkg"):
        if shutil.which(program) is None:
            raise UnavailableError(f"{program} is missing: make the root on Debian or Ubuntu")
    if not KEYRING.exists():
        raise UnavailableError(f"{KEYRING} is missing: apt-get install debian-archive-keyring")
    mirror = mirror or _mirror()
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix="making-") as name:
        made = Path(name) / "made"
        root = made / "root"
        for place in PLACES:
            (root / place).mkdir(parents=True)
        for place in ("bin", "sbin", "lib"):
            (root / place).symlink_to(f"usr/{place}")
        host = subprocess.check_output(["dpkg", "--print-architecture"], text=True).strip()
        _unpack(root, "arm64", PACKAGES, mirror, Path(name) / "arm64")
        _unpack(Path(name) / "qemu", host, (EMULATOR,), mirror, Path(name) / "host")
        (Path(name) / "qemu/usr/bin/qemu-aarch64").rename(made / "qemu-aarch64")
        _install(root / "opt/site")
        if folder.exists():
            shutil.rmtree(folder)
        made.rename(folder)


def _mirror() -> str:
    """Return the address of the mirror that this machine's apt takes Debian from."""
    query = ["apt-get", "indextargets", "--format", "$(ORIGIN) $(REPO_URI)"]
    lines = subprocess.run(query, capture_output=True, text=True, check=False).stdout.splitlines()
    for line in lines:
        origin, _, address = line.partition(" ")
        if origin == "Debian" and "security" not in address:
            return address
    raise UnavailableError("apt has no lists of Debian: run apt-get update, or name --mirror")


def _unpack(target: Path, arch: str, packages: Sequence[str], mirror: str, apt: Path) -> None:
    """Unpack packages below `target`; for arm64, those that they need as well."""
    for place in ("state/lists/partial", "cache/archives/partial", "etc/preferences.d",
                  "etc/trusted.gpg.d", "etc/apt.conf.d"):  # fmt: skip
        (apt / place).mkdir(parents=True)
    (apt / "status").touch()
    lines = [f"deb [signed-by={KEYRING}] {mirror} {suite}\n" for suite in SUITES]
    (apt / "etc/sources.list").write_text("".join(lines), encoding="utf-8")
    settings = {
        "Dir::State": apt / "state", "Dir::State::status": apt / "status",
        "Dir::Cache": apt / "cache", "Dir::Etc": apt / "etc", "Dir::Etc::sourceparts": "-",
        "APT::Architecture": arch, "APT::Architectures": arch, "APT::Install-Recommends": "false",
        "APT::Sandbox::User": "root", "Acquire::Languages": "none",
    }  # fmt: skip
    command = ["apt-get", "-qq", *(x for k, v in settings.items() for x in ("-o", f"{k}={v}"))]
    _call([*command, "update"])
    archives = apt / "cache/archives"
    if arch == "arm64":
        _call([*command, "--yes", "--download-only", "install", *packages])
    else:
        _call([*command, "download", *packages], archives)
    for archive in sorted(archives.glob("*.deb")):
        _call(["dpkg", "-x", str(archive), str(target)])
    shutil.rmtree(apt)


def requirements(extras: Sequence[str] = EXTRAS) -> list[str]:
    """Return what pyproject.toml asks for on arm64, and what the tests need."""
    text = (CHECKOUT / "pyproject.toml").read_text(encoding="utf-8")
    project = tomllib.loads(text)["project"]
    optional = project["optional-dependencies"]
    named = [Requirement(x) for x in project["dependencies"]]
    named += [Requirement(x) for extra in extras for x in optional[extra]]
    here = [x for x in named if x.marker is None or x.marker.evaluate(MARKERS)]
    return [*(f"{x.name}{x.specifier}" for x in here), *TEST_PACKAGES]


def _install(site: Path) -> None:
    """Install the wheels for arm64 that hetero and its tests need."""
    platforms = [x for tag in GLIBC for x in ("--platform", f"manylinux_{tag}_aarch64")]
    platforms += ["--platform", "manylinux2014_aarch64"]
    _call([
        sys.executable, "-m", "pip", "install", "--quiet", "--no-compile", "--target", str(site),
        *platforms, "--python-version", PYTHON, "--implementation", "cp",
        "--only-binary", ":all:", "-c", str(CHECKOUT / ".ci/constraints.txt"), *requirements(),
    ])  # fmt: skip


def build_wheel(folder: Path) -> Path:
    """Build hetero's wheel, which is pure Python, from the checkout."""
    _call([sys.executable, "-m", "build", "--outdir", str(folder), str(CHECKOUT)])
    return next(folder.glob("hetero-*.whl"))


def install_wheel(wheel: Path, site: Path) -> None:
    """Install hetero as pip does, without what it needs."""
    _call([sys.executable, "-m", "pip", "install", "--quiet", "--no-compile", "--no-deps",
           "--no-index", "--target", str(site), str(wheel)])  # fmt: skip


def _call(command: Sequence[str], cwd: Path | None = None) -> None:
    """Run a command; raises `UnavailableError` with its last words if it fails."""
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip() or done.stdout.strip()).splitlines()[-3:]
        raise UnavailableError(f"{' '.join(command[:3])} failed: {' '.join(last)}")


class Machine(NamedTuple):
    """An emulated machine: the folder of the root, and what is mounted in it for each command."""

    folder: Path
    mounts: Mapping[str, Path]
    """Places in the root, and the files or folders of this machine that are seen there."""
    cpu: str = "cortex-a76"

    def check(self) -> None:
        """Raise `UnavailableError` unless arm64 programs run in the root."""
        if not self.emulator.exists():
            raise UnavailableError(
                f"there is no arm64 root in {self.folder}: `python bench/arm64.py make` makes one"
            )
        done = self.run(["/usr/bin/true"])
        if done.returncode:
            raise UnavailableError(
                "this machine runs no arm64 programs in a user namespace (Linux 6.7 or later, "
                f"user namespaces allowed): {' '.join(done.stderr.split()[-12:])}"
            )

    @property
    def emulator(self) -> Path:
        """Return the emulator's program."""
        return self.folder / "qemu-aarch64"

    def run(self, command: Sequence[str], *, gpu: bool = False) -> subprocess.CompletedProcess[str]:
        """Run a command of the root. Without `gpu` there is no OpenCL driver."""
        environment = {
            "HOME": "/root", "PATH": "/usr/bin", "LANG": "C.UTF-8", "QEMU_CPU": self.cpu,
            "PYTHONPATH": "/opt/hetero:/opt/site", "HETERO_TIMEOUT_SCALE": "20",
            "PYTHONPYCACHEPREFIX": "/opt/compiled",
        }  # fmt: skip
        if not gpu:
            environment["OCL_ICD_VENDORS"] = "/opt/no-drivers/"
        mounts = [x for place, source in self.mounts.items() for x in (str(source), place)]
        namespace = ["unshare", "--user", "--map-root-user", "--mount", "--pid", "--fork"]
        return subprocess.run(
            [*namespace, "--kill-child", "bash", "-c", ENTER, "enter", str(self.folder / "root"),
             BINFMT.format(self.emulator), *mounts, "--",
             *(f"{k}={v}" for k, v in environment.items()), *command],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
