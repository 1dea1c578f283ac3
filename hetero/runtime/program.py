"""The program of a step: a flat list of actions; how waits are shortened once it is known.

Flags. Behind each launch that is waited for, a one-item kernel raises a flag that the host watches.

Gates. In a program in which every start of a group of GPU launches follows work of the control
thread, the GPU would run dry before each, and its worker fall asleep. With a doorbell each group is
submitted while the one before it runs, behind a gate, and starting it is a store:

    SUBMIT a; RUN x; WAIT a; RUN y; SUBMIT b; RUN z; WAIT b        becomes
    SUBMIT a gate1; RUN x; AHEAD b; WAIT gate1; RUN y; RING b; RUN z; WAIT b

A gate's completion is that of everything before it, so it is the flag of the group before. The next
group, never more than one, is submitted when the control thread has done its part of a matmul: it
would wait for the GPU's now, if that is the longer one. Where it has to wait for attention first,
the one operation besides matmuls that takes long, it is submitted meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, NamedTuple, TypeAlias

from hetero.backends.protocol import BoundCall, Completion, DeviceKind, Doorbell

Span: TypeAlias = tuple[int, int]

SUBMIT, RUN, WAIT, RING, AHEAD = range(5)
LONG: Final = "attention"  # the last part of such a node's name
KINDS: Final[tuple[DeviceKind, ...]] = ("gpu", "npu")


class Launch(NamedTuple):
    """One call of a step, for accounts and traces. `tokens` and `rows` of a matmul's part."""

    node: str
    kind: DeviceKind
    call: BoundCall
    tokens: Span
    rows: Span | None


class Action(NamedTuple):
    """What the executor does next with a launch (its place in the step).

    SUBMIT, RUN, WAIT for its completion; AHEAD: submit it behind a closed gate; RING: open the gate
    of a group whose completion is the launch's. `kind` is the device's place in `KINDS`.
    """

    code: int
    launch: int
    kind: int
    target: Callable[[], Completion | None] | Callable[[Completion], float]


def raise_flags(
    program: list[Action],
    launches: list[Launch],
    flags: Mapping[DeviceKind, BoundCall],
    bell: Doorbell | None,
) -> list[Action]:
    """Put a flag behind every launch that is waited for, but gates; wait for the flag instead."""
    flagged: dict[int, int] = {}
    for action in program:
        flag = flags.get(KINDS[action.kind]) if action.code == WAIT else None
        if flag is not None and action.launch not in flagged:
            launch = launches[action.launch]
            if bell is not None and launch.call is bell.gate:
                continue
            flagged[action.launch] = len(launches)
            launches.append(launch._replace(node=f"{launch.node} flag", call=flag))
    found: list[Action] = []
    for action in program:
        known = flagged.get(action.launch)
        if known is not None and action.code in (WAIT, RING):
            found.append(action._replace(launch=known))
            continue
        found.append(action)
        if known is not None and action.code in (SUBMIT, AHEAD):
            flag = launches[known].call
            found.append(action._replace(launch=known, target=flag.submit))
    return found


def queue_ahead(
    program: list[Action], launches: list[Launch], bells: Mapping[DeviceKind, Doorbell]
) -> tuple[list[Action], Doorbell | None]:
    """The program with gates, and its doorbell; as it is where gates would gain nothing."""
    kinds = {action.kind for action in program if action.code == SUBMIT}
    bell = bells.get(KINDS[min(kinds)]) if len(kinds) == 1 else None
    if bell is None:
        return program, None
    ahead = _Ahead(program, launches, bell, min(kinds))
    return (ahead.program(), bell) if ahead.gates else (program, None)


class _Ahead:
    """Groups are runs of submissions between which the control thread runs nothing."""

    def __init__(
        self, program: list[Action], launches: list[Launch], bell: Doorbell, kind: int
    ) -> None:
        self.launches, self.bell, self.kind = launches, bell, kind
        self.before: list[Action] = []  # up to the first group
        self.groups: list[list[Action]] = []
        self.others: list[list[Action]] = []  # the other actions from a group's start to the next's
        ran = True
        for action in program:
            if action.code == SUBMIT:
                if ran:
                    self.groups.append([])
                    self.others.append([])
                    ran = False
                self.groups[-1].append(action)
            else:
                ran = ran or action.code == RUN
                (self.others[-1] if self.others else self.before).append(action)
        first = 0 if self.before else 1
        self.gates = {i: self._gate(i) for i in range(first, len(self.groups))}

    def _gate(self, group: int) -> int:
        """The place of a group's gate among the launches."""
        launch = self.launches[self.groups[group][0].launch]
        gate = Launch(f"{launch.node} gate", launch.kind, self.bell.gate, launch.tokens, None)
        self.launches.append(gate)
        return len(self.launches) - 1

    def program(self) -> list[Action]:
        """Every group one ahead, rings where the groups began, gates for the flags of groups."""
        ended = {self.groups[i - 1][-1].launch: gate for i, gate in self.gates.items() if i > 0}
        found: list[Action] = []
        if 0 in self.gates:
            found += [self._submission(AHEAD, self.gates[0]), *self._block(0, AHEAD)]
        else:
            found += self._block(0, SUBMIT)
        found += self.before
        for i, others in enumerate(self.others):
            if i in self.gates:
                end = self.gates.get(i + 1, self.groups[i][-1].launch)
                found.append(Action(RING, end, self.kind, self.bell.ring))
            following = self._block(i + 1, AHEAD) if i + 1 < len(self.groups) else []
            at = self._idle(others)
            found += [*others[:at], *following, *others[at:]]
        return [
            action._replace(launch=ended.get(action.launch, action.launch))
            if action.code == WAIT
            else action
            for action in found
        ]

    def _idle(self, others: list[Action]) -> int:
        """Where among these actions the control thread has time to submit."""
        for at, action in enumerate(others):
            if action.code == RUN:
                return at + 1
            if self.launches[action.launch].node.endswith(LONG):
                return at
        return 0

    def _block(self, group: int, code: int) -> list[Action]:
        """A group's submissions, and the gate behind it; one flush will do behind a closed gate."""
        block = [action._replace(code=code) for action in self.groups[group]]
        if group + 1 in self.gates:
            block.append(self._submission(code, self.gates[group + 1]))
        if code != AHEAD:
            return block
        held = [a._replace(target=self.launches[a.launch].call.enqueue) for a in block[:-1]]
        return [*held, block[-1]]

    def _submission(self, code: int, gate: int) -> Action:
        return Action(code, gate, self.kind, self.bell.gate.submit)
