"""Chooses the next tasks to measure: a spread start, then where predictors disagree."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from hetero.backends.protocol import DeviceKind
from hetero.profiler import fit, predict
from hetero.profiler.grid import Task
from hetero.profiler.predict import Floats
from hetero.profiler.records import DeviceRecord, MatMulRow


@dataclass(frozen=True, kw_only=True)
class SamplingPolicy:
    """Policy of the order in which tasks are measured.

    start_share   of a kernel's tasks that are measured before anything is predicted,
    start_least   and at least so many
    large_weight  elements from which a weight's time is all n·k
    committee     predictors that disagree
    repeated      interest that each chosen task leaves in one of its (n, k) or m
    """

    start_share: float = 0.06
    start_least: int = 10
    large_weight: int = 1 << 22
    committee: int = 6
    repeated: float = 0.7


DEFAULT: Final = SamplingPolicy()


def first_tasks(tasks: Sequence[Task], policy: SamplingPolicy = DEFAULT) -> list[Task]:
    """Return a start for every kernel in `tasks`.

    A typical weight at each token count, whose kernels may be different ones; then the smallest and
    largest, and the farthest from all chosen ones in (log m, log n, log k).
    """
    chosen: list[Task] = []
    for group in by_kernel(tasks):
        levels = _levels(group, policy.large_weight)
        more = round(policy.start_share * len(group))
        count = min(len(group), max(policy.start_least, len(levels) + more))
        points = np.log2(np.asarray([(t.m, t.n, t.k) for t in group], dtype=np.float64))
        span = np.ptp(points, axis=0)
        points = points / np.where(span > 0, span, 1.0)
        ends = [int(points.sum(axis=1).argmin()), int(points.sum(axis=1).argmax())]
        order = list(dict.fromkeys([*levels, *ends]))
        while len(order) < count:
            distance = np.linalg.norm(points[:, None] - points[order][None], axis=2).min(axis=1)
            order.append(int(distance.argmax()))
        chosen += [group[i] for i in dict.fromkeys(order[:count])]
    return chosen


def _levels(group: Sequence[Task], elements: int) -> list[int]:
    """Return for each token count the place of the weight that is nearest to so many elements."""

    def off(task: Task) -> float:
        return abs(math.log2(task.n * task.k / elements))

    nearest: dict[int, int] = {}
    for i, task in enumerate(group):
        other = nearest.get(task.m)
        if other is None or off(task) < off(group[other]):
            nearest[task.m] = i
    return list(nearest.values())


def next_tasks(
    devices: Mapping[DeviceKind, DeviceRecord],
    rows: Sequence[MatMulRow],
    open_tasks: Sequence[Task],
    count: int,
    *,
    seed: int = 0,
    policy: SamplingPolicy = DEFAULT,
) -> list[Task]:
    """Return the `count` open tasks that would teach most for their time."""
    interest: list[tuple[float, Task]] = []
    for group in by_kernel(open_tasks):
        first = group[0]
        known = [row for row in rows if row.key[:3] == first.key[:3]]
        device = devices[first.device]
        uncertain, seconds = uncertainty(device, known, group, seed=seed, members=policy.committee)
        worth = uncertain / np.sqrt(np.maximum(seconds, 1e-3))
        share = worth / max(float(worth.max()), 1e-12)
        interest += list(zip(share.tolist(), group, strict=True))
    return _diverse(interest, count, policy.repeated)


def uncertainty(
    device: DeviceRecord,
    rows: Sequence[MatMulRow],
    tasks: Sequence[Task],
    *,
    seed: int = 0,
    members: int = DEFAULT.committee,
) -> tuple[Floats, Floats]:
    """Return [S] standard deviation of the committee's log times, and [S] mean time in seconds.

    Each member is fitted to a bootstrap sample of the (n, k) pairs. A part of a percent per
    doubling away from the nearest measured size keeps a confident committee curious.
    """
    sizes = np.asarray([(t.m, t.n, t.k) for t in tasks], dtype=np.float64)
    if not rows:
        return np.ones(len(tasks)), np.ones(len(tasks))
    rng = np.random.default_rng(seed)
    pairs = sorted({(row.n, row.k) for row in rows})
    answers = []
    for _ in range(members):
        drawn = {pairs[i] for i in rng.integers(0, len(pairs), len(pairs))}
        sample = [row for row in rows if (row.n, row.k) in drawn]
        model = fit.fit_unchecked(device, sample)
        answers.append(np.log(predict.predict(model, device, *sizes.T)))
    known = np.log2(np.asarray([(row.m, row.n, row.k) for row in rows], dtype=np.float64))
    gap = np.linalg.norm(np.log2(sizes)[:, None] - known[None], axis=2).min(axis=1)
    uncertain = np.std(answers, axis=0) + 0.005 * gap
    return uncertain, np.exp(np.mean(answers, axis=0))


def by_kernel(tasks: Sequence[Task]) -> list[list[Task]]:
    """Return the tasks of the same device, format and order together."""
    groups: dict[tuple[str, str, str], list[Task]] = {}
    for task in tasks:
        groups.setdefault(task.key[:3], []).append(task)
    return list(groups.values())


def _diverse(interest: list[tuple[float, Task]], count: int, repeated: float) -> list[Task]:
    """Return the best ones, each choice taking interest from those like it."""
    worth = np.asarray([value for value, _ in interest])
    tasks = [task for _, task in interest]
    chosen: list[Task] = []
    while len(chosen) < min(count, len(tasks)):
        best = int(worth.argmax())
        chosen.append(tasks[best])
        worth[best] = -1.0
        for i, task in enumerate(tasks):
            if worth[i] > 0 and task.device == tasks[best].device:
                same_pair = (task.n, task.k) == (tasks[best].n, tasks[best].k)
                worth[i] *= repeated ** (same_pair + (task.m == tasks[best].m))
    return chosen
