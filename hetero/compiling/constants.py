"""Numbers that options show too; nothing is imported for them."""

from __future__ import annotations

from typing import Final

DEFAULT_OUTLIERS: Final = "15%"  # of matmuls keep a shadow
