"""Engines in processes of their own that take turns: what a fair comparison needs.

A worker loads one engine, then answers requests over a pipe. Only the worker that was asked runs;
the others block on their pipe, so that rounds of different engines can be interleaved in one run.
"""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol


class Engine(Protocol):
    """What a worker measures. Times are seconds, measured."""

    def round(self, prompt_tokens: int, decode_tokens: int) -> dict[str, float]:
        """One prefill and the decode after it."""
        ...


@dataclass
class Worker:
    """A process that holds one engine, built there by `factory(**options)`."""

    name: str
    factory: Callable[..., Engine]
    options: dict[str, Any]
    samples: dict[str, list[float]] = field(default_factory=dict)

    def start(self) -> None:
        """Start the process and wait until the engine is loaded."""
        context = multiprocessing.get_context("spawn")
        self._pipe, child = context.Pipe()
        arguments = (child, self.factory, self.options)
        self._process = context.Process(target=_serve, args=arguments, daemon=True)
        self._process.start()
        self._receive()

    def round(self, prompt_tokens: int, decode_tokens: int, *, keep: bool = True) -> None:
        """Run one round; its values are appended to `samples` if `keep`."""
        self._pipe.send(("round", (prompt_tokens, decode_tokens)))
        for key, value in self._receive().items():
            if keep:
                self.samples.setdefault(key, []).append(value)

    def memory_bytes(self) -> int:
        """Proportional set size of the process."""
        self._pipe.send(("memory", ()))
        return int(self._receive())

    def stop(self) -> None:
        """End the process."""
        self._pipe.send(("stop", ()))
        self._process.join(timeout=30)

    def _receive(self) -> Any:
        kind, value = self._pipe.recv()
        if kind == "error":
            raise RuntimeError(f"worker {self.name} failed:\n{value}")
        return value


def pss_bytes() -> int:
    """Proportional set size of this process (Linux)."""
    lines = Path("/proc/self/smaps_rollup").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


def _serve(pipe: Connection, factory: Callable[..., Engine], options: dict[str, Any]) -> None:
    try:
        engine = factory(**options)
        pipe.send(("ready", None))
        while True:
            request, arguments = pipe.recv()
            if request == "stop":
                return
            if request == "memory":
                pipe.send(("value", pss_bytes()))
            else:
                pipe.send(("value", engine.round(*arguments)))
    except BaseException:
        pipe.send(("error", traceback.format_exc()))
        raise
