"""`LLM`: the public face of a loaded model."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self, Unpack, cast, get_args, overload

import numpy as np
import numpy.typing as npt

from hetero.arguments import (
    Message,
    check_count,
    check_ids,
    check_messages,
    check_one_of,
    check_prompt,
)
from hetero.backends.errors import KernelBuildError
from hetero.backends.formats import DEFAULT_CACHE, CacheFormat
from hetero.backends.host.files import is_replaceable
from hetero.backends.host.gc_pause import gc_paused
from hetero.backends.ops import Attention
from hetero.backends.protocol import KINDS, DeviceKind
from hetero.errors import ModelError, UserError
from hetero.generation.conversation import Conversation
from hetero.generation.loop import Generation, GenerationResult
from hetero.generation.options import GenerateOptions, GenerationConfig, read_options
from hetero.generation.own_contexts import OwnContexts
from hetero.models import LoadedModel, open_model
from hetero.models.bundle import find_bundle
from hetero.models.tokenizer import Tokenizer
from hetero.placement.choosing import Choice, PlacementRequest, choose, plan_on
from hetero.placement.device_set import DeviceMode, DeviceSet, open_devices
from hetero.placement.planning import ProfileLike, parse_size
from hetero.profiler.model_graph import ModelGraph
from hetero.runtime.engine import ContextFullError, Engine
from hetero.runtime.kernels import Progress
from hetero.runtime.kv.context import Context, check_shift
from hetero.runtime.schedule import Order
from hetero.runtime.sizes import pool_bytes
from hetero.runtime.waits import SyncMethod
from hetero.solver.execution_plan import ExecutionPlan
from hetero.solver.names import NamedStrategy
from hetero.solver.plan import STEP_TOKENS

DEFAULT_CONTEXT = 4096


class LLM:
    """A language model, ready to answer. A context manager that frees its devices.

    `model` is a Hugging Face directory, a `.gguf` file, a directory written by `hetero quantize`,
    `demo` or `random:NAME`. `device` is `auto` (what is predicted to be fastest here, the
    default), `hetero` (both), `gpu` or `npu`; `gpu` and `npu` name backends. `plan` is an
    `ExecutionPlan` or a path to one; the devices are then those of the plan, and naming others is
    an error. `profile` is a `DeviceProfile`, a file or a
    shipped name that the plan is made from (default: this machine's); `strategy` forces one, and
    `choice` says what was chosen and why. `prompt_lengths` are those to plan for, and to compare
    devices by; where they are not known `first_prompt` (a text or token ids) shows `auto` what will
    be asked first. `weights` is one of w4a16, w4a8, w8a16, f16, f32
    (default: what a quantised directory holds, else w4a16). `max_seq_len` bounds prompt and answer
    together (default: the model's, at most 4096). `max_gpu_share` (0 to 1) leaves the rest of the
    GPU's time to others, in the plan and in every step; `memory_budget` (`4GiB`, or bytes) bounds
    weights, activations and caches. Where a solver made the plan its cuts follow the devices'
    measured speeds, unless `adapt` is off: answers may then differ in the last bits of their
    logits. Calls of a long prompt are in flight together, in an `order` that a profile predicts to
    be shorter (`best`), by mllm-NPU's greedy rule (`paper`), or one after another (`fifo`); the
    order changes no bit of an answer, cuts of long prompts that go with it the last ones. `kv` is
    how keys and values are cached: f16 (the default), half of what f32 takes and decoding reads;
    q8, codes of 8 bits, half of that again; or f32, the default of an NPU alone that reads no
    others. Layers with a sliding window keep the keys and values that it reaches and a few before;
    with `whole_caches` all, so that a context can be cut anywhere without being computed again.

    A prompt is answered on a context: one of `new_context`, which the prompt goes on from, or the
    model's own (`context`), from the start unless `reuse`. While a stream uses that, further calls
    without a context have one of their own each; where the memory has no room for one they wait for
    other threads' calls. Answers on different contexts take turns step by step, whichever threads
    they are read from; an unread stream blocks no other. Raises `UserError`
    (`ModelError`) for what the user can mend, `DeviceError` for what a device could not do.
    """

    @gc_paused()
    def __init__(
        self,
        model: str,
        *,
        device: DeviceMode = "auto",
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
        order: Order = "best",
        kv: str | None = None,
        whole_caches: bool = False,
        progress: Progress | None = None,
    ) -> None:
        check_one_of("order", order, get_args(Order))
        check_one_of("kv", DEFAULT_CACHE if kv is None else kv, [*CacheFormat])
        self.kv, self._kv_asked = CacheFormat(kv or DEFAULT_CACHE), kv is not None
        self._loaded: LoadedModel = open_model(model, weights=weights)
        bundle = find_bundle(model)
        length = bundle.max_seq_len if bundle is not None and max_seq_len is None else max_seq_len
        self.max_seq_len, self._loaded = self._in_context(length)
        self._whole_caches = whole_caches or (bundle is not None and bundle.whole_caches)
        spec = self._loaded.spec(self.kv)
        may = npu in ("auto", "qnn") and device in ("auto", "hetero")
        if bundle is not None and plan is None and may:
            windows = self._loaded.config.windows
            bundle.check_caches(model, windows, whole=self._whole_caches)
            plan = bundle.load_plan(model)
        given = ExecutionPlan.load(plan) if isinstance(plan, (str, os.PathLike)) else plan
        if given is not None:
            given.check_fits(spec)
            device = _device_of(given, device)
        budget = None if memory_budget is None else parse_size(memory_budget)
        request = PlacementRequest(
            mode=device,
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
        self.choice: Choice = choose(spec, request)
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
            order=order,
        )
        try:
            try:
                with self.devices.prewarm(self._purpose) as compiled:
                    self._engine, self._own = make(warm=not compiled)
            except KernelBuildError as error:
                self.devices.without_gpu(str(error), npu)
                self._engine, self._own = make()
        except BaseException:
            self.devices.close()
            raise

    @property
    def _purpose(self) -> str:
        """Return the key of the prewarm list, equal at every start with the same options: all that
        decides which ones, and how they are fused, for a prewarmed kernel is not tried again. No
        length of context, and nothing that `auto` compared.
        """
        names = [self.devices.name(kind) for kind in KINDS]
        model = (self._loaded.fingerprint, str(self._loaded.weights.weight_format))
        plan = self.choice.plan
        how = "by rule" if plan is None else f"{plan.strategy} of {plan.profile}"
        return repr((*model, str(self.kv), self._whole_caches, names, self.choice.mode, how))

    def _make_engine(
        self, spec: ModelGraph, *, adapt: bool, **options: Any
    ) -> tuple[Engine, OwnContexts]:
        """Return the engine of the plan on the devices that are open, and the model's own contexts.
        The tokenizer is read concurrently: what comes before is Python, of which one thread runs at
        once.
        """
        self._loaded.reading_tokenizer()
        devices = self.devices.devices
        self.choice = self.choice.opened(self.devices)
        self.plan = plan_on(self.choice, spec, devices)
        self._check_caches(spec)
        if options["order"] == "fifo":
            self.plan = self.plan.model_copy(update={"in_flight": ()})
        engine = Engine(
            self._loaded.weights,
            self.plan,
            devices,
            max_seq_len=self.max_seq_len,
            control_core=self.devices.control_core,
            solver=self.choice.solver_on(devices),
            cost=self.choice.cost if self.choice.plan_on(devices) is not None else None,
            adapt=adapt and self.devices.numbers == "measured",
            fingerprint=self._loaded.fingerprint,
            kv=self.kv,
            whole_caches=self._whole_caches,
            **options,
        )
        return engine, OwnContexts(partial(engine.new_context, waits=True))

    def _check_caches(self, spec: ModelGraph) -> None:
        """Where the plan has attention on an NPU that cannot read caches of the default format,
        they are in float32. Raises `ModelError` if another one was asked for.
        """
        npu, rest = self.devices.devices.get("npu"), self.plan.rest
        if npu is None or not ("npu" in (rest.prefill, rest.decode) or self.plan.fused):
            return
        for op in {node.op for node in spec.nodes if isinstance(node.op, Attention)}:
            accepted = npu.accepts(replace(op, kv=self.kv))
            if not accepted and self._kv_asked:
                why = "; ".join(filter(None, (accepted.reason, accepted.remedy)))
                raise ModelError(f"{self.devices.name('npu')}: {why}")
            if not accepted:
                note = f"keys and values are cached in f32: {self.devices.name('npu')} reads no f16"
                self.kv = CacheFormat.F32
                self.choice = replace(self.choice, notes=(*self.choice.notes, note))
                return

    @property
    def engine(self) -> Engine:
        """Return the engine, for benchmarks and tests."""
        return self._engine

    @property
    def context(self) -> Context:
        """Return the model's own context, which a call without a context uses unless a stream has
        it: it holds the last answer on it.
        """
        return self._own.first

    def new_context(self) -> Context:
        """Return an empty context, for `generate`, `stream` and the others to go on from.

        Raises `UserError` where there is no memory for another one.
        """
        return self._engine.new_context()

    def load_context(self, path: str | os.PathLike[str]) -> Context:
        """Return a context that `Context.save` or `save_session` wrote. Raises `ModelError` if the
        file is broken or of another model.
        """
        context = self.new_context()
        try:
            context.load(path)
        except BaseException:
            context.close()
            raise
        return context

    @property
    def model(self) -> LoadedModel:
        """Configuration, weights and tokenizer."""
        return self._loaded

    def encode(self, prompt: str, *, chat: bool = False) -> list[int]:
        """Return token ids of a prompt; with `chat` as one user message in the model's template."""
        if chat:
            return self.encode_chat([{"role": "user", "content": prompt}])
        if not prompt:
            raise ModelError("the prompt is empty: give some text to go on from")
        return self._loaded.encode(prompt)

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of token ids, which may end in the middle of a character."""
        return self.tokenizer.decode(check_ids(tokens))

    @property
    def tokenizer(self) -> Tokenizer:
        """Return text to token ids and back."""
        return self._loaded.tokenizer

    @overload
    def generate(
        self, prompt: str | Sequence[int], **options: Unpack[GenerateOptions]
    ) -> GenerationResult: ...

    @overload
    def generate(
        self, prompt: list[str], **options: Unpack[GenerateOptions]
    ) -> list[GenerationResult]: ...

    def generate(
        self, prompt: str | Sequence[int] | list[str], **options: Unpack[GenerateOptions]
    ) -> GenerationResult | list[GenerationResult]:
        """Return the answer to a prompt (text or token ids), greedy unless a temperature is given;
        to a list of texts a list of answers, each as if it had been asked alone.

        With `chat` a text goes through the chat template first; ids are taken as they are, and the
        answer is a text of its own instead of going on from the prompt. Equal seeds give equal
        answers on one machine and plan. `speculative` tokens are guessed ahead from the text so
        far (`hetero.generation.speculative`), which changes no answer.
        """
        if isinstance(prompt, list) and prompt and all(isinstance(x, str) for x in prompt):
            texts = cast("list[str]", prompt)
            return [self.generate(text, **options) for text in texts]
        generation = self.stream(cast("str | Sequence[int]", prompt), **options)
        try:
            return _finish(generation)
        finally:
            generation.close()

    def generate_many(
        self,
        prompts: Sequence[str | Sequence[int]],
        *,
        n: int = 1,
        **options: Unpack[GenerateOptions],
    ) -> list[list[GenerationResult]]:
        """`n` answers to each prompt, the likeliest (by mean log-probability) first.

        Answer i is drawn with seed + i; log-probabilities are always kept. A prompt is read once;
        the other answers are drawn on forks, one at a time. With `context` every prompt goes on
        from a fork of it, and it stays as it is.
        """
        check_count("n", n)
        if isinstance(prompts, str):
            raise UserError("prompts must be a list of prompts; for one use generate")
        if options.get("logprobs") is None:
            options["logprobs"] = 0
        all_answers = []
        for prompt in prompts:
            answers = self._answers(prompt, n, read_options(options))
            all_answers.append(sorted(answers, key=lambda x: -x.mean_logprob))
        return all_answers

    def _answers(
        self, prompt: str | Sequence[int], n: int, config: GenerationConfig
    ) -> Iterator[GenerationResult]:
        """Answers to one prompt; answer i is drawn with seed + i."""
        given = config.context
        if given is not None:
            config = replace(config, context=self._engine.contexts.own(given).fork())
        seed = config.sampling.seed
        try:
            with self._begin(prompt, config, keep_prompt=n > 1) as first:
                yield _finish(first)
                for i in range(1, n):
                    sampling = replace(config.sampling, seed=None if seed is None else seed + i)
                    with first.fork(sampling) as other, other.context:
                        yield _finish(other)
        finally:
            if given is not None and config.context is not None:
                config.context.close()

    def __repr__(self) -> str:
        """Model, devices and formats."""
        return (
            f"LLM({self.model.name!r}, device={self.devices.mode!r}, "
            f"weights={self.model.weights.weight_format.value!r}, "
            f"max_seq_len={self.max_seq_len})"
        )

    def stream(self, prompt: str | Sequence[int], **options: Unpack[GenerateOptions]) -> Generation:
        """Return the answer as it comes: an iterator of pieces, whose `result()` is the whole
        answer once it is exhausted. Its context is in use until then, or until `close()`.
        """
        return self._begin(prompt, read_options(options))

    def chat(
        self, messages: Sequence[Message], **options: Unpack[GenerateOptions]
    ) -> GenerationResult:
        """Return the next message of a conversation, by the model's chat template."""
        options["chat"] = True
        return self.generate(self.encode_chat(messages), **options)

    def conversation(
        self, *, system: str | None = None, context: Context | None = None
    ) -> Conversation:
        """Return a conversation with history, of which each turn prefills only what is new.

        On the model's own context, which others use as well, or on one that it has for itself.
        """
        return Conversation(self, system=system, context=context)

    def save_session(self, path: str | Path, *, messages: Sequence[Message] = ()) -> None:
        """Write the model's own context and `messages` to a file, all or nothing."""
        self.context.save(path, messages=messages)

    def load_session(self, path: str | Path) -> list[dict[str, Any]]:
        """Put a saved context in the place of the model's own, for calls with `reuse`; returns its
        messages. Raises `ModelError`, and changes nothing, if the file is broken or of another
        model.
        """
        return self.context.load(path)

    def logits(self, tokens: Sequence[int]) -> npt.NDArray[np.float32]:
        """Return logits float32 [tokens, vocab] after every token of a fresh context."""
        ids = check_ids(tokens)
        context, hold = self._own.take((), reuse=False)
        try:
            self._engine.lock.check()
            with self._engine.lock:
                context.rewind(0)
                return self._engine.score(context, ids)
        finally:
            hold.active = False
            self._own.end()

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
        with engine.lock:
            engine.runner.start_trace()
        try:
            yield
        finally:
            about = {"model": self._loaded.name, "plan": self.plan.plan_id}
            about |= {kind: d.info.name for kind, d in self.devices.devices.items()}
            with engine.lock:
                trace = engine.runner.stop_trace()
            trace.save(path, about=about)

    def close(self) -> None:
        """Free the devices, when the step that runs is over; idempotent. Later calls, and streams
        that are unfinished, raise `DeviceLostError`.
        """
        with self._engine.lock:
            self._engine.close()
        self._loaded.weights.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _begin(
        self, prompt: str | Sequence[int], config: GenerationConfig, *, keep_prompt: bool = False
    ) -> Generation:
        """Check everything and take the context for an answer."""
        config.sampling.check_vocabulary(self._loaded.config.vocab_size)
        given = check_prompt(prompt)
        tokens = self.encode(given, chat=config.chat) if isinstance(given, str) else given
        if config.context is None:
            context, hold = self._own.take(tokens[:-1], reuse=config.reuse)
        else:
            context = self._engine.contexts.own(config.context)
            hold = context.hold()
        try:
            goes_on = config.context is not None and not config.reuse
            if goes_on and isinstance(given, str):
                tokens = self._without_start(context, tokens)
            self._check_room(len(context) if goes_on else 0, tokens)
            if config.context_shift:
                self._check_shift(context, config.keep, many=keep_prompt)
            self._engine.check_tokens(tokens)
            reused = 0 if goes_on else self._rewind(context, tokens, config)
            return Generation(
                self._engine,
                context,
                hold,
                self._loaded,
                tokens,
                config,
                ended=self._own.end,
                reused=reused,
                keep_prompt=keep_prompt,
                fallback=self.devices.fallback,
                choice=self.choice.reason,
            )
        except BaseException:
            hold.active = False
            self._own.end()
            raise

    def _rewind(self, context: Context, tokens: Sequence[int], config: GenerationConfig) -> int:
        """Keep what the context shares with the beginning of a whole text, if that is asked for;
        how many tokens that are.
        """
        whole = not config.reuse or (config.echo and config.logprobs is not None)
        kept = 0 if whole else context.shared(tokens[:-1])
        context.rewind(kept)
        if context.cached < kept:  # windows have lost what it would go on from
            context.rewind(0)
        return context.cached

    def _without_start(self, context: Context, tokens: list[int]) -> list[int]:
        """Return a text's tokens; without the one that a text begins with if it goes on from
        another.
        """
        start = self._loaded.tokenizer.bos_id
        goes_on = len(context) > 0 and len(tokens) > 1 and tokens[0] == start
        return tokens[1:] if goes_on else tokens

    def _check_room(self, before: int, tokens: Sequence[int]) -> None:
        """The context must hold the prompt, behind what it holds, and one token of an answer."""
        if before + len(tokens) >= self.max_seq_len:
            behind = f" after the {before} that it continues" if before else ""
            remedy = "truncate() the context" if before else "shorten the prompt"
            raise ContextFullError(
                f"a prompt of {len(tokens)} tokens{behind} and its answer do not fit the context "
                f"of {self.max_seq_len}: {remedy} or open the model with a larger max_seq_len"
            )

    def _check_shift(self, context: Context, keep: int, *, many: bool) -> None:
        """A full context must have tokens that move, and some that go."""
        check_shift(context.home)
        if many:
            raise UserError("several answers to one prompt share its context: no context_shift")
        if keep + 2 > self.max_seq_len:
            raise UserError(
                f"keep is {keep}, which leaves nothing to forget in a context of "
                f"{self.max_seq_len}: keep at most {self.max_seq_len - 2}"
            )

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """Return token ids of a conversation, by the model's chat template."""
        return self._loaded.encode_chat(check_messages(messages))

    def _count(self, prompt: str | Sequence[int]) -> tuple[int, ...]:
        """Return the length of a prompt that will be asked, as far as the context holds it."""
        tokens = self._loaded.encode(prompt) if isinstance(prompt, str) else prompt
        return (max(min(len(tokens), self.max_seq_len), 1),)

    def _weight_budget(self, budget: int | None) -> int | None:
        """Return the bytes of a memory budget that are left for weights."""
        if budget is None:
            return None
        loaded = self._loaded
        shadows = loaded.weights.outliers()
        taken = pool_bytes(
            loaded.config,
            self.max_seq_len,
            STEP_TOKENS,
            shadows,
            self.kv,
            whole=self._whole_caches,
        )
        return max(budget - taken, 1)

    def _in_context(self, max_seq_len: int | None) -> tuple[int, LoadedModel]:
        """Return the length of contexts, and the model in one."""
        length = self._context_length(max_seq_len)
        return length, self._loaded.for_context(length)

    def _context_length(self, max_seq_len: int | None) -> int:
        limit = self._loaded.config.max_position
        if max_seq_len is None:
            return min(limit, DEFAULT_CONTEXT)
        check_count("max_seq_len", max_seq_len)
        if not 1 <= max_seq_len <= limit:
            raise ModelError(
                f"max_seq_len must be in [1, {limit}] for {self._loaded.name}, got {max_seq_len}"
            )
        return max_seq_len


def _finish(generation: Generation) -> GenerationResult:
    """Return its whole answer."""
    for _ in generation:
        pass
    return generation.result()


def _device_of(plan: ExecutionPlan, device: DeviceMode) -> DeviceMode:
    """Return devices that a plan needs. Raises `UserError` if others were asked for."""
    kinds: frozenset[DeviceKind] = plan.devices()
    needed: DeviceMode = "hetero" if len(kinds) == 2 else next(iter(kinds))
    if device not in ("auto", needed):
        raise UserError(
            f"plan {plan.plan_id} runs on {needed}, not on {device}: leave out the device, or make "
            "another plan"
        )
    return needed
