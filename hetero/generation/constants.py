"""Numbers that options show too; nothing is imported for them."""

from __future__ import annotations

from typing import Final

DEFAULT_MAX_TOKENS: Final = 256  # of an answer
