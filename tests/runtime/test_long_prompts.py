"""Long prompts: the engine runs the calls that the plan names, and the numbers stay the same."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hetero
from hetero import LLM
from hetero.backends.registry import open_device
from hetero.errors import FallbackWarning
from hetero.models import open_model
from hetero.placement.device_set import open_devices
from hetero.runtime.engine import Engine
from hetero.solver.execution_plan import ExecutionPlan
from hetero.solver.handmade import single_device
from hetero.solver.request import PlanRequest
from hetero.solver.strategy_plans import strategy_plan
from tests.runtime.models import context_of, emptied, tiny_model
from tests.runtime.plans import random_plan
from tests.support.checkpoints import (
    Case,
    load_dequantized,
    make_checkpoint,
    reference_logits,
    relative_error,
)

pytestmark = pytest.mark.usefixtures("no_chains")

CONTEXT = 8192
VOCABULARY = 263
WEIGHTS = "w4a16"
GRAPHS = (1, 2, 4, 8, 32, 64)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: Any) -> tuple[str, Any]:
    """A tiny model with a long context, and the `transformers` model."""
    folder: Path = tmp_path_factory.mktemp("long")
    changes = {"max_position_embeddings": CONTEXT}
    return str(folder), make_checkpoint(Case("long", "Llama", changes), folder)


@pytest.fixture(scope="module", params=["hetero", "gpu", "npu"])
def llm(checkpoint: tuple[str, Any], request: pytest.FixtureRequest) -> Iterator[LLM]:
    """By this machine's profile, or the shipped one of a PC; in order, for a prompt whose chunks
    are out of order has calls of their own (`test_prefill_modes.py`).
    """
    with LLM(
        checkpoint[0],
        device=request.param,
        weights=WEIGHTS,
        max_seq_len=CONTEXT,
        order="fifo",
        kv="f32",
    ) as opened:
        yield opened


def prompt_of(tokens: int) -> list[int]:
    return np.random.default_rng(tokens).integers(3, VOCABULARY, tokens).tolist()


def traced(engine: Engine, path: Path, tokens: int) -> tuple[int, ...]:
    """Token counts of the calls that an engine really makes of a prompt, by its trace."""
    context = emptied(engine)
    engine.runner.start_trace()
    engine.prefill(context, prompt_of(tokens))
    engine.runner.stop_trace().save(path, about={})
    events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    steps = [e for e in events if e["name"].startswith("prefill ")]
    ordered = sorted(steps, key=lambda e: e["ts"])
    return tuple(tokens for e in ordered for tokens in e["args"]["chunks"])


@pytest.mark.few(2)
@pytest.mark.parametrize("tokens", [1, 40, 511, 512, 513, 1300, 4500, CONTEXT - 1])
def test_the_engine_runs_exactly_the_calls_that_the_plan_names(
    llm: LLM, tmp_path: Path, tokens: int
) -> None:
    steps = llm.plan.steps(tokens)
    assert sum(steps) == tokens
    assert max(steps) <= 512
    assert llm.engine.plan.steps(tokens) == steps
    assert traced(llm.engine, tmp_path / "trace.json", tokens) == steps


@pytest.mark.full
def test_a_long_prompt_on_both_devices_is_planned(checkpoint: tuple[str, Any]) -> None:
    with LLM(
        checkpoint[0], device="hetero", weights=WEIGHTS, max_seq_len=CONTEXT,
        prompt_lengths=(3500,),
    ) as llm:  # fmt: skip
        assert llm.choice.solver is not None, llm.choice.reason
        assert llm.choice.reason.startswith("hetero: tensor level (profile ")
        assert llm.plan.steps(3500) == (512,) * 6 + (428,)
        llm.engine.prefill(llm.context, prompt_of(3500))
        assert set(llm.context.work.devices) == {"gpu", "npu"}


@pytest.mark.parametrize("tokens", [600, 1300])
def test_numbers_of_long_prompts_match_transformers(
    checkpoint: tuple[str, Any], llm: LLM, tokens: int
) -> None:
    model = checkpoint[1]
    original = {name: value.clone() for name, value in model.state_dict().items()}
    load_dequantized(model, llm.model)
    try:
        expected = reference_logits(model, [*prompt_of(tokens), 5, 6])
    finally:
        model.load_state_dict(original)
    engine, context = llm.engine, emptied(llm.engine)
    found = [engine.prefill(context, prompt_of(tokens)).copy()]
    found += [engine.decode(context, token).copy() for token in (5, 6)]
    assert relative_error(np.stack(found), expected[tokens - 1 :]) <= 3e-3


@pytest.mark.full
def test_numbers_at_the_end_of_a_long_context_are_those_of_one_device(
    checkpoint: tuple[str, Any], llm: LLM
) -> None:
    """In calls of 512 tokens and of 64."""
    tokens = prompt_of(CONTEXT - 2)
    loaded = open_model(checkpoint[0], weights=WEIGHTS)
    plan = single_device(loaded.spec(), "gpu").model_copy(update={"step_tokens": 64})
    opened = open_devices("gpu")
    with Engine(loaded.weights, plan, opened.devices, max_seq_len=CONTEXT) as one:
        assert one.plan.steps(200) == (64, 64, 64, 8)
        expected = [
            one.prefill(context_of(one), tokens).copy(), one.decode(context_of(one), 7).copy()
        ]  # fmt: skip
    context = emptied(llm.engine)
    found = [llm.engine.prefill(context, tokens).copy(), llm.engine.decode(context, 7).copy()]
    assert relative_error(np.stack(found), np.stack(expected)) <= 1e-3


@pytest.mark.full
@pytest.mark.few(2)
@pytest.mark.parametrize("strategy", ["layer", "padding", "chunked", "hybrid-cut", "npu-only"])
def test_plans_of_named_strategies_run_in_their_calls(
    checkpoint: tuple[str, Any], tmp_path: Path, strategy: Any
) -> None:
    loaded = open_model(checkpoint[0], weights=WEIGHTS)
    profile = hetero.DeviceProfile.load("host")
    plan = strategy_plan(loaded.spec(), profile, strategy, (2600,), PlanRequest())
    (total, _) = plan.totals
    expected = {"chunked": (256,) * 10 + (40,), "npu-only": (1024, 1024, 552)}
    assert total.steps == expected.get(strategy, (2048, 552))
    kinds = plan.devices()
    opened = open_devices("hetero" if len(kinds) == 2 else next(iter(kinds)))
    with Engine(loaded.weights, plan, opened.devices, max_seq_len=CONTEXT) as engine:
        assert traced(engine, tmp_path / "trace.json", 2600) == total.steps


@pytest.mark.parametrize(("failed", "launch"), [("gpu", 40), ("gpu", 110), ("npu", 60)])
def test_what_is_left_of_a_prompt_is_cut_for_the_device_that_is_left(
    tmp_path: Path, failed: str, launch: int
) -> None:
    """A plan with calls of two graphs loses a device; the other's calls are of one."""
    loaded = open_model(str(tiny_model(tmp_path)), weights="f32")
    plan = random_plan(loaded.spec(), 100, GRAPHS, random.Random(3), strategies=["hybrid-cut"])
    tokens = prompt_of(230)

    def answer(plan: ExecutionPlan, faults: dict[str, Any]) -> tuple[Any, Engine]:
        devices: Any = {
            "gpu": open_device("reference", kind="gpu", asynchronous=True, **faults.get("gpu", {})),
            "npu": open_device(
                "reference", kind="npu", graph_sizes=GRAPHS, **faults.get("npu", {})
            ),
        }
        with Engine(loaded.weights, plan, devices, max_seq_len=256) as engine:
            assert engine.plan.steps(230) == (100, 100, 30)
            return engine.prefill(context_of(engine), tokens).copy(), engine

    expected, _ = answer(plan, {})
    with pytest.warns(FallbackWarning, match=f"the {failed} failed"):
        found, engine = answer(plan, {failed: {"fail_launch": launch}})
    assert context_of(engine).cached == 230
    assert engine.plan.step_tokens == (64 if failed == "gpu" else 512)
    assert relative_error(found, expected) <= 2e-5
