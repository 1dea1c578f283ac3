"""`LLM`: the public face of a loaded model."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self, Unpack

import numpy as np
import numpy.typing as npt

from hetero.arguments import (
    Message,
    check_count,
    check_ids,
    check_messages,
    check_prompt,
)
from hetero.backends.errors import DeviceLostError, KernelBuildError
from hetero.backends.host import forks
from hetero.backends.host.files import is_replaceable
from hetero.backends.protocol import DeviceKind
from hetero.compiling.bundle import find_bundle
from hetero.contexts import session_file
from hetero.contexts.conversation import Conversation
from hetero.errors import ModelError, UserError
from hetero.generation.loop import Generation, GenerationResult, Piece
from hetero.generation.options import GenerateOptions, read_options
from hetero.models import LoadedModel, open_model
from hetero.placement.choosing import Choice, Wishes, choose, plan_on
from hetero.placement.device_set import DeviceMode, DeviceSet, open_devices
from hetero.placement.planning import ProfileLike, parse_size
from hetero.runtime.engine import ContextFullError, Engine, pool_bytes
from hetero.runtime.kernels import Progress
from hetero.runtime.waits import SyncMethod
from hetero.solver.model_spec import ModelSpec
from hetero.solver.plan import STEP_TOKENS, ExecutionPlan, NamedStrategy

DEFAULT_CONTEXT = 4096
IN_USE = "another thread was using it when this process was forked"


class LLM:
    """A language model, ready to answer. A context manager that frees its devices.

    `model` is a Hugging Face directory, a `.gguf` file, a directory written by `hetero quantize`,
    `demo` or `random:NAME`. `device` is `hetero` (both, the default), `gpu`, `npu` or `auto`; `gpu`
    and `npu` name backends. `plan` is an `ExecutionPlan` or a path to one; the devices are then
    those of the plan, and naming others is an error. `profile` is a `DeviceProfile`, a file or a
    shipped name that the plan is made from (default: this machine's); `strategy` forces one, and
    `choice` says what was chosen and why. `prompt_lengths` are those to plan for, and to compare
    devices by; where they are not known `first_prompt` (a text or token ids) tells `auto` what will
    be asked first. `weights` is one of w4a16, w4a8, w8a16, f16, f32
    (default: what a quantised directory holds, else w4a16). `max_seq_len` bounds prompt and answer
    together (default: the model's, at most 4096). `max_gpu_share` (0 to 1) leaves the rest of the
    GPU's time to others, in the plan and in every step; `memory_budget` (`4GiB`, or bytes) bounds
    weights, activations and caches. Where a solver made the plan its cuts follow the devices'
    measured speeds, unless `adapt` is off: answers may then differ in the last bits of their
    logits.

    Calls from several threads are served one after another. A stream holds the model until it is
    exhausted or closed; another call of the thread that reads it is refused. Raises `UserError`
    (`ModelError`) for what the user can mend, `DeviceError` for what a device could not do.
    """

    def __init__(
        self,
        model: str,
        *,
        device: DeviceMode | None = None,
        gpu: str = "auto",
        npu: str = "auto",
        profile: ProfileLike = None,
        plan: ExecutionPlan | str | os.PathLike[str] | None = None,
        weights: str | None = None,
        max_seq_len: int | None = None,
        sync: SyncMethod = "fast",
        strategy: NamedStrategy | None = None,
        prompt_lengths: Sequence[int] = (),
        first_prompt: str | Sequence[int] | None = None,
        max_gpu_share: float = 1.0,
        memory_budget: str | int | None = None,
        adapt: bool = True,
        progress: Progress | None = None,
    ) -> None:
        self._lock = threading.Lock()
        self._reader: int | None = None  # thread that holds an unfinished stream
        self._lost = False
        forks.in_child(self._forked)
        self._loaded: LoadedModel = open_model(model, weights=weights)
        bundle = find_bundle(model)
        length = bundle.max_seq_len if bundle is not None and max_seq_len is None else max_seq_len
        self.max_seq_len = self._context_length(length)
        spec = self._loaded.spec()
        if (
            bundle is not None
            and plan is None
            and npu in ("auto", "qnn")
            and device in (None, "hetero")
        ):
            plan = bundle.load_plan(model)
        given = ExecutionPlan.load(plan) if isinstance(plan, (str, os.PathLike)) else plan
        if given is not None:
            given.check_fits(spec)
            device = _device_of(given, device)
        self._context: list[int] = []  # tokens that the KV cache holds
        budget = None if memory_budget is None else parse_size(memory_budget)
        wishes = Wishes(
            mode=device or "hetero",
            gpu=gpu,
            npu=npu,
            profile=profile,
            plan=given,
            strategy=strategy or "auto",
            seq_lens=prompt_lengths,
            expected=() if first_prompt is None or device != "auto" else self._count(first_prompt),
            context=self.max_seq_len,
            max_gpu_share=max_gpu_share,
            weight_budget_bytes=self._weight_budget(budget),
        )
        self.choice: Choice = choose(spec, wishes)
        options = {} if bundle is None else bundle.npu_options(model)
        self.devices: DeviceSet = open_devices(
            self.choice.mode, gpu=self.choice.gpu or gpu, npu=npu, compiled=options
        )
        make = partial(
            self._make_engine,
            spec,
            sync=sync,
            progress=progress,
            memory_budget_bytes=budget,
            max_gpu_share=max_gpu_share,
            adapt=adapt,
        )
        try:
            try:
                self._engine = make()
            except KernelBuildError as error:
                self.devices.without_gpu(str(error), npu)
                self._engine = make()
        except BaseException:
            self.devices.close()
            raise

    def _make_engine(self, spec: ModelSpec, *, adapt: bool, **options: Any) -> Engine:
        """The engine of the plan on the devices that are open."""
        devices = self.devices.devices
        self.plan = plan_on(self.choice, spec, devices)
        return Engine(
            self._loaded.weights,
            self.plan,
            devices,
            max_seq_len=self.max_seq_len,
            control_core=self.devices.control_core,
            solver=self.choice.solver_on(devices),
            adapt=adapt and self.devices.numbers == "measured",
            **options,
        )

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
        return self._loaded.encode(prompt)

    def generate(
        self, prompt: str | Sequence[int], **options: Unpack[GenerateOptions]
    ) -> GenerationResult:
        """The answer to a prompt (text or token ids), greedy unless a temperature is given.

        With `chat` a text goes through the chat template first; ids are taken as they are, and the
        answer is a text of its own instead of going on from the prompt. Equal seeds give equal
        answers on one machine and plan. `speculative` tokens are guessed ahead from the text so
        far (`hetero.generation.speculative`), which changes no answer.
        """
        with self._turn():
            generation = self._start(prompt, options)
            for _ in self._pieces(generation):
                pass
            return generation.result()

    def generate_many(
        self,
        prompts: Sequence[str | Sequence[int]],
        *,
        n: int = 1,
        **options: Unpack[GenerateOptions],
    ) -> list[list[GenerationResult]]:
        """`n` answers to each prompt, the likeliest (by mean log-probability) first.

        Answer i is drawn with seed + i; log-probabilities are always kept.
        """
        check_count("n", n)
        if isinstance(prompts, str):
            raise UserError("prompts must be a list of prompts; for one use generate")
        if options.get("logprobs") is None:
            options["logprobs"] = 0
        seed = options.get("seed")
        found = []
        for prompt in prompts:
            answers = []
            for i in range(n):
                if seed is not None:
                    options["seed"] = check_count("seed", seed, 0) + i
                answers.append(self.generate(prompt, **options))
            found.append(sorted(answers, key=lambda x: -x.mean_logprob))
        return found

    def stream(
        self,
        prompt: str | Sequence[int],
        *,
        on_end: list[GenerationResult] | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Iterator[Piece]:
        """Pieces of the answer as they come; `on_end` receives the finished result."""
        with self._turn():
            generation = self._start(prompt, options)
            try:
                for piece in self._pieces(generation):
                    self._reader = threading.get_ident()
                    yield piece
            finally:
                self._reader = None
            if on_end is not None:
                on_end.append(generation.result())

    def chat(
        self, messages: Sequence[Message], **options: Unpack[GenerateOptions]
    ) -> GenerationResult:
        """The next message of a conversation, by the model's chat template."""
        options["chat"] = True
        return self.generate(self.encode_chat(messages), **options)

    def conversation(self, *, system: str | None = None) -> Conversation:
        """A conversation with history, of which each turn prefills only what is new."""
        return Conversation(self, system=system)

    def save_session(self, path: str | Path, *, messages: Sequence[Message] = ()) -> None:
        """Write the context (tokens, keys, values) and `messages` to a file, all or nothing."""
        with self._turn():
            session_file.save_session(
                Path(path), self._loaded, self._engine, self._context, messages
            )

    def load_session(self, path: str | Path) -> list[dict[str, Any]]:
        """Put a saved context back, for calls with `reuse`; returns its messages.

        Raises `ModelError`, and changes nothing, if the file is broken or of another model.
        """
        with self._turn():
            session = session_file.load_session(Path(path), self._loaded, self._engine)
            self._context = session.tokens
            return session.messages

    def logits(self, tokens: Sequence[int]) -> npt.NDArray[np.float32]:
        """Logits float32 [tokens, vocab] after every token of a fresh context."""
        with self._turn():
            self._rewind([])
            return self._engine.score(check_ids(tokens))

    @contextmanager
    def trace(self, path: str | os.PathLike[str]) -> Iterator[None]:
        """Write a Chrome/Perfetto trace of everything that runs inside to `path`."""
        engine = self._engine
        if not Path(path).absolute().parent.is_dir():
            raise UserError(f"cannot write the trace {path}: its folder is not there; create it")
        try:
            is_replaceable(path)
        except OSError as error:
            raise UserError(
                f"cannot write the trace {path} ({error.strerror}): choose another path"
            ) from error
        with self._turn():
            engine.start_trace()
        try:
            yield
        finally:
            about = {"model": self._loaded.name, "plan": self.plan.plan_id}
            about |= {kind: d.info.name for kind, d in self.devices.devices.items()}
            engine.stop_trace().save(path, about=about)

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
        if self._lost:
            raise DeviceLostError("engine", "running the model", IN_USE, forks.REMEDY)
        with self._lock:
            yield

    def _forked(self) -> None:
        """In a forked child: a call that another thread was in will never end there."""
        if self._lock.locked() and self._reader != threading.get_ident():
            self._lost, self._lock = True, threading.Lock()

    def _start(self, prompt: str | Sequence[int], options: GenerateOptions) -> Generation:
        """Check everything, and rewind the context to what the prompt shares with it."""
        asked = read_options(options)
        asked.sampling.check_vocabulary(self._loaded.config.vocab_size)
        given = check_prompt(prompt)
        tokens = self.encode(given, chat=asked.chat) if isinstance(given, str) else given
        self._check_room(tokens)
        whole = not asked.reuse or (asked.echo and asked.logprobs is not None)
        reused = self._rewind([] if whole else tokens[:-1])
        self._engine.check(tokens[reused:])
        return Generation(
            self._engine,
            self._loaded.tokenizer,
            tokens,
            asked.sampling,
            max_tokens=asked.max_tokens,
            reused=reused,
            continues=not asked.chat,
            eos_ids=self._loaded.eos_ids,
            stop=asked.stop,
            logprobs=asked.logprobs,
            echo=asked.echo,
            fallback=self.devices.fallback,
            speculative=asked.speculative,
            choice=self.choice.reason,
        )

    def _pieces(self, generation: Generation) -> Iterator[Piece]:
        """The answer's pieces; afterwards, also after an error, the context is known again."""
        try:
            yield from generation
        finally:
            self._context = generation.context

    def _rewind(self, tokens: Sequence[int]) -> int:
        """Keep what the context shares with the beginning of `tokens`; how many that are."""
        pairs = zip(self._context, tokens, strict=False)
        shared = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
        kept = min(len(self._context), len(tokens)) if shared is None else shared
        kept = min(kept, self._engine.position)
        self._engine.truncate(kept)
        self._context = self._context[:kept]
        return kept

    def _check_room(self, tokens: Sequence[int]) -> None:
        """The context must hold the prompt and at least one token of an answer."""
        if len(tokens) >= self.max_seq_len:
            raise ContextFullError(
                f"a prompt of {len(tokens)} tokens and its answer do not fit the context of "
                f"{self.max_seq_len}: shorten the prompt or open the model with a larger "
                "max_seq_len"
            )

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of a conversation, by the model's chat template."""
        return self._loaded.encode_chat(check_messages(messages))

    def _count(self, prompt: str | Sequence[int]) -> tuple[int, ...]:
        """The length of a prompt that will be asked, as far as the context holds it."""
        tokens = self._loaded.encode(prompt) if isinstance(prompt, str) else prompt
        return (max(min(len(tokens), self.max_seq_len), 1),)

    def _weight_budget(self, budget: int | None) -> int | None:
        """What of a memory budget is left for weights, bytes."""
        if budget is None:
            return None
        return max(budget - pool_bytes(self._loaded.config, self.max_seq_len, STEP_TOKENS), 1)

    def _context_length(self, asked: int | None) -> int:
        limit = self._loaded.config.max_position
        if asked is None:
            return min(limit, DEFAULT_CONTEXT)
        check_count("max_seq_len", asked)
        if not 1 <= asked <= limit:
            raise ModelError(
                f"max_seq_len must be in [1, {limit}] for {self._loaded.name}, got {asked}"
            )
        return asked


def _device_of(plan: ExecutionPlan, asked: DeviceMode | None) -> DeviceMode:
    """Devices that a plan needs. Raises `UserError` if others were asked for."""
    kinds: frozenset[DeviceKind] = plan.devices()
    needed: DeviceMode = "hetero" if len(kinds) == 2 else next(iter(kinds))
    if asked not in (None, "auto", needed):
        raise UserError(
            f"plan {plan.plan_id} runs on {needed}, not on {asked}: leave out the device, or make "
            "another plan"
        )
    return needed
