"""Files are replaced whole, devices and links never; pipes are read once, with a deadline."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from hetero.backends.host import files
from hetero.backends.host.files import (
    atomic_write,
    atomic_writer,
    read_file,
    read_text,
    remove_partials,
    replace_directory,
    scratch_directory,
)

posix = pytest.mark.skipif(os.name != "posix", reason="devices, links and pipes of POSIX")
OLD, NEW = b"old contents", "new contents"


@pytest.fixture
def target(tmp_path: Path) -> Path:
    path = tmp_path / "plan.json"
    path.write_bytes(OLD)
    return path


@contextmanager
def other_end(work: Callable[[], Any]) -> Iterator[list[Any]]:
    """`work` in a thread: what reads or writes the other end of a pipe."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(work()))
    thread.start()
    yield found
    thread.join()


def names(folder: Path) -> set[str]:
    return {entry.name for entry in folder.iterdir()}


class TestReplacing:
    def test_a_file_has_the_new_contents_and_nothing_is_left(self, target: Path) -> None:
        atomic_write(target, NEW)
        atomic_write(target.with_name("other"), NEW.encode())
        assert target.read_text() == target.with_name("other").read_text() == NEW
        assert names(target.parent) == {"plan.json", "other"}

    def test_what_is_not_text_is_written_as_it_would_be_in_json(self, target: Path) -> None:
        atomic_write(target, "a\ud800")
        assert target.read_text() == "a\\ud800"

    def test_an_exception_on_the_way_changes_nothing(self, target: Path) -> None:
        def half() -> None:
            with atomic_writer(target) as file:
                file.write(b"half")
                raise RuntimeError

        with pytest.raises(RuntimeError):
            half()
        assert target.read_bytes() == OLD
        assert names(target.parent) == {"plan.json"}

    def test_the_target_is_whole_at_every_moment(self, target: Path) -> None:
        with atomic_writer(target) as file:
            file.write(b"half")
            file.flush()
            assert target.read_bytes() == OLD
        assert target.read_bytes() == b"half"

    def test_bytes_are_on_the_disk_before_the_name_is(
        self, target: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        order: list[str] = []
        sync, replace = os.fsync, os.replace

        def record_sync(descriptor: int) -> None:
            kind = os.fstat(descriptor)
            if stat.S_ISREG(kind.st_mode):
                assert kind.st_size == len(NEW)
            order.append("folder" if stat.S_ISDIR(kind.st_mode) else "file")
            sync(descriptor)

        monkeypatch.setattr(os, "fsync", record_sync)
        monkeypatch.setattr(os, "replace", lambda *x: (order.append("replace"), replace(*x)))
        atomic_write(target, NEW)
        assert order == ["file", "replace", "folder"]
        order.clear()
        atomic_write(target, NEW, durable=False)
        assert order == ["replace"]

    @posix
    def test_permissions_stay_and_new_files_follow_the_umask(self, target: Path) -> None:
        target.chmod(0o640)
        before = os.umask(0o027)
        try:
            atomic_write(target, NEW)
            atomic_write(target.with_name("other"), NEW)
        finally:
            os.umask(before)
        assert stat.S_IMODE(target.stat().st_mode) == 0o640
        assert stat.S_IMODE(target.with_name("other").stat().st_mode) == 0o640

    def test_a_name_as_long_as_the_file_system_takes(self, tmp_path: Path) -> None:
        atomic_write(tmp_path / ("n" * 255), NEW)
        assert names(tmp_path) == {"n" * 255}

    @posix
    def test_a_link_stays_and_its_target_is_replaced(self, target: Path) -> None:
        folder = target.parent / "deeper"
        folder.mkdir()
        (folder / "second").symlink_to("../plan.json")
        (folder / "first").symlink_to(folder / "second")
        atomic_write(folder / "first", NEW)
        assert (folder / "first").is_symlink()
        assert (folder / "second").readlink() == Path("../plan.json")
        assert target.read_text() == NEW
        assert names(folder) == {"first", "second"}

    @posix
    def test_a_link_to_nothing_makes_what_it_names(self, tmp_path: Path) -> None:
        (tmp_path / "link").symlink_to("made")
        atomic_write(tmp_path / "link", NEW)
        assert (tmp_path / "link").is_symlink()
        assert (tmp_path / "made").read_text() == NEW

    @posix
    def test_links_in_a_circle_are_an_error(self, tmp_path: Path) -> None:
        (tmp_path / "a").symlink_to("b")
        (tmp_path / "b").symlink_to("a")
        with pytest.raises(OSError, match=os.strerror(errno.ELOOP)):
            atomic_write(tmp_path / "a", NEW)

    def test_a_folder_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(IsADirectoryError):
            atomic_write(tmp_path, NEW)

    @posix
    @pytest.mark.skipif(not hasattr(os, "geteuid") or not os.geteuid(), reason="root may write all")
    def test_a_file_that_must_not_be_written_is_refused(self, target: Path) -> None:
        target.chmod(0o444)
        with pytest.raises(PermissionError):
            atomic_write(target, NEW)
        assert target.read_bytes() == OLD


@posix
class TestDevicesAndPipes:
    def test_a_device_is_written_and_stays_one(self, tmp_path: Path) -> None:
        path = tmp_path / "null"
        try:
            os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, 3))
        except (OSError, AttributeError):
            path.symlink_to("/dev/null")
        atomic_write(path, NEW)
        assert stat.S_ISCHR(path.stat().st_mode)
        assert stat.S_ISCHR(os.stat("/dev/null").st_mode)
        assert names(tmp_path) == {"null"}

    def test_a_full_device_is_an_error(self) -> None:
        with pytest.raises(OSError, match="No space left"):
            atomic_write("/dev/full", NEW)

    @pytest.mark.skipif(sys.platform != "linux", reason="/proc")
    @pytest.mark.parametrize("name", ["/dev/stdout", "/dev/fd/1", "/proc/self/fd/1"])
    def test_a_redirected_output_keeps_all_that_is_written_to_it(
        self, name: str, tmp_path: Path
    ) -> None:
        code = (
            "from hetero.backends.host.files import atomic_write\n"
            f"print('before', flush=True); atomic_write({name!r}, 'inside\\n'); print('after')"
        )
        with (tmp_path / "out").open("w") as out:
            subprocess.run([sys.executable, "-c", code], stdout=out, check=True)
        assert (tmp_path / "out").read_text() == "before\ninside\nafter\n"

    def test_a_pipe_is_written_and_stays_one(self, tmp_path: Path) -> None:
        pipe = tmp_path / "pipe"
        os.mkfifo(pipe)
        long = NEW * 100_000  # more than a pipe holds
        with other_end(pipe.read_text) as found:
            atomic_write(pipe, long)
        assert found == [long]
        assert pipe.is_fifo()
        assert names(tmp_path) == {"pipe"}

    def test_a_pipe_without_a_reader_is_an_error(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(files, "PIPE_WAIT_S", 0.05)
        os.mkfifo(tmp_path / "pipe")
        with pytest.raises(TimeoutError, match=r"no process reads this pipe for 0\.05 s"):
            atomic_write(tmp_path / "pipe", NEW)

    def test_a_reader_that_stopped_is_an_error(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(files, "PIPE_WAIT_S", 0.05)
        pipe = tmp_path / "pipe"
        os.mkfifo(pipe)
        reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
        with pytest.raises(TimeoutError, match="no process reads this pipe"):
            atomic_write(pipe, NEW * 100_000)
        os.close(reader)


class TestLeftovers:
    def left(self, target: Path, kind: str = "partial") -> Path:
        return target.with_name(f".{target.name}.0123abcd.{kind}")

    def test_what_a_killed_writer_left_is_removed_by_the_next(self, target: Path) -> None:
        self.left(target).write_bytes(b"half")
        other = target.with_name(".other.0123abcd.partial")
        other.write_bytes(b"of another target")
        atomic_write(target, NEW)
        assert names(target.parent) == {"plan.json", other.name}

    @posix
    def test_what_is_being_written_now_stays(self, target: Path) -> None:
        with atomic_writer(target) as file:
            file.write(b"first")
            atomic_write(target, "second")
            with scratch_directory(target):
                remove_partials(target)
                assert len(names(target.parent)) == 3
        assert target.read_bytes() == b"first"
        assert names(target.parent) == {"plan.json"}

    @posix
    def test_a_killed_process_leaves_nothing_for_long(self, target: Path) -> None:
        code = (
            "import os, pathlib, sys\n"
            "from hetero.backends.host.files import atomic_writer, scratch_directory\n"
            "with atomic_writer(sys.argv[1]), scratch_directory(pathlib.Path(sys.argv[1])) as made:"
            "\n    (made / 'weights').write_bytes(bytes(1000))\n    os.kill(os.getpid(), 9)"
        )
        subprocess.run([sys.executable, "-c", code, str(target)], check=False)
        assert len(names(target.parent)) == 3
        atomic_write(target, NEW)
        assert names(target.parent) == {"plan.json"}

    @posix
    def test_a_link_that_looks_like_one_is_left_alone(self, target: Path) -> None:
        elsewhere = target.parent / "elsewhere"
        elsewhere.mkdir()
        self.left(target).symlink_to(elsewhere)
        atomic_write(target, NEW)
        assert elsewhere.is_dir()

    @posix
    def test_a_directory_that_was_moved_away_comes_back(self, tmp_path: Path) -> None:
        target = tmp_path / "model"
        self.left(target, "previous").mkdir()
        (self.left(target, "previous") / "weights").write_bytes(OLD)
        remove_partials(target)
        assert (target / "weights").read_bytes() == OLD
        self.left(target, "previous").mkdir()
        remove_partials(target)
        assert names(tmp_path) == {"model"}


class TestDirectories:
    def test_a_finished_one_takes_the_place_of_another(self, tmp_path: Path) -> None:
        target = tmp_path / "model"
        for contents in (OLD, NEW.encode()):
            with scratch_directory(target) as made:
                (made / "weights").write_bytes(contents)
                replace_directory(made, target)
            assert (target / "weights").read_bytes() == contents
        assert names(tmp_path) == {"model"}

    def test_an_exception_leaves_the_other(self, tmp_path: Path) -> None:
        target = tmp_path / "model"
        target.mkdir()

        def half() -> None:
            with scratch_directory(target) as made:
                (made / "weights").write_bytes(OLD)
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            half()
        with pytest.raises(FileNotFoundError):
            replace_directory(tmp_path / "none", target)
        assert names(tmp_path) == {"model"}


class TestReading:
    def test_a_file_of_the_most_bytes_is_read_and_a_longer_one_is_not(self, target: Path) -> None:
        assert read_file(target, len(OLD)) == OLD
        with pytest.raises(OSError, match="larger than 0 MiB"):
            read_file(target, len(OLD) - 1)

    def test_text_is_utf_8_with_any_ends_of_lines(self, target: Path) -> None:
        target.write_bytes("é\r\n多\n".encode())
        assert read_text(target, 99) == "é\n多\n"
        target.write_bytes(b"\xff")
        with pytest.raises(UnicodeDecodeError):
            read_text(target, 99)

    @posix
    def test_a_device_without_end_is_read_no_further(self) -> None:
        with pytest.raises(OSError, match="larger than 1 MiB"):
            read_file("/dev/zero", 1 << 20)

    @posix
    def test_a_pipe_is_read_to_its_end(self, tmp_path: Path) -> None:
        pipe = tmp_path / "pipe"
        os.mkfifo(pipe)

        def write() -> None:
            with pipe.open("wb", buffering=0) as file:
                file.write(b"one ")
                time.sleep(0.05)
                file.write(b"two")

        with other_end(write):
            assert read_file(pipe, 99) == b"one two"

    @posix
    def test_a_silent_pipe_is_an_error(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(files, "PIPE_WAIT_S", 0.05)
        os.mkfifo(tmp_path / "pipe")
        with pytest.raises(TimeoutError, match="nothing comes from this pipe"):
            read_file(tmp_path / "pipe", 99)
        writer = os.open(tmp_path / "pipe", os.O_RDWR)  # open, and says nothing
        with pytest.raises(TimeoutError, match="nothing comes from this pipe"):
            read_file(tmp_path / "pipe", 99)
        os.close(writer)

    def test_a_folder_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(OSError, match=r"Is a directory|Permission"):
            read_file(tmp_path, 99)
