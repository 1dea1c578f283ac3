"""Names of the modes of a prompt's calls, in reports and in statistics of a run."""

from __future__ import annotations

from typing import Final

from hetero.solver.plan import PrefillMode

MODE_NAMES: Final[dict[PrefillMode, str]] = {
    "cut": "cut in order",
    "whole": "whole out of order",
    "both": "cut and out of order",
}
