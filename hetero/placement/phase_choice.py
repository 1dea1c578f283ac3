"""The devices of a phase, with what `auto` predicted of them, as words and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from hetero.solver.plan import Phase

TENSOR_LEVEL: Final = "tensor level"
LAYER_LEVEL: Final = "layer level"
ALIKE: Final = 0.005  # gains below this are not worth a word


def kind_of(device_set: str) -> Literal["gpu", "npu"]:
    """Return the kind of a device set that is one device; every core is the GPU's backend."""
    return "npu" if device_set == "npu" else "gpu"


@dataclass(frozen=True)
class PhaseChoice:
    """The device set of a phase with its predicted seconds, and the best other one with its own.

    `device_set` is `gpu`, `npu`, `EVERY_CORE`, `TENSOR_LEVEL` or `LAYER_LEVEL`. Without a
    comparison, seconds are None, and `other` is empty. From `depth_from` tokens of context on
    (above 0: of a plan's bands), `attends` computes attention, and `other` decodes before it.
    `third`: a CPU has rows of matmuls, too.
    """

    phase: Phase
    device_set: str
    predicted_s: float | None = None
    other: str = ""
    other_s: float | None = None
    depth_from: int = 0
    attends: str = ""
    third: bool = False

    @property
    def devices(self) -> str:
        """Return the device set, with the third device."""
        return f"{self.device_set} with the cpu" if self.third else self.device_set

    @property
    def gain(self) -> float | None:
        """Return the other one's seconds over these."""
        if not self.predicted_s or not self.other_s:
            return None
        return self.other_s / self.predicted_s

    def document(self) -> dict[str, Any]:
        """Return the JSON document."""
        kinds = [kind_of(self.device_set)]
        if self.device_set in (TENSOR_LEVEL, LAYER_LEVEL):
            kinds = ["gpu", "npu"]
        return {
            "phase": self.phase,
            "depth_from": self.depth_from,
            "devices": [*kinds, *["cpu"] * self.third],
            "device_set": self.device_set,
            "predicted_s": self.predicted_s,
            "over": self.other or None,
            "gain": self.gain,
        }

    def __str__(self) -> str:
        what = "prompt: " if self.phase == "prefill" else "answer: "
        text = f"{'' if self.depth_from else what}{_named(self.device_set)}"
        if self.attends and self.device_set in (TENSOR_LEVEL, LAYER_LEVEL):
            text += f" with attention on the {self.attends}"
        text += " with the cpu" if self.third else ""
        times = self.gain
        if times is None or abs(times - 1) < ALIKE:
            return text
        shared = self.other in (TENSOR_LEVEL, LAYER_LEVEL)
        other = self.other if shared else f"the {self.other}"
        return f"{text} ({times:.{1 if times >= 1.1 else 2}f} x {other})"


def described(phases: Sequence[PhaseChoice]) -> str:
    """Return a sentence for people: "prompt: npu alone (1.4 x the gpu); answer: gpu alone".

    Where decoding moves it goes on: "answer: gpu alone until 2944 tokens, then npu alone".
    """
    text = ""
    for phase in phases:
        if phase.depth_from:
            text += f" until {phase.depth_from} tokens, then {phase}"
        else:
            text += f"; {phase}" if text else str(phase)
    return text


def _named(name: str) -> str:
    return name if name in (TENSOR_LEVEL, LAYER_LEVEL) else f"{name} alone"
