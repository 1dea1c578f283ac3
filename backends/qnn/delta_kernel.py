"""The kernel of a gated delta rule: graphs of chunks (`delta_matmuls`), and what the host keeps."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from hetero.backends import ops
from hetero.backends.memory import Tensor
from hetero.backends.onnx_common.binding import Array, argument
from hetero.backends.qnn import ranges
from hetero.backends.qnn.delta_matmuls import KEY_FACTOR, VALUE_FACTOR
from hetero.backends.qnn.kernels import QnnHost, QnnKernel, Run, Sessions
from hetero.backends.qnn.shared_memory import io_binding

F32 = np.float32


class DeltaKernel(QnnKernel):
    """A gated delta rule in chunks: the host keeps the state and computes beta and g.

    Its calls are of any number of tokens, for padded ones would change the state. Graphs are of
    powers of two of them; rows behind a call's last are zeros.
    """

    def __init__(
        self,
        host: QnnHost,
        op: ops.GatedDelta,
        sessions: Sessions,
        vectors: Mapping[str, Array],
    ) -> None:
        super().__init__(host, op)
        self._delta, self._sessions, self._vectors = op, sessions, dict(vectors)

    def chunk(self, tensors: Mapping[str, Tensor], offset: int) -> Run:
        op, own, gates = self._delta, tensors["x"].array, tensors["gates"].array
        m, name = len(own), self.call_name(len(own))
        rows = 1 << (m - 1).bit_length()
        session, state = self._sessions(rows), tensors["delta_state"].array
        inputs = {
            "x": np.zeros((rows, op.columns), F32),
            "z": np.zeros((rows, op.values), F32),
            "beta": np.zeros((op.v_heads, rows, 1), F32),
            "g": np.zeros((op.v_heads, rows), F32),
            "delta_state": np.zeros(state.shape, F32),
            "norm": self._vectors["norm"],
        }
        y, peak = np.empty((rows, op.values), F32), np.empty((1, 1), F32)
        outputs = {"y": y, "next_state": np.empty(state.shape, F32), "peak": peak}
        binding = io_binding(
            session,
            {key: argument(array) for key, array in inputs.items()},
            {key: argument(array) for key, array in outputs.items()},
        )
        before = inputs["delta_state"]
        guard = ranges.RangeGuard(
            name,
            [inputs["x"], inputs["z"], before],
            [y, outputs["next_state"], peak],
            keep=(tensors, inputs, outputs),
        )
        first = gates.shape[1] - op.values - 2 * op.v_heads
        used = gates[:, first:]
        factors = np.full(op.columns, VALUE_FACTOR, F32)
        factors[: 2 * op.k_heads * op.k_dim] = KEY_FACTOR
        position, target = tensors["position"].array, tensors["y"].array

        def run() -> None:
            before[...] = 0 if position[0] + offset == 0 else state * VALUE_FACTOR
            np.multiply(own, factors, out=inputs["x"][:m])
            inputs["z"][:m] = used[:, : op.values]
            beta, g = self._beta_and_g(used[:, op.values :])
            inputs["beta"][:, :m, 0], inputs["g"][:, :m] = beta.T, g.T
            guard.before()
            session.run_with_iobinding(binding)
            guard.after()
            target[...] = y[:m]
            np.divide(outputs["next_state"], VALUE_FACTOR, out=state)

        return run

    def _beta_and_g(self, b_and_a: Array) -> tuple[Array, Array]:
        """Return beta and g, [m, H]."""
        b, a = np.split(b_and_a, 2, axis=1)
        decay, dt_bias = self._vectors["decay"], self._vectors["dt_bias"]
        beta = 0.5 + 0.5 * np.tanh(0.5 * b)
        return beta, np.maximum(decay * np.logaddexp(0, a + dt_bias), -ranges.LARGEST)
