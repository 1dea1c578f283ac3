"""Routed feed-forwards: a graph that routes, and one session for each matrix of each expert.

The host sorts tokens by expert between them: their numbers are in its memory anyway.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import onnxruntime as ort

from hetero.backends import ops
from hetero.backends.memory import Tensor
from hetero.backends.onnx_common.binding import Array, HostStep
from hetero.backends.onnx_common.builder import CONTRIB, GraphBuilder
from hetero.backends.ort_cpu import graphs
from hetero.backends.ort_cpu.kernels import OrtHost, OrtKernel, OrtMatMulKernel, Prepared

F32 = np.float32


def router(op: ops.Router) -> bytes:
    """Return the choice of experts. Inputs besides `x`: the weights of `ops.Router`."""
    graph = GraphBuilder()
    x = graph.input("x", F32, ("m", op.d))
    weight = graph.input("router", F32, (op.experts, op.d))
    bias = graph.input("router_bias", F32, (op.experts,)) if op.bias else ""
    graph.output("y", F32, ("m", 2 * op.chosen))
    scores = graph.node("Gemm", *filter(None, (x, weight, bias)), transB=1)
    if op.scores == "sigmoid":
        scores = graph.node("Sigmoid", scores)
    elif op.scores == "softmax":
        scores = graph.node("Softmax", scores, axis=-1)
    preferred = scores
    if op.choice_bias:
        preferred = graph.node("Add", scores, graph.input("choice_bias", F32, (op.experts,)))
    graph.node("TopK", preferred, graph.ints(op.chosen), out=("_", "chosen"), axis=-1)
    shares = graph.node("GatherElements", scores, "chosen", axis=1)
    if op.scores == "softmax_chosen":
        shares = graph.node("Softmax", shares, axis=-1)
    elif op.renormalised:
        total = graph.node("ReduceSum", shares, graph.ints(1), keepdims=1)
        shares = graph.node("Div", shares, graph.node("Add", total, graph.scalar(op.eps)))
    shares = graph.node("Mul", shares, graph.scalar(op.scale))
    if op.expert_scale:
        factors = graph.input("expert_scale", F32, (op.experts,))
        shares = graph.node("Mul", shares, graph.node("Gather", factors, "chosen"))
    graph.node("Concat", graph.cast("chosen", F32), shares, axis=1, out="y")
    return graph.model()


class ExpertActivation(NamedTuple):
    """The key of a session: act(gate) · up of f features."""

    f: int
    activation: ops.ExpertActivation


def activation(key: ExpertActivation) -> bytes:
    """Return act(gate) · up."""
    graph = GraphBuilder()
    gate, up = (graph.input(name, F32, ("m", key.f)) for name in ("gate", "up"))
    graph.output("y", F32, ("m", key.f))
    if key.activation == "swiglu_oai":
        least, most = (graph.scalar(x) for x in (-ops.SWIGLU_LIMIT, ops.SWIGLU_LIMIT))
        gate = graph.node("Min", gate, most)
        up = graph.node("Add", graph.node("Clip", up, least, most), graph.scalar(1.0))
        gate = graph.node("QuickGelu", gate, domain=CONTRIB, alpha=ops.SWIGLU_ALPHA)
    else:
        gate = graphs.activated(graph, key.activation, gate)
    graph.node("Mul", gate, up, out="y")
    return graph.model()


class ExpertsKernel(OrtKernel):
    """`products` has the kernel of each own expert by the name of its matrix."""

    def __init__(
        self,
        host: OrtHost,
        op: ops.Experts,
        products: Mapping[str, Sequence[OrtMatMulKernel]],
        session: ort.InferenceSession,
    ) -> None:
        nbytes = sum(kernel.nbytes for kernels in products.values() for kernel in kernels)
        super().__init__(host, op, nbytes=nbytes)
        self._products, self._activation = dict(products), session
        self._own = np.asarray(op.own)

    def launches(self, tensors: Mapping[str, Tensor], m: int) -> Prepared:
        arrays = {port: tensor.array[:m] for port, tensor in tensors.items()}
        return [HostStep(self._compute, arrays)], None, None

    def _compute(self, arrays: Mapping[str, Array]) -> None:
        x, y = arrays["x"], arrays["y"]
        chosen, shares = np.split(arrays["routes"], 2, axis=1)
        y[...] = 0
        for i in np.flatnonzero(np.isin(self._own, chosen)).tolist():
            tokens, places = np.nonzero(chosen == self._own[i])
            rows = x[tokens]
            gate, up = (self._products[k][i].product(rows) for k in ("experts_gate", "experts_up"))
            hidden = self._activation.run(None, {"gate": gate, "up": up})[0]
            product = self._products["experts_down"][i].product(hidden)
            y[tokens] += shares[tokens, places, None] * product

    def release(self) -> None:
        super().release()
        for kernels in self._products.values():
            for kernel in kernels:
                kernel.release()
        self._products.clear()
