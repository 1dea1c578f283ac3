"""LLMS and what it is compared with (section 5), as options of one service.

All work on the same cache, with the same codes, files and threads:

    llms      mixed bits, written ahead of time, LCTRU, read or computed again by plan
    lmk       a context is killed when memory is short, and computed again when it is called
    swapping  whole contexts are written and read, when memory is short
    vllm-s    chunks of 16 bits are, least recently used first
    vllm-sq   the same with all chunks at 8 bits

and, measured only, `hetero`: `llms` that reads the contexts used last between calls.

The model's own cache has 32 bits; 16 are what others would keep there.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any, Final, Literal, TypeAlias, cast, get_args

from hetero.arguments import check_one_of
from hetero.contexts.compression import KvBits
from hetero.contexts.eviction import Policy
from hetero.contexts.swap_out import When

Technique: TypeAlias = Literal["aot", "lctru", "compression", "recompute"]


@dataclass(frozen=True)
class Manager:
    """How contexts are kept; the fields are options of `Service`."""

    kv_bits: KvBits
    eviction: Policy
    swap: When
    recompute: bool = False
    read_ahead: bool = False

    def options(self) -> dict[str, Any]:
        """For `Service`."""
        return asdict(self)

    def without(self, technique: Technique) -> Manager:
        """The same without one of LLMS's techniques."""
        if technique == "aot":
            return replace(self, swap="pressure")
        if technique == "lctru":
            return replace(self, eviction="lru")
        if technique == "compression":
            return replace(self, kv_bits="16")
        return replace(self, recompute=False)


MANAGERS: Final[dict[str, Manager]] = {
    "llms": Manager("mixed", "lctru", "ahead", recompute=True),
    "lmk": Manager("16", "context", "never", recompute=True),
    "swapping": Manager("16", "context", "pressure"),
    "vllm-s": Manager("16", "lru", "pressure"),
    "vllm-sq": Manager("8", "lru", "pressure"),
}

HETERO: Final = replace(MANAGERS["llms"], read_ahead=True)


def contenders(without: Iterable[str] = ()) -> dict[str, Manager]:
    """All of them by name, and `llms` without one technique each. Raises `UserError`."""
    found = dict(MANAGERS)
    for technique in without:
        check_one_of("--without", technique, get_args(Technique))
        found[f"without {technique}"] = MANAGERS["llms"].without(cast(Technique, technique))
    return found
