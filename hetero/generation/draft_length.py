"""The number of guesses that one call verifies: as many as pay, by what was measured so far."""

from __future__ import annotations

import statistics
from collections import defaultdict, deque
from typing import Final

RECENT: Final = 9  # seconds of calls of one length, of which the median counts
DECAY: Final = 0.95  # of older guesses' weight: the last 20 or so count
ENOUGH: Final = 5  # guesses, of which the latest weigh 1
FIRST_PROBE: Final = 16  # tokens without guesses before a drafter that lost is tried again
LAST_PROBE: Final = 1024


class DraftLength:
    """Chooses the number of guesses that gives most tokens a second; 0 is a plain step.

    A call of `rows` tokens takes what such calls took; lengths that were never run are expected to
    cost what shorter ones do, so each is tried once where guesses are mostly right. Guesses of one
    `kind` are right with one probability each, learned from the text: also from guesses that no
    call has verified. Owned by one answer.
    """

    def __init__(self) -> None:
        self._seconds: defaultdict[int, deque[float]] = defaultdict(lambda: deque(maxlen=RECENT))
        self._right: defaultdict[int, float] = defaultdict(lambda: 0.5)  # of those below
        self._seen: defaultdict[int, float] = defaultdict(lambda: 1.0)
        self._interval, self._plain = FIRST_PROBE, 0

    def took(self, rows: int, seconds: float) -> None:
        """Record the seconds of a call of so many tokens."""
        self._seconds[rows].append(seconds)

    def saw(self, kind: int, *, right: bool) -> None:
        """Record whether a guess was right, given that those before it were."""
        self._right[kind] = self._right[kind] * DECAY + right
        self._seen[kind] = self._seen[kind] * DECAY + 1

    def rate(self, kind: int) -> float:
        """Return the probability that a guess of this kind is right."""
        return self._right[kind] / self._seen[kind]

    def knows(self, kind: int) -> bool:
        """Return whether enough guesses of this kind were seen for their rate to mean something."""
        return self._seen[kind] > ENOUGH

    def seconds(self, rows: int) -> float:
        """Return the expected seconds of a call; plain steps must have been run."""
        return statistics.median(self._seconds[max(x for x in self._seconds if x <= rows)])

    def best(self, kind: int, most: int, guess_s: float = 0.0) -> int:
        """Return the best number of guesses up to `most`, each of which takes `guess_s` to make.

        0 before the first call, which shows what plain steps take.
        """
        if 1 not in self._seconds:
            return 0
        return max(range(most + 1), key=lambda count: self.speed(kind, count, guess_s))

    def speed(self, kind: int, count: int, guess_s: float = 0.0) -> float:
        """Return the expected tokens a second of calls that verify so many guesses."""
        rate = self.rate(kind)
        tokens = sum(rate**right for right in range(count + 1))
        return tokens / (self.seconds(count + 1) + count * guess_s)

    def best_or_probe(self, kind: int, most: int, guess_s: float) -> int:
        """Return `best`, but 1 now and then where that is 0: rates are learned by guessing alone.

        The interval doubles each time, so that a drafter that always loses costs nearly nothing.
        """
        if best := self.best(kind, most, guess_s):
            self._interval, self._plain = FIRST_PROBE, 0
            return best
        self._plain += 1
        if self._plain < self._interval or not most:
            return 0
        self._interval, self._plain = min(2 * self._interval, LAST_PROBE), 0
        return 1
