"""The parameters of waiting, in one record."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class WaitPolicy:
    """Parameters of predicting, sleeping through and polling waits.

    Seconds where a name ends in `_s`; shares and factors have no unit. The defaults suit a core
    whose sleeps return 5 to 100 us late, on a dedicated machine or under a hypervisor. (Deadlines
    are `SharedWaits`'.)

    Predicting a wait (`prediction.Prediction`). Oversleeping costs its full length, waking early
    only some polling, so predictions are biased low:

    rise              share of the difference by which a prediction follows a longer wait
    fall              and a shorter one
    outlier           a wait longer than this many predictions counts as that many
    overslept         a wait that was over when a sleep ended counts as this share of that sleep

    How late sleeps return (`prediction.SleepTimes`):

    lateness          share of sleeps that should return no later than assumed
    lateness_step_s   how far one sleep moves the assumption
    far               a sleep this many times less late than assumed makes the assumption decay
    decay             share of the assumption that is dropped then, and where it was so large that a
                      long wait was polled: only another sleep can correct it
    calibration_s     length of the sleeps that are measured at the start
    calibration_sleeps  and how many

    Sleeping and polling (`wait_point.WaitPoint`):

    early             share of a wait that is polled at its end, because kernel times vary
    earliest_s        and at most this long: longer sleeps return later (a hypervisor gives the core
                      of a long sleep to others)
    min_sleep_s       shortest sleep; where polling is not allowed, sleeps have this length
    max_sleep_s       slices of a long sleep, with a poll between them: a wait may be far shorter
                      than the one before (the first step of a model is slow)
    sleep_slice       or this share of the sleep, if that is longer; sleeps between polls, where
                      polling is not allowed, become as long of the time since the first
    worth             waits shorter than this many times the lateness are polled: a third of all
                      sleeps returns later than assumed and leaves a cold core
    long_s            waits longer than this are slept through whatever the lateness
    late_s            polling this much longer than predicted turns into sleeps between polls
    late_sleep_s      of this length
    stopped_s         a gap between two polls longer than this does not count against a deadline:
                      the whole process was stopped (Ctrl-Z), and maybe the devices with it

    Contention for the control core (`contention.CoreContention`):

    preempted_s       a gap between two polls longer than this: something else had the core
    others            share of a gap that this thread spent runnable but not running, by the
                      scheduler, from which on other programs caused it
    slice_s           a gap as long as a scheduler's time slice: one is enough
    contended_gaps    and this many shorter ones
    contended_s       within this time: a hypervisor takes the core for a moment now and then, which
                      is no reason to stop polling
    contended_waits   waits that are slept through then, because sleepers get the core back
    no_wait_value_steps    steps without wait values then: a gate polls too, on the device's core

    Which ways of starting and watching a launch pay off (`trials`):

    trials            launches of each way, in turns
    agreed            pairs that end them where one way was faster in all
    trial_width       elements of the operation that is launched
    flag_gain         a flag must be seen in less than this share of an event's time: it costs
                      another kernel submission, and a difference within the noise is none
    """

    rise: float = 0.05
    fall: float = 0.4
    outlier: float = 3.0
    overslept: float = 0.85

    lateness: float = 0.65
    lateness_step_s: float = 2e-6
    far: float = 4.0
    decay: float = 0.01
    calibration_s: float = 150e-6
    calibration_sleeps: int = 24

    early: float = 0.03
    earliest_s: float = 0.2e-3
    min_sleep_s: float = 30e-6
    max_sleep_s: float = 1e-3
    sleep_slice: float = 1 / 32
    worth: float = 6.0
    long_s: float = 300e-6
    late_s: float = 2e-3
    late_sleep_s: float = 50e-6
    stopped_s: float = 1.0

    preempted_s: float = 500e-6
    others: float = 0.5
    slice_s: float = 2.5e-3
    contended_gaps: int = 3
    contended_s: float = 0.25
    contended_waits: int = 32
    no_wait_value_steps: int = 64

    trials: int = 25
    agreed: int = 8
    trial_width: int = 1 << 12
    flag_gain: float = 0.8

    def stopped(self, gap_s: float) -> float:
        """Return the part of a gap between two polls that does not count against a deadline."""
        return gap_s if gap_s > self.stopped_s else 0.0


DEFAULT = WaitPolicy()
