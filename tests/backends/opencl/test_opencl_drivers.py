"""Levels, drivers, finding libraries, and the repair of PoCL's record; no OpenCL is loaded here."""

from __future__ import annotations

import ctypes
import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyopencl")

from hetero.backends.errors import DeviceOptionError, DeviceUnavailableError
from hetero.backends.opencl import open as open_opencl
from hetero.backends.opencl import platform
from hetero.backends.opencl.drivers import driver_of_library, driver_of_platform, icd, levels
from hetero.backends.opencl.drivers.levels import LEVELS, chosen_level, processor_levels
from hetero.backends.opencl.drivers.pocl import Pocl
from hetero.backends.opencl.drivers.pocl_headers import HEADER, make_headers, short
from hetero.backends.opencl.drivers.pocl_repair import (
    applies,
    find_field,
    repair,
    target_triple,
)
from hetero.backends.opencl.kernel_files import OURS
from hetero.backends.opencl.self_test import run_folder
from hetero.backends.opencl.self_test.kernel_store import KernelStore
from hetero.backends.opencl.self_test.run_folder import RunFolder, sweep

TRIPLE = b"x86_64-unknown-linux-gnu\0"
V3 = levels._AVX2
V4 = levels._AVX512


class TestLevels:
    @pytest.mark.parametrize(
        ("flags", "best"),
        [
            (V4 | {"avx512_vnni", "avx512_bf16"}, "avx512-vnni"),
            (V4, "avx512"),
            (V4 - {"avx512cd"}, "avx2"),  # Knights Landing has no BW, VMs mask what they like
            (V3, "avx2"),
            (V3 - {"abm"}, "x86-64"),  # LZCNT would run as BSR: wrong numbers and no signal
            (V3 | {"avx512f", "avx512_vnni"}, "avx2"),
            (frozenset({"sse4_2", "avx"}), "x86-64"),
            (frozenset(), "x86-64"),
        ],
    )
    def test_follow_from_flags(
        self, monkeypatch: pytest.MonkeyPatch, flags: frozenset[str], best: str
    ) -> None:
        monkeypatch.setattr(levels.platform, "machine", lambda: "x86_64")
        ladder = [level.name for level in processor_levels(frozenset(flags))]
        everything = ["avx512-vnni", "avx512", "avx2", "x86-64"]
        assert ladder == everything[everything.index(best) :]

    def test_other_processors_have_one(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(levels.platform, "machine", lambda: "aarch64")
        assert processor_levels(V4) == (levels.GENERIC,)

    def test_can_be_chosen(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("HETERO_OPENCL_LEVEL", raising=False)
        assert chosen_level() is None
        monkeypatch.setenv("HETERO_OPENCL_LEVEL", processor_levels()[-1].name)
        assert chosen_level() is processor_levels()[-1]

    def test_unknown_and_too_high(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HETERO_OPENCL_LEVEL", "avx51")
        with pytest.raises(DeviceOptionError, match=r"did you mean 'avx512'\? known are avx512-v"):
            chosen_level()
        monkeypatch.setenv("HETERO_OPENCL_LEVEL", "avx512-vnni")
        monkeypatch.setattr(levels, "cpu_flags", lambda: V4)
        monkeypatch.setattr(levels.platform, "machine", lambda: "x86_64")
        with pytest.raises(DeviceOptionError, match="without avx512_vnni; choose one of avx512, "):
            chosen_level()


@pytest.mark.skipif(sys.platform != "linux", reason="vendor folders are Linux's")
class TestLibraries:
    def test_the_wheels_and_the_systems(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "a.icd").write_text("/somewhere/libpocl.so.2.9.0\n")
        (tmp_path / "b.icd").write_text("libnvidia-opencl.so.1\n")
        (tmp_path / "c.icd").write_text("")
        monkeypatch.setenv("OCL_ICD_VENDORS", str(tmp_path))
        found = [(c.library, c.driver.name) for c in icd.candidates()]
        assert found[0] == ("libnvidia-opencl.so.1", "vendor")
        assert ("/somewhere/libpocl.so.2.9.0", "pocl") in found
        assert len([name for _, name in found if name == "vendor"]) == 1

    def test_one_file_and_a_folder_that_is_not_there(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "one.icd").write_text("libmali.so")
        monkeypatch.setenv("OCL_ICD_VENDORS", str(tmp_path / "one.icd"))
        assert [c.library for c in icd.candidates()] == ["libmali.so"]
        monkeypatch.setenv("OCL_ICD_VENDORS", str(tmp_path / "none"))
        assert icd.candidates() == []

    def test_the_fingerprint_follows_the_file(self, tmp_path: Path) -> None:
        library = tmp_path / "libpocl.so"
        library.write_bytes(bytes(3 << 20))
        candidate = icd.DriverCandidate(str(library), Pocl(), "test")
        before = candidate.fingerprint()
        assert candidate.fingerprint() == before
        content = bytearray(library.read_bytes())
        content[-1] = 1
        library.write_bytes(content)
        assert candidate.fingerprint() != before

    @pytest.mark.parametrize(
        ("library", "name"),
        [
            ("/x/pyopencl/.libs/libpocl-21062cec.so", "pocl"),
            ("/usr/lib/libpocl.so.2", "pocl"),
            ("/env/lib/libintelocl.so", "intel"),
            ("/usr/lib/intel-opencl/libigdrcl.so", "vendor"),  # Intel's GPUs
            ("libOpenCL_adreno.so", "vendor"),
        ],
    )
    def test_whose_a_library_is(self, library: str, name: str) -> None:
        assert driver_of_library(library).name == name

    @pytest.mark.parametrize(
        ("title", "family"),
        [
            ("QUALCOMM Snapdragon(TM) QUALCOMM Adreno(TM) 750", "adreno"),
            ("NVIDIA CUDA NVIDIA H200", "nvidia"),
            ("ARM Platform Mali-G720", "other"),
        ],
    )
    def test_families_of_gpus(self, title: str, family: str) -> None:
        assert driver_of_platform("whatever").family(levels.GENERIC, title) == family

    @pytest.mark.parametrize("platform", ["Portable Computing Language", "Intel(R) OpenCL"])
    def test_processors_have_a_family_for_every_level(self, platform: str) -> None:
        from hetero.backends.opencl.tuning import FAMILIES

        driver = driver_of_platform(platform)
        assert driver.computes_on_cpu
        assert {driver.family(level, "") for level in LEVELS.values()} <= set(FAMILIES)


class TestLinks:
    def test_every_pick_is_the_levels_file(self, tmp_path: Path) -> None:
        """PoCL looks for its files from where it was loaded."""
        wheel = tmp_path / "site" / "pyopencl" / ".libs" / "libpocl-1.so"
        share = tmp_path / "site" / "pocl_binary_distribution" / ".libs" / "share" / "pocl"
        share.mkdir(parents=True)
        wheel.parent.mkdir(parents=True)
        wheel.write_text("library")
        (share / "include").mkdir()
        for suffix in ("avx512", "avx2", "sse2"):
            (share / f"kernel-x86_64-unknown-linux-gnu-{suffix}.bc").write_text(suffix)
        linked = Path(Pocl().library(str(wheel), LEVELS["avx2"], tmp_path / "run", KernelStore()))
        assert linked.read_text() == "library"
        found = linked.parent / "../../pocl_binary_distribution/.libs/share/pocl"
        texts = {path.read_text() for path in found.glob("*.bc")}
        assert (len(list(found.glob("*.bc"))), texts) == (3, {"avx2"})
        assert Pocl().library(str(wheel), LEVELS["avx2"], tmp_path / "run", KernelStore()) == str(
            linked
        )

    def test_a_systems_library_stays_where_it_is(self, tmp_path: Path) -> None:
        own = str(tmp_path / "libpocl.so.2")
        assert Pocl().library(own, LEVELS["avx2"], tmp_path, KernelStore()) == own


class TestRepair:
    def test_versions(self) -> None:
        assert applies("OpenCL 3.0 PoCL 3.0-rc2  Linux, Release, RELOC, LLVM 14.0.6")
        assert applies("OpenCL 3.0 PoCL 3.1+debian  Linux, None+Asserts")
        assert not applies("OpenCL 3.0 PoCL 5.0  Linux, Release")
        assert not applies("OpenCL 3.0 PoCL 6.0  Linux, Release")

    @pytest.mark.parametrize(
        ("version", "triple"),
        [
            ("OpenCL 3.0 PoCL HSTR: pthread-x86_64-unknown-linux-gnu-k8-sse3", TRIPLE[:-1]),
            ("OpenCL 3.0 PoCL HSTR: cpu-x86_64-pc-linux-gnu-znver3", b"x86_64-pc-linux-gnu"),
            ("OpenCL 3.0", b""),
        ],
    )
    def test_the_triple_that_is_reported(self, version: str, triple: bytes) -> None:
        assert target_triple(version).encode() == triple

    def test_finds_the_field_behind_wild_pointers(self) -> None:
        triple, name = ctypes.create_string_buffer(TRIPLE), ctypes.create_string_buffer(b"znver3")
        longer = ctypes.create_string_buffer(TRIPLE[:-1] + b"x32")
        fields = (ctypes.c_uint64 * 512)(0, 1, 8, 2**63, 2**64 - 1, 0x10, 0xDEAD0000BEEF)
        fields[7] = ctypes.addressof(longer)
        fields[79], fields[80] = ctypes.addressof(triple), ctypes.addressof(name)
        assert find_field(ctypes.addressof(fields), TRIPLE) == 640
        text = TRIPLE[:-1].decode()
        assert repair(ctypes.addressof(fields), text, "haswell") == "znver3"
        assert repair(ctypes.addressof(fields), text, "x86-64") == "haswell"
        assert ctypes.string_at(fields[80]) == b"x86-64"

    @pytest.mark.parametrize("behind", [b"", b"/usr/lib/kernel.bc", b"No Such Name", bytes(1)])
    def test_what_is_no_name_is_left_alone(self, behind: bytes) -> None:
        triple, other = ctypes.create_string_buffer(TRIPLE), ctypes.create_string_buffer(behind)
        fields = (ctypes.c_uint64 * 512)()
        fields[79], fields[80] = ctypes.addressof(triple), ctypes.addressof(other)
        assert repair(ctypes.addressof(fields), TRIPLE[:-1].decode(), "haswell") is None
        assert fields[80] == ctypes.addressof(other)

    def test_never_looks_beyond_the_struct(self) -> None:
        triple, name = ctypes.create_string_buffer(TRIPLE), ctypes.create_string_buffer(b"znver3")
        fields = (ctypes.c_uint64 * 512)()
        fields[452], fields[453] = ctypes.addressof(triple), ctypes.addressof(name)
        assert find_field(ctypes.addressof(fields), TRIPLE) is None


@pytest.mark.skipif(os.name != "posix", reason="killed by a signal")
def refuse(monkeypatch: pytest.MonkeyPatch, root: Path, lacks: str) -> None:
    """Let no link be made under a folder, or nothing of any size be written there."""
    if lacks == "room":

        def full(folder: Path) -> None:
            if folder.is_relative_to(root):
                raise OSError(errno.ENOSPC, "No space left on device", str(folder))

        monkeypatch.setattr(run_folder, "try_room", full)
        return
    link = Path.symlink_to

    def unlinked(path: Path, *arguments: Any) -> None:
        if path.is_relative_to(root):
            raise PermissionError(errno.EPERM, "Operation not permitted", str(path))
        link(path, *arguments)

    monkeypatch.setattr(Path, "symlink_to", unlinked)


class TestRunFolder:
    def test_is_removed_after_its_process_was_killed(self, tmp_path: Path) -> None:
        code = (
            "import sys, time; from pathlib import Path; "
            "from hetero.backends.opencl.self_test.run_folder import RunFolder; "
            "f = RunFolder(Path(sys.argv[1])); f.use(Path('/v/x.json')); "
            "print(f.path, flush=True); time.sleep(60)"
        )
        child = subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True
        )
        assert child.stdout is not None
        folder = Path(child.stdout.readline().strip())
        assert sweep(tmp_path / "runs") == []
        assert folder.is_dir()
        child.kill()
        child.wait()
        child.stdout.close()
        own = RunFolder(tmp_path)
        assert own.suspects == [Path("/v/x.json")]
        assert not folder.exists()
        own.remove()
        assert list((tmp_path / "runs").iterdir()) == []

    def test_a_link_in_its_place_is_left_alone(self, tmp_path: Path) -> None:
        """Another user may have put it into a folder for temporary files."""
        victim = tmp_path / "victim"
        victim.write_text("kept")
        (tmp_path / "hetero-opencl-1-a.lock").symlink_to(victim)
        (tmp_path / "hetero-opencl-1-a").mkdir()
        assert sweep(tmp_path) == []
        assert victim.read_text() == "kept"
        assert (tmp_path / "hetero-opencl-1-a").is_dir()

    def test_nowhere_to_write(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "file").write_text("")
        monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path / "file"))
        with pytest.raises(DeviceUnavailableError, match="name a writable folder in TMPDIR"):
            RunFolder(tmp_path / "file")

    def test_a_read_only_cache_has_its_runs_elsewhere(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "file").write_text("")
        monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path / "other"))
        folder = RunFolder(tmp_path / "file")
        assert (tmp_path / "other") in folder.path.parents
        folder.remove()

    @pytest.mark.parametrize("lacks", ["links", "room"])
    def test_a_cache_without_links_or_room_has_its_runs_elsewhere(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lacks: str
    ) -> None:
        """A disk of Windows' kind (vfat), or a full one; nothing is left there."""
        cache, other = tmp_path / "cache", tmp_path / "other"
        monkeypatch.setattr("tempfile.gettempdir", lambda: str(other))
        refuse(monkeypatch, cache, lacks)
        folder = RunFolder(cache)
        assert other in folder.path.parents
        assert not list((cache / "runs").iterdir())
        folder.remove()

    @pytest.mark.parametrize("lacks", ["links", "room"])
    def test_a_machine_without_links_or_room_has_a_folder_all_the_same(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lacks: str
    ) -> None:
        """A GPU's driver needs neither."""
        cache = tmp_path / "cache"
        monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path / "other"))
        refuse(monkeypatch, tmp_path, lacks)
        folder = RunFolder(cache)
        assert cache in folder.path.parents
        folder.remove()

    def test_a_fork_does_not_remove_its_parents(self, tmp_path: Path) -> None:
        folder = RunFolder(tmp_path)
        folder.pid += 1
        folder.remove()
        assert folder.path.is_dir()
        folder.pid = os.getpid()
        folder.remove()
        assert not folder.path.exists()


