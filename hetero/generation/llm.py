"""`LLM`: the public face of a loaded model."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack, cast, overload

import numpy as np
import numpy.typing as npt

from hetero.arguments import (
    Message,
    check_count,
    check_ids,
    check_messages,
    check_prompt,
)
from hetero.backends.host.closing import Closing
from hetero.backends.host.gc_pause import gc_paused
from hetero.errors import ModelError, UserError
from hetero.generation.answer_contexts import AnswerContexts
from hetero.generation.conversation import Conversation
from hetero.generation.drafts import check_draft, open_draft
from hetero.generation.early_loading import EarlyLoader, note_opened
from hetero.generation.loading import LoadOptions
from hetero.generation.loop import Generation, GenerationResult
from hetero.generation.options import GenerateOptions, GenerationConfig, read_options
from hetero.generation.tracing import traced
from hetero.models import LoadedModel
from hetero.models.tokenizer import Tokenizer
from hetero.placement.device_set import DeviceMode
from hetero.placement.phase_choice import PhaseChoice
from hetero.placement.phases import phases_of
from hetero.runtime.engine import Engine
from hetero.runtime.kernels import Progress
from hetero.runtime.kv.context import Context
from hetero.runtime.schedule import Order
from hetero.runtime.waits import SyncMethod
from hetero.solver.execution_plan import ExecutionPlan
from hetero.solver.names import NamedStrategy

if TYPE_CHECKING:
    from hetero.generation.embedding import Embedding, EmbedOptions, Texts
    from hetero.placement.planning import ProfileLike


class LLM(Closing):
    """A language model, ready to answer. A context manager that frees its devices.

    `model` is a Hugging Face directory, a `.gguf` file, a directory written by `hetero quantize`,
    `demo` or `random:NAME`. `device` is `auto` (what is predicted to be fastest here, the default),
    `hetero` (both), `gpu` or `npu`; `gpu` and `npu` name backends, and `cpu` one for rows of
    matmuls that a plan may have for a third (`none`: for none). `plan` is an `ExecutionPlan` or a
    path to one; naming other devices than its own is an error. `profile` is a `DeviceProfile`, a
    file or a shipped name that the plan is made from (default: this machine's); `strategy` forces
    one, and `choice` says what was chosen and why. `experts` is a file of `hetero eval
    --count-experts`, by which plans share routed experts. `prompt_lengths` are those to plan for,
    and to compare devices by; where they are not known `first_prompt` (a text or token ids) shows
    `auto` what will be asked first. `weights` is one of w4a16, w4a8, w8a16, f16, f32 (default: what
    a quantised directory holds, else w4a16). `max_seq_len` bounds prompt and answer together
    (default: the model's, at most 4096). `max_gpu_share` (0 to 1) leaves the rest of the GPU's time
    to others, in the plan and in every step; `memory_budget` (`4GiB`, or bytes) bounds weights,
    activations and caches. Where a solver made the plan its cuts follow the devices' measured
    speeds, unless `adapt` is off: answers may then differ in the last bits of their logits. Calls
    of a long prompt are in flight together, in an `order` that a profile predicts to be shorter
    (`best`), by mllm-NPU's greedy rule (`paper`), or one after another (`fifo`); the order changes
    no bit of an answer, the cuts that go with it the last ones. `kv` is how keys and values are
    cached: f16 (the default), half the bytes of f32; q8, codes of 8 bits, half of that; or f32, the
    default of an NPU alone that reads no others. Layers with a sliding window keep the keys and
    values that it reaches; with `whole_caches` all, so that a context can be cut anywhere and is
    not computed again. `draft_model` guesses tokens ahead (`speculative`): a smaller model of the
    same vocabulary on a `draft_device`, a Gemma 4 assistant, `mtp`, the model's own head for it, or
    `early-exit:4`, its first 4 layers. A first start compiles kernels for seconds: `wait_for_plan`
    off answers on the NPU alone meanwhile, and moves to the plan's devices between two steps.

    A prompt is answered on a context: one of `new_context`, which the prompt goes on from, or the
    model's own (`context`), from the start unless `reuse`. While a stream uses that, further calls
    without a context have one of their own each; where the memory has no room for one they wait for
    other threads' calls. Answers on different contexts take turns step by step. Raises `UserError`
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
        cpu: str = "auto",
        profile: ProfileLike = None,
        plan: ExecutionPlan | str | os.PathLike[str] | None = None,
        experts: str | os.PathLike[str] | None = None,
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
        wait_for_plan: bool = True,
        draft_model: str | None = None,
        draft_device: DeviceMode = "auto",
        progress: Progress | None = None,
    ) -> None:
        options = LoadOptions(
            device=device, gpu=gpu, npu=npu, cpu=cpu, profile=profile, plan=plan, experts=experts,
            weights=weights, max_seq_len=max_seq_len, sync=sync, strategy=strategy,
            prompt_lengths=prompt_lengths, first_prompt=first_prompt, max_gpu_share=max_gpu_share,
            memory_budget=memory_budget, adapt=adapt, order=order, kv=kv, whole_caches=whole_caches,
            progress=progress, wait_for_plan=wait_for_plan or draft_model is not None,
        )  # fmt: skip
        self._opened = loader = EarlyLoader(model, options)
        assistant = check_draft(draft_model, draft_device, loader.model, options)
        self._engine, self._own = loader.load()
        self._loaded, self.kv, self.max_seq_len = loader.model, loader.kv, loader.max_seq_len
        self.choice, self.devices, self.plan = loader.choice, loader.devices, loader.plan
        if loader.moves:  # else nothing of a closed model waits for the collector
            loader.moved = partial(note_opened, loader, self)
        self.draft = open_draft(draft_model, draft_device, loader, options, self._engine, assistant)
        self._answers = AnswerContexts(self._engine, self._loaded, self._own, loader, self.draft)

    def finish_preparing(self, limit_s: float = math.inf) -> bool:
        """Return whether later starts find all prepared, at the latest after `limit_s`."""
        late = self._opened.late
        return late is None or late.wait(limit_s)

    @property
    def engine(self) -> Engine:
        """Return the engine, for benchmarks and tests."""
        return self._engine

    @property
    def context(self) -> Context:
        """Return the model's own context, with its last answer, for calls without a context."""
        return self._own.first

    def new_context(self) -> Context:
        """Return an empty context. Raises `UserError` where there is no memory for another one."""
        return self._engine.new_context()

    def load_context(self, path: str | os.PathLike[str]) -> Context:
        """Return a context that `Context.save` or `save_session` wrote. Raises `ModelError`."""
        context = self.new_context()
        try:
            context.load(path)
        except BaseException:
            context.close()
            raise
        return context

    @property
    def model(self) -> LoadedModel:
        """Return configuration, weights and tokenizer."""
        return self._loaded

    def encode(self, prompt: str, *, chat: bool = False) -> list[int]:
        """Return the token ids of a prompt; with `chat` as a message in the model's template."""
        if chat:
            return self.encode_chat([{"role": "user", "content": prompt}])
        if not prompt:
            raise ModelError("the prompt is empty: give some text to go on from")
        return self._loaded.encode(prompt)

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of token ids, which may end in the middle of a character."""
        return self.tokenizer.decode(check_ids(tokens))

    @property
    def phases(self) -> tuple[PhaseChoice, ...]:
        """Return what computes prompts and what computes answers, by the plan as it is now."""
        return phases_of(self._engine.plan, self._engine.devices, self.choice)

    @property
    def tokenizer(self) -> Tokenizer:
        """Return the tokenizer: text to token ids and back."""
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
        """Return the answer to a prompt (text or token ids), greedy unless a temperature is given.

        A list of texts gives a list of answers, each as if it had been asked alone.

        With `chat` a text goes through the chat template first; ids are taken as they are, and the
        answer is a text of its own instead of continuing the prompt. Equal seeds give equal answers
        on one machine and plan. Up to `speculative` tokens are guessed ahead
        (`hetero.generation.speculative`), which changes no answer.
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
        """Return `n` answers to each prompt, the likeliest (by mean log-probability) first.

        Answer i is drawn with seed + i; log-probabilities are always computed. A prompt is read
        once; the other answers are drawn on forks, one at a time. With `context` every prompt
        continues a fork of it, and it stays as it is.
        """
        check_count("n", n)
        if isinstance(prompts, str):
            raise UserError("prompts must be a list of prompts; for one use generate")
        if options.get("logprobs") is None:
            options["logprobs"] = 0
        all_answers = []
        for prompt in prompts:
            answers = self._drawn(prompt, n, read_options(options))
            all_answers.append(sorted(answers, key=lambda x: -x.mean_logprob))
        return all_answers

    def _drawn(
        self, prompt: str | Sequence[int], n: int, config: GenerationConfig
    ) -> Iterator[GenerationResult]:
        """Yield answers to one prompt; answer i is drawn with seed + i."""
        given = config.context
        if given is not None:
            config = replace(config, context=self._engine.contexts.own(given).fork())
        seed = config.sampling.seed
        try:
            with self._begin(prompt, config, keep_prompt=n > 1) as first:
                yield _finish(first)
                for i in range(1, n):
                    sampling = replace(config.sampling, seed=None if seed is None else seed + i)
                    with first.fork(sampling, config.constraint) as other, other.context:
                        yield _finish(other)
        finally:
            if given is not None and config.context is not None:
                config.context.close()

    def __repr__(self) -> str:
        """Return model, devices and formats."""
        return (
            f"LLM({self.model.name!r}, device={self.devices.mode!r}, "
            f"weights={self.model.weights.weight_format.value!r}, "
            f"max_seq_len={self.max_seq_len})"
        )

    def stream(self, prompt: str | Sequence[int], **options: Unpack[GenerateOptions]) -> Generation:
        """Return the answer as it comes: an iterator of text deltas.

        Its `result()` is the whole answer once it is exhausted. Its context is in use until then,
        or until `close()`.
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
        """Return a conversation, on the model's own context or one of its own."""
        return Conversation(self, system=system, context=context)

    def save_session(self, path: str | Path, *, messages: Sequence[Message] = ()) -> None:
        """Write the model's own context and `messages` to a file, all or nothing."""
        self.context.save(path, messages=messages)

    def load_session(self, path: str | Path) -> list[dict[str, Any]]:
        """Replace the model's own context by a saved one, for calls with `reuse`.

        Returns its messages. Raises `ModelError`, and changes nothing, if the file is broken or of
        another model.
        """
        return self.context.load(path)

    def logits(self, tokens: Sequence[int]) -> npt.NDArray[np.float32]:
        """Return logits float32 [tokens, vocab] after every token of a fresh context."""
        ids = check_ids(tokens)
        with self._answers.cleared() as context:
            return self._engine.score(context, ids)

    def embed(self, texts: Texts, **options: Unpack[EmbedOptions]) -> Embedding:
        """Return embeddings float32 [texts, features] of length 1 of texts or token ids."""
        from hetero.generation.embedding import embed

        return embed(self._engine, self._loaded, self._answers.cleared, texts, options)

    @contextmanager
    def trace(self, path: str | os.PathLike[str]) -> Iterator[None]:
        """Write a Chrome/Perfetto trace of everything that runs inside to `path`."""
        about = {"model": self._loaded.name, "plan": self.plan.plan_id}
        about |= {kind: d.info.name for kind, d in self.devices.devices.items()}
        about["numbers"] = self.devices.numbers
        with traced(self._engine, path, about):
            yield

    def close(self) -> None:
        """Free the devices, when the running step is over; idempotent.

        Later calls, and streams that are unfinished, raise `DeviceLostError`.
        """
        self._opened.close()
        with self._engine.lock:
            self._engine.close()
        self._loaded.weights.close()
        if self.draft is not None:
            self.draft.close()

    def _begin(
        self, prompt: str | Sequence[int], config: GenerationConfig, *, keep_prompt: bool = False
    ) -> Generation:
        """Return the answer to a prompt, on the context that the options name."""
        config.sampling.check_vocabulary(self._loaded.config.vocab_size)
        given = check_prompt(prompt)
        is_text = isinstance(given, str)
        tokens = self.encode(given, chat=config.chat) if isinstance(given, str) else given
        return self._answers.begin(tokens, config, is_text=is_text, keep_prompt=keep_prompt)

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """Return the token ids of a conversation, by the model's chat template."""
        return self._loaded.encode_chat(check_messages(messages))


def _finish(generation: Generation) -> GenerationResult:
    """Return the whole answer of a stream."""
    for _ in generation:
        pass
    return generation.result()
