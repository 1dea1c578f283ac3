"""Timing launches by the host's clock, and every number that it depends on (`TimingPolicy`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from hetero.backends.host.clock import Clock, ManualClock
from hetero.backends.protocol import BoundCall, Completion, Device
from hetero.profiler.interference import Interference, NoInterference, longest_wait_s


@dataclass(frozen=True, kw_only=True)
class TimingPolicy:
    """Policy of batching launches, of warm-up launches, and of what counts as out of cache.

    Seconds where a name ends in `_s`, bytes where it ends in `_bytes`.

    Caches:

    cache_bytes       size of the last-level cache where the system does not report it
    colder            so many times that cache is read to push everything out of it,
    max_cold_bytes    and at most so much
    uses              of a blocking call of a small model before it is timed, if they read no more
                      than the caches hold

    Copies of a weight, that launches of one batch take turns with:

    copied_bytes      in all, as far as the number of copies allows
    min_copies
    max_copies
    kept_bytes        kernels beyond this are dropped, least recently used first

    Warm-up launches, the calls before a timed one:

    warm_up_size      n, k of their weight
    warm_up_s         how long they run in an asynchronous device's queue: a core that was idle
                      takes some time to full speed
    max_warm_ups      and at most so many
    warm_up_calls     where calls block
    late              share of a batch's time that the warm-ups' end may be seen late by

    Batches:

    batch_s           launches are batched up to this long, so that submission is hidden
    longest_batch     launches of a small model's batch, which are submitted while the warm-ups run
    interrupted_s     a launch that is longer makes no batch, whatever interrupted it
    repeats           further launches that are timed before the length of a batch is chosen
    small_repeats     of a small model, where they cost little
    polled_s          a wait polls for so long, then it sleeps
    """

    cache_bytes: int = 1 << 25
    colder: int = 4
    max_cold_bytes: int = 1 << 29
    uses: int = 4

    copied_bytes: int = 1 << 25
    min_copies: int = 4
    max_copies: int = 64
    kept_bytes: int = 1 << 31

    warm_up_size: tuple[int, int] = (512, 512)
    warm_up_s: float = 3e-3
    max_warm_ups: int = 256
    warm_up_calls: int = 2
    late: float = 0.02

    batch_s: float = 4e-3
    longest_batch: int = 64
    interrupted_s: float = 40e-3
    repeats: int = 1
    small_repeats: int = 2
    polled_s: float = 0.1

    def warm_ups(self, seconds: float, each_s: float) -> int:
        """Return how many leads keep a queue at work for so long."""
        return int(min(max(seconds / each_s, 1), self.max_warm_ups))

    def batch(self, each_s: float, most: int) -> int:
        """Return launches that take `batch_s` together, if each takes so many seconds.

        At most `most`.
        """
        return int(min(max(self.batch_s / each_s, 1), most))


DEFAULT: Final = TimingPolicy()
CPUS = Path("/sys/devices/system/cpu")


def last_level_cache_bytes() -> int | None:
    """Return the size of the largest cache of any core (Linux), None elsewhere."""
    sizes = []
    for path in CPUS.glob("cpu[0-9]*/cache/index*/size"):
        try:
            text = path.read_text(encoding="ascii").strip()
        except (OSError, UnicodeDecodeError):  # a core that is switched off
            continue
        factor = {"K": 1 << 10, "M": 1 << 20}.get(text[-1:], 1)
        digits = text.rstrip("KM")
        if digits.isdigit():
            sizes.append(int(digits) * factor)
    return max(sizes, default=None)


def cold_bytes(policy: TimingPolicy = DEFAULT) -> int:
    """Return reading that pushes everything out of the caches."""
    cache = last_level_cache_bytes() or policy.cache_bytes
    return min(policy.colder * cache, policy.max_cold_bytes)


def time_after(
    warm_ups: Sequence[BoundCall],
    calls: Sequence[BoundCall],
    clock: Clock,
    interference: Interference | None = None,
    policy: TimingPolicy = DEFAULT,
) -> tuple[float, float]:
    """Return the seconds of calls in a queue, from the end of their warm-up launches.

    Of which that end may have been seen late, because a thread of ours waited for a core.
    """
    interference = interference or NoInterference()
    before = interference.waits_s()
    warm_up = [call.submit() for call in warm_ups][-1]
    batch = [call.submit() for call in calls]
    poll_until_done(warm_up, clock, policy)
    start_s = clock.now()
    late_s = longest_wait_s(before, interference.waits_s())
    poll_until_done(batch[-1], clock, policy)
    return clock.now() - start_s, late_s


def time_calls(calls: Sequence[BoundCall], device: Device, clock: Clock) -> float:
    """Return the seconds of calls, in one queue where the device is asynchronous, else one by one.

    Blocking calls are looked up before, as a step has them: a look-up on a thread whose caches hold
    other things is a tenth or two of a short call.
    """
    now, runs = clock.now, [call.run for call in calls]
    queues = device.capabilities.asynchronous
    start_s = now()
    if queues:
        [call.submit() for call in calls][-1].wait()
    else:
        for run in runs:
            run()
    return now() - start_s


def poll_until_done(completion: Completion, clock: Clock, policy: TimingPolicy = DEFAULT) -> None:
    """Return as soon as a launch is complete.

    A thread that sleeps wakes 0.1 ms late or, now and then, milliseconds: seen so late, the leads'
    end makes a batch look short, and its own end long.
    """
    give_up_s = clock.now() + policy.polled_s
    while not isinstance(clock, ManualClock) and clock.now() < give_up_s:
        if completion.done():
            return
    completion.wait()
