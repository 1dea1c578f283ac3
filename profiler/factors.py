"""The bound of factors that scale a profile's times, for starts that load no profile."""

from typing import Final

MAX_FACTOR: Final = 1000.0  # by more no machine differs from another
