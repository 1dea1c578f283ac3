"""Time limits of slow and busy machines."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from hetero.backends.errors import UserError
from hetero.backends.host import time_limits
from hetero.backends.host.time_limits import Patience, time_limit

LIMIT_S = 10.0


@pytest.mark.parametrize(
    ("text", "limit_s"), [(None, 60.0), ("", 60.0), ("4", 240.0), ("0.5", 30.0), (" 2e1 ", 1200.0)]
)
def test_a_variable_multiplies_limits(monkeypatch: Any, text: str | None, limit_s: float) -> None:
    monkeypatch.delenv(time_limits.VARIABLE, raising=False)
    if text is not None:
        monkeypatch.setenv(time_limits.VARIABLE, text)
    assert time_limit(60.0) == limit_s


@pytest.mark.parametrize("text", ["much", "0", "-1", "nan", "inf", "1e9", "4x"])
def test_a_wrong_factor_is_one_sentence(monkeypatch: Any, text: str) -> None:
    monkeypatch.setenv(time_limits.VARIABLE, text)
    with pytest.raises(UserError, match=r"HETERO_TIMEOUT_SCALE=.*from 0\.1 to 1000"):
        time_limit(60.0)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_processor_time_of_a_process_with_an_odd_name(tmp_path: Path) -> None:
    odd = tmp_path / "a) b 9"
    odd.symlink_to(sys.executable)
    code = "while True: pass"
    with subprocess.Popen([odd, "-S", "-c", code]) as busy:
        try:
            start_s = time.monotonic()
            while not (time_limits.cpu_seconds(busy.pid) or 0.0) > 0.1:
                assert time.monotonic() - start_s < 60
                time.sleep(0.01)
        finally:
            busy.kill()
    assert time_limits.cpu_seconds(busy.pid) is None


@pytest.mark.parametrize(
    ("cpu_s", "over_after"),
    [
        ([0.0, 0.0], 1),  # sleeps
        ([0.0, 9.9], 1),  # works for ever, with a core of its own
        ([0.0, 2.0, 4.0, 6.0, 8.0, 10.0], 5),  # works, on a busy machine
        ([3.0, 4.0, 5.0, 5.0], 3),  # worked, then stopped
        ([None], 1),  # the system does not say
        ([1.0, None], 1),  # it ended
    ],
)
def test_a_process_that_works_is_waited_for(
    monkeypatch: Any, cpu_s: list[float | None], over_after: int
) -> None:
    """Until it has had as much of a core as one alone on the machine would have."""
    times = iter(cpu_s)
    monkeypatch.setattr(time_limits, "cpu_seconds", lambda _: next(times, None))
    patience = Patience(1, LIMIT_S)
    asked = 1
    while not patience.is_over():
        asked += 1
    assert asked == over_after
