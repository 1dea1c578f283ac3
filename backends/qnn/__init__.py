"""The Hexagon NPU through QNN (`onnxruntime-qnn`).

On a Snapdragon the compiled graphs run on the NPU. On Linux on x86-64 Qualcomm's library compiles
for a named chip and runs the compiled graph in functional emulation: results are the chip's, times
are not. `open(**options)` takes

    soc           chip by name (`chips.CHIPS`), such as "sm8650"
    graph_sizes   token counts that graphs are made for; others are refused when bound
    cache         directory for compiled graphs, True for this user's cache, None to compile anew in
                  this process every time
    htp_library   path of libQnnHtp.so, to use another than the wheel's

Arithmetic is fp16 with weights of 4 bits (groups of 32), 8 bits or fp16. Nothing ever runs on the
CPU instead: what the Hexagon does not take is an error.
"""

from __future__ import annotations

from pathlib import Path

import platformdirs

from hetero.backends.protocol import Device
from hetero.backends.qnn.device import DEFAULT_GRAPH_SIZES, QnnDevice
from hetero.backends.qnn.library import hexagon_present, load
from hetero.backends.snapdragon import CHIPS, DEFAULT_CHIP, Chip, find_chip


def cache_directory() -> Path:
    """Where compiled graphs are kept; may be deleted at any time."""
    return Path(platformdirs.user_cache_dir("hetero", appauthor=False)) / "qnn"


def open(
    *,
    soc: str = DEFAULT_CHIP,
    graph_sizes: tuple[int, ...] = DEFAULT_GRAPH_SIZES,
    cache: str | Path | bool | None = True,
    htp_library: str | Path | None = None,
) -> Device:
    """Open the Hexagon; see the module's docstring for the options.

    Raises `DeviceUnavailableError` if the libraries cannot be loaded, `ValueError` for a chip that
    is not known.
    """
    chip = find_chip(soc)
    directory = cache_directory() if cache is True else Path(cache) if cache else None
    return QnnDevice(load(htp_library), chip, graph_sizes=graph_sizes, directory=directory)


__all__ = [
    "CHIPS",
    "DEFAULT_CHIP",
    "DEFAULT_GRAPH_SIZES",
    "Chip",
    "QnnDevice",
    "cache_directory",
    "find_chip",
    "hexagon_present",
    "open",
]
