"""Small ONNX graphs, node by node."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from onnx import TensorProto, helper, numpy_helper

CONTRIB = "com.microsoft"
OPSET = 21
IR_VERSION = 10
# Initializers whose bytes are given to the session in memory still need a file that exists.
PLACEHOLDER_FILE = Path(__file__)

Dim: TypeAlias = int | str


class GraphBuilder:
    """Collects nodes and hands out tensor names. Names of inputs and outputs are the caller's."""

    def __init__(self) -> None:
        self._nodes: list[Any] = []
        self._inputs: list[Any] = []
        self._outputs: list[Any] = []
        self._initializers: list[Any] = []

    def input(self, name: str, dtype: npt.DTypeLike, shape: tuple[Dim, ...]) -> str:
        """Declare a graph input."""
        self._inputs.append(helper.make_tensor_value_info(name, _element_type(dtype), shape))
        return name

    def output(self, name: str, dtype: npt.DTypeLike, shape: tuple[Dim, ...]) -> str:
        """Declare a graph output; some node must write this name."""
        self._outputs.append(helper.make_tensor_value_info(name, _element_type(dtype), shape))
        return name

    @property
    def input_names(self) -> frozenset[str]:
        """Return the names of the graph's inputs so far."""
        return frozenset(value.name for value in self._inputs)

    def constant(self, value: npt.NDArray[Any]) -> str:
        """Return a small tensor stored in the graph."""
        name = f"constant_{len(self._initializers)}"
        self._initializers.append(numpy_helper.from_array(np.asarray(value), name))
        return name

    def int4(self, values: npt.NDArray[np.int8]) -> str:
        """Return a constant of 4-bit integers in [-8, 7]."""
        flat = np.append(values.reshape(-1), np.zeros(values.size % 2, np.int8)) & 15
        packed = (flat[0::2] | (flat[1::2] << 4)).astype(np.uint8)
        name = f"constant_{len(self._initializers)}"
        made = helper.make_tensor(name, TensorProto.INT4, values.shape, packed.tobytes(), raw=True)
        self._initializers.append(made)
        return name

    def ints(self, *values: int) -> str:
        """Return a constant int64 vector, as shapes, axes and bounds are given."""
        return self.constant(np.array(values, dtype=np.int64))

    def scalar(self, value: float, dtype: npt.DTypeLike = np.float32) -> str:
        """Return a constant scalar, float32 by default."""
        return self.constant(np.array(value, dtype=dtype))

    def cast(self, value: str, dtype: npt.DTypeLike, out: str = "") -> str:
        """Convert the element type."""
        return self.node("Cast", value, out=out, to=_element_type(dtype))

    def slice(self, value: str, start: int, stop: int, axis: int) -> str:
        """Return elements [start, stop) along an axis."""
        return self.node("Slice", value, self.ints(start), self.ints(stop), self.ints(axis))

    def weight(self, name: str, dtype: npt.DTypeLike, shape: tuple[int, ...]) -> str:
        """Return a tensor that the session reads from memory.

        By `SessionOptions.add_initializer`.
        """
        proto = TensorProto(name=name, data_type=_element_type(dtype), dims=shape)
        proto.data_location = TensorProto.EXTERNAL
        proto.external_data.add(key="location", value=PLACEHOLDER_FILE.name)
        self._initializers.append(proto)
        return name

    def node(
        self,
        kind: str,
        *inputs: str,
        out: str | tuple[str, ...] = "",
        domain: str = "",
        **attrs: Any,
    ) -> str:
        """Append a node; returns its first output, named by `out` or freshly."""
        outputs = (out or f"t{len(self._nodes)}",) if isinstance(out, str) else out
        self._nodes.append(helper.make_node(kind, inputs, outputs, domain=domain, **attrs))
        return outputs[0]

    def model(self, opset: int = OPSET) -> bytes:
        """Return the serialised model."""
        graph = helper.make_graph(
            self._nodes, "hetero", self._inputs, self._outputs, self._initializers
        )
        opsets = [helper.make_opsetid("", opset), helper.make_opsetid(CONTRIB, 1)]
        model = helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION)
        serialized: bytes = model.SerializeToString()
        return serialized


def _element_type(dtype: npt.DTypeLike) -> int:
    return int(helper.np_dtype_to_tensor_dtype(np.dtype(dtype)))
