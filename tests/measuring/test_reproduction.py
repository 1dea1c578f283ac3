"""The paper beside the simulated chip: what the command prints and draws."""

from __future__ import annotations

from pathlib import Path

import pytest

from hetero.errors import UserError
from hetero.measuring.reproduction import Claim, Reproduction


def claim(simulated: float, within: float | None = 0.1, reason: str = "") -> Claim:
    return Claim("e1", f"Llama <{simulated}>", "tok/s", 100.0, simulated, within, reason)


def made(*claims: Claim, orders: tuple[str, ...] = ()) -> Reproduction:
    return Reproduction("chip", claims, orders, ("power",))


def test_a_target_is_met_or_missed() -> None:
    assert made(claim(109), claim(300, None, "because")).met
    assert not made(claim(109), claim(111)).met
    assert not made(claim(100), orders=("135: … MISSED",)).met
    verdicts = [c.verdict for c in (claim(109), claim(111), claim(300, None, "because"))]
    assert verdicts == ["met", "MISSED", "differs"]


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
