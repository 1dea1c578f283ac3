"""What all benches share: options, workers in processes of their own, timelines, tables."""

from __future__ import annotations

import json
import multiprocessing
import re
import statistics
import time
import traceback
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar

import numpy as np
import typer

from hetero.backends.formats import StorageFormat
from hetero.backends.memory import HostBuffer
from hetero.backends.weights import (
    PackedWeight,
    data_dtype,
    data_shape,
    scales_dtype,
    scales_shape,
)
from hetero.measuring.benchmark import environment
from hetero.models import LoadedModel
from hetero.placement.device_set import open_devices
from hetero.runtime.engine import Engine
from hetero.runtime.kv.context import Context
from hetero.runtime.program import PREQUEUE, RUN, SUBMIT, WAIT
from hetero.solver.execution_plan import ExecutionPlan

MIB = 2**20
_CONTEXTS: weakref.WeakKeyDictionary[Engine, Context] = weakref.WeakKeyDictionary()
DATA = Path(__file__).parent / "data"
LLAMA = "random:llama-3.2-1b"
CONTEXT = 256  # of decoding

Key = TypeVar("Key")
Lengths = Annotated[str, typer.Option("-p", help="tokens of prompts, such as 256,1024")]
Prompt = Annotated[int, typer.Option("-p", help="tokens of the prompt")]
Tokens = Annotated[int, typer.Option("-n", help="tokens that are decoded, one by one")]
Rounds = Annotated[int, typer.Option("-r", help="rounds; all contenders take turns in each")]
NUMBER = re.compile(r"([-+±]?[\d.,]+( ?%)?( [a-z/]+)?)?")


def new_app(about: str | None) -> typer.Typer:
    """An application of subcommands that shows errors as Python does."""
    return typer.Typer(
        help=about, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False
    )


def one_command(command: Callable[..., None], **settings: bool) -> typer.Typer:
    """An application of one command; `settings` are those of its Click context."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command(context_settings=dict(settings))(command)
    return app


def integers(text: str) -> list[int]:
    """Of `64,256`."""
    return [int(part) for part in text.split(",")]


def table(head: str, rows: Iterable[Sequence[object]]) -> None:
    """Print Markdown: a head such as `engine|tokens/s`, then the rows as they come."""
    names = head.split("|")
    print(f"| {' | '.join(names)} |")
    for i, row in enumerate(rows):
        cells = [str(cell) for cell in row]
        if i == 0:
            sides = ("---:" if NUMBER.fullmatch(cell) else "---" for cell in cells)
            print(f"|{'|'.join(sides)}|")
        print(f"| {' | '.join(cells)} |", flush=True)


def spread(values: Sequence[float], scale: float = 1.0, digits: int = 2) -> tuple[str, str, str]:
    """Cells: median, least, most."""
    shown = (statistics.median(values), min(values), max(values))
    first, second, third = (f"{scale * value:.{digits}f}" for value in shown)
    return first, second, third


def finish(*notes: str) -> None:
    """Print notes and the environment: the last line of every bench."""
    print("\n" + "".join(f"{note}\n" for note in notes) + json.dumps(environment()))


def in_turns(
    contenders: Mapping[Key, Callable[[], float]], rounds: int, warm: int = 1
) -> dict[Key, list[float]]:
    """What every contender answers in each round, without the rounds that warm up."""
    found: dict[Key, list[float]] = {name: [] for name in contenders}
    for turn in range(rounds + warm):
        for name, measure in contenders.items():
            value = measure()
            if turn >= warm:
                found[name].append(value)
    return found


def timed(run: Callable[[], object]) -> float:
    """Seconds of one call."""
    start_s = time.perf_counter()
    run()
    return time.perf_counter() - start_s


def random_weight(storage: StorageFormat, n: int, k: int) -> PackedWeight:
    """A packed weight of random bits (4 and 8 bits) or normal values, in memory of its own."""
    rng = np.random.default_rng(0)
    shape, kind = data_shape(storage, n, k), data_dtype(storage)
    data = HostBuffer(int(np.prod(shape)) * kind.itemsize).array(kind, shape)
    if not storage.quantised:
        data[...] = rng.standard_normal(shape, dtype=np.float32)
        return PackedWeight(storage, n, k, data)
    data[...] = np.frombuffer(rng.bytes(data.nbytes), dtype=kind).reshape(shape)
    shape, kind = scales_shape(storage, n, k), scales_dtype(storage)
    scales = HostBuffer(int(np.prod(shape)) * kind.itemsize).array(kind, shape)
    scales[...] = rng.random(shape, dtype=np.float32)
    return PackedWeight(storage, n, k, data, scales)


def context_of(engine: Engine) -> Context:
    """The one context of an engine that a bench runs on."""
    if engine not in _CONTEXTS:
        _CONTEXTS[engine] = engine.new_context()
    return _CONTEXTS[engine]


def open_engine(plan: ExecutionPlan, loaded: LoadedModel, longest: int, **options: Any) -> Engine:
    """An engine on the devices that the plan names; `options` are `Engine`'s."""
    kinds = plan.devices()
    opened = open_devices("hetero" if len(kinds) == 2 else next(iter(kinds)))
    core = opened.control_core
    return Engine(
        loaded.weights, plan, opened.devices, max_seq_len=longest, control_core=core, **options
    )


