"""The program of a step: a flat list of actions; how waits are shortened once it is known.

Flags. Behind each launch that is waited for, a one-item kernel raises a flag that the host watches.

Gates. In a program in which every start of a group of GPU launches follows work of the control
thread, the GPU would run dry before each, and its worker fall asleep. With a stream signal each
group is submitted while the one before it runs, behind a gate, and starting it is a store:

    SUBMIT a; RUN x; WAIT a; RUN y; SUBMIT b; RUN z; WAIT b        becomes
    SUBMIT a gate1; RUN x; PREQUEUE b; WAIT gate1; RUN y; SIGNAL b; RUN z; WAIT b

A gate's completion is that of everything before it, so it is the flag of the group before.

A submission takes 4 to 25 us of the control thread, and the NPU's calls, which it makes, are late
by that. So what is behind wait values is submitted while the thread would wait: as late as
possible, a few launches while a norm or an activation runs, all others while attention does, the
one operation that takes long besides matmuls, or a matmul that is the GPU's alone. Only where no
wait is left before a group begins it is submitted when the control thread has done its part of a
matmul: it may have to wait for the GPU's then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple, TypeAlias

from hetero.backends.optional import StreamSignal
from hetero.backends.protocol import EVERY_KIND, BoundCall, Completion, DeviceKind, Operand

Span: TypeAlias = tuple[int, int]
Place: TypeAlias = tuple[int, int]  # the group at work, and before which other action

SUBMIT, RUN, WAIT, SIGNAL, PREQUEUE, WAIT_LAYER = range(6)
SHORT_ROOM = 2  # launches that are submitted while a norm or an activation runs
LONG: Final = "attention"  # the last part of the name of a node that takes long
FAR: Final = 8  # groups that one is submitted ahead of its start, at most


class Launch(NamedTuple):
    """One call of a step, for accounts and traces.

    `tokens` and `rows` of a matmul's part; `outputs` are what it writes, caches left out; `chunk`
    which of the step's it is for.
    """

    node: str
    kind: DeviceKind
    call: BoundCall
    tokens: Span
    rows: Span | None
    outputs: tuple[Operand, ...] = ()
    chunk: int = 0


class Action(NamedTuple):
    """The executor's next operation on a launch (its index in the step).

    SUBMIT, RUN, WAIT for its completion; PREQUEUE: submit it behind a closed gate; SIGNAL: open the
    gate of the group that completes with the launch; WAIT_LAYER: wait until the cache layer that
    the launch works on is loaded. `kind` is the device's index in `EVERY_KIND`.
    """

    code: int
    launch: int
    kind: int
    target: Callable[[], Completion | float | None] | Callable[[Completion], float]


def raise_flags(
    program: list[Action],
    launches: list[Launch],
    flags: Mapping[DeviceKind, BoundCall],
    signal: StreamSignal | None,
) -> list[Action]:
    """Put a flag after every launch that is waited for, but wait values; wait for the flag."""
    flagged: dict[int, int] = {}
    for action in program:
        flag = flags.get(EVERY_KIND[action.kind]) if action.code == WAIT else None
        if flag is not None and action.launch not in flagged:
            launch = launches[action.launch]
            if signal is not None and launch.call is signal.wait_value:
                continue
            flagged[action.launch] = len(launches)
            launches.append(launch._replace(node=f"{launch.node} flag", call=flag, outputs=()))
    actions: list[Action] = []
    for action in program:
        known = flagged.get(action.launch)
        if known is not None and action.code in (WAIT, SIGNAL):
            actions.append(action._replace(launch=known))
            continue
        actions.append(action)
        if known is not None and action.code in (SUBMIT, PREQUEUE):
            flag = launches[known].call
            actions.append(action._replace(launch=known, target=flag.submit))
    return actions


def prequeue(
    program: list[Action], launches: list[Launch], signals: Mapping[DeviceKind, StreamSignal]
) -> tuple[list[Action], StreamSignal | None]:
    """Return the program with wait values, and its signal; unchanged where they gain nothing."""
    kinds = {action.kind for action in program if action.code == SUBMIT}
    signal = signals.get(EVERY_KIND[min(kinds)]) if len(kinds) == 1 else None
    if signal is None:
        return program, None
    ahead = _Ahead(program, launches, signal, min(kinds))
    return (ahead.program(), signal) if ahead.wait_values else (program, None)


class _Ahead:
    """Groups are runs of submissions between which the control thread runs nothing."""

    def __init__(
        self, program: list[Action], launches: list[Launch], signal: StreamSignal, kind: int
    ) -> None:
        self.launches, self.signal, self.kind = launches, signal, kind
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
        self.wait_values = {i: self._gate(i) for i in range(first, len(self.groups))}

    def _gate(self, group: int) -> int:
        """Return the place of a group's gate among the launches."""
        launch = self.launches[self.groups[group][0].launch]
        gate = Launch(
            f"{launch.node} gate", launch.kind, self.signal.wait_value, launch.tokens, None
        )
        self.launches.append(gate)
        return len(self.launches) - 1

    def program(self) -> list[Action]:
        """Return the program with every group queued one ahead.

        It has signals where the groups began, and waits on the wait values in place of the groups'
        flags.
        """
        ended = {
            self.groups[i - 1][-1].launch: gate for i, gate in self.wait_values.items() if i > 0
        }
        actions: list[Action] = []
        if 0 in self.wait_values:
            actions += [self._submission(PREQUEUE, self.wait_values[0]), *self._block(0, PREQUEUE)]
        else:
            actions += self._block(0, SUBMIT)
        actions += self.before
        places = self._places()
        for i, others in enumerate(self.others):
            if i in self.wait_values:
                end = self.wait_values.get(i + 1, self.groups[i][-1].launch)
                actions.append(Action(SIGNAL, end, self.kind, self.signal.signal))
            for at in range(len(others) + 1):
                actions += places.get((i, at), [])
                actions += others[at : at + 1]
        return [
            action._replace(launch=ended.get(action.launch, action.launch))
            if action.code == WAIT
            else action
            for action in actions
        ]

    def _places(self) -> dict[Place, list[Action]]:
        """Return the place of each submission of the second group and later ones."""
        room = {place: n for i in range(len(self.groups)) for place, n in self._waits(i)}
        waits = list(room)
        places: dict[Place, list[Action]] = {}
        place: Place = (len(self.groups), 0)
        for group in reversed(range(1, len(self.groups))):
            last = (group - 1, _after_run(self.others[group - 1]))
            for action in reversed(self._block(group, PREQUEUE)):
                while waits and (waits[-1][0] >= group or not room[waits[-1]]):
                    waits.pop()
                if waits and waits[-1][0] >= group - FAR:
                    last = waits[-1]
                    room[last] -= 1
                place = min(place, last)
                places.setdefault(place, []).insert(0, action)
        return places

    def _waits(self, group: int) -> Iterator[tuple[Place, int]]:
        """Return the waits for a group before the control thread's concurrent work, with room.

        The room is how many submissions fit in each.
        """
        launches = [action.launch for action in self.groups[group]]
        for at, action in enumerate(self.others[group]):
            if action.code == RUN:
                return
            if action.launch in launches:
                before = launches[: launches.index(action.launch) + 1]
                long = any(self._is_long(self.launches[i]) for i in before)
                yield (group, at), len(self.launches) if long else SHORT_ROOM

    def _is_long(self, launch: Launch) -> bool:
        return launch.rows is not None or launch.node.endswith(LONG)

    def _block(self, group: int, code: int) -> list[Action]:
        """Return a group's submissions, and the gate after it; a closed gate needs one flush."""
        block = [action._replace(code=code) for action in self.groups[group]]
        if group + 1 in self.wait_values:
            block.append(self._submission(code, self.wait_values[group + 1]))
        if code != PREQUEUE:
            return block
        deferred = [a._replace(target=self.launches[a.launch].call.enqueue) for a in block[:-1]]
        return [*deferred, block[-1]]

    def _submission(self, code: int, gate: int) -> Action:
        return Action(code, gate, self.kind, self.signal.wait_value.submit)


def _after_run(others: Sequence[Action]) -> int:
    """Return where the control thread's own work is done, and it may wait for the group's."""
    return next((at + 1 for at, action in enumerate(others) if action.code == RUN), 0)
