"""Gates and flags in a program: the same order of work as without, and never a deadlock."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from hetero.backends.optional import StreamSignal
from hetero.backends.protocol import BoundCall, Completion
from hetero.runtime.program import (
    FAR,
    LONG,
    PREQUEUE,
    RUN,
    SIGNAL,
    SUBMIT,
    WAIT,
    Action,
    Launch,
    prequeue,
    raise_flags,
)
from tests.support.selection import examples

CODES = {SUBMIT: "SUBMIT", RUN: "RUN", WAIT: "WAIT", SIGNAL: "SIGNAL", PREQUEUE: "PREQUEUE"}


class Call(BoundCall):
    """A named call; nothing runs."""

    def __init__(self, name: str) -> None:
        self.name, self.m = name, 1

    def run(self) -> None:
        raise AssertionError

    def submit(self) -> Completion:
        raise AssertionError


class Signal(StreamSignal):
    """A signal that no device waits for."""

    wait_value = Call("gate")

    def signal(self) -> None:
        """Nothing."""

    release = reset = check = signal


def written(program: str) -> tuple[list[Action], list[Launch]]:
    """Actions of a text such as `S W R`: submit the GPU's next call, wait for its last, run; `L`
    submits one that takes long.
    """
    launches: list[Launch] = []
    actions: list[Action] = []
    submitted = -1
    for letter in program.split():
        code = {"S": SUBMIT, "L": SUBMIT, "R": RUN, "W": WAIT}[letter]
        if code == WAIT:
            if submitted >= 0:
                actions.append(Action(WAIT, submitted, 0, lambda _: 0.0))
            continue
        kind = 0 if code == SUBMIT else 1
        call = Call(f"{'ab'[kind]}{len(launches)}{LONG if letter == 'L' else ''}")
        actions.append(Action(code, len(launches), kind, call.submit))
        submitted = len(launches) if code == SUBMIT else submitted
        launches.append(Launch(call.name, ("gpu", "npu")[kind], call, (0, 1), None))  # type: ignore[arg-type]
    return actions, launches


def shown(program: list[Action], launches: list[Launch]) -> list[str]:
    return [f"{CODES[action.code]} {launches[action.launch].node}" for action in program]


def test_the_example_of_the_docstring() -> None:
    actions, launches = written("S R W R S R W")
    found, signal = prequeue(actions, launches, {"gpu": Signal()})
    found = raise_flags(found, launches, {"gpu": Call("flag")}, signal)
    assert shown(found, launches) == [
        "SUBMIT a0", "SUBMIT a3 gate", "RUN b1", "PREQUEUE a3", "PREQUEUE a3 flag", "WAIT a3 gate",
        "RUN b2", "SIGNAL a3 flag", "RUN b4", "WAIT a3 flag",
    ]  # fmt: skip


def test_what_comes_next_is_submitted_while_attention_runs_and_a_little_in_short_waits() -> None:
    cut = "S W S R"  # a norm or an activation, and the GPU's part of a matmul beside the NPU's
    actions, launches = written(" ".join([f"{cut} S L W S R {cut} {cut}"] * 3 + ["S W"]))
    found, _ = prequeue(actions, launches, {"gpu": Signal()})
    letters = {SUBMIT: "s", PREQUEUE: "a", RUN: "R", SIGNAL: "|"}
    told = ""
    for action in found:
        long = LONG in launches[action.launch].node
        told += letters.get(action.code) or ("L" if long else "W")
    block = "aaaaaaaLR|" + 3 * "aaWR|"  # seven of the next block's thirteen, and two at a time
    assert told[told.index("L") - 7 :].startswith(block + block + "aaaaLR|")


def test_a_program_of_one_group_stays() -> None:
    actions, launches = written("S S W")
    assert prequeue(actions, launches, {"gpu": Signal()}) == (actions, None)
    actions, launches = written("S R W S W")
    assert prequeue(actions, launches, {}) == (actions, None)


@dataclass
class Queue:
    """The device: runs what it may at once (`greedy`) or only what is waited for."""

    launches: list[Launch]
    greedy: bool
    queue: list[int] = field(default_factory=list)
    done: list[str] = field(default_factory=list)  # calls that started, in order, with the RUNs
    at: int = 0
    opened: int = 0
    wait_values: int = 0

    def go(self, until: int | None = None) -> bool:
        """Run on; whether launch `until` was reached (a gate: everything before it is over)."""
        while self.at < len(self.queue):
            launch = self.launches[self.queue[self.at]]
            closed = launch.node.endswith("gate") and self.wait_values == self.opened
            if closed:
                return until in self.queue[: self.at + 1]
            self.wait_values += launch.node.endswith("gate")
            self.at += 1
            if launch.node == launch.call.name:
                self.done.append(launch.node)
            if until == self.queue[self.at - 1]:
                return True
        return until in self.queue[: self.at]


@settings(max_examples=examples(200), deadline=None)
@given(st.text("SRWL", max_size=40), st.booleans(), st.booleans())
def test_gates_change_no_order(letters: str, greedy: bool, flagged: bool) -> None:
    """Each GPU call comes after the same calls of the control thread as without wait values (those
    that were before its submission), waits end, and what was waited for is over.
    """
    actions, launches = written(" ".join([*letters, "W"]))
    before: dict[str, set[str]] = {}
    ran: set[str] = set()
    for action in actions:
        name = launches[action.launch].node
        if action.code == RUN:
            ran = ran | {name}
        elif action.code == SUBMIT:
            before[name] = ran
    awaited = [launches[a.launch].node for a in actions if a.code == WAIT]
    found, signal = prequeue(actions, launches, {"gpu": Signal()})
    found = raise_flags(found, launches, {"gpu": Call("flag")} if flagged else {}, signal)

    device = Queue(launches, greedy)
    for action in found:
        if action.code == RUN:
            device.done.append(launches[action.launch].node)
        elif action.code in (SUBMIT, PREQUEUE):
            device.queue.append(action.launch)
        elif action.code == SIGNAL:
            device.opened += 1
        else:
            assert device.go(action.launch), "a wait that does not end"
            assert awaited.pop(0) in device.done
        if greedy:
            device.go()
        assert (
            sum(launches[i].node.endswith("gate") for i in device.queue) <= device.opened + FAR + 1
        )
    assert not awaited
    assert device.at == len(device.queue) or not before
    for name, needed in before.items():
        assert needed <= set(device.done[: device.done.index(name)])
    numbers = [int(name[1:].removesuffix(LONG)) for name in device.done if name[0] == "a"]
    assert numbers == sorted(numbers)
