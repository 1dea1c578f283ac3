"""Errors that a user can cause: one sentence that names the thing, the rule and the remedy."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from hetero.backends.errors import UserError
from hetero.backends.sentences import one_sentence


@contextmanager
def memory_for(what: str) -> Iterator[None]:
    """Turn a refusal of memory inside the block into one sentence that names `what`."""
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


class QuotaError(UserError):
    """The error of an application that has all that it may have."""


class DiskFullError(UserError):
    """The error of data that must be stored, where the disk or its budget does not take it."""


class StoredFileError(UserError):
    """The error of a file of an earlier process that is damaged or cannot be read."""


class ModelError(UserError):
    """The error of a model, its files or its name."""


class FallbackWarning(UserWarning):
    """The warning that a device is missing or failed, and another does its work."""


__all__ = ["FallbackWarning", "ModelError", "UserError", "memory_for", "one_sentence"]
