"""Drivers of real GPUs, and every implementation that nothing else is known of."""

from __future__ import annotations

from hetero.backends.opencl.drivers.driver import Driver
from hetero.backends.opencl.drivers.levels import Level

FAMILIES = (("adreno", ("adreno", "qualcomm")), ("nvidia", ("nvidia", "tesla", "geforce")))


class Vendor(Driver):
    """A vendor's own driver: kernels of work-groups, compiled for whatever the device is."""

    name = "vendor"

    def owns_library(self, library: str) -> bool:
        """See `Driver.owns_library`: any library that no other driver owns."""
        del library
        return True

    def owns_platform(self, platform_name: str) -> bool:
        """See `Driver.owns_platform`."""
        del platform_name
        return True

    def family(self, level: Level, device_name: str) -> str:
        """See `Driver.family`: by the names of platform and device."""
        del level
        names = device_name.lower()
        for family, words in FAMILIES:
            if any(word in names for word in words):
                return family
        return "other"
