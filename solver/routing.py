"""How often the tokens of a text chose each expert of each layer."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Count = Annotated[int, Field(ge=0, lt=2**53)]


class Routing(BaseModel):
    """Counts by layer and expert over `tokens` tokens of a text, of the model named.

    Written by `hetero eval --count-experts`; without it plans assume equal shares.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    schema_version: Literal[1] = 1
    model: str
    tokens: Annotated[int, Field(ge=1, lt=2**53)]
    layers: dict[Annotated[int, Field(ge=0, lt=2**31)], tuple[Count, ...]]

    def of(self, layer: int, experts: int) -> tuple[int, ...] | None:
        """Return a layer's counts; None where there are none of so many experts."""
        counts = self.layers.get(layer, ())
        return counts if len(counts) == experts and any(counts) else None
