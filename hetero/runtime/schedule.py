"""The order in which the control thread starts the launches of a step, and its waits.

A schedule is a list of starts and waits. A wait is for one launch of a queue and stands for all
before it in that queue. A launch needs one for every other queue in which something ends that it
has an edge from; none for its own queue, and none for what kept the control thread till its end.

`in_order`      the launches as the graph lists them, of each stage the queued ones first, so that
                both devices work at once
`out_of_order`  a list scheduler: of the launches that nothing is before any more it starts the one
                that can begin first ("Fast On-device LLM Inference with NPUs", section 3.4: other
                chunks' work fills the gaps that a chunk's own order leaves). Where several can, it
                takes by `paper` the one of largest contribution (its eq. 6), by `best` whichever
                of three rules makes the shortest schedule, eq. 6 among them

Pure: time is what `Cost` says of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby, pairwise
from typing import Literal, NamedTuple, TypeAlias

from hetero.backends.protocol import DeviceKind
from hetero.runtime.launch_graph import LaunchGraph, LaunchSpec

Cost: TypeAlias = Callable[[LaunchSpec], float]  # seconds on its device
Order: TypeAlias = Literal["fifo", "paper", "best"]


def windows(calls: Sequence[int], limit: int) -> list[tuple[int, ...]]:
    """Group the calls of a prompt in as few windows of at most `limit` calls as possible."""
    count = -(-len(calls) // limit)
    stops = [len(calls) * i // count for i in range(count + 1)] if count else [0]
    return [tuple(calls[a:b]) for a, b in pairwise(stops)]


class Start(NamedTuple):
    """Submit a launch, or run it where it keeps the control thread (its place in the graph)."""

    launch: int


class Await(NamedTuple):
    """Wait for a launch and all before it in its queue, because of launch `before`.

    None: because the step ends.
    """

    launch: int
    before: int | None


Schedule: TypeAlias = tuple[Start | Await, ...]


def in_order(graph: LaunchGraph, *, eager: bool = True) -> Schedule:
    """Schedule stage after stage.

    Without `eager` a stage's waits all come before its first launch, and both parts of a cut have
    ended before the next stage: for waits that are for a whole queue, whatever was submitted to it.
    """
    order = _Order(graph)
    cut: tuple[int, ...] = ()
    for _, stage in groupby(range(len(graph.launches)), key=lambda i: graph.launches[i].stage):
        members = sorted(stage, key=lambda i: not graph.launches[i].asynchronous)
        if not eager:
            order.join(cut, members[0])
            for i in members:
                order.meet(i)
            cut = tuple(members) if len({graph.launches[i].kind for i in members}) > 1 else ()
        for i in members:
            order.start(i)
    return order.end()


def ordered(graph: LaunchGraph, order: Iterable[int]) -> Schedule:
    """Return the launches in this order, with the waits that they need.

    No launch may come before one that it has an edge from.
    """
    placed = _Order(graph)
    for launch in order:
        placed.start(launch)
    return placed.end()


def out_of_order(
    graph: LaunchGraph, costs_s: Sequence[float], submit_s: float = 0.0, order: Order = "best"
) -> Schedule:
    """Return the shortest schedule that the list scheduler makes by the rules of an `order`.

    Shortest is by `seconds_of`. It is `in_order` where none is shorter, and for `fifo`.
    """
    schedules = [in_order(graph)]
    if order != "fifo":
        rules = schedule_rules(graph, costs_s, order)
        schedules += [ListScheduler(graph, costs_s, submit_s, rule).schedule() for rule in rules]
    launches = graph.launches
    return min(schedules, key=lambda schedule: seconds_of(launches, schedule, costs_s, submit_s))


class Orders:
    """Schedules by one order, computed once for launches of the same nodes, chunks and devices.

    Their edges are the same: other token counts make other seconds, but not another order, unless
    it would be longer than in order. Computing one takes some 30 ms for 600 launches, reusing it a
    third of one.
    """

    def __init__(self, order: Order) -> None:
        self.order: Order = order
        self._schedules: dict[tuple[tuple[str, int, DeviceKind | None], ...], list[Schedule]] = {}

    def schedule(
        self, launches: Sequence[LaunchSpec], cost: Cost, *, submit_s: float = 0.0
    ) -> Schedule:
        """Return the schedule of `out_of_order`."""
        return self.shortest(launches, [cost(launch) for launch in launches], submit_s)[1]

    def shortest(
        self, launches: Sequence[LaunchSpec], costs_s: Sequence[float], submit_s: float = 0.0
    ) -> tuple[float, Schedule]:
        """Return the schedule by the seconds of each launch, and its length."""
        key = tuple((launch.name, launch.chunk, launch.kind) for launch in launches)
        known = self._schedules.get(key)
        if known is None:
            graph = LaunchGraph.of(launches)
            best = out_of_order(graph, costs_s, submit_s, self.order)
            plain = in_order(graph)
            known = self._schedules[key] = [plain] if plain == best else [plain, best]
        timed = [(seconds_of(launches, x, costs_s, submit_s), x) for x in known]
        return min(timed, key=lambda x: x[0])


def seconds_of(
    launches: Sequence[LaunchSpec],
    schedule: Schedule,
    costs_s: Sequence[float],
    submit_s: float = 0.0,
) -> float:
    """Return how long a schedule takes if every launch takes its `costs_s`.

    A submission keeps the control thread for `submit_s`, and nothing else takes any time.
    """
    line = _Timeline(launches, costs_s, submit_s)
    for step in schedule:
        if isinstance(step, Start):
            line.start(step.launch)
        else:
            line.wait(step.launch)
    return line.now_s


_Missing: TypeAlias = Sequence[int]  # how many launches each still has to wait for
_Rule: TypeAlias = Callable[[int, _Missing], tuple[float, ...]]  # the least is started first


def schedule_rules(graph: LaunchGraph, costs_s: Sequence[float], order: Order) -> tuple[_Rule, ...]:
    """Return what decides between launches that can begin at once: the least is started first."""
    left_s, launches = _longest_after(graph, costs_s), graph.launches

    def contribution(i: int, missing: _Missing) -> tuple[float, ...]:
        """Return eq.

        6: seconds of the other device's launches that this one alone still holds back, for the NPU
        if it is the GPU's, against it if it is the NPU's; ties to the oldest chunk.
        """
        freed_s = sum(
            costs_s[other]
            for other in graph.after[i]
            if missing[other] == 1 and launches[other].kind != launches[i].kind
        )
        return (freed_s if launches[i].kind == "npu" else -freed_s, launches[i].chunk, i)

    if order == "paper":
        return (contribution,)
    return (
        contribution,
        lambda i, _: (-left_s[i], i),  # what most depends on
        lambda i, _: (launches[i].chunk, -left_s[i], i),  # the oldest chunk, then that
    )


class _Order:
    """A schedule in the making: launches are started in some order, waits follow from the edges."""

    def __init__(self, graph: LaunchGraph) -> None:
        self._graph = graph
        self._steps: list[Start | Await] = []
        self._places: dict[int, int] = {}  # of started launches, in order of their starts
        self._waited: dict[DeviceKind | None, int] = {}  # places up to which queues are empty
        self._last: dict[DeviceKind | None, int] = {}  # launch of each queue that was started last

    def awaited(self, launch: int) -> Mapping[DeviceKind | None, int]:
        """Return the launches to wait for before this one, by their queues: the last of each."""
        own = self._graph.launches[launch].kind
        last_by_queue: dict[DeviceKind | None, int] = {}
        for other in self._graph.before[launch]:
            spec = self._graph.launches[other]
            if not spec.asynchronous or spec.kind == own:
                continue
            if self._places[other] <= self._waited.get(spec.kind, -1):
                continue
            last = last_by_queue.get(spec.kind)
            if last is None or self._places[other] > self._places[last]:
                last_by_queue[spec.kind] = other
        return last_by_queue

    def meet(self, launch: int) -> None:
        """Wait for what has to end before a launch."""
        for _, other in sorted(self.awaited(launch).items(), key=_by_kind):
            self._wait(other, launch)

    def start(self, launch: int) -> None:
        """Wait for what has to end before a launch, and start it."""
        self.meet(launch)
        self._places[launch] = len(self._places)
        self._steps.append(Start(launch))
        spec = self._graph.launches[launch]
        if spec.asynchronous:
            self._last[spec.kind] = launch

    def join(self, parts: Iterable[int], before: int) -> None:
        """Wait for launches that were started, whether or not `before` needs what they wrote."""
        launches = self._graph.launches
        last = {launches[i].kind: i for i in parts if launches[i].asynchronous}
        for kind, launch in sorted(last.items(), key=_by_kind):
            if self._places[launch] > self._waited.get(kind, -1):
                self._wait(launch, before)

    def end(self) -> Schedule:
        """Wait for the last of every queue; return the schedule."""
        for kind, launch in sorted(self._last.items(), key=_by_kind):
            if self._places[launch] > self._waited.get(kind, -1):
                self._wait(launch, None)
        return tuple(self._steps)

    def _wait(self, launch: int, before: int | None) -> None:
        self._steps.append(Await(launch, before))
        self._waited[self._graph.launches[launch].kind] = self._places[launch]


def _by_kind(item: tuple[DeviceKind | None, int]) -> str:
    return str(item[0])


class _Timeline:
    """The control thread and the queues in the cost model's time."""

    def __init__(
        self, launches: Sequence[LaunchSpec], costs_s: Sequence[float], submit_s: float
    ) -> None:
        self.now_s = 0.0  # of the control thread
        self.ends_s: dict[int, float] = {}
        self._launches, self._submit_s = launches, submit_s
        self._costs_s = costs_s
        self._free_s: dict[DeviceKind | None, float] = {}

    def start(self, launch: int) -> None:
        """Submit to the queue, or run."""
        spec = self._launches[launch]
        if spec.asynchronous:
            self.now_s += self._submit_s
            begin_s = max(self.now_s, self._free_s.get(spec.kind, 0.0))
            self._free_s[spec.kind] = self.ends_s[launch] = begin_s + self._costs_s[launch]
        else:
            self.now_s = self.ends_s[launch] = self.now_s + self._costs_s[launch]

    def wait(self, launch: int) -> None:
        """Wait until a launch has ended."""
        self.now_s = max(self.now_s, self.ends_s[launch])


