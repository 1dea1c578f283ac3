"""Memory that is not coherent: a step hands over what crosses, once, and nothing else.

With `copied` the GPU works on copies of its own, so whatever is not handed over is stale and shows.
With `mapped` a processor's memory is coherent all the same: those tests count what is mapped.
"""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("pyopencl")

from hetero import LLM
from hetero.backends.errors import DeviceOptionError
from hetero.backends.memory import PAGE_BYTES
from hetero.backends.opencl import open as open_opencl
from hetero.backends.opencl.coherence import MEMORY_VARIABLE, hands_over, is_coherent
from hetero.backends.opencl.resources import DeviceMemory, Resources, SvmBuffer
from hetero.backends.opencl.self_test.cases import try_cases
from hetero.backends.protocol import Device, DeviceKind
from hetero.backends.registry import open_device
from hetero.errors import FallbackWarning
from hetero.models import open_model
from hetero.runtime.engine import Engine
from hetero.runtime.hidden_states import states_together
from hetero.runtime.kv.attention_stats import ScoreStats
from hetero.runtime.kv.cache_sync import joined
from hetero.runtime.kv.context import Context
from hetero.solver.execution_plan import ExecutionPlan
from hetero.solver.handmade import single_device
from hetero.solver.plan import NonMatmulDevices
from tests.runtime.models import tiny_model
from tests.runtime.plans import random_plan
from tests.support.checkpoints import relative_error
from tests.support.selection import examples

pytestmark = pytest.mark.usefixtures("no_chains")

GRAPHS = (1, 2, 4, 8, 32, 64)
TOLERANCE = 2e-5
Open: TypeAlias = Callable[..., Engine]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: Any) -> Path:
    return tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def opened(folder: Path) -> Iterator[Open]:
    """Opens engines by memory model and plan, each once."""
    engines: dict[tuple[str, str], Engine] = {}

    def find(memory: str, name: str = "gpu") -> Engine:
        if (memory, name) not in engines:
            engines[memory, name] = open_engine(folder, memory, name)
        return engines[memory, name]

    yield find
    for engine in engines.values():
        engine.close()


def plan_of(folder: Path, name: str) -> ExecutionPlan:
    spec = open_model(str(folder), weights="f32").spec()
    if name == "gpu":
        return single_device(spec, "gpu")
    plan = random_plan(spec, 45, GRAPHS, random.Random(5))
    by_phase = {"cut": ("gpu", "gpu"), "npu first": ("npu", "gpu"), "gpu first": ("gpu", "npu")}
    non_matmul = dict(zip(("prefill", "decode"), by_phase[name], strict=True))
    return plan.model_copy(update={"non_matmul": NonMatmulDevices.model_validate(non_matmul)})


def open_engine(folder: Path, memory: str, name: str, **options: Any) -> Engine:
    plan = plan_of(folder, name)
    models = {"mapped": {"coherent": False}, "copied": {"unified_memory": False}}
    devices: dict[DeviceKind, Device] = {"gpu": open_opencl(**models.get(memory, {}))}
    if "npu" in plan.devices():
        devices["npu"] = open_device("ort-cpu", graph_sizes=GRAPHS)
    weights = open_model(str(folder), weights="f32").weights
    return Engine(weights, plan, devices, max_seq_len=160, **options)


@pytest.fixture
def coherent_device() -> None:
    """Skips where memory is another one: of a graphics card's own, for one."""
    with open_opencl() as device:
        if not device.capabilities.coherent:
            pytest.skip("needs an OpenCL device whose memory is coherent")


def handovers(engine: Engine) -> int:
    gpu: Any = engine.devices["gpu"]
    return int(gpu.maps + gpu.copies)


def tokens_of(seed: int, count: int) -> list[int]:
    return [int(x) for x in np.random.default_rng(seed).integers(0, 263, count)]


def logits_of(engine: Engine, tokens: list[int]) -> Any:
    """Logits after a text, on a context of its own."""
    with engine.new_context() as context:
        return engine.prefill(context, tokens).copy()


@pytest.mark.parametrize("memory", ["mapped", "copied"])
def test_a_gpu_alone_hands_over_inputs_and_logits_alone(opened: Open, memory: str) -> None:
    engine, tokens = opened(memory), tokens_of(1, 40)
    with engine.new_context() as context:
        for part in (tokens[:30], tokens[30:39], tokens[39:]):
            before = handovers(engine)
            logits = engine.prefill(context, part).copy()
            assert handovers(engine) - before == 3  # tokens, position, logits
        assert relative_error(logits, logits_of(opened("coherent"), tokens)) < TOLERANCE
        before = handovers(engine)
        context.cache.read(0, 20)
        context.cache.read(3, 40)  # the host has seen them
        layout = context.cache.layout
        assert handovers(engine) - before == 2 * layout.layers * layout.kv_heads


