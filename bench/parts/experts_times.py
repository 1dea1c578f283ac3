"""Times of routed experts for a shipped profile of this kind of machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hetero.backends.host.affinity import assign_cores, pinned
from hetero.placement.device_set import open_devices
from hetero.profiler.complete import completed
from hetero.profiler.options import Options
from hetero.profiler.records import DeviceProfile

PROFILES = Path(__file__).parents[2] / "profiler" / "profiles"


def experts_times(
    profile: Annotated[str, typer.Option(help="name of a shipped profile")] = "host-avx2",
) -> None:
    """Add times of routed experts, measured here, to a shipped profile of this kind of machine.

    They are scaled so that attention takes what the profile says (`profiler/complete.py`); nothing
    else in it changes. Its devices are others, of another driver perhaps, so they must be of the
    same kind of processor: the last word of the GPU's fingerprint.
    """
    path = PROFILES / f"{profile}.json"
    shipped = DeviceProfile.load(path)
    opened = open_devices("hetero")
    try:
        here = {kind: device.info.fingerprint for kind, device in opened.devices.items()}
        kinds = [x.rsplit("-", 1)[-1] for x in (here["gpu"], shipped.devices["gpu"].fingerprint)]
        if kinds[0] != kinds[1]:
            raise SystemExit(f"this machine is a {kinds[0]}, profile {profile} is of a {kinds[1]}")
        moved = {
            kind: record.model_copy(update={"fingerprint": here[kind]})
            for kind, record in shipped.devices.items()
        }
        options = Options(
            weight_formats=tuple(dict.fromkeys(x.weight_format for x in shipped.predictors)),
            gpu_core=assign_cores().gpu,
            control_core=opened.control_core,
        )
        with pinned(opened.control_core):
            taken = completed(
                shipped.model_copy(update={"devices": moved}),
                opened.devices,
                options,
                only="Experts",
            )
    finally:
        opened.close()
    devices = {
        kind: record.model_copy(update={"fingerprint": shipped.devices[kind].fingerprint})
        for kind, record in taken.devices.items()
    }
    taken.model_copy(update={"devices": devices}).save(path)
    for note in taken.notes[len(shipped.notes) :]:
        print(note)
