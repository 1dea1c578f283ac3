"""The number of bits of a context's chunks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal, TypeAlias

from hetero.arguments import check_one_of
from hetero.contexts.chunk_memory import ChunkMemory
from hetero.contexts.chunks import Chunk, first_bits
from hetero.contexts.codec import RAW
from hetero.contexts.ratios import Rule, paper
from hetero.errors import UserError

KvBits: TypeAlias = Literal["raw", "16", "8", "4", "2", "mixed"]
KV_BITS: Final = ("raw", "16", "8", "4", "2", "mixed")


class Compression:
    """The rule of one service.

    `ratio` is the size of all `mixed` chunks but a text's first together, relative to 8-bit codes.
    By the rule `layers` they have `mixed`, the codec's number for bits by head.
    """

    def __init__(self, bits: KvBits, ratio: float, rule: Rule) -> None:
        check_one_of("kv_bits", bits, KV_BITS)
        check_one_of("kv_rule", rule, ("layers", "paper"))
        if not 0.25 <= ratio <= 1:
            raise UserError(f"kv_ratio is from 0.25 to 1 (of the bytes at 8 bits), got {ratio}")
        self.bits, self.ratio, self.rule = bits, ratio, rule
        self.mixed = 0

    @property
    def by_head(self) -> bool:
        """Return whether the heads of each layer have bits of their own."""
        return self.bits == "mixed" and self.rule == "layers"

    @property
    def ranks(self) -> bool:
        """Return whether chunks are ranked by their densities."""
        return self.bits == "mixed" and self.rule == "paper"

    @property
    def first(self) -> int:
        """Return the bits of a new chunk."""
        if self.by_head:
            return self.mixed
        return {"raw": RAW, "mixed": 8}.get(self.bits) or int(self.bits)

    def apply(self, memory: ChunkMemory, chunks: Sequence[Chunk]) -> None:
        """Lower chunks that have more bits than chosen, after a call.

        Shared chunks stay as they are, since each text ranks them differently.
        """
        full = [chunk for chunk in chunks if chunk.full]
        densities = [chunk.density for chunk in full]
        chosen = paper(densities, self.ratio) if self.ranks else [self.first] * len(full)
        for chunk, bits in zip(full, chosen, strict=True):
            if chunk.refs == 1:
                memory.lower(chunk, bits if self.ranks or chunk.start else first_bits(bits))