@pytest.mark.few(2)
@pytest.mark.parametrize("name", ["cut", "npu first", "gpu first"])
@pytest.mark.parametrize("memory", ["mapped", "copied"])
def test_cut_models_have_the_numbers_of_coherent_memory(
    opened: Open, memory: str, name: str
) -> None:
    engine, whole, tokens = opened(memory, name), opened("coherent"), tokens_of(2, 48)
    for slot in engine.deployment.pool.slots():
        if slot.name not in ("tokens", "position"):
            engine.deployment.pool[slot].array[:] = 7e7  # whatever is not written shows
    with engine.new_context() as context:
        texts = [tokens[:45], tokens[:46], tokens[:47], tokens[:48]]
        got = [engine.prefill(context, tokens[:45]).copy()]
        got += [engine.decode(context, token).copy() for token in tokens[45:]]
        got.append(engine.prefill(context, tokens[:20]).copy())  # the other side goes on
        for logits, text in zip(got, [*texts, tokens + tokens[:20]], strict=True):
            assert relative_error(logits, logits_of(whole, text)) < TOLERANCE


@pytest.mark.few(2)
@pytest.mark.parametrize("name", ["gpu", "npu first", "gpu first"])
@pytest.mark.parametrize("memory", ["mapped", "copied"])
def test_texts_of_one_step_have_the_numbers_of_coherent_memory(
    opened: Open, memory: str, name: str
) -> None:
    engine, whole, tokens = opened(memory, name), opened("coherent"), tokens_of(3, 48)
    texts = [tokens[:11], tokens[11:23], tokens[30:31]]
    found = []
    for one in (engine, whole):
        with one.new_context() as context:
            one.prefill(context, tokens)
            context.rewind(0)
            states = states_together(one, context, texts, 12)
            assert states is not None
            found.append([x[: len(text)] for x, text in zip(states, texts, strict=True)])
            found[-1].append(one.prefill(context, tokens).copy())
    for got, expected in zip(*found, strict=True):
        assert relative_error(got, expected) < TOLERANCE


@settings(max_examples=examples(12), deadline=None, suppress_health_check=[*HealthCheck])
@given(data=st.data())
def test_contexts_are_the_same_text_whoever_computed_them(
    opened: Open, tmp_path_factory: Any, data: st.DataObject
) -> None:
    """Random calls, forks, cuts, files and joint steps: each context answers as its text does."""
    engine = opened("copied", data.draw(st.sampled_from(["gpu", "npu first", "gpu first"])))
    whole, random_tokens = opened("coherent"), np.random.default_rng(data.draw(st.integers(0, 99)))
    contexts: list[Context] = [engine.new_context()]
    path = tmp_path_factory.mktemp("session") / "context.safetensors"
    for _ in range(data.draw(st.integers(2, 7))):
        context = data.draw(st.sampled_from(contexts))
        action = data.draw(st.sampled_from(["prefill", "decode", "fork", "cut", "file", "rows"]))
        tokens = [int(x) for x in random_tokens.integers(0, 263, 12)]
        if action == "prefill" and len(context) < 100:
            engine.prefill(context, tokens)
        elif action == "decode" and context.cached:
            engine.decode(context, tokens[0])
        elif action == "fork":
            contexts.append(context.fork())
        elif action == "cut" and context.cached:
            context.truncate(data.draw(st.integers(1, context.cached)))
        elif action == "file" and context.cached:
            context.save(path)
            contexts.append(engine.new_context())
            contexts[-1].load(path)
        elif action == "rows" and len(contexts) > 1 and all(x.cached for x in contexts[:2]):
            rows = list(zip(contexts[:2], tokens, strict=False))
            assert all(x is not None for x in engine.decode_rows(rows))
    for context in contexts:
        if context.cached:
            text = list(context.tokens)
            logits = engine.decode(context, 7)
            assert relative_error(logits, logits_of(whole, [*text, 7])) < TOLERANCE
        context.close()


@pytest.mark.full
def test_scores_of_attention_are_those_of_coherent_memory(opened: Open) -> None:
    sums = []
    for memory in ("coherent", "copied"):
        engine = opened(memory)
        with engine.new_context() as context, engine.new_context() as other:
            for each in (context, other):
                each.score_stats = ScoreStats(160)
                engine.prefill(each, tokens_of(3, 40))
            for token in tokens_of(4, 20):
                engine.decode_rows([(context, token), (other, token)])
            engine.decode(context, 5)
            sums += [context.score_stats.sums, other.score_stats.sums]  # type: ignore[union-attr]
    np.testing.assert_allclose(sums[2], sums[0], rtol=1e-4)
    np.testing.assert_allclose(sums[3], sums[1], rtol=1e-4)


@pytest.mark.full
def test_a_gpu_that_is_lost_takes_its_keys_and_values_along(opened: Open, folder: Path) -> None:
    text, other = tokens_of(6, 50), tokens_of(7, 30)
    with open_engine(folder, "copied", "cut") as engine:
        context, second = engine.new_context(), engine.new_context()
        engine.prefill(context, text[:49])
        engine.prefill(second, other)
        gpu: Any = engine.devices["gpu"]
        gpu._health.lose("of a test")
        with pytest.warns(FallbackWarning, match="going on with npu"):
            logits = engine.decode(context, text[49])
        assert relative_error(logits, logits_of(opened("coherent"), text)) < TOLERANCE
        logits = engine.decode(second, 9)
        assert relative_error(logits, logits_of(opened("coherent"), [*other, 9])) < TOLERANCE


