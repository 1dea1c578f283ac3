"""One contender of `hetero bench`, in a process of its own.

Whatever a process fixes with its first model (OpenCL's drivers and threads) is then the contender's
own. The parent sends `Open`, then a `Round` whenever it is the contender's turn; in between the
process blocks on its input, so that the others have the cores. The last message is a `Reopen`.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, Final, NamedTuple, TypeAlias, TypeVar

import numpy as np

from hetero.backends.errors import DeviceError
from hetero.backends.host.affinity import allowed_cores, run_on
from hetero.backends.host.json_child import ChildDiedError, JsonChild, serving
from hetero.backends.host.peak_memory import peak_rss_bytes
from hetero.errors import FallbackWarning, UserError
from hetero.generation.llm import LLM
from hetero.profiler.errors import ProfileWarning
from hetero.runtime.logits import Logits
from hetero.solver.plan import PHASES, Phase

SILENCE_S: Final = 600.0  # the longest wait for a message, kernels compiled on a slow machine
SLOWEST_TOKEN_S: Final = 5.0  # and for each token of a round
PROGRESS_S: Final = 1.0  # between two messages of progress
WARM_STEPS: Final = 2  # untimed: other contenders have had the cores and their caches


class Sample(NamedTuple):
    """One test of one round."""

    tokens_per_s: float
    copied_bytes: int


@dataclass(frozen=True, kw_only=True)
class Open:
    """Open a model with these options of `LLM`, on these cores."""

    model: str
    options: dict[str, Any]
    cores: list[int]


@dataclass(frozen=True, kw_only=True)
class Round:
    """Compute a prompt, and decode after it; with a `depth` each after so many tokens instead.

    Without a prompt (`None`), decode where the last round ended.
    """

    prompt_tokens: int | None
    decode_tokens: int
    depth: int | None = None


@dataclass(frozen=True, kw_only=True)
class Reopen:
    """Close the model, and open and close it once more."""


@dataclass(frozen=True, kw_only=True)
class Loading:
    """The model is being opened: `done` parts of `total` are."""

    done: int
    total: int


@dataclass(frozen=True, kw_only=True)
class Opened:
    """The opened model.

    `strategy` is that of the plan, `numbers` `measured` or `emulated`; `cores` and `device_sets`
    are by phase.
    """

    load_s: float
    choice: str
    strategy: str
    cores: dict[str, int]
    device_sets: dict[str, str]
    max_seq_len: int
    weights: str
    numbers: str
    devices: dict[str, str]


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A round: tokens/s and copied bytes a token of either test, the process's largest size."""

    prefill: Sample
    decode: Sample
    peak_rss_bytes: int


@dataclass(frozen=True, kw_only=True)
class Reopened:
    """The seconds of the second load."""

    load_s: float


@dataclass(frozen=True, kw_only=True)
class Warned:
    """A warning, at any time."""

    message: str


@dataclass(frozen=True, kw_only=True)
class Refused:
    """The reason why it cannot be done, in a sentence for people."""

    message: str


ToContender: TypeAlias = Open | Round | Reopen
FromContender: TypeAlias = Loading | Opened | Measured | Reopened | Warned | Refused
_KINDS: Final[dict[str, type[Any]]] = {
    kind.__name__: kind
    for kind in (Open, Round, Reopen, Loading, Opened, Measured, Reopened, Warned, Refused)
}
Answer = TypeVar("Answer", Opened, Measured, Reopened)


def encode(message: ToContender | FromContender) -> dict[str, Any]:
    """Return the JSON object of a message."""
    return {"is": type(message).__name__, **asdict(message)}


def decode(message: Mapping[str, Any]) -> Any:
    """Return the message of a JSON object."""
    fields = {key: value for key, value in message.items() if key != "is"}
    if message["is"] == "Measured":
        fields |= {test: Sample(*fields[test]) for test in ("prefill", "decode")}
    return _KINDS[message["is"]](**fields)


