"""Files that people name: replaced whole or not at all, read once and no further than a bound.

New contents are written next to the target as `.NAME.XXXXXXXX.partial`, locked by the writer; the
next writer of the same target removes what a killed writer left. A symbolic link stays: its target
is replaced. Devices, pipes and descriptors (`/dev/null`, `/dev/stdout`) are never replaced but
written to. Everything raises `OSError`, whose `strerror` is for people.

"""

from __future__ import annotations

import codecs
import contextlib
import errno
import hashlib
import io
import os
import re
import select
import shutil
import stat
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Final, TypeAlias

AnyPath: TypeAlias = str | os.PathLike[str]

LONGEST_DOCUMENT_BYTES: Final = 64 << 20
LONGEST_TEXT_BYTES: Final = 256 << 20
PIPE_WAIT_S: float = 10.0  # silence of the other end of a pipe
_LONGEST_NAME_BYTES: Final = 200  # of 255 that file systems take
_CHUNK_BYTES: Final = 4096  # a pipe that is ready takes so much without blocking (PIPE_BUF)
_MAX_LINKS: Final = 40
ROOM_BYTES: Final = 1 << 20  # compiled kernels take more, but only a full disk has less
OPEN_FILES_HOLD_FOLDERS = os.name == "nt"  # a folder cannot be renamed while a file in it is open
_OPEN: Final = sum(getattr(os, name, 0) for name in ("O_NONBLOCK", "O_NOCTTY", "O_BINARY"))
_DESCRIPTORS: Final = re.compile(r"/dev/fd|/proc/(self|thread-self|\d+)(/task/\d+)?/fd")


def atomic_write(path: AnyPath, data: str | bytes, *, durable: bool = True) -> None:
    """Make `data` (text as UTF-8) the whole contents of a file, or leave it unchanged.

    `durable`: it is on the disk when this returns. An existing file keeps its permissions.
    """
    with atomic_writer(path, durable=durable) as file:
        file.write(data if isinstance(data, bytes) else data.encode("utf-8", "backslashreplace"))


@contextmanager
def atomic_writer(path: AnyPath, *, durable: bool = True) -> Iterator[BinaryIO]:
    """Yield a file whose contents become those of `path` at the end of the block.

    Not after an exception.
    """
    target, special = _destination(path)
    if special:
        gathered = io.BytesIO()
        yield gathered
        _write_through(target, gathered.getbuffer())
        return
    remove_partials(target)
    partial, file = _new_partial(target)
    try:
        with file:
            yield file
            file.flush()
            if durable:
                os.fsync(file.fileno())
            _keep_permissions(partial, target)
            if os.name == "nt":
                file.close()  # which would not let it be moved
            os.replace(partial, target)
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise
    if durable:
        sync_directory(target.parent)


@contextmanager
def scratch_directory(target: Path) -> Iterator[Path]:
    """Yield a new directory next to `target`, for `replace_directory`.

    Deleted, or moved, at the end.
    """
    remove_partials(target)
    partial = _partial_name(target)
    partial.mkdir()
    try:
        with _locked(partial):
            yield partial
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def replace_directory(fresh: Path, target: Path) -> None:
    """Put a finished directory in place of `target`; what was there comes back on failure."""
    if not target.exists():
        fresh.rename(target)
        sync_directory(target.parent)
        return
    previous = _partial_name(target, "previous")
    with _locked(target):
        _move_away(target, previous)
        try:
            fresh.rename(target)
        except BaseException:
            with contextlib.suppress(OSError):  # another process has put its own there
                previous.rename(target)
            raise
        sync_directory(target.parent)
        doomed = previous.rename(_partial_name(target))  # half of it must not come back
    shutil.rmtree(doomed, ignore_errors=True)


def _move_away(target: Path, previous: Path) -> None:
    try:
        target.rename(previous)
    except PermissionError as error:
        if not OPEN_FILES_HOLD_FOLDERS:
            raise
        what = "a program has a file in it open: close the models that use it"
        raise PermissionError(error.errno, what, str(target)) from error


def try_room(folder: Path, nbytes: int = ROOM_BYTES) -> None:
    """Raise `OSError` unless a file of so many bytes can be written in a folder.

    For want of room, a quota or a limit of sizes (`ulimit -f`) a driver's compiler fails without
    saying so.
    """
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(bytes(nbytes))
        file.flush()