@pytest.mark.usefixtures("coherent_device")
def test_the_probe_sees_copies_of_the_hosts_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that says that memory is unified, and keeps a copy that nothing updates."""
    with open_opencl() as device:
        assert device.capabilities.coherent
        assert is_coherent(device)
        assert hands_over(device)

        def copied(self: Resources, array: Any, access: int) -> DeviceMemory:
            import pyopencl as cl

            return DeviceMemory(self.context, access | cl.mem_flags.COPY_HOST_PTR, hostbuf=array)

        monkeypatch.setattr(Resources, "_buffer", copied)
        assert not is_coherent(device)
        device.coherent = False
        assert not hands_over(device)  # mapping moves nothing either
        device.unified_memory = False
        assert hands_over(device)
        with open_opencl() as other:
            assert not other.capabilities.unified_memory


@pytest.mark.full
@pytest.mark.usefixtures("coherent_device")
def test_a_gpu_that_is_coherent_in_its_own_memory_allocates_pool_and_caches(
    folder: Path, opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other memory is copied once and then stale, so any buffer that is not its own shows."""
    import pyopencl as cl

    text, own = tokens_of(11, 60), weakref.WeakSet[SvmBuffer]()
    init, buffer = SvmBuffer.__init__, Resources._buffer

    def noted(self: SvmBuffer, *args: Any) -> None:
        init(self, *args)
        own.add(self)

    def copied(self: Resources, array: Any, access: int) -> DeviceMemory:
        at = array.ctypes.data
        if any(x.address <= at < x.address + x.nbytes for x in own):
            return buffer(self, array, access)
        return DeviceMemory(self.context, access | cl.mem_flags.COPY_HOST_PTR, hostbuf=array)

    wanted = logits_of(opened("coherent"), text)
    monkeypatch.setattr(SvmBuffer, "__init__", noted)
    monkeypatch.setattr(Resources, "_buffer", copied)
    with open_opencl() as device:
        if not device.has_svm:
            pytest.skip("needs fine-grained shared virtual memory")
        assert device.capabilities.coherent
        assert device.capabilities.own_memory
        assert device.capabilities.attention_heads
    with open_engine(folder, "probed", "cut") as engine:
        assert engine.devices["gpu"].capabilities.own_memory
        assert relative_error(logits_of(engine, text), wanted) < TOLERANCE
        context = engine.new_context()
        engine.prefill(context, text[:-1])
        assert relative_error(engine.decode(context, text[-1]), wanted) < TOLERANCE
        assert sum(x.nbytes for x in own) >= engine.memory.context_bytes


@pytest.mark.full
@pytest.mark.usefixtures("coherent_device")
def test_shared_virtual_memory_can_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MEMORY_VARIABLE, "svm")
    with open_opencl() as device:
        assert device.capabilities.own_memory
        assert device.allocate(5000).address % PAGE_BYTES == 0
        assert not device.allocate(5000).bytes.any()
        list(try_cases(device, 0, 1))
    monkeypatch.setattr(Resources, "has_svm", False)
    with pytest.raises(DeviceOptionError, match="has none that is fine-grained"):
        open_opencl()


@pytest.mark.usefixtures("coherent_device")
@pytest.mark.parametrize(("word", "unified"), [("mapped", True), ("copied", False)])
def test_the_memory_model_can_be_named(
    word: str, unified: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(MEMORY_VARIABLE, word)
    with open_opencl() as device:
        assert device.capabilities.unified_memory == unified
        assert not device.capabilities.coherent
        assert not device.capabilities.attention_heads
    monkeypatch.setenv(MEMORY_VARIABLE, "shared")
    with pytest.raises(DeviceOptionError, match="known are svm"):
        open_opencl()


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=12))
def test_spans_are_joined(spans: list[tuple[int, int]]) -> None:
    rows = {row for start, stop in spans for row in range(start, stop)}
    result = joined(spans)
    assert {row for start, stop in result for row in range(start, stop)} == rows
    assert all(a[1] < b[0] for a, b in pairwise(result))


@pytest.mark.full
@pytest.mark.usefixtures("coherent_device")
@pytest.mark.filterwarnings("ignore:profile .* was taken elsewhere")
@pytest.mark.parametrize("memory", ["mapped", "copied"])
def test_a_plan_of_coherent_memory_runs_without_shared_heads(
    memory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a profile of a machine on which both devices share the heads of attention."""
    prompt = "the sun " * 40
    with LLM("demo", device="hetero", profile="host-amx") as llm:
        assert llm.plan.shares_attention
        wanted = llm.generate(prompt, max_tokens=8).tokens
    monkeypatch.setenv(MEMORY_VARIABLE, memory)
    with LLM("demo", device="hetero", profile="host-amx") as llm:
        assert not llm.plan.shares_attention
        assert llm.generate(prompt, max_tokens=8).tokens == wanted
