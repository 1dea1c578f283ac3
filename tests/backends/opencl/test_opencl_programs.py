"""The program cache, in memory and on disk, and the repair of PoCL's CPU name."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from hetero.backends.opencl import pocl_repair
from hetero.backends.opencl.device import OpenCLDevice
from hetero.backends.opencl.program import ProgramCache

DEFINES = {"VEC": 4, "D": 8}


def disk_cache(device: OpenCLDevice, folder: Path, key: str = "key") -> ProgramCache:
    return ProgramCache(device.context, device.native, key=key, directory=folder)


class TestProgramCache:
    def test_one_build_per_set_of_defines(self, device: OpenCLDevice) -> None:
        cache = ProgramCache(device.context, device.native, key="", directory=None)
        first = cache.get("elementwise.cl", DEFINES)
        assert cache.get("elementwise.cl", dict(DEFINES)) is first
        assert cache.get("elementwise.cl", {"VEC": 8}) is not first
        assert cache.builds == 2

    def test_binaries_are_read_back(self, device: OpenCLDevice, tmp_path: Path) -> None:
        disk_cache(device, tmp_path).get("elementwise.cl", DEFINES)
        again = disk_cache(device, tmp_path)
        assert "add" in again.get("elementwise.cl", DEFINES).kernel_names
        assert again.builds == 0

    @pytest.mark.parametrize("damage", ["cut", "flipped", "empty"])
    def test_a_broken_binary_is_rebuilt(
        self, device: OpenCLDevice, tmp_path: Path, damage: str
    ) -> None:
        disk_cache(device, tmp_path).get("elementwise.cl", DEFINES)
        (file,) = tmp_path.iterdir()
        good = file.read_bytes()
        flipped = good[:100] + bytes([good[100] ^ 1]) + good[101:]
        file.write_bytes({"cut": good[:-10], "flipped": flipped, "empty": b""}[damage])
        again = disk_cache(device, tmp_path)
        again.get("elementwise.cl", DEFINES)
        assert again.builds == 1
        assert file.stat().st_size == len(good)

    def test_another_key_is_another_file(self, device: OpenCLDevice, tmp_path: Path) -> None:
        disk_cache(device, tmp_path, "driver 1").get("elementwise.cl", DEFINES)
        other = disk_cache(device, tmp_path, "driver 2")
        other.get("elementwise.cl", DEFINES)
        assert other.builds == 1
        assert len(list(tmp_path.iterdir())) == 2

    def test_an_unwritable_folder_is_no_error(self, device: OpenCLDevice, tmp_path: Path) -> None:
        blocked = tmp_path / "file"
        blocked.write_text("")
        disk_cache(device, blocked).get("elementwise.cl", DEFINES)


class TestRepair:
    @pytest.mark.parametrize(
        ("flags", "name"),
        [
            ("avx2 fma bmi2 f16c avx512f avx512bw avx512dq avx512vl avx512_vnni avx512_bf16",
             "cooperlake"),
            ("avx2 fma bmi2 f16c avx512f avx512bw avx512dq avx512vl avx512_vnni", "cascadelake"),
            ("avx2 fma bmi2 f16c avx512f avx512bw avx512dq avx512vl", "skylake-avx512"),
            ("avx2 fma bmi2 f16c avx512f", "haswell"),
            ("sse4_2 avx", "x86-64"),
            ("", "x86-64"),
        ],
    )  # fmt: skip
    def test_cpu_name(self, flags: str, name: str) -> None:
        assert pocl_repair.known_cpu_name(frozenset(flags.split())) == name

    def test_only_for_pocl_3_0_with_an_unknown_cpu(self) -> None:
        pocl, generic = "OpenCL 3.0 PoCL 3.0-rc2  Linux", "OpenCL 3.0 PoCL HSTR: pthread-x-generic"
        assert pocl_repair.applies(pocl, generic)
        assert not pocl_repair.applies("OpenCL 3.0 PoCL 5.0  Linux", generic)
        assert not pocl_repair.applies(pocl, "OpenCL 3.0 PoCL HSTR: pthread-x-cascadelake")

    def test_finds_the_field_behind_wild_pointers(self) -> None:
        text = ctypes.create_string_buffer(b"generic")
        longer = ctypes.create_string_buffer(b"generically")
        fields = (ctypes.c_uint64 * 512)(0, 1, 8, 2**63, 2**64 - 1, 0x10, 0xDEAD0000BEEF)
        fields[7] = ctypes.addressof(longer)
        fields[80] = fields[90] = ctypes.addressof(text)
        assert pocl_repair.find_field(ctypes.addressof(fields)) == 640
        assert pocl_repair.repair(ctypes.addressof(fields), "haswell")
        assert ctypes.string_at(fields[80]) == b"haswell"
        assert fields[90] == ctypes.addressof(text)

    def test_never_looks_beyond_the_struct(self) -> None:
        text = ctypes.create_string_buffer(b"generic")
        fields = (ctypes.c_uint64 * 512)()
        fields[452] = ctypes.addressof(text)  # byte 3616: something else's
        assert pocl_repair.find_field(ctypes.addressof(fields)) is None
        assert not pocl_repair.repair(ctypes.addressof(fields), "haswell")
        assert fields[452] == ctypes.addressof(text)

    def test_without_the_repair_the_error_says_what_to_do(
        self, device: OpenCLDevice, tmp_path: Path
    ) -> None:
        if device.info.details.get("repaired", "no") == "no":
            pytest.skip("needs a CPU that PoCL 3.0 does not know")
        code = """
            from hetero.backends.errors import DeviceUnavailableError
            from hetero.backends.opencl import open, pocl_repair
            pocl_repair.find_field = lambda *_: None
            try:
                open()
            except DeviceUnavailableError as error:
                print(error)
            """
        environment = {**os.environ, "POCL_CACHE_DIR": str(tmp_path)}
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(code)],
            env=environment, capture_output=True, text=True, check=True, timeout=60,
        )  # fmt: skip
        assert "install a newer PoCL" in done.stdout
        assert "CL_BUILD_PROGRAM_FAILURE" in done.stdout
