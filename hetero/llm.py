"""`LLM`: the public face of a loaded model."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Self, TypedDict, Unpack

import numpy as np
import numpy.typing as npt

from hetero.backends.protocol import DeviceKind
from hetero.device_set import DeviceMode, DeviceSet, open_devices
from hetero.errors import ModelError, UserError
from hetero.generation import Generation, GenerationResult, Piece
from hetero.models import LoadedModel, open_model
from hetero.runtime.engine import Engine
from hetero.runtime.kernels import Progress
from hetero.sampling import SamplingParams
from hetero.solver.handmade import layer_level, single_device
from hetero.solver.model_spec import ModelSpec
from hetero.solver.plan import ExecutionPlan

DEFAULT_MAX_TOKENS = 256
DEFAULT_CONTEXT = 4096

Message = Mapping[str, str]


class SamplingOptions(TypedDict, total=False):
    """Keyword arguments of `SamplingParams`."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    seed: int | None


class LLM:
    """A language model, ready to answer. A context manager that frees its devices.

    `model` is a Hugging Face directory, a directory written by `hetero quantize`, `demo` or
    `random:NAME`. `device` is `hetero` (both), `gpu`, `npu` or `auto`; `gpu` and `npu` name
    backends. `plan` is an `ExecutionPlan` or a path to one. `weights` is one of w4a16, w4a8, w8a16,
    f16, f32. `max_seq_len` bounds prompt and answer together (default: the model's, at most 4096).

    Calls from several threads are served one after another. A stream holds the model until it is
    exhausted or closed; another call of the thread that reads it is refused. Raises `UserError`
    (`ModelError`) for what the user can mend, `DeviceError` for what a device could not do.
    """

    def __init__(
        self,
        model: str,
        *,
        device: DeviceMode = "hetero",
        gpu: str = "auto",
        npu: str = "auto",
        profile: str | None = None,
        plan: ExecutionPlan | str | os.PathLike[str] | None = None,
        weights: str = "w4a16",
        max_seq_len: int | None = None,
        progress: Progress | None = None,
    ) -> None:
        if profile is not None:
            raise ModelError("profiles are read by the solver, which this version does not have")
        self._lock = threading.Lock()
        self._reader: int | None = None  # thread that holds an unfinished stream
        self._loaded: LoadedModel = open_model(model, weights=weights)
        self.max_seq_len = self._context_length(max_seq_len)
        spec = self._loaded.spec()
        given = ExecutionPlan.load(plan) if isinstance(plan, (str, os.PathLike)) else plan
        if given is not None:
            given.check_fits(spec)
            device = _mode_of(given)
        self.devices: DeviceSet = open_devices(device, gpu=gpu, npu=npu)
        try:
            self.plan = self._choose_plan(given, spec)
            self._engine = Engine(
                self._loaded.weights,
                self.plan,
                self.devices.devices,
                max_seq_len=self.max_seq_len,
                control_core=self.devices.control_core,
                progress=progress,
            )
        except BaseException:
            self.devices.close()
            raise

    @property
    def engine(self) -> Engine:
        """The engine, for benchmarks and tests."""
        return self._engine

    @property
    def model(self) -> LoadedModel:
        """Configuration, weights and tokenizer."""
        return self._loaded

    def encode(self, prompt: str, *, chat: bool = False) -> list[int]:
        """Token ids of a prompt; with `chat` as one user message in the model's template."""
        if chat:
            return self.encode_chat([{"role": "user", "content": prompt}])
        if not prompt:
            raise ModelError("the prompt is empty: give some text to go on from")
        return self._loaded.tokenizer.encode(prompt)

    def generate(
        self,
        prompt: str | Sequence[int],
        *,
        max_tokens: int = DEFAULT_MAX_TOKENS,
        stop: Sequence[str] = (),
        chat: bool = False,
        **sampling: Unpack[SamplingOptions],
    ) -> GenerationResult:
        """The answer to a prompt (text or token ids), greedy unless a temperature is given.

        With `chat` a text goes through the chat template first; ids are taken as they are, and the
        answer is a text of its own instead of going on from the prompt.
        """
        with self._turn():
            generation = self._start(prompt, max_tokens, stop, chat, SamplingParams(**sampling))
            for _ in generation:
                pass
            return generation.result()

    def stream(
        self,
        prompt: str | Sequence[int],
        *,
        max_tokens: int = DEFAULT_MAX_TOKENS,
        stop: Sequence[str] = (),
        chat: bool = False,
        on_end: list[GenerationResult] | None = None,
        **sampling: Unpack[SamplingOptions],
    ) -> Iterator[Piece]:
        """Pieces of the answer as they come; `on_end` receives the finished result."""
        with self._turn():
            generation = self._start(prompt, max_tokens, stop, chat, SamplingParams(**sampling))
            try:
                for piece in generation:
                    self._reader = threading.get_ident()
                    yield piece
            finally:
                self._reader = None
            if on_end is not None:
                on_end.append(generation.result())

    def chat(
        self,
        messages: Sequence[Message],
        *,
        max_tokens: int = DEFAULT_MAX_TOKENS,
        stop: Sequence[str] = (),
        **sampling: Unpack[SamplingOptions],
    ) -> GenerationResult:
        """The next message of a conversation, by the model's chat template."""
        tokens = self.encode_chat(messages)
        return self.generate(tokens, max_tokens=max_tokens, stop=stop, chat=True, **sampling)

    def logits(self, tokens: Sequence[int]) -> npt.NDArray[np.float32]:
        """Logits float32 [tokens, vocab] after every token of a fresh context."""
        with self._turn():
            self._engine.truncate(0)
            return self._engine.score(tokens)

    def close(self) -> None:
        """Free the devices; idempotent. Later calls raise `DeviceLostError`."""
        self._engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """Wait for the other threads' calls. Raises where this thread would wait for itself."""
        if self._reader == threading.get_ident():
            raise UserError(
                "a stream of this model is unfinished: read it to its end or close() it before the "
                "next call"
            )
        with self._lock:
            yield

    def _start(
        self,
        prompt: str | Sequence[int],
        max_tokens: int,
        stop: Sequence[str],
        chat: bool,
        sampling: SamplingParams,
    ) -> Generation:
        tokens = self.encode(prompt, chat=chat) if isinstance(prompt, str) else list(prompt)
        self._engine.truncate(0)
        self._engine.check(tokens)
        return Generation(
            self._engine,
            self._loaded.tokenizer,
            tokens,
            sampling,
            max_tokens=max_tokens,
            continues=not chat,
            eos_ids=self._loaded.eos_ids,
            stop=stop,
            fallback=self.devices.fallback,
        )

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of a conversation, by the model's chat template."""
        return self._loaded.tokenizer.encode_chat([dict(message) for message in messages])

    def _context_length(self, asked: int | None) -> int:
        limit = self._loaded.config.max_position
        if asked is None:
            return min(limit, DEFAULT_CONTEXT)
        if not 1 <= asked <= limit:
            raise ModelError(
                f"max_seq_len must be in [1, {limit}] for {self._loaded.name}, got {asked}"
            )
        return asked

    def _choose_plan(self, given: ExecutionPlan | None, spec: ModelSpec) -> ExecutionPlan:
        kinds = frozenset(self.devices.devices)
        if given is not None and given.devices() <= kinds:
            return given
        if kinds == {"gpu", "npu"}:
            return layer_level(spec)
        (only,) = kinds
        return single_device(spec, only)


def _mode_of(plan: ExecutionPlan) -> DeviceMode:
    """Devices that a plan needs."""
    kinds: frozenset[DeviceKind] = plan.devices()
    if len(kinds) == 2:
        return "hetero"
    (only,) = kinds
    return only
