"""Simulations of several ways to make a matmul's activations int8, to compare them.

    naive         one static scale, the maximum on the calibration text
    none          one static scale of least error; what is beyond it is cut off
    15%, all, …   hot channels of this part of the matmuls in floating point (`--outliers`), with
                  what the codes of their other channels cut off; not with 15%-clipped
    paper         the rule of mllm-NPU's code, with all that is cut off added exactly
    smooth        SmoothQuant (Xiao et al., arXiv 2211.10438), α = 0.5 at every matmul, static scale
    per-token     a scale of each token, from its own maximum
    activations   naive, but weights stay float32: what the activations alone cost

They use the reference arithmetic. Weights are int8 with one scale a row but for the last. A
simulated model has all its weights in float64, so it is for small models; it has no kernel and says
nothing of speed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from hetero.backends.formats import WeightFormat
from hetero.backends.ops import MatMul
from hetero.backends.protocol import WeightValue
from hetero.backends.reference.compute import Arrays, Program, program, softcapped, static_codes
from hetero.backends.weights import Float32Array, PackedWeight
from hetero.compiling.static_scales import (
    NO_CHANNELS,
    Scale,
    Scales,
    StaticWeights,
    check_shadows,
    choose,
    collect_scales,
    most_important,
    pack_without,
    step_of,
)
from hetero.compiling.walk import Progress, fresh_slots, role_of, run_node
from hetero.errors import UserError
from hetero.models import LoadedModel
from hetero.models.calibration_record import OutlierChoice
from hetero.models.graph import model_graph
from hetero.models.model_weights import ModelWeights, Shadow
from hetero.profiler.model_graph import Node
from hetero.runtime.kernels import node_weights

ALPHA: Final = 0.5
CLIPPED: Final = "-clipped"
OWN_SCHEMES: Final = ("naive", "smooth", "per-token", "activations")
MakeProgram = Callable[[Node, Mapping[str, WeightValue]], Program]


class SimulatedModel:
    """A model whose operations run one after the other, matmuls by `at_matmul`.

    `weights` are of the format in which the operations are to be; sequences start at position 0.
    """

    def __init__(
        self, model: LoadedModel, weights: ModelWeights, context: int, at_matmul: MakeProgram
    ) -> None:
        self.model, self.max_seq_len = model, context
        nodes = model_graph(weights.config, weights.weight_format, capacity=context).nodes
        self._programs: list[tuple[Node, Program]] = []
        for node in nodes:
            block = None if node.layer is None else weights.block(node.layer)
            values = node_weights(node, block, weights)
            is_matmul = isinstance(node.op, MatMul)
            run = at_matmul(node, values) if is_matmul else program(node.op, values)[0]
            self._programs.append((node, run))
        for index in range(weights.config.num_layers):
            weights.release(index)

    def logits(self, tokens: Sequence[int]) -> npt.NDArray[np.float32]:
        """Return logits float32 [tokens, vocab] after every token."""
        slots = fresh_slots(tokens)
        for node, run in self._programs:
            run_node(node, run, slots)
        logits: npt.NDArray[np.float32] = slots["logits"]
        return logits


class Schemes:
    """Simulated models of every scheme, from one walk of the float model on calibration tokens."""

    def __init__(
        self,
        model: LoadedModel,
        sequences: Sequence[Sequence[int]],
        context: int,
        progress: Progress | None = None,
    ) -> None:
        self.model, self.context = model, context
        self._exact, self._sequences, self._progress = model.weights, sequences, progress
        self._scales: dict[tuple[bool, bool], dict[str, Scales]] = {}

    def scales(self, *, paper: bool = False, excess: bool = True) -> dict[str, Scales]:
        """Return the scales of every matmul; `paper`, `excess`: see `choose_scales`."""
        key = paper, excess
        if key not in self._scales:
            self._scales[key] = collect_scales(
                self._exact, self._sequences, paper=paper, excess=excess, progress=self._progress
            )
        return self._scales[key]

    def model_of(self, scheme: str) -> SimulatedModel:
        """Return a scheme by name. Raises `UserError` for an unknown one."""
        match scheme:
            case "naive":
                return self.chosen({name: x.widest for name, x in self.scales().items()})
            case "smooth":
                return self._rebuilt(self._smooth, WeightFormat.W8A8)
            case "per-token":
                return self._rebuilt(_per_token, WeightFormat.W8A8)
            case "activations":
                return self._rebuilt(self._floats_by_codes, WeightFormat.F32)
        name = scheme.removesuffix(CLIPPED)
        try:
            choice = OutlierChoice.parse(name)
        except UserError:
            raise UserError(
                f"unknown scheme {scheme!r}: choose one of {', '.join(OWN_SCHEMES)}, or what "
                "--outliers takes (15%, none, all, paper)"
            ) from None
        if choice.kept:
            check_shadows(self._exact)
        scales = self.scales(paper=choice.paper, excess=name == scheme)
        return self.chosen(choose(scales, most_important(scales, choice.kept)))

    def chosen(self, chosen: Mapping[str, Scale]) -> SimulatedModel:
        """Return scales, hot channels and excess of every matmul by name."""
        weights = StaticWeights(self._exact, chosen)

        def make(node: Node, values: Mapping[str, WeightValue]) -> Program:
            name = _name(node)
            scale = chosen[name]
            run, _ = program(node.op, values)
            if scale.excess:
                run = _with_excess(run, _dense(values), scale)
            if node.layer is None:
                return run
            shadow = weights.block(node.layer).shadows.get(role_of(node))
            return run if shadow is None else _with_slab(run, shadow)

        return SimulatedModel(self.model, weights, self.context, make)

    def _rebuilt(self, make: MakeProgram, weight_format: WeightFormat) -> SimulatedModel:
        """Return matmuls made of their float weights; other operations as in a format."""
        weights = self._exact
        if weight_format is WeightFormat.W8A8:
            everywhere = Scale(1.0, 100.0, 0.0)  # of which only the embeddings are used
            weights = StaticWeights(self._exact, dict.fromkeys(self.scales(), everywhere))

        def from_floats(node: Node, values: Mapping[str, WeightValue]) -> Program:
            role = role_of(node)
            if node.layer is None:
                exact = self._exact.outer_weight(role, "weight")
            else:
                exact = self._exact.block(node.layer).matrix(role)
            return make(node, {**values, "weight": exact})

        return SimulatedModel(self.model, weights, self.context, from_floats)

    def _smooth(self, node: Node, values: Mapping[str, WeightValue]) -> Program:
        weight, channel_max = _dense(values), self.scales()[_name(node)].channel_max
        peaks = np.abs(weight).max(axis=0)
        usable = (channel_max > 0) & (peaks > 0)
        factors = np.ones_like(channel_max)
        factors[usable] = channel_max[usable] ** ALPHA / peaks[usable] ** (1 - ALPHA)
        scale = np.array([step_of(float((channel_max / factors).max()))], dtype=np.float32)
        packed = pack_without(weight * factors, NO_CHANNELS)
        run, _ = program(node.op, {**values, "weight": packed, "x_scale": scale})

        def smoothed(arrays: Arrays) -> None:
            run({**arrays, "x": arrays["x"] / factors})

        return smoothed

    def _floats_by_codes(self, node: Node, values: Mapping[str, WeightValue]) -> Program:
        step = np.float32(self.scales()[_name(node)].widest.step)
        run, _ = program(node.op, values)

        def rounded(arrays: Arrays) -> None:
            run({**arrays, "x": static_codes(arrays["x"], step) * step})

        return rounded


def _per_token(node: Node, values: Mapping[str, WeightValue]) -> Program:
    packed = pack_without(_dense(values), NO_CHANNELS)
    assert isinstance(node.op, MatMul)
    softcap = node.op.softcap
    weight, bias = packed.dequantize().T.astype(np.float64), values.get("bias")

    def run(arrays: Arrays) -> None:
        x = arrays["x"]
        steps = np.maximum(np.abs(x).max(axis=1, keepdims=True) / np.float32(127), 1e-30)
        y = (np.rint(x / steps) * steps).astype(np.float64) @ weight
        arrays["y"][:] = softcapped(y if bias is None else y + bias, softcap)

    return run


def _with_slab(run: Program, shadow: Shadow) -> Program:
    weight = shadow.weight.T.astype(np.float64)  # [h, n]

    def both(arrays: Arrays) -> None:
        run(arrays)
        arrays["y"][:] += arrays["x"][:, shadow.channels].astype(np.float64) @ weight

    return both


def _with_excess(run: Program, weight: Float32Array, scale: Scale) -> Program:
    transposed = weight.T.astype(np.float64)

    def both(arrays: Arrays) -> None:
        run(arrays)
        codes = np.rint(arrays["x"] / np.float32(scale.step))
        excess = (codes - codes.clip(-128, 127)) * np.float64(scale.step)
        arrays["y"][:] += excess @ transposed

    return both


def _name(node: Node) -> str:
    return role_of(node) if node.layer is None else f"blocks.{node.layer}.{role_of(node)}"


def _dense(values: Mapping[str, WeightValue]) -> Float32Array:
    weight = values["weight"]
    assert isinstance(weight, PackedWeight)
    return weight.dequantize()
