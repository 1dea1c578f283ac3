"""A weight format is one record: what asks for it elsewhere finds a new one by itself."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hetero.backends.formats import FLOATS, StorageFormat, WeightFormat
from hetero.backends.weights import packed_bytes

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("storage", StorageFormat)
def test_bytes_per_weight_are_those_of_whole_blocks(storage: StorageFormat) -> None:
    of_rows = 4 * 64 if storage.scales == "row" else 0
    assert storage.bytes_per_weight * 64 * 512 + of_rows == packed_bytes(storage, 64, 512)


def test_fp16_is_enough_for_floats_of_16_bits_and_for_codes_times_floats() -> None:
    assert {x.value for x in WeightFormat if x.half_is_enough} == {
        "w4a16",
        "w8a16",
        "f16",
        "gguf-a16",
    }
    assert FLOATS.are_floats
    assert WeightFormat.W4A8.activations.largest == 127


def test_a_storage_names_the_format_that_it_is_opened_in() -> None:
    """Whatever the order of the formats is: a new one does not change how models are opened."""
    defaults = {x.storage.default_format for x in WeightFormat}
    assert {x.value for x in defaults} == {"w4a16", "w8a16", "w8a8", "f16", "f32", "gguf-a16"}
    assert all(x.storage.default_format.storage is x.storage for x in WeightFormat)
    with pytest.raises(ValueError, match="is not a valid WeightFormat"):
        _ = StorageFormat.Q6_K.default_format


@pytest.mark.full
def test_a_new_format_is_a_change_of_one_file(tmp_path: Path) -> None:
    """Eight-bit weights and activations, added to a copy: the contract holds on the reference."""
    rooms = ("hetero", "backends", "profiler", "solver")
    for room in rooms:
        shutil.copytree(ROOT / room, tmp_path / ("" if room == "hetero" else "hetero") / room)
    shutil.copytree(ROOT / "tests", tmp_path / "tests")
    path = tmp_path / "hetero" / "backends" / "formats.py"
    text = path.read_text(encoding="utf-8")
    text = text.replace('    W4A8 = "w4a8"\n', '    W4A8 = "w4a8"\n    W8A8G = "w8a8g"\n')
    record = "    WeightFormat.W8A8G: _Format(StorageFormat.Q8, INT8_GROUPS, 2e-2),\n"
    text = text.replace("_FORMATS: Final = {\n", "_FORMATS: Final = {\n" + record)
    path.write_text(text, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--full",
         "-k", "reference and w8a8g", "tests/backends/test_contract.py"],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:]
    listed = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", "--full",
         "-k", "reference and w8a8g", "-o", "addopts=", "tests/backends/test_contract.py"],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert len(re.findall("w8a8g", listed.stdout)) > 20, listed.stdout[-3000:]
    for command in ("generate", "eval", "bench"):
        offered = subprocess.run(
            [sys.executable, "-m", "hetero.start", command, "--help"],
            cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(tmp_path)},
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        assert "w8a8g" in offered.stdout, command