def has_room(folder: Path) -> bool:
    """Return whether `try_room` raises nothing."""
    try:
        try_room(folder)
    except OSError:
        return False
    return True


def remove_partials(target: Path) -> None:
    """Remove what killed writers of `target` left; what is being written now is locked and stays.

    A directory that was moved away and not yet replaced when its writer was killed comes back.
    """
    pattern = re.compile(rf"\.{re.escape(_short_name(target))}\.[0-9a-f]{{8}}\.(partial|previous)")
    with contextlib.suppress(OSError):
        for entry in sorted(os.scandir(target.parent), key=lambda entry: entry.name):
            if pattern.fullmatch(entry.name):
                _remove_unlocked(Path(entry.path), target)


def read_file(path: AnyPath, max_bytes: int) -> bytes:
    """Return the contents of a file or a pipe, read once.

    Raises `OSError` for more than `max_bytes`, and for a pipe of which nothing comes within
    `PIPE_WAIT_S`.
    """
    if "\0" in os.fspath(path):
        raise _error(errno.EINVAL, path)
    descriptor = os.open(path, os.O_RDONLY | _OPEN)
    try:
        kind = os.fstat(descriptor).st_mode
        if stat.S_ISDIR(kind):
            raise _error(errno.EISDIR, path)
        chunks: list[bytes] = []
        left = max_bytes + 1
        while left:
            if not stat.S_ISREG(kind):
                _await(descriptor, stat.S_ISFIFO(kind))
            try:
                chunk = os.read(descriptor, min(left, 1 << 20))
            except BlockingIOError:  # another reader of the pipe was faster
                continue
            if not chunk:
                return b"".join(chunks)
            chunks.append(chunk)
            left -= len(chunk)
    finally:
        os.close(descriptor)
    raise OSError(errno.EFBIG, f"it is larger than {max_bytes >> 20} MiB")


def read_text(path: AnyPath, max_bytes: int) -> str:
    """Return UTF-8 text without a byte order mark, read as by `read_file`.

    Raises `OSError`, `UnicodeDecodeError`.
    """
    return io.TextIOWrapper(io.BytesIO(read_file(path, max_bytes)), encoding="utf-8-sig").read()


def read_document(path: AnyPath, max_bytes: int = LONGEST_DOCUMENT_BYTES) -> bytes:
    """Return the bytes of `read_file` without a byte order mark, which Windows editors write."""
    return read_file(path, max_bytes).removeprefix(codecs.BOM_UTF8)


def sync_directory(path: Path) -> None:
    """Make renames in a directory durable, where the system can (not on Windows)."""
    if os.name != "posix":
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def is_replaceable(path: AnyPath) -> bool:
    """Return whether `path` is, or would become, a regular file.

    Raises `OSError` where that is unknown.
    """
    return not _destination(path)[1]


def _destination(path: AnyPath) -> tuple[Path, bool]:
    """Return where the links of `path` end, and whether that is written to instead of replaced."""
    if "\0" in os.fspath(path):
        raise _error(errno.EINVAL, path)
    target = Path(path).absolute()
    for _ in range(_MAX_LINKS):
        folder = Path(os.path.realpath(target.parent))
        target = folder / target.name
        if folder.is_relative_to("/proc") or _DESCRIPTORS.fullmatch(str(folder)):
            return target, True
        if not target.is_symlink():
            break
        target = folder / os.readlink(target)
    else:
        raise _error(errno.ELOOP, path)
    try:
        kind = target.stat().st_mode
    except FileNotFoundError:
        return target, False
    if stat.S_ISDIR(kind):
        raise _error(errno.EISDIR, path)
    if stat.S_ISBLK(kind):
        raise OSError(errno.EPERM, "it is a disk", os.fspath(path))
    if stat.S_ISREG(kind) and not os.access(target, os.W_OK):
        raise _error(errno.EACCES, path)
    return target, not stat.S_ISREG(kind)


def _write_through(target: Path, data: memoryview) -> None:
    """Write to a device, a pipe or a descriptor of this process."""
    descriptor = _open_special(target)
    try:
        while data:
            _await(descriptor, True, writing=True)
            with contextlib.suppress(BlockingIOError):
                data = data[os.write(descriptor, data[:_CHUNK_BYTES]) :]
    finally:
        os.close(descriptor)


