"""A Chrome/Perfetto trace of every step: lanes for the GPU, the NPU and the control thread.

Times are measured: the NPU's and the control thread's by the host, the GPU's by its driver (without
a driver's clock a launch is shown from its submission to the moment that the host saw its end).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any, Final

from hetero.backends.host.files import atomic_write
from hetero.backends.protocol import EVERY_KIND
from hetero.errors import UserError
from hetero.runtime.program import PREQUEUE, RUN, SIGNAL, SUBMIT, WAIT_LAYER, Launch
from hetero.runtime.step import Step
from hetero.runtime.usage import StepRun

LANES: Final = {lane: kind.upper() for lane, kind in enumerate(EVERY_KIND, start=1)}
CONTROL: Final = len(EVERY_KIND) + 1
NAMES: Final = LANES | {CONTROL: "control"}


class Trace:
    """Events of the steps that ran while it was on. Control thread only."""

    def __init__(self) -> None:
        self._events: list[dict[str, Any]] = []
        self._start_s: float | None = None

    def add(self, step: Step, run: StepRun) -> None:
        """Add the last run of a step."""
        stamps = run.stamps
        if self._start_s is None:
            self._start_s = stamps[0]
        self._events.append(
            self._event(
                f"{step.phase} {step.tokens}",
                CONTROL,
                stamps[0],
                stamps[-1],
                {"tokens": step.tokens, "chunks": list(step.chunks)}
                | {f"{kind} idle": round(run.idle_share(kind), 4) for kind in run.counts},
            )
        )
        ended = self._control(step, run)
        for index, submitted_s in ended.items():
            self._asynchronous(step, index, *submitted_s)

    def _control(self, step: Step, run: StepRun) -> dict[int, tuple[float, float]]:
        """Events of the control thread and of blocking devices; submissions with seen ends."""
        slept = iter(run.slept)
        submitted: dict[int, float] = {}
        seen: dict[int, tuple[float, float]] = {}
        for action, start_s, end_s in zip(step.program, run.stamps, run.stamps[1:], strict=False):
            launch = step.launches[action.launch]
            if action.code == RUN:
                lane = EVERY_KIND.index(launch.kind) + 1
                self._add(launch.node, lane, start_s, end_s, _arguments(launch))
            elif action.code == SIGNAL:
                self._add(f"ring for {launch.node}", CONTROL, start_s, end_s, {})
            elif action.code in (SUBMIT, PREQUEUE):
                submitted[action.launch] = start_s
                self._add(f"submit {launch.node}", CONTROL, start_s, end_s, {})
            elif action.code == WAIT_LAYER:
                next(slept)
                self._add(f"keys and values for {launch.node}", CONTROL, start_s, end_s, {})
            else:
                middle_s = start_s + next(slept)
                self._add(f"sleep for {launch.node}", CONTROL, start_s, middle_s, {})
                self._add(f"poll for {launch.node}", CONTROL, middle_s, end_s, {})
                for index in [i for i in submitted if i <= action.launch]:
                    if step.launches[index].kind == launch.kind:
                        seen[index] = (submitted.pop(index), end_s)
        return seen

    def _asynchronous(self, step: Step, index: int, submitted_s: float, seen_s: float) -> None:
        launch, completion = step.launches[index], step.completions[index]
        span = completion.span() if completion is not None else None
        start_s, end_s = span or (submitted_s, seen_s)
        known = "driver's clock" if span else "submitted to seen"
        lane = EVERY_KIND.index(launch.kind) + 1
        self._add(launch.node, lane, start_s, end_s, _arguments(launch) | {"times": known})

    def _add(
        self, name: str, lane: int, start_s: float, end_s: float, arguments: dict[str, Any]
    ) -> None:
        if end_s > start_s:
            self._events.append(self._event(name, lane, start_s, end_s, arguments))

    def _event(
        self, name: str, lane: int, start_s: float, end_s: float, arguments: dict[str, Any]
    ) -> dict[str, Any]:
        assert self._start_s is not None
        return {
            "name": name,
            "cat": NAMES[lane],
            "ph": "X",
            "pid": 1,
            "tid": lane,
            "ts": round(1e6 * (start_s - self._start_s), 3),
            "dur": round(1e6 * (end_s - start_s), 3),
            "args": arguments,
        }

    def save(self, path: str | os.PathLike[str], *, about: dict[str, str]) -> None:
        """Write as JSON (open it in ui.perfetto.dev or chrome://tracing), atomically.

        Raises `UserError` where it cannot be written.
        """
        document = {
            "traceEvents": [*_names(), *self._events],
            "displayTimeUnit": "ms",
            "otherData": {"numbers": "measured"} | about,
        }
        try:
            atomic_write(path, json.dumps(document) + "\n", durable=False)
        except OSError as error:
            raise UserError(
                f"cannot write the trace {path} ({error.strerror}): choose another path"
            ) from None


def _names() -> Iterator[dict[str, Any]]:
    yield {"name": "process_name", "ph": "M", "pid": 1, "args": {"name": "hetero"}}
    for lane, name in NAMES.items():
        yield {"name": "thread_name", "ph": "M", "pid": 1, "tid": lane, "args": {"name": name}}
        yield {"name": "thread_sort_index", "ph": "M", "pid": 1, "tid": lane,
               "args": {"sort_index": lane}}  # fmt: skip


def _arguments(launch: Launch) -> dict[str, Any]:
    event: dict[str, Any] = {
        "kernel": launch.call.name,
        "tokens": list(launch.tokens),
        "chunk": launch.chunk,
    }
    if launch.rows is not None:
        event["rows"] = list(launch.rows)
    return event
