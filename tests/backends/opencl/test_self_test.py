"""Self-tests in child processes: faults end on the next level down, whatever the processor is."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("pyopencl")

from hetero.backends.errors import DeviceError
from hetero.backends.opencl.drivers import levels
from hetero.backends.opencl.drivers.icd import DriverCandidate
from hetero.backends.opencl.program_source import ProgramSource
from hetero.backends.opencl.reports import CHECKING, PREPARING
from hetero.backends.opencl.self_test import results, runner, supervisor
from hetero.backends.opencl.self_test.kernel_store import SUFFIX
from hetero.backends.opencl.self_test.program_compiler import Variant
from hetero.backends.opencl.self_test.results import SelfTestResult
from hetero.backends.opencl.self_test.runner import SelfTests, passed_level
from tests.support.selection import exhaustive

PLANTED = (sys.executable, "-P", str(Path(__file__).parent / "planted_worker.py"))
OWN = levels.processor_levels()
FEW = 3  # families of kernels that are enough for a fault, the first of them among these


def linked(path: Path, link: Path) -> None:
    """Entries of the store are never written in place, so that a link is as good as a copy."""
    try:
        link.hardlink_to(path)
    except OSError:  # another file system
        shutil.copy2(path, link)


@pytest.fixture
def self_tests(kernels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SelfTests:
    """With a cache of its own that has every kernel and no result."""
    for path in kernels.glob(f"*/*{SUFFIX}"):
        link = tmp_path / "kernels" / path.parent.name / path.name
        link.parent.mkdir(parents=True, exist_ok=True)
        linked(path, link)
    monkeypatch.setattr(supervisor, "worker_command", lambda: PLANTED)
    return SelfTests(tmp_path, notify=lambda _: None)


def plant(monkeypatch: pytest.MonkeyPatch, *, first: int | None = FEW, **planted: object) -> None:
    """Of all families of kernels with `first=None`."""
    chosen = {} if first is None else {"first": first}
    monkeypatch.setenv("PLANTED", json.dumps(planted | chosen))


def has_flags(monkeypatch: pytest.MonkeyPatch, flags: frozenset[str]) -> None:
    for module in (levels, results):
        monkeypatch.setattr(module, "cpu_flags", lambda: flags)


def outcomes(result: SelfTestResult) -> list[tuple[str, str]]:
    return [(a.level, a.outcome) for a in result.devices[0].attempts]


FAULTS = {"crash": "crashed", "hang": "hung", "wrong": "wrong"}


@pytest.mark.full
@pytest.mark.sampled(3)
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize(
    "depth",
    [
        pytest.param(i, id=level.name, marks=[pytest.mark.full] * (i > 1))
        for i, level in enumerate(OWN)
    ],
)
def test_a_fault_ends_on_the_next_level_down(
    self_tests: SelfTests,
    pocl: DriverCandidate,
    monkeypatch: pytest.MonkeyPatch,
    depth: int,
    fault: str,
) -> None:
    """On a processor whose best level this is; it is named, and the next one is used."""
    level, below = OWN[depth], OWN[depth + 1 : depth + 2]
    has_flags(monkeypatch, level.flags)
    plant(monkeypatch, faults={level.name: fault})
    said: list[str] = []
    self_tests.notify = said.append
    result = self_tests.examine(pocl)
    assert outcomes(result) == [(level.name, FAULTS[fault]), *((x.name, "passed") for x in below)]
    assert passed_level(result.devices[0], OWN) is (below[0] if below else None)
    assert [level.name in sentence for sentence in said if sentence != PREPARING] == [True]
    # What was found is kept: nothing is tried again.
    monkeypatch.setattr(supervisor, "worker_command", lambda: ("false",))
    assert SelfTests(self_tests.root, notify=pytest.fail).examine(pocl) == result


# LLVM 14's name for each processor, and which flags of a level it has: at most those of this one.
V2 = "x86-64"
PROCESSORS = [
    ("Nehalem", "nehalem", V2), ("Westmere", "westmere", V2), ("Sandy Bridge", "sandybridge", V2),
    ("Ivy Bridge", "ivybridge", V2), ("Haswell", "haswell", "avx2"),
    ("Broadwell", "broadwell", "avx2"), ("Skylake", "skylake", "avx2"),
    ("Skylake-X", "skylake-avx512", "avx512"), ("Cascade Lake", "cascadelake", "avx512-vnni"),
    ("Cooper Lake", "cooperlake", "avx512-vnni"), ("Ice Lake", "icelake-client", "avx512-vnni"),
    ("Ice Lake server", "icelake-server", "avx512-vnni"),
    ("Tiger Lake", "tigerlake", "avx512-vnni"), ("Rocket Lake", "rocketlake", "avx512-vnni"),
    ("Alder Lake", "alderlake", "avx2"), ("Alder Lake, AVX-512 on", "alderlake", "avx512-vnni"),
    ("Raptor, Meteor, Arrow and Lunar Lake", "goldmont", "avx2"), ("N100", "goldmont", "avx2"),
    ("Goldmont", "goldmont", V2), ("Tremont", "tremont", V2),
    ("Sapphire Rapids", "sapphirerapids", "avx512-vnni"),
    ("Granite Rapids", "icelake-client", "avx512-vnni"), ("Knights Landing", "knl", "avx2"),
    ("Jaguar", "btver2", V2), ("Piledriver", "bdver2", V2), ("Excavator", "bdver4", "avx2"),
    ("Zen", "znver1", "avx2"), ("Zen 2", "znver2", "avx2"), ("Zen 3", "znver3", "avx2"),
    ("Zen 4", "znver3", "avx512-vnni"), ("Zen 5", "generic", "avx512-vnni"),
    ("x86-64-v2, AMD", "k8-sse3", V2), ("x86-64-v3, AMD", "k8-sse3", "avx2"),
    ("x86-64-v3, Intel", "nocona", "avx2"), ("x86-64-v4, AMD", "k8-sse3", "avx512"),
    ("flags masked to nothing", "sapphirerapids", V2), ("unreadable", "generic", V2),
]  # fmt: skip


FIRST = {level: name for name, _, level in reversed(PROCESSORS)}  # of each level


@pytest.mark.parametrize(
    ("name", "llvm", "level"),
    [
        pytest.param(*x, id=x[0], marks=[pytest.mark.full] * (x[0] != FIRST[x[2]]))
        for x in PROCESSORS
    ],
)
def test_every_processor_computes_right(
    self_tests: SelfTests,
    pocl: DriverCandidate,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    llvm: str,
    level: str,
) -> None:
    """The name is repaired whatever it is, and the kernels of the level agree with numpy."""
    flags = levels.LEVELS[level].flags
    if not flags <= OWN[0].flags:
        pytest.skip(f"this processor has no {level}")
    has_flags(monkeypatch, flags)
    monkeypatch.setattr(runner, "MAX_PARTS", 1)  # children whose start takes as long as the rest
    plant(monkeypatch, first=None if exhaustive() else FEW, cpu_name=llvm)
    assert outcomes(self_tests.examine(pocl)) == [(level, "passed")]


@pytest.mark.parametrize(
    "depth",
    [
        pytest.param(i, id=level.name, marks=[pytest.mark.full] * (i > 0))
        for i, level in enumerate(OWN)
    ],
)
def test_all_kernels_of_a_level_compute_right(
    self_tests: SelfTests, pocl: DriverCandidate, monkeypatch: pytest.MonkeyPatch, depth: int
) -> None:
    """For the first processor of the level: with the repair all of them are one."""
    level = OWN[depth]
    has_flags(monkeypatch, level.flags)
    llvm = next(llvm for name, llvm, _ in PROCESSORS if name == FIRST[level.name])
    plant(monkeypatch, first=None, cpu_name=llvm)
    assert outcomes(self_tests.examine(pocl)) == [(level.name, "passed")]


@pytest.mark.full
@pytest.mark.skipif(
    not OWN[0].name.startswith("avx512"), reason="znver3, as which it is planted, has all of it"
)
def test_without_the_repair_such_a_processor_fails(
    pocl: DriverCandidate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the repair is for, and that a self-test finds it out: LLVM crashes, or compiles for
    ever.
    """
    monkeypatch.setattr(supervisor, "worker_command", lambda: PLANTED)
    monkeypatch.setattr(supervisor, "SILENCE_S", 10.0)
    plant(monkeypatch, first=None, cpu_name="znver3", unrepaired=True)
    result = SelfTests(tmp_path, notify=lambda _: None).examine(pocl, OWN[0])
    ((level, outcome),) = outcomes(result)
    assert (level, outcome in ("crashed", "failed", "hung")) == (OWN[0].name, True)


