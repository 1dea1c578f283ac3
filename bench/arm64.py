"""hetero on Linux arm64, emulated: what is installed, devices, formats, a bundle, the contract.

python bench/arm64.py make     # Debian, wheels and the emulator: 400 MB to load, 1.3 GB, a minute
python bench/arm64.py slice    # what .ci/run runs of it: half a minute
python bench/arm64.py whole    # everything, with PoCL as the GPU: an hour
python bench/arm64.py run -- python3 -m hetero devices

Emulation shows that wheels exist, code runs and numbers are right. Its times say nothing, and x86's
order of loads and stores stays: what Arm's own order breaks is not seen.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, NamedTuple

import typer
from common import new_app, table
from parts.arm64_root import (
    CHECKOUT,
    Machine,
    UnavailableError,
    build_wheel,
    default_folder,
    install_wheel,
)
from parts.arm64_root import make as make_root

app = new_app(__doc__)
SKIPPED = 77  # as automake's tests exit that are skipped
HETERO = ("python3", "-m", "hetero")
QUIET = {"HETERO_NOTICES": "off", "HETERO_SCALE": "off"}
QUIETLY = ("env", *(f"{name}={value}" for name, value in QUIET.items()))
PROMPT = ("Once upon a time", "--max-tokens", "20")
WEIGHTS = ("w4a16", "w4a8", "w8a16", "w8a8", "f16", "f32")
CACHES = ("f32", "f16", "q8")
SAMPLES = CHECKOUT / "docs/demo-model/samples.md"
NODE = "/dev/fastrpc-cdsp"  # of the kernel's driver; here one that answers nothing
# Prints a line for each format: its name and what the demo model says in it.
TEXTS = """
import sys, hetero
folder, device, *formats = sys.argv[1:]
for name in formats:
    weights, kv = name.split("/")
    model = folder + "/w8a8" if weights == "w8a8" else "demo"
    with hetero.LLM(model, device=device, weights=weights, kv=kv) as llm:
        text = llm.generate("Once upon a time", max_tokens=20, chat=False).text
    print(name, repr(text), flush=True)
