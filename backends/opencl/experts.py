"""Router and Experts: routed feed-forwards, chosen, sorted and computed without the host.

Pairs of a token and an expert that it chose become rows, sorted by expert, each of which begins at
a whole tile of rows (`kernels/experts.cl`). The matmuls' kernels then read every chosen expert's
weights once, and no others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final, TypeAlias

import numpy as np
import pyopencl as cl

from hetero.backends.checks import accept_format, packed, vector
from hetero.backends.formats import GROUP_SIZE
from hetero.backends.memory import Tensor
from hetero.backends.opencl.calls import Argument, KernelLaunch, OpenCLKernel
from hetero.backends.opencl.elementwise import MACROS
from hetero.backends.opencl.gpu_capabilities import WEIGHT_FORMATS
from hetero.backends.opencl.matmul import (
    SIMT_LANES,
    MatMulPlan,
    cpu_program,
    matmul_operands,
    simt_program,
    work_items,
)
from hetero.backends.opencl.matmul_tuning import (
    CpuTuning,
    SimtTuning,
    WorkTile,
    kind_of,
    matmul_tuning,
)
from hetero.backends.opencl.program_source import Define
from hetero.backends.opencl.resources import DeviceMemory, Resources
from hetero.backends.ops import PASS_TOKENS, SWIGLU_ALPHA, SWIGLU_LIMIT, Experts, Router
from hetero.backends.protocol import Acceptance, Capabilities, Operand, WeightValue, tensors_of
from hetero.backends.weights import ROW_BLOCK, padded

SIMT_TOKENS: Final = 8  # rows of a tile on a GPU
EACH_LOGIT: Final = 8  # experts of a work-item on a processor
LOGIT_TILES: Final = {16: (4, 4), 8: (2, 4)}  # tokens and experts of sums in registers, by vector

Place: TypeAlias = tuple[cl.Buffer, int]  # a buffer, and the first of its 32-bit words


def accepts_experts(op: Experts) -> Acceptance:
    """Return whether `prepare_experts` takes the record."""
    return accept_format(Capabilities(kind="gpu", weight_formats=WEIGHT_FORMATS), op)


def prepare_router(
    device: Resources, op: Router, weights: Mapping[str, WeightValue]
) -> OpenCLKernel:
    """Prepare two launches: the logits of all experts, and the choice."""
    tuning = device.tuning
    tokens, experts = LOGIT_TILES[tuning.vector] if tuning.lanes == 1 else (1, 1)
    defines: dict[str, Define] = {
        **tuning.defines, "TILE_TOKENS": tokens, "TILE_EXPERTS": experts,
        "D": op.d, "E": op.experts, "K": op.chosen, op.scores.upper(): 1,
        "CHOICE_BIAS": int(op.choice_bias), "EPS": float(op.eps), "SCALE": float(op.scale),
        "EXPERT_SCALE": int(op.expert_scale),
        "RENORMALISED": int(op.renormalised or op.scores == "softmax_chosen"),
    }  # fmt: skip
    program = device.programs.get("router.cl", defines)
    weight = device.constant(vector(weights, "router"))
    bias, choice, scale = (
        device.constant(vector(weights, name)) if name in weights else weight
        for name in ("router_bias", "choice_bias", "expert_scale")
    )
    each = EACH_LOGIT if tuning.lanes == 1 else 1
    groups = -(-op.experts // each)

    def launches(operands: Mapping[str, Operand], m: int) -> list[KernelLaunch]:
        tensors = tensors_of(operands)
        logits: Place = (device.shared_scratch(4 * m * op.experts), 0)
        args = (m, tensors["x"], *logits, weight, bias, each, int(op.bias))
        size, local = (tuning.lanes * groups, -(-m // tokens)), (tuning.lanes, 1)
        chosen = (m, *logits, tensors["y"], choice, scale)
        return [
            KernelLaunch(program, "router_logits", size, local, args),
            KernelLaunch(program, "router_choose", (m,), (1,), chosen),
        ]

    copied = 0 if device.capabilities.unified_memory else 4 * op.experts * op.d
    return OpenCLKernel(device, op, launches, keep=(weight, bias, choice, scale), nbytes=copied)


def prepare_experts(
    device: Resources, op: Experts, weights: Mapping[str, WeightValue]
) -> OpenCLKernel:
    """Prepare the launches of every pass of up to `PASS_TOKENS` tokens."""
    plans = {name: _plan(device, op, name, weights) for name in op.matmuls}
    is_own = np.zeros(op.experts, np.int32)
    is_own[list(op.own)] = 1
    mask = device.constant(is_own)
    experts = _Experts(device, op, plans, matmul_tuning(device.tuning.family), mask)

    def launches(operands: Mapping[str, Operand], m: int) -> list[KernelLaunch]:
        tensors = tensors_of(operands)
        made = []
        for start in range(0, m, PASS_TOKENS):
            stop = min(start + PASS_TOKENS, m)
            rows = {port: tensor.rows(start, stop) for port, tensor in tensors.items()}
            made += _Pass(experts, rows, stop - start).launches()
        return made

    copied = 0
    if not device.capabilities.unified_memory:
        copied = sum(packed(weights, name).nbytes for name in plans)
    keep = (*(plan.operands for plan in plans.values()), *weights.values(), mask, is_own)
    return OpenCLKernel(device, op, launches, keep=keep, nbytes=copied)


def _plan(
    device: Resources, op: Experts, name: str, weights: Mapping[str, WeightValue]
) -> MatMulPlan:
    """Return the plan of one expert's rows, on the weights of all."""
    matmul = op.matmuls[name]
    ((_, part),) = packed(weights, name).spans()
    bias = {"bias": weights[f"{name}_bias"]} if op.bias else {}
    operands = matmul_operands(device, part, bias, 0)
    kind = kind_of(op.weight_format, part.storage)
    return MatMulPlan(device, matmul, operands, kind, 0, matmul.n)


