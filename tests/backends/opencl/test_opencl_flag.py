"""Completion flags are seen before the driver reports the end."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np

from hetero.backends.opencl.flag import FlagCompletion
from hetero.backends.protocol import Completion


class Event(Completion):
    """An event that the driver has not reported as complete yet; its times come with the end."""

    def __init__(self) -> None:
        self.complete = False

    def done(self) -> bool:
        return self.complete

    def wait(self, deadline_s: float = 1.0) -> None:
        self.complete = True

    def span(self) -> tuple[float, float] | None:
        assert self.complete, "the driver has no times of what is at work"
        return 1.0, 2.0


def test_times_of_a_flag_that_is_seen_early() -> None:
    flag = SimpleNamespace(word=np.array([3], np.int32), submissions=3)
    event = Event()
    completion = FlagCompletion(flag, event)
    assert completion.done()
    assert not event.complete
    assert completion.span() == (1.0, 2.0)


def test_a_flag_counts_round() -> None:
    flag = SimpleNamespace(word=np.array([2], np.int32), submissions=3)
    completion = FlagCompletion(flag, Event())
    assert not completion.done()
    for word, done in ((3, True), (4, True), (2**31 - 1, True), (-(2**31), True), (2, False)):
        flag.word[0] = word
        assert completion.done() == done, word
