"""Numbers that options show too; nothing is imported for them."""

from __future__ import annotations

from typing import Final

SINKS: Final = 4  # first tokens that stay when a context is shifted, as in StreamingLLM
