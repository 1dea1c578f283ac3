"""OpenCL implementations that need to be known, one file each. A new one joins `DRIVERS`."""

from __future__ import annotations

from hetero.backends.opencl.drivers.driver import Driver
from hetero.backends.opencl.drivers.intel import IntelCpu
from hetero.backends.opencl.drivers.pocl import Pocl
from hetero.backends.opencl.drivers.vendor import Vendor

VENDOR = Vendor()
DRIVERS: tuple[Driver, ...] = (Pocl(), IntelCpu(), VENDOR)


def driver_of_library(library: str) -> Driver:
    """Return the driver of a library's file name; unknown ones are the vendors'."""
    return next((d for d in DRIVERS if d.owns_library(library)), VENDOR)


def driver_of_platform(platform_name: str) -> Driver:
    """Return whose platform a name is."""
    return next((d for d in DRIVERS if d.owns_platform(platform_name)), VENDOR)