@pytest.mark.full
def test_kernels_of_an_earlier_run_are_not_blamed_on_the_level(
    self_tests: SelfTests, pocl: DriverCandidate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An entry that is whole but wrong: it is compiled again before the level is given up."""
    store = self_tests.store(pocl, OWN[0])
    entries = sorted(store.folders[0].iterdir())
    for path in entries:
        files = store.get(path.stem)
        assert files is not None
        store.put(path.stem, dict.fromkeys(files, b"\x7fELF"))
    plant(monkeypatch)
    assert outcomes(self_tests.examine(pocl)) == [(OWN[0].name, "passed")]


@pytest.mark.full
def test_a_run_that_was_killed_is_tried_again(
    self_tests: SelfTests, pocl: DriverCandidate, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    self_tests.examine(pocl)
    assert self_tests.known(pocl) is not None
    results.drop_results([self_tests.path(pocl), self_tests.root / "elsewhere.json"])
    assert self_tests.known(pocl) is None


@pytest.mark.full
def test_after_a_run_that_was_killed_it_says_so(
    self_tests: SelfTests, pocl: DriverCandidate, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    self_tests.examine(pocl)
    said: list[str] = []
    self_tests.run.suspects.append(self_tests.path(pocl))
    again = SelfTests(self_tests.root, notify=said.append)
    assert outcomes(again.examine(pocl)) == [(OWN[0].name, "passed")]
    assert said == [CHECKING]


@pytest.mark.full
@pytest.mark.parametrize("damage", ["", "{}", "[1", '{"key": 3}'])
def test_a_broken_result_is_made_again(
    self_tests: SelfTests, pocl: DriverCandidate, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    path = self_tests.path(pocl)
    path.parent.mkdir()
    path.write_text(damage, encoding="utf-8")
    plant(monkeypatch)
    assert outcomes(self_tests.examine(pocl)) == [(OWN[0].name, "passed")]
    assert self_tests.known(pocl) is not None


def test_what_is_killed_from_outside_is_not_kept(
    self_tests: SelfTests, pocl: DriverCandidate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A child that the system ended for want of memory says nothing of the level."""
    code = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    monkeypatch.setattr(supervisor, "worker_command", lambda: (sys.executable, "-c", code))
    result = self_tests.examine(pocl)
    assert "SIGKILL" in result.problem
    assert self_tests.known(pocl) is None


def test_a_silent_child_is_a_hang(
    self_tests: SelfTests, pocl: DriverCandidate, monkeypatch: pytest.MonkeyPatch
) -> None:
    silent = (sys.executable, "-c", "import time; time.sleep(60)")
    monkeypatch.setattr(supervisor, "worker_command", lambda: silent)
    monkeypatch.setattr(supervisor, "SILENCE_S", 0.3)
    assert "hung (no answer for 0.3 s" in self_tests.examine(pocl).problem


class TestSupervisor:
    """Compiling for a running model in a child."""

    def build(
        self, self_tests: SelfTests, pocl: DriverCandidate, text: str, kernel: str | None = None
    ) -> None:
        job = self_tests.job(pocl, OWN[0], self_tests.run.path / "test")
        builder = supervisor.Supervisor(job, 0)
        variant = None if kernel is None else Variant(kernel, (1,), (1,), "i")
        try:
            builder.build(ProgramSource("test.cl", text, ()), variant)
        finally:
            builder.close()

    def test_a_wrong_program_is_an_error_with_its_log(
        self, self_tests: SelfTests, pocl: DriverCandidate, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        plant(monkeypatch)
        with pytest.raises(DeviceError, match="CL_BUILD_PROGRAM_FAILURE") as caught:
            self.build(self_tests, pocl, "__kernel void broken( {")
        assert "error:" in str(caught.value)
        assert "test.cl" in caught.value.operation

    @pytest.mark.full
    def test_a_kernel_that_crashes_costs_an_error(
        self, self_tests: SelfTests, pocl: DriverCandidate, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        plant(monkeypatch)
        crash = "__kernel void down(const int n) { *(volatile __global int *)(size_t)16 = n; }"
        with pytest.raises(DeviceError, match=r"crashed.*SIGSEGV"):
            self.build(self_tests, pocl, crash, "down")

    @pytest.mark.full
    def test_what_compiles_is_kept(
        self, self_tests: SelfTests, pocl: DriverCandidate, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        plant(monkeypatch)
        text = "__kernel void fine(const int n) { }"
        self.build(self_tests, pocl, text, "fine")
        store = self_tests.store(pocl, OWN[0])
        source = ProgramSource("test.cl", text, ())
        assert store.get(source.digest)
        assert store.get(Variant("fine", (1,), (1,), "i").entry(source))


@pytest.mark.full
def test_progress_is_said_once(
    self_tests: SelfTests,
    pocl: DriverCandidate,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    plant(monkeypatch)
    self_tests.notify = runner.print_notice
    self_tests.examine(pocl)
    self_tests.examine(pocl)
    out, err = capfd.readouterr()
    assert (out, err) == ("", f"hetero: {PREPARING}\n")


NOTHING = "print('{\"devices\": []}', flush=True); import sys; sys.stdin.read()"
CRASH = "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"


def count_children(monkeypatch: pytest.MonkeyPatch, code: str) -> list[int]:
    started: list[int] = []

    def command() -> tuple[str, ...]:
        started.append(1)
        return (sys.executable, "-S", "-c", code)

    monkeypatch.setattr(supervisor, "worker_command", command)
    return started


def open_node(root: Path, _: pytest.MonkeyPatch) -> None:
    (root / "dev/dri").mkdir(parents=True)
    (root / "dev/dri/renderD128").touch()


def mount_sys(root: Path, _: pytest.MonkeyPatch) -> None:
    (root / "sys/devices/system/cpu").mkdir(parents=True)


def boot(root: Path, _: pytest.MonkeyPatch) -> None:
    (root / "proc/sys/kernel/random").mkdir(parents=True)
    (root / "proc/sys/kernel/random/boot_id").write_text("another\n")


def enable(_: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUSTICL_ENABLE", "freedreno")


def show_gpu(_: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")


def find_libraries(_: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", "/opt/llvm/lib")


def give_time(_: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HETERO_TIMEOUT_SCALE", "4")


CHANGES = (open_node, mount_sys, boot, enable, show_gpu, find_libraries, give_time)


@pytest.mark.parametrize("code", [NOTHING, CRASH], ids=["no device", "crash"])
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_missing_device_is_looked_for_again_when_the_cause_may_have_ended(
    self_tests: SelfTests,
    pocl: DriverCandidate,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[Path, pytest.MonkeyPatch], None],
    code: str,
) -> None:
    root = tmp_path / "root"
    monkeypatch.setattr(results, "ROOT", root)
    started = count_children(monkeypatch, code)
    problem = self_tests.examine(pocl).problem
    assert "CL_DEVICE_NOT_FOUND" in problem or "crashed" in problem
    assert self_tests.examine(pocl).problem == problem
    assert SelfTests(self_tests.root).known(pocl) is not None
    assert len(started) == 1  # the same circumstances: not tried again
    change(root, monkeypatch)
    assert SelfTests(self_tests.root).known(pocl) is None
    self_tests.examine(pocl)
    assert len(started) == 2


def test_the_right_to_open_a_node_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "ROOT", tmp_path)
    open_node(tmp_path, monkeypatch)
    before = results.circumstances()
    monkeypatch.setattr("os.access", lambda *_: False)
    assert results.circumstances() != before


def test_other_code_of_the_judge_is_another_key(
    pocl: DriverCandidate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = [results.result_key(pocl)]
    for folder, text in (("a", "TOLERANCE = 1e-5"), ("b", "TOLERANCE = 1e-5"), ("c", "")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "judge.py").write_text(text)
        monkeypatch.setattr(results, "CODE", (tmp_path / folder,))
        keys.append(results.result_key(pocl))
    assert keys[1] == keys[2]  # the same text in another folder
    assert len(set(keys)) == 3


@pytest.mark.full
def test_a_driver_without_a_device_is_loaded_again_on_request(
    self_tests: SelfTests, pocl: DriverCandidate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `hetero doctor` does; a driver that passed is not."""
    started = count_children(monkeypatch, NOTHING)
    for _ in range(2):
        assert self_tests.examine(pocl, retry=True).problem
    assert len(started) == 2
    monkeypatch.setattr(supervisor, "worker_command", lambda: PLANTED)
    plant(monkeypatch)
    assert outcomes(self_tests.examine(pocl, retry=True))[0][1] == "passed"
    monkeypatch.setattr(supervisor, "worker_command", lambda: ("false",))
    assert outcomes(self_tests.examine(pocl, retry=True))[0][1] == "passed"


@pytest.mark.full
def test_a_child_that_works_is_no_hang(
    self_tests: SelfTests, pocl: DriverCandidate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy machine, where it had no core for longer than the limit."""
    asked: list[int] = []

    class Working(supervisor.Patience):
        def is_over(self) -> bool:
            asked.append(1)
            return False

    monkeypatch.setattr(supervisor, "Patience", Working)
    monkeypatch.setattr(supervisor, "SILENCE_S", 0.05)
    plant(monkeypatch)
    assert outcomes(self_tests.examine(pocl)) == [(OWN[0].name, "passed")]
    assert asked


@pytest.mark.full
@pytest.mark.parametrize("room", [True, False])
def test_what_a_full_disk_breaks_is_not_kept(
    self_tests: SelfTests, pocl: DriverCandidate, monkeypatch: pytest.MonkeyPatch, room: bool
) -> None:
    """A driver's compiler does not say why it fails."""
    code = (
        "import json, sys\n"
        "from pathlib import Path\n"
        "from hetero.backends.opencl.self_test import worker\n"
        "from hetero.backends.errors import DeviceError\n"
        "def fail(*_): raise DeviceError('opencl', 'building add', 'CL_BUILD_PROGRAM_FAILURE')\n"
        "worker.try_cases = fail\n"
        f"worker.has_room = lambda _: {room}\n"
        "worker.main()\n"
    )
    monkeypatch.setattr(supervisor, "worker_command", lambda: (sys.executable, "-c", code))
    assert {outcome for _, outcome in outcomes(self_tests.examine(pocl))} == {"failed"}
    kept = SelfTests(self_tests.root).known(pocl)
    assert kept is None or bool(kept.devices[0].attempts) == room
