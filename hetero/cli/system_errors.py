"""Errors of the system that a user can mend, as sentences; others keep their traceback."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from typing import Final

# What to do about an error at a path; other errors there have the system's words alone.
AT_PATH: Final = {
    errno.EACCES: "give this user the right to use it, or name another",
    errno.EPERM: "give this user the right to use it, or name another",
    errno.EROFS: "name one on a disk that can be written",
    errno.ENOENT: "check the name",
    errno.ENOTDIR: "check the name",
    errno.EISDIR: "name a file",
    errno.ENOSPC: "make room on the disk, or name one on another",
    errno.EDQUOT: "make room in this user's quota, or name one on another disk",
    errno.EFBIG: "the limit of file sizes is too low (`ulimit -f`)",
    errno.EMFILE: "the limit of open files is too low (`ulimit -n`)",
    errno.ENAMETOOLONG: "name it shorter",
    errno.EEXIST: "name another",
}
# Those that name no path: of the output, of this process's limits, of the current folder.
WITHOUT_PATH: Final = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EBADF), ""),
    errno.EMFILE: "the limit of open files is too low (`ulimit -n`)",
    errno.ENFILE: "the system has too many open files",
    errno.ENOMEM: "close other programs, or ask for less",
    errno.EAGAIN: "the limit of processes or threads is too low (`ulimit -u`)",
    errno.ENOENT: "the current folder does not exist any more: change to another",
    errno.ETIMEDOUT: "try again",
}
OF_THE_SYSTEM: Final = ("/dev/", "/sys/", "/proc/")


def system_sentence(error: OSError, arguments: Sequence[str]) -> str | None:
    """Return an error as a sentence with the remedy.

    None if neither a path nor a limit of the user's is the cause. `arguments` is the command line.
    """
    reason = error.strerror or str(error)
    if error.filename is None:
        remedy = WITHOUT_PATH.get(error.errno or 0)
        if remedy is None:
            return None
        return f"{reason}: {remedy}" if remedy else f"the output cannot be written: {reason}"
    path = os.fsdecode(error.filename) if not isinstance(error.filename, int) else ""
    typed = any(path in argument for argument in arguments)
    if path.startswith(OF_THE_SYSTEM) and not typed:
        return None
    remedy = AT_PATH.get(error.errno or 0)
    return f"{path}: {reason}" + (f"; {remedy}" if remedy else "")
