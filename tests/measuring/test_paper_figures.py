"""Figures of the paper, executed: every bar has a prediction close by, every wait its launch."""

from __future__ import annotations

import json

import pytest

from hetero.errors import UserError
from hetero.measuring.paper_figures import SHOWN, figure

CHIP = "snapdragon-8-gen-3"


@pytest.mark.full
@pytest.mark.parametrize("number", [14, 15, 16, 17, 19])
def test_every_bar_is_executed_as_it_is_predicted(number: int) -> None:
    shown = figure(number, CHIP)
    assert len(shown.rows) == len(shown.table.rows)
    for row in shown.rows:
        assert row["executed"] == pytest.approx(row["predicted"], rel=0.05), row["what"]
        assert row["kind"] == ("fitted" if number == 19 else "simulated")
    json.dumps(shown.rows)


@pytest.mark.full
def test_fast_synchronisation_gains_in_decoding() -> None:
    shown = figure(17, CHIP)
    speeds = [row["executed"] for row in shown.rows]
    assert all(fast > 1.5 * slow for fast, slow in zip(speeds[::2], speeds[1::2], strict=True))
    assert shown.rows[0]["paper_value"] == 14.01


@pytest.mark.full
def test_a_timeline_has_each_wait_after_its_kernel() -> None:
    rows = figure(11, CHIP).rows
    for phase in ("prefill", "decode"):
        mine = [row for row in rows if row["phase"] == phase]
        assert {row["action"] for row in mine} == {"submit", "run", "wait"}
        ends = {row["what"]: row["kernel_end_s"] for row in mine if row["kernel_end_s"] is not None}
        waits = [row for row in mine if row["action"] == "wait"]
        assert len(waits) >= 3  # a matmul of the GPU alone needs none
        for row in waits:
            assert ends[row["what"]] <= row["end_s"] <= ends[row["what"]] + 1e-4
            assert 0 <= row["slept_s"] <= row["end_s"] - row["start_s"] + 1e-12
        times = [row["start_s"] for row in mine]
        assert times == sorted(times)


def test_other_figures_are_refused_by_name() -> None:
    with pytest.raises(UserError, match="figure 12 of HeteroLLM has no numbers here"):
        figure(12, CHIP)
    assert SHOWN == (11, 13, 14, 15, 16, 17, 19)