def _open_special(target: Path) -> int:
    """Return a descriptor to write to; waits for the reader of a pipe."""
    own = str(target.parent) in ("/dev/fd", f"/proc/{os.getpid()}/fd")
    if own and target.name.isdecimal():
        return os.dup(int(target.name))  # opened again, a file would be written from its start
    give_up_s = time.monotonic() + PIPE_WAIT_S
    while True:
        try:
            return os.open(target, os.O_WRONLY | os.O_APPEND | _OPEN)
        except OSError as error:
            if error.errno != errno.ENXIO or not stat.S_ISFIFO(target.stat().st_mode):
                raise
        if time.monotonic() > give_up_s:
            raise OSError(errno.ETIMEDOUT, f"no process reads this pipe for {PIPE_WAIT_S:g} s")
        time.sleep(0.01)


def _await(descriptor: int, limited: bool, *, writing: bool = False) -> None:
    """Wait until a descriptor can be read or written; only of a pipe the silence is limited."""
    if not hasattr(select, "poll"):  # Windows, where only sockets can be waited for
        return
    asked = select.poll()
    asked.register(descriptor, select.POLLOUT if writing else select.POLLIN)
    if not asked.poll(1000 * PIPE_WAIT_S if limited else None):
        what = "no process reads this pipe" if writing else "nothing comes from this pipe"
        raise OSError(errno.ETIMEDOUT, f"{what} for {PIPE_WAIT_S:g} s")


def _new_partial(target: Path) -> tuple[Path, BinaryIO]:
    """Return a new, locked file next to `target`."""
    while True:
        partial = _partial_name(target)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | _OPEN
        file = os.fdopen(os.open(partial, flags, 0o666), "wb")
        _lock(file.fileno())
        if partial.exists():  # else another writer took it away before it was locked
            return partial, file
        file.close()


def _partial_name(target: Path, kind: str = "partial") -> Path:
    return target.with_name(f".{_short_name(target)}.{uuid.uuid4().hex[:8]}.{kind}")


def _short_name(target: Path) -> str:
    name = target.name
    if len(os.fsencode(name)) > _LONGEST_NAME_BYTES:
        return hashlib.sha256(os.fsencode(name)).hexdigest()
    return name


def _keep_permissions(partial: Path, target: Path) -> None:
    """Give the new file the mode, and as far as allowed the owner, of the one it replaces."""
    try:
        status = target.stat()
    except OSError:
        return
    if hasattr(os, "chown"):
        with contextlib.suppress(OSError):
            os.chown(partial, status.st_uid, status.st_gid)
    partial.chmod(stat.S_IMODE(status.st_mode))


def _remove_unlocked(path: Path, target: Path) -> None:
    with contextlib.suppress(OSError):
        if os.name == "nt":
            path.unlink()  # refused of a file that is open, and of a directory
            return
        lock = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | _OPEN)
        try:
            if not _lock(lock):
                return
            if path.name.endswith(".previous") and not target.exists():
                path.rename(target)
            elif path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink()
        finally:
            os.close(lock)


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Lock a directory, wherever it is moved, where the system can (not on Windows)."""
    if os.name != "posix":
        yield
        return
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        _lock(descriptor)
        yield
    finally:
        os.close(descriptor)


def hold(descriptor: int) -> None:
    """Mark a file as in use, together with other users, until all copies of its descriptor close.

    A mapping that Python makes of it has one.
    """
    _lock(descriptor, shared=True)


def is_in_use(path: Path) -> bool:
    """Return whether a process writes a file, or `hold`s it.

    On Windows nothing shows, but what is open cannot be removed either.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | _OPEN)
    except OSError:
        return False
    try:
        return os.name != "nt" and not _lock(descriptor)
    finally:
        os.close(descriptor)


def remove_unused(path: Path) -> bool:
    """Remove a file, a link or a directory unless `is_in_use`.

    Returns whether it was removed. Raises `OSError`, on Windows also for open files.
    """
    if path.is_symlink():
        path.unlink()
        return True
    if os.name == "nt":
        shutil.rmtree(path) if path.is_dir() else path.unlink()
        return True
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | _OPEN)
    try:
        if not _lock(descriptor):
            return False
        shutil.rmtree(path) if path.is_dir() else path.unlink()
        return True
    finally:
        os.close(descriptor)


def _lock(descriptor: int, *, shared: bool = False) -> bool:
    """Lock a file until it is closed; return whether no other process had it."""
    try:
        import fcntl
    except ImportError:  # Windows
        return False
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _error(code: int, path: AnyPath) -> OSError:
    return OSError(code, os.strerror(code), os.fspath(path))
