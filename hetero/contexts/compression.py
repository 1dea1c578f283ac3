"""The number of bits of a context's chunks, set when a call on it has returned."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal, TypeAlias

from hetero.arguments import check_one_of
from hetero.contexts.chunk_memory import ChunkMemory
from hetero.contexts.chunks import Chunk
from hetero.contexts.codec import CHUNK_TOKENS, RAW, ChunkCodec
from hetero.contexts.ratios import Rule, newest, paper
from hetero.errors import UserError

KvBits: TypeAlias = Literal["raw", "16", "8", "4", "2", "mixed"]
KV_BITS: Final = ("raw", "16", "8", "4", "2", "mixed")


class Compression:
    """The rule of one service.

    `ratio` is the size of all `mixed` chunks but a text's first together, relative to 8-bit codes.
    """

    def __init__(
        self,
        bits: KvBits,
        ratio: float,
        rule: Rule,
        codec: ChunkCodec,
    ) -> None:
        check_one_of("kv_bits", bits, KV_BITS)
        check_one_of("kv_rule", rule, ("newest", "paper"))
        if not 0.25 <= ratio <= 1:
            raise UserError(f"kv_ratio is from 0.25 to 1 (of the bytes at 8 bits), got {ratio}")
        self.bits, self.ratio, self.rule = bits, ratio, rule
        self._nbytes = {each: codec.nbytes(CHUNK_TOKENS, each) for each in codec.nested}

    @property
    def ranks(self) -> bool:
        """Return whether chunks are ranked by their densities."""
        return self.bits == "mixed" and self.rule == "paper"

    @property
    def first(self) -> int:
        """Return the bits of a new chunk."""
        if self.bits == "raw":
            return RAW
        return 8 if self.bits == "mixed" else int(self.bits)

    def choose(self, densities: Sequence[float]) -> list[int]:
        """Return the bits of each of a context's full chunks."""
        if self.bits != "mixed":
            return [self.first] * len(densities)
        if self.rule == "paper":
            return paper(densities, self.ratio)
        return newest(len(densities), self.ratio, self._nbytes)

    def apply(self, memory: ChunkMemory, chunks: Sequence[Chunk]) -> None:
        """Lower chunks that have more bits than chosen.

        Shared chunks stay as they are, since each text ranks them differently.
        """
        full = [chunk for chunk in chunks if chunk.full]
        chosen = self.choose([chunk.density for chunk in full])
        for chunk, bits in zip(full, chosen, strict=True):
            if chunk.refs == 1:
                memory.lower(chunk, bits)
