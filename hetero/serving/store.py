"""The store of all models: the database, its thread, and turns on conversations."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import anyio.to_thread

from hetero.serving.database import Records
from hetero.serving.turns import Turns

T = TypeVar("T")


@dataclass
class Store:
    """The records, used in one thread of their own, and the turns, by (app, conversation)."""

    records: Records
    turns: Turns = field(default_factory=Turns)

    def __post_init__(self) -> None:
        self._disk = ThreadPoolExecutor(1, thread_name_prefix="hetero records")

    async def disk(self, work: Callable[..., T], *arguments: Any, **options: Any) -> T:
        """Run a query of the records in their thread."""
        call = partial(work, *arguments, **options)
        return await anyio.to_thread.run_sync(self._disk.submit(call).result)

    def close(self) -> None:
        """Close the records, which are then on the disk."""
        self._disk.shutdown()
        self.records.close()
