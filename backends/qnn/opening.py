"""The Hexagon NPU through QNN (`onnxruntime-qnn`).

On a Snapdragon the compiled graphs run on the NPU. On Linux on x86-64 Qualcomm's library compiles
for a named chip and runs the compiled graph in functional emulation: results are the chip's, times
are not. `open(**options)` takes

    soc           chip by name (`snapdragon.CHIPS`), such as "sm8650"; None for this machine's
    graph_sizes   token counts that graphs are made for; others are refused when bound
    cache         directory for compiled graphs, True for this user's cache, None to compile in
                  this process every time
    ahead         graphs are only compiled, for a chip that need not be here
    activations   of matmuls: "float16"; "int16", codes of 16 bits (W4A16 and W8A16 as QNN has
                  them); "int8" (W8A8), for 8-bit weights with one scale for all of them
    shared_weights the cache has one file for all sizes of a weight, which a device opens
    htp_library   path of libQnnHtp.so, to use another than the wheel's

Arithmetic is fp16 by default, with weights of 4 bits (groups of 32), 8 bits or fp16. Nothing ever
runs on the CPU instead: what the Hexagon does not take is an error.
"""

from __future__ import annotations

from pathlib import Path

from hetero.backends.errors import DeviceUnavailableError
from hetero.backends.host.folders import cache_folder
from hetero.backends.protocol import Device
from hetero.backends.qnn.device import QnnDevice
from hetero.backends.qnn.integer import Activations
from hetero.backends.qnn.library import hexagon_present, load
from hetero.backends.qnn.npu_capabilities import DEFAULT_GRAPH_SIZES
from hetero.backends.qnn.session import Target
from hetero.backends.qnn.startup import check_starts
from hetero.backends.snapdragon import CHIPS, DEFAULT_CHIP, Chip, chip_here, find_chip


def cache_directory() -> Path:
    """Return where compiled graphs are kept; may be deleted at any time."""
    return cache_folder() / "qnn"


def open(
    *,
    soc: str | None = None,
    graph_sizes: tuple[int, ...] = DEFAULT_GRAPH_SIZES,
    cache: str | Path | bool | None = True,
    ahead: bool = False,
    activations: Activations = "float16",
    shared_weights: bool = False,
    htp_library: str | Path | None = None,
) -> Device:
    """Open the Hexagon; see the module's docstring for the options.

    Raises `DeviceUnavailableError` if the libraries cannot be loaded, if a real Hexagon does not
    start, or for another chip than that; `ValueError` for a chip that is not known.
    """
    chip = _chosen(soc, None if ahead else chip_here())
    directory = cache_directory() if cache is True else Path(cache) if cache else None
    library = load(htp_library)
    if not ahead and not library.emulated:
        check_starts(Target(library, chip))
    return QnnDevice(
        library,
        chip,
        graph_sizes=graph_sizes,
        directory=directory,
        activations=activations,
        shared_weights=shared_weights,
    )


def _chosen(soc: str | None, here: Chip | None) -> Chip:
    """Return the named chip, which must be this machine's if that is known."""
    wanted = find_chip(soc) if soc is not None else here or find_chip(DEFAULT_CHIP)
    if here is not None and here != wanted:
        raise DeviceUnavailableError(
            "qnn",
            "opening the Hexagon",
            f"WRONG_CHIP: this machine has a {here.label}, not a {wanted.label}",
            f"compile the model again with --soc {here.name}",
        )
    return wanted


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
