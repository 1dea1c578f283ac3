"""`max_gpu_share` at run time: pauses, and what is told of them."""

from __future__ import annotations

from typing import Any

import pytest

from hetero import LLM, UserError
from hetero.models import open_model
from hetero.runtime.gpu_share import LONGEST_PAUSE_S, GpuShare
from hetero.solver.handmade import single_device
from tests.runtime.models import tiny_model


@pytest.mark.parametrize(
    ("limit", "busy_s", "wall_s", "pause_s"),
    [
        (0.5, 0.01, 0.01, 0.01),  # busy all the time: as long again
        (0.5, 0.004, 0.01, 0.0),
        (0.25, 0.01, 0.02, 0.02),
        (1.0, 0.01, 0.01, 0.0),
        (0.001, 0.01, 0.01, LONGEST_PAUSE_S),
    ],
)
def test_a_step_that_overdraws_is_followed_by_a_pause(
    limit: float, busy_s: float, wall_s: float, pause_s: float
) -> None:
    slept: list[float] = []
    share = GpuShare(limit, slept.append)
    share.after(busy_s, wall_s)
    assert sum(slept) == pytest.approx(pause_s)
    assert share.share == pytest.approx(busy_s / (wall_s + pause_s))
    share.after(0.0, 1.0)
    assert sum(slept) == pytest.approx(pause_s)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: Any) -> str:
    return str(tiny_model(tmp_path_factory.mktemp("tiny")))


def test_the_share_holds_for_a_plan_that_keeps_the_gpu_busy(folder: str) -> None:
    """A device that is missing leaves a plan of which the share was not thought."""
    spec = open_model(folder).spec()
    plan = single_device(spec, "gpu").model_copy(update={"max_gpu_share": 0.4})
    with LLM(folder, plan=plan) as free, LLM(folder, plan=plan, max_gpu_share=0.4) as llm:
        wanted = free.generate([1, 2, 3], max_tokens=12)
        found = llm.generate([1, 2, 3], max_tokens=12)
        assert found.tokens == wanted.tokens
        assert found.stats.gpu_share is not None
        assert 0 < found.stats.gpu_share <= 0.4
        assert wanted.stats.gpu_share is None


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"max_gpu_share": 1.5}, "between 0 and 1, got 1.5"),
        ({"max_gpu_share": 0.5, "device": "gpu"}, "the GPU alone cannot leave 50%"),
    ],
)
def test_a_share_that_cannot_be_held_is_refused(
    folder: str, options: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(UserError, match=sentence):
        LLM(folder, **options)


def test_a_plan_made_for_more_is_refused(folder: str) -> None:
    plan = single_device(open_model(folder).spec(), "gpu")
    with pytest.raises(UserError, match=r"hetero plan --max-gpu-share 0\.3"):
        LLM(folder, plan=plan, max_gpu_share=0.3)
