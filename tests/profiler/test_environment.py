"""The machine of a profile, as fake trees describe it."""

from __future__ import annotations

from pathlib import Path

import pytest

from hetero.profiler import environment, timing


@pytest.fixture
def cpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A phone's: four little cores first, then large ones, the last of them switched off."""
    for core in range(8):
        frequencies = tmp_path / f"cpu{core}" / "cpufreq"
        frequencies.mkdir(parents=True)
        large = core >= 4
        values = {
            "cpuinfo_max_freq": 3000000 if large else 2000000,
            "scaling_cur_freq": 2900000 + core if large else 1000000 + core,
            "scaling_governor": f"governor{core}",
        }
        for name, value in values.items():
            (frequencies / name).write_text(f"{value}\n")
        for index, size in enumerate(("64K", "512K", "8M") if large else ("32K", "128K")):
            folder = tmp_path / f"cpu{core}" / "cache" / f"index{index}"
            folder.mkdir(parents=True)
            (folder / "size").write_text(f"{size}\n")
    (tmp_path / "cpu7/cache/index0/size").unlink()
    (tmp_path / "cpu7/cache/index0/size").mkdir()
    (tmp_path / "cpufreq").mkdir()
    for module in (environment, timing):
        monkeypatch.setattr(module, "CPUS", tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("core", "hertz", "governor"),
    [(None, 2900004e3, "governor4"), (6, 2900006e3, "governor6"), (0, 1000000e3, "governor0")],
)
@pytest.mark.usefixtures("cpus")
def test_the_clock_is_of_the_core_that_computes(
    core: int | None, hertz: float, governor: str
) -> None:
    assert environment.clock_hz(core) == hertz
    found = environment.read_environment(gpu_core=None, control_core=core)
    assert (found.clock_hz, found.governor) == (hertz, governor)


@pytest.mark.usefixtures("cpus")
def test_the_largest_cache_is_that_of_any_core() -> None:
    assert timing.last_level_cache_bytes() == 8 << 20


def test_a_system_without_such_files_has_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (environment, timing):
        monkeypatch.setattr(module, "CPUS", tmp_path)
    assert timing.last_level_cache_bytes() is None
    assert environment.read_environment(gpu_core=None, control_core=None).governor is None
