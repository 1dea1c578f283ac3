"""Rope, with optional RMSNorm of each query and key head."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np
import pyopencl as cl

from hetero.backends import rope_tables
from hetero.backends.checks import vector
from hetero.backends.opencl.attention import head_vector
from hetero.backends.opencl.calls import Argument, InPanels, KernelLaunch, OpenCLKernel
from hetero.backends.opencl.program_source import Define
from hetero.backends.opencl.resources import Resources
from hetero.backends.ops import Rope, weight_names
from hetero.backends.protocol import Operand, WeightValue, whole


def prepare_rope(device: Resources, op: Rope, weights: Mapping[str, WeightValue]) -> OpenCLKernel:
    """Prepare a work-item per token on a CPU, per token and head on a GPU."""
    tuning = device.tuning
    total = op.heads + 2 * op.kv_heads
    item_heads = total if tuning.lanes == 1 else 1
    program = device.programs.get("rope.cl", _defines(device, op, item_heads))
    cosines, sines = _tables(device, op)
    norms = (
        (cosines, cosines)  # not read
        if op.qk_norm_eps is None
        else tuple(device.constant(vector(weights, name)) for name in weight_names(op))
    )
    norms = norms if len(norms) == 2 else (*norms, *norms)

    def launches(tensors: Mapping[str, Operand], m: int) -> list[KernelLaunch]:
        items = m * (total // item_heads)
        args: tuple[Argument, ...] = (
            items,
            InPanels(tensors["qkv"]),
            whole(tensors["position"]),
            whole(tensors["out"]),
            cosines,
            sines,
            *norms,
        )
        size = -(-items // tuning.lanes) * tuning.lanes
        return [KernelLaunch(program, "rope", (size,), (tuning.lanes,), args)]

    return OpenCLKernel(device, op, launches)


def _defines(device: Resources, op: Rope, item_heads: int) -> dict[str, Define]:
    widest = device.tuning.vector
    defines: dict[str, Define] = {
        **device.tuning.defines,
        "HV": head_vector(op.head_dim, widest),
        "RV": head_vector(op.rotated // 2, widest),
        "HEADS": op.heads,
        "KV_HEADS": op.kv_heads,
        "HEAD_DIM": op.head_dim,
        "ROTATED": op.rotated,
        "ITEM_HEADS": item_heads,
        "TABLES": 2 if op.scales_queries else 1,
        "GATE_HEADS": op.heads if op.gated else 0,
    }
    if op.qk_norm_eps is not None:
        defines["EPS"] = float(op.qk_norm_eps)
        if op.qk_norm_row:
            defines["ROW_NORM"] = 1
        if op.qk_norm_after:
            defines["NORM_AFTER"] = float(rope_tables.attention_factor(op.scaling) ** 2)
    if op.v_norm_eps is not None:
        defines["V_EPS"] = float(op.v_norm_eps)
    return defines


def _tables(device: Resources, op: Rope) -> tuple[cl.Buffer, cl.Buffer]:
    """Return cos and sin in float32, one pair for all layers that rotate alike.

    Those of scaled queries follow those of keys, position by position.
    """
    plain = dict.fromkeys(("qk_norm_row", "qk_norm_after", "gated"), False)
    key = dataclasses.replace(
        op,
        heads=1,
        kv_heads=1,
        qk_norm_eps=None,
        v_norm_eps=None,
        **plain,  # type: ignore[arg-type]
    )
    if key not in device.rope_tables:
        scale = rope_tables.query_scale(op)[:, None]
        factors = (1, scale) if op.scales_queries else (1,)
        cosines, sines = (
            device.constant(np.concatenate([x * y for y in factors], axis=1).astype(np.float32))
            for x in rope_tables.tables(op)
        )
        device.rope_tables[key] = cosines, sines
    return device.rope_tables[key]
