"""The engine: runs a model's decoder on the devices of one `ExecutionPlan`."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt

from hetero.backends.affinity import pinned
from hetero.backends.errors import DeviceLostError
from hetero.backends.memory import Tensor
from hetero.backends.ops import WeightFormat
from hetero.backends.protocol import BoundCall, DeviceKind
from hetero.errors import UserError
from hetero.models.weights import ModelWeights
from hetero.runtime.decoder import Node, decoder_nodes
from hetero.runtime.executor import Executor, Step, Usage, make_segments
from hetero.runtime.kernels import Devices, Progress, node_device, prepare_kernels
from hetero.runtime.pieces import padded_size, split
from hetero.runtime.pool import ActivationPool
from hetero.solver.plan import ExecutionPlan, Phase

LONGEST_PIECE = 512
SCORING_PIECE = 32
STEPS_KEPT = 24


class ContextFullError(UserError):
    """More tokens than the context holds."""


class Engine:
    """One model, its KV cache and its lowered steps. Used by one thread at a time.

    A phase and token count is lowered once to a `Step`; the last `STEPS_KEPT` are kept. Tokens are
    given by `prefill` and `decode`, which return float32 logits [vocab] of the last token as a view
    that the next call overwrites. `position` is the number of tokens in the cache.
    """

    def __init__(
        self,
        weights: ModelWeights,
        plan: ExecutionPlan,
        devices: Devices,
        *,
        max_seq_len: int,
        control_core: int | None = None,
        progress: Progress | None = None,
    ) -> None:
        config = weights.config
        self.config = config
        self.plan = plan
        self.devices = dict(devices)
        self.max_seq_len = max_seq_len
        self.position = 0
        self.executor = Executor()
        self._control_core = control_core
        self._static_sizes = self._find_static_sizes()
        self._longest = min([LONGEST_PIECE, *(max(s) for s in self._static_sizes.values() if s)])
        # A padded last piece writes rows behind the last token; they lie beyond every context.
        capacity = max_seq_len + self._longest
        self.nodes = decoder_nodes(config, WeightFormat(weights.weight_format), capacity)
        self.kernels = prepare_kernels(self.nodes, weights, plan, self.devices, progress)
        owner = self.devices.get("npu") or self.devices["gpu"]
        self.pool = ActivationPool(
            config,
            tokens=self._longest,
            capacity=capacity,
            owner=owner,
            logit_rows=SCORING_PIECE,
        )
        self.pool.map_to(self.devices.values())
        self._steps: OrderedDict[tuple[Phase, int, int], Step] = OrderedDict()
        self._closed = False

    def prefill(self, tokens: Sequence[int]) -> npt.NDArray[np.float32]:
        """Append a prompt to the context, in pieces; logits [vocab] after its last token."""
        self.check(tokens)
        pieces = split(len(tokens), self._piece_sizes("prefill"), self._longest)
        start = 0
        for i, count in enumerate(pieces):
            rows = 1 if i == len(pieces) - 1 else 0
            self._run("prefill", tokens[start : start + count], rows)
            start += count
        return self._last_logits()

    def decode(self, token: int) -> npt.NDArray[np.float32]:
        """Append one token to the context; logits [vocab] after it."""
        self.check((token,))
        self._run("decode", (token,), 1)
        return self._last_logits()

    def score(self, tokens: Sequence[int]) -> npt.NDArray[np.float32]:
        """Append tokens; a copy of the logits [tokens, vocab] after every one."""
        self.check(tokens)
        parts = []
        for start in range(0, len(tokens), SCORING_PIECE):
            piece = tokens[start : start + SCORING_PIECE]
            for count in split(len(piece), self._piece_sizes("prefill"), SCORING_PIECE):
                self._run("prefill", piece[:count], count)
                parts.append(self._logits(count).copy())
                piece = piece[count:]
        return np.concatenate(parts)

    def truncate(self, position: int) -> None:
        """Forget every token from `position` on."""
        if not 0 <= position <= self.position:
            raise ValueError(f"the context holds {self.position} tokens, cannot cut at {position}")
        self.position = position

    def usage(self) -> dict[DeviceKind, Usage]:
        """What each device did since the last `reset_usage`."""
        return {kind: Usage(u.ops, u.busy_s) for kind, u in self.executor.usage.items()}

    def reset_usage(self) -> None:
        """Start counting anew."""
        self.executor.usage.clear()

    def step(self, phase: Phase, m: int, logit_rows: int = 1) -> Step:
        """The lowered step of m tokens whose last `logit_rows` rows get logits."""
        key = (phase, m, logit_rows)
        if key not in self._steps:
            self._steps[key] = self._lower(phase, m, logit_rows)
            if len(self._steps) > STEPS_KEPT:
                self._steps.popitem(last=False)
        self._steps.move_to_end(key)
        return self._steps[key]

    def close(self) -> None:
        """Release the devices; idempotent."""
        self._closed = True
        self._steps.clear()
        for device in self.devices.values():
            device.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _run(self, phase: Phase, tokens: Sequence[int], logit_rows: int) -> None:
        step = self.step(phase, len(tokens), logit_rows)
        slot = self.pool["tokens"].array
        slot[: len(tokens)] = tokens
        slot[len(tokens) :] = 0
        self.pool["position"].array[0] = self.position
        with pinned(self._control_core):
            self.executor.run(step)
        self.position += len(tokens)

    def _last_logits(self) -> npt.NDArray[np.float32]:
        logits: npt.NDArray[np.float32] = self.pool["logits"].array[0]
        return logits

    def _logits(self, rows: int) -> npt.NDArray[np.float32]:
        logits: npt.NDArray[np.float32] = self.pool["logits"].array[:rows]
        return logits

    def check(self, tokens: Sequence[int]) -> None:
        """Raise what `prefill(tokens)` would raise, without running anything."""
        if self._closed:
            raise DeviceLostError("engine", "running the model", "the model was closed")
        if not len(tokens):
            raise UserError("the prompt is empty: give at least one token")
        if self.position + len(tokens) > self.max_seq_len:
            raise ContextFullError(
                f"{self.position + len(tokens)} tokens do not fit the context of "
                f"{self.max_seq_len}: shorten the prompt or open the model with a larger "
                "max_seq_len"
            )
        bad = next((t for t in tokens if not 0 <= t < self.config.vocab_size), None)
        if bad is not None:
            raise UserError(f"token id {bad} is outside the vocabulary of {self.config.vocab_size}")

    def _find_static_sizes(self) -> dict[DeviceKind, tuple[int, ...]]:
        """Graph sizes of devices with static shapes; an empty tuple for the others."""
        return {
            kind: device.capabilities.graph_sizes if device.capabilities.static_shapes else ()
            for kind, device in self.devices.items()
        }

    def _piece_sizes(self, phase: Phase) -> tuple[int, ...]:
        """Graph sizes that pieces should fill: those of the device that has the phase's matmuls."""
        kinds = {
            node_device(self.plan, node, phase, 1) for node in self.nodes if node.layer is not None
        }
        sizes = [set(self._static_sizes[kind]) for kind in kinds if self._static_sizes[kind]]
        return tuple(sorted(set.intersection(*sizes))) if sizes else ()

    def _lower(self, phase: Phase, m: int, logit_rows: int) -> Step:
        calls: list[tuple[DeviceKind, bool, BoundCall]] = []
        for node in self.nodes:
            if node.name == "lm_head" and not logit_rows:
                continue
            kind = node_device(self.plan, node, phase, m)
            rows = logit_rows if node.name == "lm_head" else m
            graph = padded_size(rows, self._static_sizes[kind])
            call = self.kernels.get(node, kind).bind(self._tensors(node, m, rows, graph), graph)
            calls.append((kind, self.devices[kind].capabilities.asynchronous, call))
        return Step(m, make_segments(calls), tuple(call for _, _, call in calls))

    def _tensors(self, node: Node, m: int, rows: int, graph: int) -> dict[str, Tensor]:
        tensors = {port: self.pool[slot] for port, slot in node.slots.items()}
        if node.name == "lm_head":
            last = min(m, self.pool.tokens)
            first = last - rows
            stop = min(first + graph, self.pool.tokens)
            tensors["x"] = tensors["x"].rows(first, stop)
        return tensors
