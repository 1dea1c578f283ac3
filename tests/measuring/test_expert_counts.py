"""`hetero eval --count-experts`, and `hetero plan --experts` with what it wrote."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from hetero.models import model_path
from hetero.solver.errors import PlanError
from hetero.solver.expert_shares import Routing
from tests.runtime.test_routed_logits import QWEN3_GGUF, drawn
from tests.support.helpers import Command


@pytest.mark.full
def test_a_plan_by_the_counts_of_a_text(command: Command, tmp_path: Path) -> None:
    folder, _ = drawn("Qwen3Moe", QWEN3_GGUF | {"vocab_size": 2048})
    model, text, counts = (str(tmp_path / x) for x in ("model", "text.txt", "counts.json"))
    shutil.copytree(folder, model)
    shutil.copy(model_path("demo") / "tokenizer.json", model)
    Path(text).write_text("the words of a text " * 12, encoding="utf-8")
    done = command("eval", model, "--text", text, "--count-experts", counts, "--max-tokens", "40")
    assert done.returncode == 0, done.stderr
    assert "hetero plan --experts" in done.stderr
    routing = Routing.load(counts)
    assert routing.tokens == 40
    assert {layer: (len(x), sum(x)) for layer, x in routing.layers.items()} == {
        0: (8, 120), 1: (8, 120)
    }  # fmt: skip
    assert 1 <= routing.busiest <= 8 / 3
    planned = command("plan", model, "--profile", "host", "--experts", counts, "--json")
    assert planned.returncode == 0, planned.stderr
    assert "routed experts" in " ".join(json.loads(planned.stdout)["notes"])
    other = command("plan", "qwen3-moe-3b", "--profile", "host", "--experts", counts)
    assert other.returncode == 2
    assert "have none of the 64 experts of layer 0" in other.stderr


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("{}", "model: Field required"),
        ('{"model": "m", "tokens": 1, "layers": {"0": []}}', "layers.0: Tuple should have at"),
        ('{"model": "m", "tokens": 1, "layers": {"0": [-1]}}', "greater than or equal to 0"),
    ],
)
def test_counts_that_are_not_valid(text: str, rule: str, tmp_path: Path) -> None:
    (tmp_path / "c.json").write_text(text, encoding="utf-8")
    with pytest.raises(PlanError, match=rule):
        Routing.load(tmp_path / "c.json")
