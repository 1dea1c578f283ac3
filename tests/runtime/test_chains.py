"""Which submissions become chains: none is lost, moved behind a wait, or done twice."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from hetero.backends.optional import SupportsFusedLaunch
from hetero.backends.protocol import KINDS, BoundCall, DeviceKind
from hetero.runtime.fused_launch import LONGEST, SHORTEST, fuse_program
from hetero.runtime.program import PREQUEUE, RUN, SIGNAL, SUBMIT, WAIT, Action, Launch


class Call(BoundCall):
    """That its device may chain, or not."""

    def __init__(self, number: int, chains: bool) -> None:
        self.name, self.m, self.fusible = f"{number}", 1, chains
        self.number = number

    def run(self) -> None: ...


class Chained(BoundCall):
    """Calls as one."""

    def __init__(self, stages: Sequence[Sequence[BoundCall]]) -> None:
        self.stages = [
            [call.number for call in stage if isinstance(call, Call)] for stage in stages
        ]

    def run(self) -> None: ...


class Device(SupportsFusedLaunch):
    """Chains what it may; with `refuses` nothing."""

    def __init__(self, refuses: bool) -> None:
        self.refuses = refuses

    def fuse(self, runs: Any, *, compiles: bool) -> list[Chained] | None:
        return None if self.refuses else [Chained(run) for run in runs]


def random_program(rng: random.Random) -> tuple[list[Action], list[Launch]]:
    """Launches of both devices, some awaited at once, others later; nodes of one to four."""
    program: list[Action] = []
    launches: list[Launch] = []
    waiting: list[int] = []
    node = 0
    length, rarely = rng.randint(1, 300), rng.choice([0.01, 0.05, 0.3])
    while len(launches) < length:
        kind = 0 if rng.random() > rarely else 1
        node += 1
        for _ in range(rng.choice([1, 1, 1, 2, 4])):
            number = len(launches)
            call = Call(number, rng.random() > rarely / 4)
            device: DeviceKind = KINDS[kind]
            launches.append(Launch(f"node {node}", device, call, (0, 1), None))
            code = PREQUEUE if rng.random() < rarely / 4 else RUN if kind and number % 2 else SUBMIT
            program.append(Action(code, number, kind, call.run))
            if rng.random() < rarely:
                waiting.append(number)
        while waiting and rng.random() < 0.5:
            number = waiting.pop(rng.randrange(len(waiting)))
            code = rng.choice([WAIT, SIGNAL])
            program.append(Action(code, number, KINDS.index(launches[number].kind), min))
    return program, launches


def check(seed: int) -> int:
    """Chains of a random program."""
    rng = random.Random(seed)
    program, launches = random_program(rng)
    devices: Any = {kind: Device(refuses=kind == "npu" and seed % 2 == 0) for kind in KINDS}
    found = fuse_program(tuple(program), tuple(launches), devices, compiles=True)
    chains = 0
    expected = iter(program)
    awaited = {action.launch for action in program if action.code in (WAIT, SIGNAL)}
    for action in found:
        whole = getattr(getattr(action.target, "__self__", None), "stages", None)
        if whole is None:
            assert action == next(expected)
            continue
        chains += 1
        members = [number for stage in whole for number in stage]
        replaced = [next(expected) for _ in members]
        assert [x.launch for x in replaced] == members
        assert {(x.code, x.kind) for x in replaced} == {(SUBMIT, action.kind)}
        assert (action.code, action.launch) == (SUBMIT, members[-1])
        assert not awaited & set(members[:-1]), "a wait would find nothing"
        assert all(launches[number].call.fusible for number in members)
        assert SHORTEST <= len(members) <= LONGEST
        for stage in whole:
            assert len({launches[number].node for number in stage}) == 1
    assert next(expected, None) is None
    return chains


def test_every_launch_is_submitted_once_and_waits_find_theirs() -> None:
    assert sum(map(check, range(200))) > 100
