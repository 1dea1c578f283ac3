"""Numbers that options show too; nothing is imported for them."""

from __future__ import annotations

from typing import Final

MAX_ROUNDS: Final = 2000  # of `hetero sync-bench`
MIN_TOKENS: Final = 32  # of fewer, the interval of any score is wider than what one wants to know
