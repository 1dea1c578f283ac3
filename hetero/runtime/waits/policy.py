"""Every number that waiting depends on, in one record."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class WaitPolicy:
    """How waits are predicted, slept through and polled. Seconds where a name ends in `_s`; shares
    and factors have no unit. The defaults are right for a core with sleeps that are 5 to 100 us
    late, on a machine of one's own or under a hypervisor.

    Predicting a wait (`predictor.Prediction`). Oversleeping is paid for in full and waking early
    with a little polling, so that predictions settle low:

    rise              share of the difference that a prediction follows a longer wait by
    fall              and a shorter one
    outlier           a wait of more than so many predictions counts as that many
    overslept         a wait that was over when a sleep ended counts as this share of that sleep

    How late sleeps are (`predictor.SleepTimes`):

    lateness          share of sleeps that are to be no later than is assumed
    lateness_step_s   what one sleep moves the assumption by
    far               a sleep that was so many times less late than assumed puts it in doubt
    doubt             share of the assumption that is forgotten then, and where it was so large that
                      a long wait was not slept through: only another sleep can tell
    calibration_s     length of the sleeps that are measured at the start
    calibration_sleeps  and how many

    Sleeping and polling (`poll.Site`):

    early             share of a wait that is polled at its end, because kernels vary
    earliest_s        and at most so long: who sleeps longer is woken later (a hypervisor gives the
                      core of a long sleep to others)
    shortest_nap_s    no sleep is shorter; naps where polling is not allowed are of this length
    longest_nap_s     pieces of a long sleep, with a look at the launch between them: a wait may be
                      far shorter than the one before (the first step of a model is slow)
    nap               or this share of the sleep, if that is longer
    worth             waits of less than so many times the lateness are polled: a third of all
                      sleeps is later than assumed and leaves a cold core
    long_s            waits of more than this are slept in whatever the lateness
    late_s            polling so much longer than predicted becomes naps between looks
    late_nap_s        of this length
    stopped_s         a gap between two looks of more than this counts for no deadline: the whole
                      process was stopped (Ctrl-Z), and the devices may have been

    Who else uses the control core (`contention.Contention`):

    preempted_s       a gap between two looks of more than this: something else had the core
    others            share of a gap that our thread waited for other programs, by the scheduler,
                      from which on it was theirs
    slice_s           a gap as long as a scheduler's slice: one is enough
    crowded_gaps      and of shorter ones so many
    crowded_s         within so long: a hypervisor takes the core for a moment now and then, and
                      that is no reason to stop polling
    crowded_waits     waits that are slept through then, because sleepers get the core back
    gateless_steps    steps without gates then: a gate polls too, on the device's core

    Which ways of starting and watching a launch pay (`trials`):

    trials            launches of each way, in turns
    trial_width       elements of the operation that is launched
    flag_gain         a flag has to be seen in less than this share of an event's time: it is a
                      second kernel to submit, and a difference within the noise is none
    """

    rise: float = 0.05
    fall: float = 0.4
    outlier: float = 3.0
    overslept: float = 0.85

    lateness: float = 0.65
    lateness_step_s: float = 2e-6
    far: float = 4.0
    doubt: float = 0.01
    calibration_s: float = 150e-6
    calibration_sleeps: int = 24

    early: float = 0.03
    earliest_s: float = 0.2e-3
    shortest_nap_s: float = 30e-6
    longest_nap_s: float = 1e-3
    nap: float = 1 / 32
    worth: float = 6.0
    long_s: float = 300e-6
    late_s: float = 2e-3
    late_nap_s: float = 50e-6
    stopped_s: float = 1.0

    preempted_s: float = 500e-6
    others: float = 0.5
    slice_s: float = 2.5e-3
    crowded_gaps: int = 3
    crowded_s: float = 0.25
    crowded_waits: int = 32
    gateless_steps: int = 64

    trials: int = 25
    trial_width: int = 1 << 12
    flag_gain: float = 0.8

    def stopped(self, gap_s: float) -> float:
        """The part of a gap between two looks that counts for no deadline."""
        return gap_s if gap_s > self.stopped_s else 0.0


DEFAULT = WaitPolicy()
