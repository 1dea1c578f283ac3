"""The longest launches of a prompt that are fused, by solver and runtime alike."""

from __future__ import annotations

from typing import Final

LONGEST_FUSED: Final = 6e8  # FLOPs of a prompt's launch: longer ones save less than a twentieth
