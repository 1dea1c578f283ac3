"""OpenCL on every core of a processor, which leaves none for an NPU.

For PCs, whose cores are all that there is. A GPU is not used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hetero.backends import opencl

if TYPE_CHECKING:
    from hetero.backends.opencl.device import OpenCLDevice


def open(**options: Any) -> OpenCLDevice:
    """Return `hetero.backends.opencl.open` with every core that this process may use."""
    return opencl.open(every_core=True, **options)
