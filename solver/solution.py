"""Scenarios to solve a plan for, and their solutions."""

from __future__ import annotations

from typing import NamedTuple

from hetero.backends.protocol import DeviceKind
from hetero.profiler.model_graph import OpName
from hetero.solver.layer_dp import LayerPath, walk
from hetero.solver.non_matmul import NonMatmulTimes
from hetero.solver.options import Option, PowerModel
from hetero.solver.plan import Phase


class Scenario(NamedTuple):
    """One kind of step: a prompt of m tokens, or decoding m tokens.

    `context` is the number of tokens before them; None: none before a prompt, and as many as the
    settings say before decoding.
    """

    phase: Phase
    m: int
    context: int | None = None


class Solution(NamedTuple):
    """A solved scenario: option of every matmul by name, the rest's device, and the whole step.

    `around_s` is what the step takes besides its operators (`Overheads.around_s`). `attention` is
    what was chosen of attention (and what else is after that matmul), None where it has no choice.
    `sampled` are the matmuls that see sampled rows alone (`ModelGraph.sampled_in`).
    """

    scenario: Scenario
    options: dict[OpName, Option]
    non_matmul: NonMatmulTimes
    path: LayerPath
    power: PowerModel | None
    around_s: float = 0.0
    attention: Option | None = None
    sampled: frozenset[OpName] = frozenset({"lm_head"})

    @property
    def devices(self) -> frozenset[DeviceKind]:
        """Return the devices that work in the step.

        Matmuls of sampled rows alone do not count.
        """
        block = [x.devices for name, x in self.options.items() if name not in self.sampled]
        block += [self.attention.devices] if self.attention is not None else []
        return frozenset({self.non_matmul.device}).union(*block)

    def alone_on(self, device: DeviceKind) -> bool:
        """Return whether one device computes everything."""
        others = [option.devices for option in self.options.values()]
        return self.devices.union(*others) == {device}

    @property
    def heads(self) -> int:
        """Return the key/value heads of attention on the NPU besides the GPU's.

        0 where one device has all.
        """
        return self.attention.rows if self.attention is not None else 0

    def without_head(self) -> Solution:
        """Return the same step without logits: a call that is not the last one of its prompt."""
        options = {name: x for name, x in self.options.items() if name not in self.sampled}
        return self._replace(options=options, path=self.path.without_sampled())

    @property
    def seconds(self) -> float:
        """Return the predicted time of the step."""
        return walk(self.path).seconds + self.around_s

    @property
    def joules(self) -> float | None:
        """Return the predicted energy of the step; None if the profile does not say."""
        if self.power is None:
            return None
        steps = walk(self.path).steps
        return sum(count * o.joules(self.power, state) for o, state, count in steps)


def uses_third(solution: Solution) -> bool:
    """Return whether a CPU computes rows of a matmul in the step."""
    return any(option.cpu_rows for option in solution.options.values())