@dataclass
class Contestant:
    """The parent's side of a contender: a context manager that ends its process."""

    name: str
    child: JsonChild = field(default_factory=partial(JsonChild, "hetero.measuring.contender"))
    peak_rss_bytes: int = 0

    def open(self, model: str, options: dict[str, Any], note: Callable[[str], None]) -> Opened:
        """Open the model there. Raises `UserError` or `DeviceError`."""
        note(f"loading {self.name}")
        request = Open(model=model, options=options, cores=allowed_cores())
        self.opened = self._ask(request, Opened, SILENCE_S, note)
        return self.opened

    def round(
        self, prompt_tokens: int | None, decode_tokens: int, depth: int | None = None
    ) -> Measured:
        """Measure a `Round` there, while no other contender does. Raises as `open`."""
        tokens = (prompt_tokens or 0) + decode_tokens + (depth or 0)
        limit_s = SILENCE_S + SLOWEST_TOKEN_S * tokens
        request = Round(prompt_tokens=prompt_tokens, decode_tokens=decode_tokens, depth=depth)
        measured = self._ask(request, Measured, limit_s)
        self.peak_rss_bytes = max(self.peak_rss_bytes, measured.peak_rss_bytes)
        return measured

    def reopen_s(self) -> float:
        """Return the seconds of another load, after which nothing is open. Raises as `open`."""
        return self._ask(Reopen(), Reopened, SILENCE_S).load_s

    def __enter__(self) -> Contestant:
        return self

    def __exit__(self, *error: Any) -> None:
        self.child.__exit__(*error)

    def _ask(
        self,
        request: ToContender,
        kind: type[Answer],
        limit_s: float,
        note: Callable[[str], None] = lambda _: None,
    ) -> Answer:
        try:
            self.child.say(encode(request))
            while True:
                match decode(self.child.hear(limit_s)):
                    case kind() as answer:
                        return answer
                    case Loading(done=done, total=total):
                        note(f"loading {self.name}: {done} of {total}")
                    case Warned(message=message):
                        warnings.warn(f"{self.name}: {message}", FallbackWarning, stacklevel=3)
                    case Refused(message=message):
                        raise UserError(message)
        except ChildDiedError as error:
            raise UserError(
                f"the process of {self.name} {error}: close other programs if memory ran out, or "
                "bench that device alone"
            ) from error


class _Bench:
    """The child's side."""

    def __init__(self, request: Open, say: Callable[[FromContender], None]) -> None:
        self._request, self._say, self._said_s = request, say, 0.0
        start_s = time.perf_counter()
        self.llm = self._open()
        self.load_s = time.perf_counter() - start_s

    def _open(self) -> LLM:
        request = self._request
        return LLM(request.model, progress=self._progress, **request.options)

    def _progress(self, done: int, total: int) -> None:
        if time.monotonic() - self._said_s >= PROGRESS_S:
            self._said_s = time.monotonic()
            self._say(Loading(done=done, total=total))

    def opened(self) -> Opened:
        """Return the answer to `Open`."""
        llm = self.llm
        stored = llm.model.weights
        return Opened(
            load_s=self.load_s,
            choice=llm.choice.reason,
            strategy=_planned(llm),
            cores={phase: processor_cores(llm, phase) for phase in PHASES},
            device_sets={x.phase: x.devices for x in llm.phases if not x.depth_from},
            max_seq_len=llm.max_seq_len,
            weights=",".join((stored.weight_format, *stored.also)),
            numbers=llm.devices.numbers,
            devices={kind: d.info.fingerprint for kind, d in llm.devices.devices.items()},
        )

    def round(self, request: Round) -> Measured:
        """Measure both tests."""
        prompt = _prompt(self.llm, request.prompt_tokens or 0)
        if request.prompt_tokens is None:
            prefill, decode = Sample(0.0, 0), _time_decode(self.llm, request.decode_tokens, 0)
        elif request.depth is None:
            prefill, decode = time_round(self.llm, prompt, request.decode_tokens)
        else:
            depth = _prompt(self.llm, request.depth)
            prefill, decode = time_at_depth(self.llm, depth, prompt, request.decode_tokens)
        return Measured(prefill=prefill, decode=decode, peak_rss_bytes=peak_rss_bytes())

    def reopen(self) -> Reopened:
        """Time another load."""
        self.llm.close()
        start_s = time.perf_counter()
        self._open().close()
        return Reopened(load_s=time.perf_counter() - start_s)


def _planned(llm: LLM) -> str:
    if len(llm.plan.devices()) < 2:
        return f"{llm.devices.mode}-only"
    if llm.plan.apart:
        return "apart"
    return "layer" if llm.choice.solver is None else "auto"  # by rule, or by the solver


