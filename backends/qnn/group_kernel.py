"""A group as one kernel: everything that its operations need from the host, around one graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
import onnxruntime as ort

from hetero.backends import checks, ops
from hetero.backends.errors import DeviceError
from hetero.backends.groups import Group
from hetero.backends.memory import Tensor
from hetero.backends.onnx_common.binding import Argument, Array, argument, rows_argument
from hetero.backends.protocol import (
    BoundCall,
    Operand,
    check_shape,
    port_dtype,
    port_shape,
    whole,
)
from hetero.backends.qnn import graphs, ranges
from hetero.backends.qnn.catalog import contexts, group_chunk_rows
from hetero.backends.qnn.graphs import result, results
from hetero.backends.qnn.kernels import (
    Mask,
    Masks,
    QnnCall,
    QnnHost,
    QnnKernel,
    Rows,
    Run,
    float_rope_tables,
)
from hetero.backends.qnn.library import BACKEND
from hetero.backends.qnn.shared_memory import io_binding

HIGHEST = 1 - 1 / 254  # of the largest code that is certain to stand for no larger value
CLIPPED = "CODES_CLIPPED: a result is beyond its codes, which a group does not compute again"
GroupSessions = Callable[[int, int], ort.InferenceSession]


class GroupLaunch(NamedTuple):
    """The graph for one context length, bound.

    `mask` is None without attention. `peaks` [steps, 1] are the largest codes of its matmuls of
    codes, over the last one.
    """

    context: int
    session: ort.InferenceSession
    binding: ort.IOBinding
    mask: Mask | None
    peaks: Array


class GroupKernel(QnnKernel):
    """Bound to the group's slots; `appends` this call's keys and values to the caches."""

    def __init__(
        self, host: QnnHost, group: Group, sessions: GroupSessions, masks: Masks, *, nbytes: int
    ) -> None:
        super().__init__(host, group.steps[0].op, nbytes=nbytes)
        self._group, self._sessions, self._masks = group, sessions, masks
        self._attention = group.attention
        turns = (step.op for step in group.steps if isinstance(step.op, ops.Rope))
        self._rope = next(turns, None)
        self._tables = {} if self._rope is None else float_rope_tables(self._rope)

    def bind(self, tensors: Mapping[str, Operand], m: int) -> BoundCall:
        self.host.health.check(f"binding {self._group.name}")
        plain = self._checked(tensors, m)
        checks.check_token_count(self.host.capabilities, self.op, m)
        step = group_chunk_rows(self._group)
        runs = [
            self.chunk(self._rows(plain, start, min(start + step, m)), start)
            for start in range(0, m, step)
        ]
        call = QnnCall(self.call_name(m), m, self.host.health, runs)
        self._calls.add(call)
        return call

    def call_name(self, m: int) -> str:
        return f"{self._group.name} m={m}"

    def _checked(self, tensors: Mapping[str, Operand], m: int) -> dict[str, Tensor]:
        group = self._group
        names = {*group.inputs, *group.outputs, *group.fixed}
        if set(tensors) != names:
            raise ValueError(
                f"{group.name} takes the tensors {sorted(names)}, got {sorted(tensors)}"
            )
        first = group.steps[0].op
        for slot, shape in group.shapes((*group.inputs, *group.outputs)):
            check_shape(group.name, slot, tensors[slot], (m, *shape), port_dtype(first, slot))
        for name, (slot, port) in group.fixed.items():
            op = next(step.op for step in group.steps if (port, slot) in step.slots)
            shape = port_shape(op, port, m)
            check_shape(group.name, name, tensors[name], shape, port_dtype(op, port), fixed=True)
        return {slot: whole(operand) for slot, operand in tensors.items()}

    def _rows(self, tensors: Mapping[str, Tensor], start: int, stop: int) -> dict[str, Tensor]:
        fixed = self._group.fixed
        return {s: t if s in fixed else t.rows(start, stop) for s, t in tensors.items()}

    def chunk(self, tensors: Mapping[str, Tensor], offset: int) -> Run:
        group, op = self._group, self._attention
        m = tensors[group.inputs[0]].shape[0]
        rows = Rows(self._tables, m)
        own = self._own(m)
        launches = [self._launch(tensors, rows, own, m, c) for c in self._contexts(m)]
        guard = ranges.RangeGuard(
            self.call_name(m),
            [tensors[slot].array for slot in group.inputs],
            [tensors[slot].array for slot in group.outputs] + [a for a in (own,) if a is not None],
            keep=(tensors, rows, launches),
        )
        caches = [tensors[port].array for port in ("k_cache", "v_cache")] if op else []
        position = tensors["position"].array if "position" in tensors else np.zeros(1, np.int32)
        row = tensors["cache_row"].array if "cache_row" in tensors else position
        limit = op.capacity if op else (self._rope.max_position if self._rope else m + offset)
        name = self.call_name(m)

        def run() -> None:
            first = checks.first_position(BACKEND, name, row, m + offset, limit) + offset
            guard.before()
            rows.at(int(position[0]) + offset)
            launch = next(x for x in launches if x.mask is None or first <= x.context)
            if launch.mask is not None:
                launch.mask.at(first)
            launch.session.run_with_iobinding(launch.binding)
            guard.after()
            if (launch.peaks > HIGHEST).any():
                raise DeviceError(BACKEND, name, CLIPPED, 'give a plan without "fused"')
            if op is not None and own is not None:
                _append(op, own, caches, first)

        return run

    def _contexts(self, m: int) -> list[int]:
        return [0] if self._attention is None else contexts(self._attention.capacity, m)

    def _own(self, m: int) -> Array | None:
        """Return where the queries, keys and values that attention reads are given out."""
        op = self._attention
        return None if op is None else np.zeros((m, op.width), np.float32)

    def _launch(
        self, tensors: Mapping[str, Tensor], rows: Rows, own: Array | None, m: int, context: int
    ) -> GroupLaunch:
        group, op = self._group, self._attention
        session = self._sessions(m, context)
        inputs: dict[str, Argument] = {s: rows_argument(tensors[s], m) for s in group.inputs}
        inputs |= {name: argument(array) for name, array in rows.arrays.items()}
        mask = None
        if op is not None:
            mask = self._masks.find(m, context, op.window, appends=True)
            inputs |= {"visible": argument(mask.visible), "written": argument(mask.written)}
            for kind in "kv":
                for head, cache in enumerate(tensors[f"{kind}_cache"].array):
                    inputs[f"{kind}{head}"] = argument(cache[:context])
        outputs = {result(slot): rows_argument(tensors[slot], m) for slot in group.outputs}
        for slot in set(results(group)) - set(group.outputs):
            assert own is not None
            outputs[result(slot)] = argument(own)
        peaks = np.zeros((len(graphs.peaks(group)), 1, 1), np.float32)
        outputs |= {at: argument(row) for at, row in zip(graphs.peaks(group), peaks, strict=True)}
        return GroupLaunch(context, session, io_binding(session, inputs, outputs), mask, peaks)


def _append(op: ops.Attention, own: Array, caches: list[Array], first: int) -> None:
    """Write this call's keys and values, the last heads of `own` [m, width], to the caches."""
    m = len(own)
    heads = own.reshape(m, -1, op.head_dim).transpose(1, 0, 2)[op.heads :]  # [2G, m, D]
    for cache, part in zip(caches, np.split(heads, 2), strict=True):
        cache[:, first : first + m] = part
