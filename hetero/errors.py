"""Errors that a user can cause: one sentence that names the thing, the rule and the remedy."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from hetero.backends.errors import UserError
from hetero.backends.sentences import one_sentence


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


class QuotaError(UserError):
    """An application has all that it may have."""


class DiskFullError(UserError):
    """There is no room under a budget for data that must be kept."""


class ModelError(UserError):
    """A model, its files or the name it was asked by cannot be used."""


class FallbackWarning(UserWarning):
    """A device is missing or failed; another does its work."""


__all__ = ["FallbackWarning", "ModelError", "UserError", "memory_for", "one_sentence"]
