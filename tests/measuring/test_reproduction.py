"""The paper beside the simulated chip: what the command prints and draws."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hetero.errors import UserError
from hetero.measuring.reproduction import Claim, Limit, Reproduction, lifted
from hetero.profiler.records import DeviceProfile


def claim(
    simulated: float,
    within: float | None = 0.1,
    reason: str = "",
    *,
    off: float = 0.0,
) -> Claim:
    what, executed = f"Llama <{simulated}>", (1 + off) * simulated
    return Claim("e1", what, "tok/s", 100.0, simulated, within, reason, executed, "simulated")


def made(*claims: Claim, orders: tuple[str, ...] = ()) -> Reproduction:
    return Reproduction("chip", claims, orders, ("power",))


def test_a_target_is_met_or_missed() -> None:
    assert made(claim(109), claim(300, None, "because")).met
    assert not made(claim(109), claim(111)).met
    assert not made(claim(100), orders=("135: … MISSED",)).met
    verdicts = [c.verdict for c in (claim(109), claim(111), claim(300, None, "because"))]
    assert verdicts == ["met", "MISSED", "differs"]


def test_what_is_executed_is_close_to_what_was_predicted() -> None:
    assert made(claim(100, off=0.04), claim(100, off=-0.04)).met
    assert not made(claim(100, off=0.06)).met
    off = made(claim(100), claim(100, off=-0.06))
    assert "1 of 2 are within 5 % of what the solver predicted" in off.summary()
    far = made(claim(93), claim(102), claim(150, None, "because"))
    assert "The median difference of 3 speeds to the paper's: 7.0 %" in far.summary()
    row = off.document()[1]
    assert (row["predicted"], row["executed"], row["kind"]) == (100, 94, "simulated")
    assert row["difference"] == pytest.approx(-0.06)


@pytest.mark.full
def test_the_papers_numbers_are_drawn_beside_ours(tmp_path: Path) -> None:
    found = made(claim(109), claim(80, None), orders=("a < b",))
    found.report(tmp_path / "r.html")
    page = (tmp_path / "r.html").read_text(encoding="utf-8")
    assert "Llama &lt;109&gt;" in page
    assert "Llama <" not in page
    assert "a &lt; b" in page
    assert "1 of 1 targets (thin lines) are met; 1 have none" in page
    assert [row["ratio"] for row in found.document()] == [1.09, 0.8]
    with pytest.raises(UserError, match=r"choose \.html"):
        found.report(tmp_path / "r.pdf")


def test_a_target_is_limited_only_where_it_is_met_without_the_limit() -> None:
    class Chip:
        def value(self, formula: str) -> float:
            return float(formula)

    chip: Any = Chip()
    short = claim(80)
    assert short.without(Limit("groups of 32", chip, "85")) is short
    explained = short.without(Limit("groups of 32", chip, "95"))
    assert (explained.verdict, explained.limited) == ("limited", True)
    assert "groups of 32; without that it would be 95 tok/s" in explained.cells()[-1]
    found = made(explained, claim(100))
    assert found.met
    assert "1 of the 2 claims that have a target are within it; a limit" in found.summary()
    assert not made(short).met


def test_lifting_a_limit_changes_the_bytes_of_four_bit_weights_alone() -> None:
    profile = DeviceProfile.load("snapdragon-8-gen-3")
    other = lifted(profile, 0.25)
    sizes = {x.weight_format.value: x.model and x.model.bytes_per_weight for x in other.predictors}
    assert sizes == {"w4a16": 0.25, "w8a8": 1.0}
    assert {x.model and x.model.bytes_per_weight for x in profile.predictors} == {0.5625, 1.0}