@dataclass(frozen=True)
class _Experts:
    """The device, weights and tiles that all passes share."""

    device: Resources
    op: Experts
    plans: Mapping[str, MatMulPlan]
    tuning: CpuTuning | SimtTuning
    is_own: DeviceMemory

    def tile(self, name: str, m: int) -> WorkTile:
        """Return the register tile of a matrix for the tokens that m tokens give an expert."""
        if isinstance(self.tuning, SimtTuning):
            return WorkTile(SIMT_TOKENS, SIMT_TOKENS, 1)
        op = self.op
        each = round(m * op.chosen * len(op.own) / op.experts / op.distinct(m))
        return self.tuning.tile(self.plans[name].kind, max(each, 1))

    def program(self, tile: int) -> cl.Program:
        """Return the program that sorts rows into tiles, and sums them up."""
        op, shifted = self.op, self.op.activation == "swiglu_oai"
        defines: dict[str, Define] = {
            **self.device.tuning.defines, "E": op.experts, "K": op.chosen, "TILE": tile,
            "SHIFTED": int(shifted), "LIMIT": SWIGLU_LIMIT, "ALPHA": SWIGLU_ALPHA,
            "ACTIVATION": "SWIGLU_OAI" if op.activation == "swiglu_oai" else MACROS[op.activation],
        }  # fmt: skip
        return self.device.programs.get("experts.cl", defines, before=("activations.cl",))


