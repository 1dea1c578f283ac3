"""Statistics of an answer, and the meter that they come from."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from hetero.generation.speculative import DraftStats
from hetero.runtime.engine import Engine
from hetero.runtime.kv.context import Context
from hetero.runtime.usage import Work


class TimeSource(Protocol):
    """A clock that returns seconds from some fixed point."""

    def __call__(self) -> float: ...


@dataclass(frozen=True, kw_only=True)
class DeviceShare:
    """Work of one device: operations run and seconds busy (measured)."""

    ops: int
    busy_s: float


@dataclass(frozen=True, kw_only=True)
class DevicePart:
    """Tokens of prompt and answer that were computed while these devices (backends) were open."""

    devices: dict[str, str]
    prompt_tokens: int
    answer_tokens: int

    def __str__(self) -> str:
        names = " and ".join(f"{kind} ({backend})" for kind, backend in self.devices.items())
        return f"{self.prompt_tokens} tokens of the prompt, {self.answer_tokens} more on {names}"


@dataclass(frozen=True, kw_only=True)
class Stats:
    """Measured on this machine. Speeds in tokens/s; `ttft_s` is the time to the first token.

    `reused_tokens` of the prompt were in the context already; `prefill_tokens_per_s` counts the
    others. `decode_tokens_per_s` counts decode steps (one token each after the first); 0 without
    any.
    `speculation` says how many guessed tokens were right, where tokens were guessed.
    `gpu_share` is the part of the time that the GPU was busy, where `max_gpu_share` bounds it;
    `npu_idle_share` the part of the prompt's time in which the NPU had nothing to do, where both
    devices work; `prefill_mode` how its matmuls are cut and its calls ordered, and what was
    predicted of the other ways, where it has several.
    `adaptations` are the changes of cuts, and of a device chosen alone, since the model was opened,
    with their reasons.
    `choice` is why `--device auto` chose what it did; empty otherwise.
    `shifted_tokens` are those that a full context forgot, with `context_shift`. `parts` are those
    of the text on other devices: several where the model moved (`wait_for_plan`), or one failed.
    """

    prompt_tokens: int
    completion_tokens: int
    ttft_s: float
    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    reused_tokens: int = 0
    placement: dict[str, DeviceShare | str] = field(default_factory=dict)
    speculation: DraftStats | None = None
    gpu_share: float | None = None
    npu_idle_share: float | None = None
    prefill_mode: str = ""
    adaptations: tuple[str, ...] = ()
    choice: str = ""
    shifted_tokens: int = 0
    parts: tuple[DevicePart, ...] = ()


class AnswerMeter:
    """Times and work of one answer on a context, from its first step on."""

    def __init__(self, context: Context, clock: TimeSource) -> None:
        self._context, self._clock = context, clock
        self._before = context.work.copy()
        self._work: Work | None = None  # of this answer, once it has ended
        self._start_s = self._first_s = self._last_s = 0.0
        self._decode_steps = 0
        self.shifted_tokens = 0  # that the context forgot

    def start(self) -> None:
        """Note the moment before the first step."""
        self._start_s = self._clock()

    def first_token(self) -> None:
        """Note that the first token was chosen."""
        self._first_s = self._last_s = self._clock()

    def next_token(self) -> None:
        """Note that a token was chosen after a decode step."""
        self._decode_steps += 1
        self._last_s = self._clock()

    @property
    def ended(self) -> bool:
        """Return whether the answer's work is known (`end`)."""
        return self._work is not None

    @property
    def work(self) -> Work:
        """Return the work of this answer so far; all of it once it has ended."""
        return self._work or self._context.work.since(self._before)

    def end(self, work: Work) -> None:
        """Note all of the answer's work; what its context does from here on is not counted."""
        self._work = work

    def stats(
        self,
        engine: Engine,
        *,
        prompt_tokens: int,
        completion_tokens: int,
        reused_tokens: int,
        fallback: str,
        speculation: DraftStats | None,
        choice: str,
    ) -> Stats:
        """Return the statistics so far. `fallback` is the model's, where the engine has none."""
        work = self.work
        placement: dict[str, DeviceShare | str] = {
            kind: DeviceShare(ops=use.ops, busy_s=use.busy_s) for kind, use in work.devices.items()
        }
        if engine.deployment.fallback or fallback:
            placement["fallback"] = engine.deployment.fallback or fallback
        ttft_s, decode_s = max(self._first_s - self._start_s, 0.0), self._last_s - self._first_s
        limited = engine.runner.gpu_share is not None and work.wall_s > 0
        return Stats(
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
            ttft_s=ttft_s,
            prefill_tokens_per_s=(prompt_tokens - reused_tokens) / ttft_s if ttft_s else 0.0,
            decode_tokens_per_s=self._decode_steps / decode_s if decode_s > 0 else 0.0,
            reused_tokens=reused_tokens,
            placement=placement,
            speculation=speculation,
            adaptations=tuple(engine.deployment.adaptations),
            gpu_share=work.gpu_busy_s / work.wall_s if limited else None,
            npu_idle_share=work.idle_share("npu") if len(work.devices) == 2 else None,
            prefill_mode=work.mode,
            choice=choice,
            shifted_tokens=self.shifted_tokens,
            parts=tuple(
                DevicePart(devices=dict(open), prompt_tokens=prompt, answer_tokens=answer)
                for open, (prompt, answer) in work.parts.items()
            ),
        )