class TestHeaders:
    TEXT = """
        /* float dropped(float); */
        #define __ovld __attribute__((overloadable)) // of all
        #if A
        #if B
        float __ovld unnamed(float);
        #else
        double __ovld unnamed(double);
        #endif
        #endif
        #define WIDE(x) \\
            (x + 1)
        float __ovld
            exp(float x);
        #ifdef C
        float16 __ovld convert_float16(int16);
        void __ovld vstore_half4_rte(float4);
        void __ovld vstore_half4_rtz(float4);
        #endif
        typedef float floats[2];
    """

    def test_keep_what_kernels_name_and_no_empty_condition(self) -> None:
        words = frozenset({"exp", "convert_float", "vstore_half", "_rte"})  # joined by macros
        assert short(self.TEXT, words).splitlines() == [
            "#define __ovld __attribute__((overloadable))",
            "#define WIDE(x)  (x + 1)",
            "float __ovld exp(float x);",
            "#ifdef C",
            "float16 __ovld convert_float16(int16);",
            "void __ovld vstore_half4_rte(float4);",
            "#endif",
            "typedef float floats[2];",
        ]

    def test_are_made_once_and_shared_with_children(self, tmp_path: Path) -> None:
        theirs, ours, again = (tmp_path / name for name in ("theirs", "ours", "again"))
        theirs.mkdir()
        (theirs / HEADER).write_text("int mine(int);\nint min(int);\n", encoding="utf-8")
        (theirs / "_kernel.h").write_text("#define F(x) mine(x)\n", encoding="utf-8")
        store = KernelStore(tmp_path / "store")
        for target in (ours, ours, again):
            make_headers(theirs, target, store)
            text = (target / HEADER).read_text(encoding="utf-8")
            ours_only, _, others = text.partition("#else\n")
            assert ours_only == f"#ifdef {OURS}\nint mine(int);\nint min(int);\n"  # as kernels do
            assert others == f'#include "{theirs / HEADER}"\n#endif\n'
            assert (target / "_kernel.h").samefile(theirs / "_kernel.h")
        (kept,) = (tmp_path / "store").iterdir()
        kept.write_bytes(kept.read_bytes()[:-1])  # damaged: made again
        make_headers(theirs, tmp_path / "third", store)
        assert (tmp_path / "third" / HEADER).read_text(encoding="utf-8") == text

    def test_other_kernels_have_another_header_and_so_another_store(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        pocl = icd.DriverCandidate("libpocl.so.2", Pocl(), "the test")
        before = pocl.fingerprint()
        assert pocl.fingerprint() == before
        monkeypatch.setattr("hetero.backends.opencl.drivers.pocl.sources_digest", lambda: "other")
        assert pocl.fingerprint() != before


@pytest.mark.parametrize("variable", icd.VENDOR_VARIABLES)
def test_a_vendor_folder_that_is_not_there_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    """It leaves no driver, the wheel's neither."""
    named = tmp_path / "none"
    for name in icd.VENDOR_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    assert icd.missing_folder() == ""
    monkeypatch.setenv(variable, str(named))
    assert icd.candidates() == []
    with pytest.raises(DeviceUnavailableError) as raised:
        platform._nothing(None, None, False, [], [])
    assert f"{variable}={named} cannot be read" in raised.value.code
    assert raised.value.remedy == "unset it, or name a folder with .icd files"
    named.mkdir()
    assert icd.missing_folder() == ""
    assert icd.candidates()  # the wheel's, as the loader has it


@pytest.mark.parametrize(
    ("machine", "remedy"),
    [("x86_64", "pip install 'pyopencl"), ("aarch64", "apt install pocl-opencl-icd")],
)
def test_what_to_install_is_for_this_processor(
    monkeypatch: pytest.MonkeyPatch, machine: str, remedy: str
) -> None:
    monkeypatch.setattr("platform.machine", lambda: machine)
    with pytest.raises(DeviceUnavailableError) as raised:
        platform._nothing(None, None, False, [], [])
    assert remedy in raised.value.remedy


def test_files_that_cannot_be_written_cost_the_gpu_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other device does the work (`device_set`)."""

    def full(**_: Any) -> Any:
        raise OSError(errno.EFBIG, "File too large", "/cache/x")

    monkeypatch.setattr(platform, "find_device", full)
    with pytest.raises(DeviceUnavailableError, match=r"File too large.*XDG_CACHE_HOME"):
        open_opencl()


IDLE = """
import sys
from hetero.backends.opencl.self_test import worker
worker.IDLE_S = 0.5
for line in worker._lines():
    print(line.strip(), flush=True)
"""


@pytest.mark.full
def test_an_idle_worker_ends_by_itself() -> None:
    """Also where standard input cannot be polled."""
    process = subprocess.Popen(
        [sys.executable, "-c", IDLE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with process:
        assert process.stdin is not None
        assert process.stdout is not None
        for line in ("first", "second"):
            process.stdin.write(f"{line}\n")
            process.stdin.flush()
            assert process.stdout.readline() == f"{line}\n"
        assert process.wait(timeout=60) == 0  # its input is still open