def time_round(llm: LLM, prompt: Sequence[int], decode_tokens: int) -> tuple[Sample, Sample]:
    """Return prefill and decode of one warm round; decode follows the prompt."""
    go_to(llm, [])
    prefill, logits = _time_prompt(llm, prompt)
    return prefill, _time_decode(llm, decode_tokens, int(np.argmax(logits)))


def time_at_depth(
    llm: LLM, depth: Sequence[int], prompt: Sequence[int], decode_tokens: int
) -> tuple[Sample, Sample]:
    """Return prefill and decode of one warm round, each after the tokens of `depth`."""
    prefill = Sample(0.0, 0)
    if prompt:
        go_to(llm, depth)
        prefill, _ = _time_prompt(llm, prompt)
    go_to(llm, depth)
    return prefill, _time_decode(llm, decode_tokens, 0)


def go_to(llm: LLM, tokens: Sequence[int]) -> None:
    """Bring the context to these tokens, of which it keeps those that it begins with.

    The last ones are decoded: caches are warm, and what a model with states has to compute again
    after a cut is computed.
    """
    engine, context = llm.engine, llm.context
    kept = tokens[: max(len(tokens) - WARM_STEPS, 0)]
    context.truncate(context.shared(kept))
    if missing := kept[context.cached :]:
        engine.prefill(context, missing)
    for token in tokens[len(kept) :] or [0] * WARM_STEPS:
        engine.decode(context, token)
    if not tokens:
        context.truncate(0)


def _time_prompt(llm: LLM, prompt: Sequence[int]) -> tuple[Sample, Logits]:
    """Return the speed of a prompt, and its last logits."""
    runner = llm.engine.runner
    copied, start = runner.copied_bytes, time.perf_counter()
    logits = llm.engine.prefill(llm.context, prompt if prompt else [0])
    seconds = time.perf_counter() - start
    copied = runner.copied_bytes - copied
    return Sample(len(prompt) / seconds, copied // max(len(prompt), 1)), logits


def _time_decode(llm: LLM, tokens: int, token: int) -> Sample:
    """Return the speed of decoding; `token` is the first one's input."""
    if not tokens:
        return Sample(0.0, 0)
    runner = llm.engine.runner
    copied, start = runner.copied_bytes, time.perf_counter()
    for _ in range(tokens):
        token = int(np.argmax(llm.engine.decode(llm.context, token)))
    seconds = time.perf_counter() - start
    return Sample(tokens / seconds, (runner.copied_bytes - copied) // tokens)


def _prompt(llm: LLM, count: int) -> list[int]:
    random = np.random.default_rng(0)
    return [int(token) for token in random.integers(3, llm.model.config.vocab_size, count)]


def processor_cores(llm: LLM, phase: Phase) -> int:
    """Return how many cores of the processor the devices of a phase compute on.

    One for a device that is a core, all for OpenCL on every core, none for a separate GPU or NPU.
    """
    count = 0
    for kind in llm.engine.plan.devices_of(phase) & set(llm.devices.devices):
        info = llm.devices.devices[kind].info
        on_core = "cpu" in info.details or "emulated" in info.details
        if on_core or info.backend in ("ort-cpu", "reference"):
            count += int(info.details.get("cores", "1"))
    return count


def _answer(bench: _Bench, request: ToContender) -> FromContender:
    match request:
        case Round():
            return bench.round(request)
        case Reopen():
            return bench.reopen()
    raise ValueError("a contender opens one model")


def main() -> None:
    """Answer the parent until it closes the input."""
    with serving() as (messages, write):

        def say(message: FromContender) -> None:
            write(encode(message))

        warnings.showwarning = partial(_warn, say)
        request: Open = decode(next(messages))
        run_on(request.cores)
        try:
            bench = _Bench(request, say)
            with bench.llm:
                say(bench.opened())
                for message in messages:
                    say(_answer(bench, decode(message)))
        except (UserError, DeviceError, MemoryError) as error:
            say(Refused(message=str(error) or "out of memory"))


def _warn(say: Callable[[FromContender], None], message: Warning | str, kind: Any, *_: Any) -> None:
    if issubclass(kind, FallbackWarning | ProfileWarning):
        say(Warned(message=str(message)))


if __name__ == "__main__":
    main()
