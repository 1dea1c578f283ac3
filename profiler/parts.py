"""The parts of a profile that are no matmuls: each is measured once, or comes from the journal."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from hetero.profiler.journal import Journal

R = TypeVar("R", bound=BaseModel)


class Parts:
    """Lists of records by the part's name.

    `before` is called with the name of a part before it is measured; what it raises ends the run.
    """

    def __init__(self, journal: Journal, before: Callable[[str], None]) -> None:
        self._journal, self._before = journal, before
        self._parts: dict[str, Any] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._parts

    def __getitem__(self, name: str) -> Any:
        return self._parts[name]

    def get(self, name: str) -> Any:
        """Return the records of a part; none where it was not measured."""
        return self._parts.get(name, ())

    def take(
        self,
        name: str,
        kind: type[R],
        make: Callable[[], list[R]],
        *,
        several: bool = False,
        fits: Callable[[R], bool] = lambda _: True,
    ) -> list[R]:
        """Return the records of a part, one unless `several`.

        They come from the journal, where all of them fit what is here, or are measured and written
        to it.
        """
        for entry in self._journal.of_kind("part"):
            if entry["name"] == name and (several or len(entry["values"]) == 1):
                with suppress(ValidationError):  # then it is measured again
                    records = [kind.model_validate(value) for value in entry["values"]]
                    if all(map(fits, records)):
                        self._parts[name] = records
                        return records
        self._before(name)
        made = make()
        self._journal.add(
            {"kind": "part", "name": name, "values": [v.model_dump(mode="json") for v in made]}
        )
        self._parts[name] = made
        return made