class ListScheduler:
    """The list scheduler: by when the control thread could start a launch, queued ones first.

    With the `costs_s` that launches really take it is dispatch by completion: it starts a launch
    knowing when those before it end, and a rule made from predicted times decides.
    """

    def __init__(
        self, graph: LaunchGraph, costs_s: Sequence[float], submit_s: float, rule: _Rule
    ) -> None:
        self._graph, self._rule = graph, rule
        self._order, self._line = _Order(graph), _Timeline(graph.launches, costs_s, submit_s)
        self._missing = [len(others) for others in graph.before]

    def schedule(self) -> Schedule:
        """Start launch after launch."""
        ready = {i: 0.0 for i, missing in enumerate(self._missing) if not missing}
        while ready:
            now_s = self._line.now_s
            best = min(ready, key=lambda i: self._merit(i, max(ready[i], now_s)))
            del ready[best]
            for other in self._order.awaited(best).values():
                self._line.wait(other)
            self._order.start(best)
            self._line.start(best)
            ready |= {i: self._ended_s(i) for i in self._freed(best)}
        return self._order.end()

    def _merit(self, launch: int, start_s: float) -> tuple[float, ...]:
        runs = not self._graph.launches[launch].asynchronous
        return (start_s, runs, *self._rule(launch, self._missing))

    def _ended_s(self, launch: int) -> float:
        """Return when everything has ended that a launch has to wait for."""
        launches, ends_s = self._graph.launches, self._line.ends_s
        own = launches[launch].kind
        queued = (i for i in self._graph.before[launch] if launches[i].asynchronous)
        return max((ends_s[i] for i in queued if launches[i].kind != own), default=0.0)

    def _freed(self, launch: int) -> Iterable[int]:
        """Return the launches that waited for this one last."""
        for other in self._graph.after[launch]:
            self._missing[other] -= 1
            if not self._missing[other]:
                yield other


def _longest_after(graph: LaunchGraph, costs_s: Sequence[float]) -> Sequence[float]:
    """Return for every launch the seconds of the longest chain that begins with it."""
    left_s = [0.0] * len(graph.launches)
    for i in reversed(range(len(graph.launches))):
        longest_s = max((left_s[other] for other in graph.after[i]), default=0.0)
        left_s[i] = costs_s[i] + longest_s
    return left_s
