"""A number of bytes that is never exceeded: whoever needs some takes them first."""

from __future__ import annotations

import threading

from hetero.errors import UserError


class ByteBudget:
    """Bytes in use by everything together, at most `limit` at every instant.

    Bytes are taken before the memory (or the space on the disk) is, and given back after it has
    been. Any thread may do either. `peak` is the most that was ever in use.
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
        """Return bytes in use."""
        return self._used

    @property
    def free(self) -> int:
        """Return bytes that nobody uses."""
        return self.limit - self._used

    @property
    def peak(self) -> int:
        """Return the most that was ever in use."""
        return self._peak

    def take(self, nbytes: int) -> bool:
        """Use so many more, if there are so many; whether there were."""
        if nbytes < 0:
            raise ValueError(f"cannot take {nbytes} bytes")
        with self._lock:
            if self._used + nbytes > self.limit:
                return False
            self._used += nbytes
            self._peak = max(self._peak, self._used)
            return True

    def give(self, nbytes: int) -> None:
        """Use so many less. Raises `ValueError` for more than are in use: accounts are wrong."""
        with self._lock:
            if not 0 <= nbytes <= self._used:
                raise ValueError(f"{nbytes} bytes of {self.name} given back, {self._used} in use")
            self._used -= nbytes
