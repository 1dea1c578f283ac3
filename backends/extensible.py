"""Records that get new fields after documents of them were written."""

from __future__ import annotations

from dataclasses import field, fields, is_dataclass
from typing import Any, TypeVar

_Value = TypeVar("_Value")


def later(default: _Value) -> _Value:
    """Return a field that was added to a record after documents of it had been written.

    With its default it is neither in `repr` nor in documents: what was stored under a record's
    identity (compiled graphs, plans, saved contexts) stays valid.
    """
    value: _Value = field(default=default, metadata={"later": True})
    return value


def document(record: Any) -> dict[str, Any]:
    """Return the fields of a record, and of records in it; `later` ones where they are set."""
    named = {
        x.name: getattr(record, x.name)
        for x in fields(record)
        if not x.metadata.get("later") or getattr(record, x.name) != x.default
    }
    return {name: document(x) if is_dataclass(x) else x for name, x in named.items()}


class Extensible:
    """A record, made with `repr=False`, whose `later` fields are shown only where they are set."""

    def __repr__(self) -> str:
        """Return what `dataclass` generates, without `later` fields at their defaults."""
        named = [
            f"{x.name}={getattr(self, x.name)!r}"
            for x in fields(self)  # type: ignore[arg-type]
            if not x.metadata.get("later") or getattr(self, x.name) != x.default
        ]
        return f"{type(self).__qualname__}({', '.join(named)})"
