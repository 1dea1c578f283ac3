"""Chunks of a prompt in flight together: answers, faults, memory, statistics."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

pytest.importorskip("pyopencl")

import pyopencl as cl

from hetero import LLM
from hetero.backends.errors import DeviceError
from hetero.backends.opencl.calls import OpenCLCall, OpenCLCompletion
from hetero.backends.registry import open_device
from hetero.errors import FallbackWarning, UserError
from hetero.models import open_model
from hetero.profiler.cost import CostModel
from hetero.profiler.records import DeviceProfile
from hetero.runtime.engine import Engine
from hetero.runtime.prefill_mode import padded_chunks
from tests.runtime.models import tiny_model
from tests.runtime.plans import random_plan

PROMPT = np.random.default_rng(3).integers(3, 1000, 450).tolist()
LONGER = PROMPT + PROMPT[:30]


def opened(order: str, **options: Any) -> LLM:
    chosen: dict[str, Any] = {
        "device": "hetero",
        "strategy": "chunked",
    } | options
    return LLM("demo", order=order, adapt=False, weights="w4a16", **chosen)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def fifo() -> Iterator[LLM]:
    with opened("fifo") as llm:
        assert llm.engine.deployment.window == 1
        yield llm


def logits(llm: LLM, prompt: list[int] = PROMPT) -> np.ndarray:
    llm.context.rewind(0)
    return llm.engine.prefill(llm.context, prompt).copy()


@pytest.mark.full
@pytest.mark.parametrize("order", ["paper", "best"])
@pytest.mark.parametrize(("tokens", "last"), [(257, 1), (300, 64), (450, 224)])
def test_the_order_changes_no_bit(fifo: LLM, order: str, tokens: int, last: int) -> None:
    """Nor does what the last call computes behind the prompt's end."""
    with opened(order) as llm:
        assert llm.engine.deployment.window == 2
        for _ in range(3):  # in one step, after it another one
            found = logits(llm, PROMPT[:tokens])
            assert llm.engine.runner.last_step.chunks == (256, last)
            assert np.array_equal(found, logits(fifo, PROMPT[:tokens]))
        more = llm.generate(PROMPT[:tokens], max_tokens=12, temperature=0.0)
        assert more.tokens == fifo.generate(PROMPT[:tokens], max_tokens=12, temperature=0.0).tokens


@pytest.mark.full
def test_a_new_length_finds_its_launches_bound(fifo: LLM) -> None:
    """Up to the next multiple of 32; where the context ends sooner, it is computed exactly."""
    with opened("best") as llm:
        steps = set()
        for tokens in (470, 450, 480, 449):
            found = logits(llm, LONGER[:tokens])
            steps.add(llm.engine.runner.last_step)
            assert np.array_equal(found, logits(fifo, LONGER[:tokens])), tokens
        assert len(steps) == 1
    assert padded_chunks((256, 200), 456) == (256, 200)
    assert padded_chunks((256, 200), 480) == padded_chunks((256, 224), 480) == (256, 224)
    assert padded_chunks((100, 90), 480) == padded_chunks((100, 96), 480) == (100, 96)
    assert padded_chunks((100, 97), 480) == (100, 97)


@pytest.mark.full
def test_several_contexts_share_a_windows_launches(fifo: LLM) -> None:
    other = PROMPT[::-1]
    with opened("best") as llm, llm.new_context() as one, llm.new_context() as two:
        found = [llm.engine.prefill(c, p).copy() for c, p in ((one, PROMPT), (two, other))]
        assert np.array_equal(found[0], logits(fifo))
        assert np.array_equal(found[1], logits(fifo, other))


@pytest.mark.full
def test_a_device_that_fails_in_a_window_costs_no_token(
    fifo: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = fifo.generate(PROMPT, max_tokens=6, temperature=0.0).tokens
    submit, made = OpenCLCall.submit, [0]

    def fail(call: OpenCLCall) -> OpenCLCompletion:
        made[0] += 1
        if made[0] > 30:
            raise call.device.failed("launching", cl.status_code.OUT_OF_RESOURCES)
        return submit(call)

    with opened("best") as llm:
        monkeypatch.setattr(OpenCLCall, "submit", fail)
        llm.engine.deployment.lower()  # bound methods
        with pytest.warns(FallbackWarning, match="OUT_OF_RESOURCES"):
            found = llm.generate(PROMPT, max_tokens=6, temperature=0.0)
        assert made[0] > 30
        assert llm.engine.deployment.window == 1
        assert found.tokens == wanted
        assert found.stats.npu_idle_share is None or found.stats.npu_idle_share < 1


@pytest.mark.full
def test_what_is_not_finite_costs_the_whole_window(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.input_layernorm.weight"][:] = 3e38
    save_file(tensors, folder / "model.safetensors")
    loaded = open_model(str(folder), weights="w4a16")
    plan = random_plan(loaded.spec(), 40, (1, 8, 32), random.Random(2), strategies=["row-cut"])
    devices: Any = {"gpu": open_device("opencl"), "npu": open_device("ort-cpu")}
    cost = CostModel(DeviceProfile.load("host"))
    with Engine(
        loaded.weights, plan, devices, max_seq_len=160, order="best", cost=cost
    ) as engine:  # fmt: skip
        context = engine.new_context(waits=True)
        with pytest.raises(DeviceError, match=r"layer1\..* NOT_FINITE"):
            engine.prefill(context, list(range(5, 125)))
        assert len(engine.runner.last_step.chunks) > 1
        assert context.cached == 0


@pytest.mark.full
def test_a_window_counts_as_memory_and_shrinks_to_the_budget() -> None:
    with opened("best") as wide, opened("fifo") as narrow:
        assert wide.engine.memory.pool_bytes > 1.8 * narrow.engine.memory.pool_bytes
        between = (wide.engine.memory.total_bytes + narrow.engine.memory.total_bytes) // 2
    with opened("best", memory_budget=between) as llm:
        assert llm.engine.deployment.window == 1
        assert llm.engine.memory.total_bytes <= between


@pytest.mark.full
@pytest.mark.parametrize("options", [{"sync": "finish"}, {"sync": "copy"}, {"max_gpu_share": 0.9}])
def test_what_waits_for_whole_queues_has_no_windows(options: dict[str, Any]) -> None:
    strategy = {"strategy": None} if "max_gpu_share" in options else {}
    with opened("best", **options, **strategy) as llm:
        assert llm.engine.deployment.window == 1


@pytest.mark.full
def test_idle_share_in_statistics_and_trace(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with opened("best") as llm, llm.trace(path):
        stats = llm.generate(PROMPT, max_tokens=2).stats
    assert stats.npu_idle_share is not None
    assert 0 <= stats.npu_idle_share < 1
    events = json.loads(path.read_text())["traceEvents"]
    (prompt,) = [e for e in events if e["name"].startswith("prefill ")]
    assert prompt["args"]["chunks"] == [256, 224]
    assert prompt["args"]["npu idle"] == pytest.approx(stats.npu_idle_share, abs=1e-3)
    assert {e["args"]["chunk"] for e in events if e.get("cat") == "NPU"} == {0, 1}


def test_an_unknown_order_is_refused() -> None:
    with pytest.raises(UserError, match="order is fifo, paper or best, got 'lifo'"):
        opened("lifo")