"""
PYTEST = ("env", "-C", "/checkout", "python3", "-m", "pytest", "-p", "no:cacheprovider")
CONTRACT = "tests/backends/test_contract.py"
WAITS = (
    "tests/backends/test_fence.py", "tests/runtime/test_waits.py",
    "tests/backends/opencl/test_opencl_flag.py", "tests/backends/opencl/test_stream_signal.py",
)  # fmt: skip

Folder = Annotated[Path | None, typer.Option(help="of the root; by default in the user's cache")]
Wheel = Annotated[Path | None, typer.Option(help="hetero's; by default built from the checkout")]


class Check(NamedTuple):
    """A command of the emulated machine, and what it has to print, as a regular expression."""

    name: str
    command: Sequence[str]
    expected: str | Callable[[], str]
    code: int = 0
    gpu: bool = False


@app.command()
def make(
    folder: Folder = None,
    mirror: Annotated[str, typer.Option(help="of Debian; by default that of apt")] = "",
) -> None:
    """Make the root: nothing of it runs meanwhile, and no privileges are needed."""
    folder = folder or default_folder()
    with skipping():
        make_root(folder, mirror)
    print(f"an arm64 root is in {folder}")


@app.command()
def run(command: list[str], folder: Folder = None, wheel: Wheel = None) -> None:
    """Run a command of the root, with hetero installed and PoCL."""
    with skipping(), opened(folder, wheel) as machine:
        done = machine.run(command, gpu=True)
    print(done.stdout, end="")
    print(done.stderr, end="", file=sys.stderr)
    raise typer.Exit(done.returncode)


@app.command("slice")
def small(folder: Folder = None, wheel: Wheel = None) -> None:
    """Run what fits in the gate: doctor, two formats, some of the contract, all on the NPU alone.

    Exits with 77 and one line where this machine has no root or cannot run it.
    """
    with skipping(), opened(folder, wheel) as machine:
        succeeded = report(machine, slice_checks(machine.mounts["/root"]), jobs=2)
    raise typer.Exit(not succeeded)


@app.command()
def whole(
    folder: Folder = None,
    wheel: Wheel = None,
    gpu: Annotated[bool, typer.Option(help="with PoCL as the GPU, which takes most time")] = True,
    only: Annotated[str, typer.Option(help="checks whose names match this")] = "",
) -> None:
    """Run everything and print a table."""
    with skipping(), opened(folder, wheel) as machine, tempfile.TemporaryDirectory() as name:
        home = machine.mounts["/root"]
        calibrate(home)
        checks = [*npu_checks(home), *(gpu_checks(home) if gpu else ())]
        succeeded = report(machine, checks, only)
        if re.search(only, "bundle"):
            bundled = with_bundle(machine, Path(name) / "bundle")
            succeeded = report(bundled, bundle_checks(), only) and succeeded
    raise typer.Exit(not succeeded)


def slice_checks(home: Path) -> Iterator[Check]:
    """Yield what the gate runs."""
    yield Check("doctor", (*HETERO, "doctor"), r"PASS +npu +ort-cpu", code=1)
    yield same_texts("formats", home, "npu", ("w4a16/f16", "w4a8/q8"))
    yield passing("contract, ort-cpu", (CONTRACT,), "ort-cpu and w4a8 and not group")


def npu_checks(home: Path) -> Iterator[Check]:
    """Yield what needs no OpenCL driver."""
    yield Check("requirements", ("python3", "-m", "pip", "check"), "No broken requirements")
    yield Check("doctor without a driver", (*HETERO, "doctor"), r"PASS +npu +ort-cpu", code=1)
    yield same_text("generate, npu", ("--device", "npu"), gpu=False)
    yield same_texts("formats, npu", home, "npu", formats())
    yield passing("contract, ort-cpu", (CONTRACT,), "ort-cpu")
    yield passing("test_ort_cpu", ("tests/backends/test_ort_cpu.py",), "")


def gpu_checks(home: Path) -> Iterator[Check]:
    """Yield what runs on PoCL, which compiles and tests its kernels first."""
    yield Check("devices", (*HETERO, "devices"), r"found +gpu +opencl ", gpu=True)
    yield Check("doctor", (*HETERO, "doctor"), r"PASS +gpu +opencl ", gpu=True)
    for device in ("gpu", "hetero"):
        yield same_text(f"generate, {device}", ("--device", device), gpu=True)
    yield passing("flags and waits", WAITS, "not intel and not half", gpu=True)
    yield same_texts("formats, gpu", home, "gpu", formats())
    yield passing("contract, opencl", (CONTRACT,), "opencl and not intel and not half", gpu=True)


def bundle_checks() -> Iterator[Check]:
    """Yield how far a bundle opens where there is no Hexagon behind the device node."""
    yield Check("bundle: doctor", (*HETERO, "doctor"), r"PASS +npu +FastRPC +loads", code=1)
    generate = (*HETERO, "generate", "/bundle", *PROMPT)
    yield Check("bundle: generate", generate, r"QNN_BACKEND_ERROR_CANNOT_INITIALIZE", code=2)


def formats() -> list[str]:
    """Return formats of weights, and those of caches."""
    return [*(f"{x}/f16" for x in WEIGHTS), *(f"w4a16/{x}" for x in CACHES if x != "f16")]


def same_text(name: str, options: Sequence[str], *, gpu: bool) -> Check:
    """Return the check that the demo model says there what it says here."""
    arguments = ("generate", "demo", *PROMPT, *options)

    def text() -> str:
        return re.escape(here([sys.executable, "-P", "-m", "hetero", *arguments]))

    return Check(name, (*HETERO, *arguments), text, gpu=gpu)


def same_texts(name: str, home: Path, device: str, names: Sequence[str]) -> Check:
    """Return the check that it does in these formats; `home` has what is quantised."""

    def texts() -> str:
        return re.escape(here([sys.executable, "-P", "-c", TEXTS, str(home), device, *names]))

    command = ("python3", "-c", TEXTS, "/root", device, *names)
    return Check(name, command, texts, gpu=device != "npu")


def calibrate(home: Path) -> None:
    """Quantise the demo model to w8a8, which needs a text."""
    quantize = ("quantize", "demo", "--weights", "w8a8", "--calibrate", str(SAMPLES))
    here([sys.executable, "-P", "-m", "hetero", *quantize, "--out", str(home / "w8a8")])


def passing(name: str, files: Sequence[str], chosen: str, *, gpu: bool = False) -> Check:
    """Return the check that tests pass."""
    return Check(name, (*PYTEST, *files, "-k", chosen), r"\d+ passed(?!.*(failed|error))", gpu=gpu)


def here(command: Sequence[str]) -> str:
    """Return what a command of this machine prints."""
    environment = {**os.environ, **QUIET}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed on this machine:\n{done.stderr}")
    return done.stdout


@contextmanager
def opened(folder: Path | None, wheel: Path | None) -> Iterator[Machine]:
    """Install hetero next to the root and yield the machine; its home is new and is removed."""
    with tempfile.TemporaryDirectory(prefix="hetero-arm64-") as name:
        site, home = Path(name) / "site", Path(name) / "home"
        home.mkdir()
        mounts = {
            "/root": home,
            "/opt/hetero": site,
            **{f"/checkout/{x}": CHECKOUT / x for x in ("tests", "pyproject.toml")},
        }
        machine = Machine(folder or default_folder(), mounts)
        machine._replace(mounts={}).check()
        install_wheel(wheel or build_wheel(Path(name)), site)
        yield machine


def with_bundle(machine: Machine, bundle: Path) -> Machine:
    """Return the machine with a bundle that is compiled here, and a device node of a Hexagon."""
    command = ("compile", "demo", "--soc", "sm8650", "--graph-sizes", "32", "--max-seq-len", "64")
    here([sys.executable, "-P", "-m", "hetero", *command, "--out", str(bundle)])
    return machine._replace(mounts={**machine.mounts, "/bundle": bundle, NODE: Path(os.devnull)})


def report(machine: Machine, checks: Iterable[Check], only: str = "", *, jobs: int = 1) -> bool:
    """Run checks, print a table, and what failed; returns whether nothing did."""
    failed: list[str] = []

    def row(check: Check) -> tuple[str, str, str]:
        expected = check.expected if isinstance(check.expected, str) else check.expected()
        start_s = time.perf_counter()
        done = machine.run([*QUIETLY, *check.command], gpu=check.gpu)
        took_s = time.perf_counter() - start_s
        said = done.stdout + done.stderr
        passed = done.returncode == check.code and re.search(expected, said)
        if not passed:
            failed.append(f"{check.name}, exit code {done.returncode}:\n{said[-4000:]}")
        return check.name, "passed" if passed else "FAILED", f"{took_s:.0f}"

    chosen = [check for check in checks if re.search(only, check.name)]
    with ThreadPoolExecutor(jobs) as pool:
        table("check|result|s (emulated)", pool.map(row, chosen))
    for text in failed:
        print(text, file=sys.stderr)
    return not failed


@contextmanager
def skipping() -> Iterator[None]:
    """Say what this machine lacks in one line and exit."""
    try:
        yield
    except UnavailableError as error:
        print(f"skipped: {error}", file=sys.stderr)
        raise typer.Exit(SKIPPED) from None


if __name__ == "__main__":
    app()
