"""Errors that a user can cause: one sentence that names the thing, the rule and the remedy."""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator
from contextlib import contextmanager

from hetero.terminal import printable

LONGEST_SENTENCE = 1000


class UserError(ValueError):
    """Something that the user can mend; the message is one sentence for people.

    What a file or a library says at length is put on one line and cut in the middle.
    """

    def __init__(self, message: str) -> None:
        super().__init__(one_sentence(message))


@contextmanager
def memory_for(what: str) -> Iterator[None]:
    """Memory that the system refuses inside the block becomes one sentence that names `what`."""
    try:
        yield
    except (MemoryError, OSError) as error:
        if isinstance(error, OSError) and error.errno != errno.ENOMEM:
            raise
        why = str(error) or "out of memory"
        raise UserError(
            f"not enough memory for {what} ({why}): close other programs, or "
            "open the model with smaller weights (w4a16) or a smaller max_seq_len"
        ) from None


def one_sentence(message: str) -> str:
    """A message on one line of at most about 1000 characters, control characters escaped."""
    line = printable(re.sub(r"\s*\n\s*", " ", message))
    if len(line) <= LONGEST_SENTENCE:
        return line
    return f"{line[: LONGEST_SENTENCE - 300]} … {line[-300:]}"


class QuotaError(UserError):
    """An application has all that it may have."""


class DiskFullError(UserError):
    """What is to be kept finds no room under its budget."""


class ModelError(UserError):
    """A model, its files or the name it was asked by cannot be used."""


class FallbackWarning(UserWarning):
    """A device is missing or failed; another does its work."""
