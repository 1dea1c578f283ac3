"""Counts of how often the tokens of a text chose each expert of each layer."""

from __future__ import annotations

import os
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from hetero.backends.host.files import LONGEST_DOCUMENT_BYTES, read_text
from hetero.backends.ops import Experts
from hetero.profiler.model_graph import MAX_LAYERS, ModelGraph
from hetero.solver.errors import PlanError
from hetero.solver.plan import MAX_EXPERTS, write

Count = Annotated[int, Field(ge=0, lt=2**53)]
Layer = Annotated[int, Field(ge=0, lt=MAX_LAYERS)]
Counts = Annotated[tuple[Count, ...], Field(min_length=1, max_length=MAX_EXPERTS)]
REMEDY = "count them with `hetero eval MODEL --text FILE --count-experts FILE`"


class Routing(BaseModel):
    """Counts by layer and expert over `tokens` tokens of a text, of the model named.

    `hetero eval --count-experts` writes it; without one, plans assume equal shares.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    schema_version: Literal[1] = 1
    model: str
    tokens: Annotated[int, Field(ge=1, lt=2**53)]
    layers: dict[Layer, Counts]

    def of(self, layer: int, experts: int) -> tuple[int, ...] | None:
        """Return a layer's counts; None where there are none of so many experts."""
        counts = self.layers.get(layer, ())
        return counts if len(counts) == experts and any(counts) else None

    @property
    def busiest(self) -> float:
        """Return how much more often than on average the layers' busiest experts are chosen."""
        known = [x for x in self.layers.values() if any(x)]
        return sum(max(x) * len(x) / sum(x) for x in known) / max(len(known), 1)

    def checked(self, graph: ModelGraph) -> Self:
        """Return it. Raises `PlanError` unless it counts every routed layer of the model."""
        for node in graph.nodes:
            if not isinstance(node.op, Experts) or node.layer is None:
                continue
            if self.of(node.layer, node.op.experts) is None:
                raise PlanError(
                    f"the counts are of {self.model} and have none of the {node.op.experts} "
                    f"experts of layer {node.layer} of {graph.name}: {REMEDY}"
                )
        return self

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write as JSON, atomically. Raises `PlanError` where it cannot be written."""
        write(path, self.model_dump_json(indent=1) + "\n", "counts")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read and validate a file of counts. Raises `PlanError` with one sentence."""
        try:
            return cls.model_validate_json(read_text(path, LONGEST_DOCUMENT_BYTES))
        except (OSError, UnicodeDecodeError) as error:
            why = getattr(error, "strerror", None) or error
            raise PlanError(f"cannot read the counts {path} ({why}): {REMEDY}") from None
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"]) or "document"
            raise PlanError(
                f"the counts {path} are not valid: {where}: {first['msg']}: {REMEDY}"
            ) from None
