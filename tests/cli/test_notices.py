"""What is worth a line on standard error, and how often; where a machine's own profile lies."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import pytest

from hetero.cli.profile import third_device
from hetero.errors import UserError
from hetero.placement.planning import locate_profile
from hetero.profiler import profile_files
from hetero.terminal import notices
from hetero.terminal.notices import DAY_S, NO_PROFILE, notify
from tests.support.helpers import Command


@pytest.fixture
def stamp(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    path = tmp_path / "cache" / "said"
    monkeypatch.setattr(notices, "stamp_path", lambda: path)
    monkeypatch.delenv(notices.VARIABLE)
    return path


def test_that_there_is_no_profile_is_said_once_a_day(
    stamp: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(3):
        notify(f"{NO_PROFILE}, so …")
        notify("another")
    assert capsys.readouterr().err.splitlines().count("hetero: another") == 3
    notify(NO_PROFILE)
    assert capsys.readouterr().err == ""
    now = time.time()
    for at in (now - DAY_S - 60, now + DAY_S):  # long ago, and by a clock that was put back
        os.utime(stamp, (at, at))
        notify(NO_PROFILE)
        assert capsys.readouterr().err == f"hetero: {NO_PROFILE}\n"


def test_where_nothing_can_be_kept_it_is_said_every_time(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, stamp: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(notices, "stamp_path", lambda: tmp_path / "file" / "said")
    notify(NO_PROFILE)
    notify(NO_PROFILE)
    assert capsys.readouterr().err.count(NO_PROFILE) == 2


def test_the_old_name_of_measuring_a_third_device_is_read_with_a_notice(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert third_device("none", None) is None
    assert third_device("ort-cpu", None) == "ort-cpu"
    assert capsys.readouterr().err == ""
    assert third_device("none", "ort-cpu") == "ort-cpu"
    assert "--cpu is now called --measure-cpu" in capsys.readouterr().err


def test_notices_can_be_turned_off(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    notify(NO_PROFILE)
    assert capsys.readouterr().err
    monkeypatch.setenv(notices.VARIABLE, "off")
    notify(NO_PROFILE)
    notify("another")
    assert capsys.readouterr().err == ""
    monkeypatch.setenv(notices.VARIABLE, "never")
    with pytest.raises(UserError, match="HETERO_NOTICES is one of daily, always, off, got 'never'"):
        notify("x")


@pytest.mark.full
def test_quiet_is_an_option(command: Command, own_folders: tuple[Path, Path]) -> None:
    words = ("plan", "demo", "--seq-lens", "64")
    assert NO_PROFILE in command(*words).stderr
    assert command("--quiet", *words).stderr == ""


@pytest.fixture
def own_folders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> tuple[Path, Path]:
    own, old = tmp_path / "data" / "host.json", tmp_path / "cache" / "host.json"
    monkeypatch.setattr(profile_files, "own_profile_path", lambda: own)
    monkeypatch.setattr(profile_files, "cached_profile_path", lambda: old)
    monkeypatch.setenv("HETERO_SCALE", "off")
    return own, old


@pytest.mark.full
def test_a_profile_is_data_and_the_old_place_is_read(own_folders: tuple[Path, Path]) -> None:
    own, old = own_folders
    assert NO_PROFILE in locate_profile(None)[1]
    old.parent.mkdir()
    shutil.copy(profile_files.shipped_path("host"), old)
    assert (profile_files.taken_profile_path(), locate_profile(None)[1]) == (old, "")
    own.parent.mkdir()
    shutil.copy(profile_files.shipped_path("host-avx2"), own)
    assert profile_files.taken_profile_path() == own
    assert locate_profile(None)[0].fingerprint == locate_profile("host-avx2")[0].fingerprint