def token_ids(count: int, vocabulary: int) -> list[int]:
    """Random ones, the same every time."""
    return np.random.default_rng(0).integers(3, vocabulary, count).tolist()  # type: ignore[no-any-return]


def run_prompt(engine: Engine, m: int) -> float:
    """Seconds of a prompt of m tokens."""
    prompt, context = token_ids(m, engine.config.vocab_size), context_of(engine)
    context.truncate(0)
    return timed(lambda: engine.prefill(context, prompt))


def run_steps(engine: Engine, tokens: int, before: int) -> list[float]:
    """Seconds of each of so many decoding steps behind `before` tokens."""
    context = context_of(engine)
    context.truncate(min(before, len(context)))
    if len(context) < before:
        engine.prefill(context, [5] * (before - len(context)))
    drawn = token_ids(tokens, engine.config.vocab_size)
    return [timed(lambda token=token: engine.decode(context, token)) for token in drawn]  # type: ignore[misc]


class Span(NamedTuple):
    """A part of the last step: `what` is `gpu` or `npu` (computing), `waits` or `submits`."""

    node: str
    what: str
    start_s: float
    end_s: float
    is_matmul: bool

    @property
    def role(self) -> str:
        """The operator's name without its layer."""
        return self.node.rsplit(".", maxsplit=1)[-1]

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.end_s - self.start_s


@contextmanager
def timing(engine: Engine) -> Iterator[None]:
    """The devices of an engine keep their calls' times, each call for itself."""
    engine.runner.start_trace()
    yield
    engine.runner.stop_trace()


def timeline(engine: Engine) -> list[Span]:
    """The last step: what the control thread and blocking devices did by the host's clock, and,
    with `SupportsQueueControl.set_timing` on, launches by their device's.
    """
    step, stamps = engine.runner.last_step, engine.runner.last_run.stamps
    spans = []
    for at, action in enumerate(step.program):
        launch = step.launches[action.launch]
        what = {RUN: launch.kind, WAIT: "waits", SUBMIT: "submits", PREQUEUE: "submits"}
        if (name := what.get(action.code)) is not None:
            matmul = launch.rows is not None
            spans.append(Span(launch.node, name, stamps[at], stamps[at + 1], matmul))
    for launch, completion in zip(step.launches, step.completions, strict=True):
        if completion is not None and (span := completion.span()) is not None:
            spans.append(Span(launch.node, launch.kind, *span, launch.rows is not None))
    return spans


class Worker:
    """A process that holds one engine, made there by `factory(**options)`, and answers requests:
    only the one that was asked runs, the others block, so that rounds can be interleaved.
    """

    def __init__(self, name: str, factory: Callable[..., Any], **options: Any) -> None:
        self.name, self._made = name, (factory, options)

    def start(self) -> None:
        """Start the process and load the engine. Raises `RuntimeError` if that fails."""
        context = multiprocessing.get_context("spawn")
        self._pipe, child = context.Pipe()
        self._process = context.Process(target=_serve, args=(child, *self._made), daemon=True)
        self._process.start()
        self._receive()

    def ask(self, method: str, *arguments: Any) -> Any:
        """What a method of the engine returns; `memory` is the proportional set size in bytes."""
        self._pipe.send((method, arguments))
        return self._receive()

    def stop(self) -> None:
        """End the process."""
        self._pipe.send(None)
        self._process.join(timeout=30)

    def _receive(self) -> Any:
        succeeded, value = self._pipe.recv()
        if not succeeded:
            raise RuntimeError(f"worker {self.name} failed:\n{value}")
        return value


def pss_bytes(*kinds: str) -> int:
    """Proportional set size of this process, or the sum of other kinds of pages (Linux)."""
    lines = Path("/proc/self/smaps_rollup").read_text(encoding="utf-8").splitlines()
    wanted = tuple(f"{kind}:" for kind in kinds or ("Pss",))
    return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith(wanted))


def _serve(pipe: Connection, factory: Callable[..., Any], options: dict[str, Any]) -> None:
    try:
        engine = factory(**options)
        pipe.send((True, None))
        while (request := pipe.recv()) is not None:
            method, arguments = request
            answer = pss_bytes if method == "memory" else getattr(engine, method)
            pipe.send((True, answer(*arguments)))
    except BaseException:
        pipe.send((False, traceback.format_exc()))
        raise
