"""A byte budget that is never exceeded: bytes are taken from it before they are used."""

from __future__ import annotations

import threading

from hetero.errors import UserError


class ByteBudget:
    """The bytes in use by all owners together, at most `limit` at every instant.

    Bytes are taken before memory or disk space is allocated, and given back after it is freed. Any
    thread may do either. `peak` is the most that was ever in use.
    """

    def __init__(self, limit: int, name: str = "memory") -> None:
        if limit < 0:
            raise UserError(f"the budget of {name} must not be negative, got {limit} bytes")
        self.limit, self.name = limit, name
        self._lock = threading.Lock()
        self._used = 0
        self._peak = 0

    @property
    def used(self) -> int:
        """Return the bytes in use."""
        return self._used

    @property
    def free(self) -> int:
        """Return the bytes not in use."""
        return self.limit - self._used

    @property
    def peak(self) -> int:
        """Return the most that was ever in use."""
        return self._peak

    def take(self, nbytes: int) -> bool:
        """Take bytes if that many are free; return whether they were."""
        if nbytes < 0:
            raise ValueError(f"cannot take {nbytes} bytes")
        with self._lock:
            if self._used + nbytes > self.limit:
                return False
            self._used += nbytes
            self._peak = max(self._peak, self._used)
            return True

    def give(self, nbytes: int) -> None:
        """Give bytes back.

        Raises `ValueError` if more are given back than are in use: the accounts are wrong.
        """
        with self._lock:
            if not 0 <= nbytes <= self._used:
                raise ValueError(f"{nbytes} bytes of {self.name} given back, {self._used} in use")
            self._used -= nbytes