class _Pass:
    """The launches of m tokens, and the scratch memory that they share."""

    def __init__(self, experts: _Experts, tensors: Mapping[str, Tensor], m: int) -> None:
        self.experts, self.tensors, self.m = experts, tensors, m
        self.device, op = experts.device, experts.op
        tiles = {name: experts.tile(name, m) for name in experts.plans}
        self.tiles, self.tile = tiles, max(x.tokens for x in tiles.values())
        pairs = m * op.chosen
        most = pairs + min(op.experts, pairs) * (self.tile - 1)
        self.rows = padded(most, self.tile)
        plan_words = 2 * op.experts + 1 + pairs + self.rows + self.rows // self.tile
        sizes = {
            "packed": max(self._packed_words(name) for name in tiles),
            "wide": self.rows * max(op.d, op.f),  # x, then hidden features
            "both": self.rows * max(2 * op.f, op.d),  # gate and up, then products
            "plan": plan_words,
        }
        starts = np.cumsum([0, *(padded(x, 16) for x in sizes.values())]).tolist()
        scratch = self.device.shared_scratch(4 * starts[-1])
        self.places: dict[str, Place] = {
            name: (scratch, start) for name, start in zip(sizes, starts, strict=False)
        }

    def launches(self) -> list[KernelLaunch]:
        """Return all launches, in order."""
        op, place, x = self.experts.op, self.places, self.tensors["x"]
        lanes, plan = self.device.tuning.lanes, self.places["plan"]
        program = self.experts.program(self.tile)
        by_row, local = (lanes, self.rows), (lanes, 1)
        launch = partial(KernelLaunch, program)
        routes = self.tensors["routes"]
        down, target = place["both"], self.tensors["y"]
        sort = (self.m, routes, *plan, self.rows, self.experts.is_own)
        gather = launch(
            "gather", by_row, local, (self.rows, x, *plan, *place["wide"], self.m, op.d)
        )
        return [
            launch("sort_routes", (lanes,), (lanes,), sort),
            *[gather] * (not all(self._packs_routed(name) for name in op.matmuls)),
            *self._products(("experts_gate", "experts_up"), place["both"], 2 * op.f),
            launch(
                "activate_rows", by_row, local,
                (self.rows, *place["both"], *plan, *place["wide"], op.f),
            ),
            *self._products(("experts_down",), down, op.d),
            launch(
                "combine", (lanes, self.m), local, (self.m, *down, routes, *plan, target, op.d)
            ),
        ]  # fmt: skip

    def _products(self, names: tuple[str, ...], target: Place, stride: int) -> list[KernelLaunch]:
        """Return the launches of matrices side by side, of which each has columns of `target`."""
        made: list[KernelLaunch] = []
        inputs: dict[object, Place] = {}
        for i, name in enumerate(names):
            plan = self.experts.plans[name]
            columns = target[0], target[1] + i * plan.n
            if isinstance(self.experts.tuning, CpuTuning):
                made += self._cpu(name, inputs, columns, stride)
            else:
                made += self._simt(name, inputs, columns, stride)
        return made

    def _cpu(
        self, name: str, inputs: dict[object, Place], target: Place, stride: int
    ) -> list[KernelLaunch]:
        plan, tile, tuning = self.experts.plans[name], self.tiles[name], self.experts.tuning
        assert isinstance(tuning, CpuTuning)
        program = cpu_program(plan, tuning, tile, "experts_cpu.cl")
        made = []
        key = (plan.kind, tile)
        if key not in inputs:
            launch = self._packing(name, program)
            made += launch
            inputs.clear()  # there is one place for them
            inputs[key] = self.places["packed" if launch else "wide"]
        count = -(-plan.n // (tuning.rows * tile.vectors))
        groups = min(count, work_items(self.device, 2 if self.m == 1 else 4))
        _, k_panel = tuning.panels(plan.kind, self.rows + tile.tokens, plan.k, tile)
        args = (
            count, *plan.operands.args, *inputs[key], *target, *self.places["plan"],
            self.experts.op.experts, plan.n, stride, plan.k, k_panel, -(-count // groups),
            plan.operands.has_bias,
        )  # fmt: skip
        return [*made, KernelLaunch(program, "expert_rows", (groups,), (1,), args)]

    def _packing(self, name: str, program: cl.Program) -> list[KernelLaunch]:
        """Return the launch that packs the sorted rows, if the kernel does not take them as is."""
        plan, tile, tuning = self.experts.plans[name], self.tiles[name], self.experts.tuning
        assert isinstance(tuning, CpuTuning)
        words = tuning.group_words(plan.kind, tile)
        if words == GROUP_SIZE and tile.tokens == 1 and plan.k == plan.op.k:
            return []
        count = self.rows // tile.tokens
        packed_rows, _ = self.places["packed"]
        if name != "experts_down" and self._packs_routed(name):
            op, (buffer, start) = self.experts.op, self.places["plan"]
            source: Place = (buffer, start + 2 * op.experts + 1 + self.m * op.chosen)
            sizes = (op.experts, plan.op.k, plan.k)
            routed = (count, self.tensors["x"], buffer, start, *source, packed_rows, *sizes)
            return [KernelLaunch(program, "pack_routed", (count,), (1,), routed)]
        args = (count, *self.places["wide"], packed_rows, self.rows, plan.op.k, plan.k)
        return [KernelLaunch(program, "pack", (count,), (1,), args)]

    def _packs_routed(self, name: str) -> bool:
        """Return whether rows are packed from the tokens that they belong to."""
        tuning = self.experts.tuning
        return isinstance(tuning, CpuTuning) and bool(
            tuning.planes(self.experts.plans[name].kind, self.tiles[name])
        )

    def _packed_words(self, name: str) -> int:
        plan, tuning = self.experts.plans[name], self.experts.tuning
        words = GROUP_SIZE
        if isinstance(tuning, CpuTuning):
            words = tuning.group_words(plan.kind, self.tiles[name])
        return self.rows * (padded(plan.k, GROUP_SIZE) // GROUP_SIZE * words + 1)

    def _simt(
        self, name: str, inputs: dict[object, Place], target: Place, stride: int
    ) -> list[KernelLaunch]:
        plan, tuning, op = self.experts.plans[name], self.experts.tuning, self.experts.op
        assert isinstance(tuning, SimtTuning)
        program = simt_program(plan, "experts_simt.cl", tokens=SIMT_TOKENS, splits=tuning.splits)
        made = []
        rounds = not plan.kind.activations.are_floats
        if rounds not in inputs:
            inputs[rounds] = self.places["packed" if rounds else "wide"]
            made += self._rounding(plan, program) if rounds else []
        buffer, start = self.places["plan"]
        tiles = self.rows // self.tile
        of_tiles: Place = (buffer, start + 2 * op.experts + 1 + self.m * op.chosen + self.rows)
        args: tuple[Argument, ...] = (
            tiles, *plan.operands.args, *inputs[rounds], *target, buffer, start, *of_tiles,
            op.experts, plan.n, stride, plan.op.k, plan.operands.has_bias,
        )  # fmt: skip
        size = (ROW_BLOCK * tiles, tuning.splits * (plan.n // ROW_BLOCK))
        local = (ROW_BLOCK, tuning.splits)
        return [*made, KernelLaunch(program, "expert_rows", size, local, args)]

    def _rounding(self, plan: MatMulPlan, program: cl.Program) -> list[KernelLaunch]:
        count = self.rows * padded(plan.op.k, GROUP_SIZE) // GROUP_SIZE
        rounded, _ = self.places["packed"]
        args = (count, *self.places["wide"], rounded, plan.op.k)
        size = (padded(count, SIMT_LANES),)
        return [KernelLaunch(program, "round_activations", size, (SIMT_LANES,), args)]
