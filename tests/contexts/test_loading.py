"""What is read and what is computed; steps that wait for layers, on every kind of plan."""

from __future__ import annotations

import gc
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero.backends.host import time_limits
from hetero.backends.host.clock import ManualClock
from hetero.contexts.load_plan import LoadItem, Rates, plan_load
from hetero.contexts.measured import (
    LONGEST_BEFORE,
    PROMPTS,
    measure_load,
    measure_prompts,
    measure_run,
)
from hetero.contexts.prompt_times import (
    CalibratedTimes,
    PredictedTimes,
    PromptTimes,
    predict_prompts,
)
from hetero.runtime.kv.layer_gate import LayerGate, LoadError
from tests.contexts.models import WAYS, open_llm
from tests.runtime.models import tiny_model
from tests.support.selection import examples

LAYERS = 4
PIECES = st.lists(
    st.tuples(st.sampled_from(["memory", "disk", "nowhere"]), st.integers(1, 400)),
    min_size=1,
    max_size=7,
)


def simulated(
    pieces: list[LoadItem], load: Sequence[bool], prompt: int, rates: Rates, before: int
) -> float:
    """Seconds until the first token, layer by layer, one resource after another."""
    count, others, at, runs = prompt, 0, before, 0
    for piece, is_loaded in zip(pieces, load, strict=True):
        if is_loaded:
            at += piece.tokens
        else:
            count, others = count + piece.tokens, others + piece.tokens * at
    others += prompt * at
    runs = sum(not one and other for one, other in pairwise(load))
    had = [p for p, is_loaded in zip(pieces, load, strict=True) if is_loaded]
    read_s = sum(p.disk_bytes / rates.read_bytes_per_s for p in had)
    read_s += sum(rates.read_chunk_s for p in had if p.disk_bytes)
    compute_s = rates.prefill_s(count, others / count) + runs * (rates.run_s or 0.0)
    work_s = sum(p.work_s for p in had)
    read_s += work_s if rates.decodes_overlapped else 0.0
    compute_s += 0.0 if rates.decodes_overlapped else work_s
    layer_read, layer_compute = read_s / LAYERS, compute_s / LAYERS
    there = done = rates.read_latency_s if any(p.disk_bytes for p in had) else 0.0
    for _ in range(LAYERS):
        there += layer_read
        done = max(done, there) + layer_compute
    return float(done) + (rates.load_s if had else 0.0)


def allowed(pieces: list[LoadItem], rates: Rates, *, recompute: bool) -> Iterator[tuple[bool, ...]]:
    """Yield all that may be loaded."""
    for load in product([True, False], repeat=len(pieces)):
        end = load[load.index(False) :] if False in load else ()
        known = [p for p in pieces[: len(load) - len(end)] if p.missing]
        if rates.run_s is None:
            first = next((i for i, p in enumerate(pieces) if p.missing), len(pieces))
            if any(end) or known or (not recompute and len(load) - len(end) < first):
                continue
            if any(p.disk_bytes == 0 for p in pieces[len(load) - len(end) : first]):
                continue
        elif any(
            (x and p.missing) or not (x or p.missing or (p.disk_bytes and recompute))
            for x, p in zip(load, pieces, strict=True)
        ):
            continue
        yield load


def pieces_of(kinds: list[tuple[str, int]], rates: Rates) -> list[LoadItem]:
    return [
        LoadItem(16, 0, 0, missing=True)
        if kind == "nowhere"
        else rates.load_item(16, 8, n if kind == "disk" else 0)
        for kind, n in kinds
    ]


RATES = st.builds(
    lambda slope, bend, **rates: Rates(
        prefill_s=lambda m, before: 0.01 + slope * m * (1 + bend * (before + m / 2)),
        chunk_s={8: 1e-3},
        read_chunk_s=1e-4,
        **rates,
    ),
    slope=st.floats(1e-4, 1e-2),
    bend=st.floats(0, 0.05),
    read_bytes_per_s=st.floats(1e2, 1e5),
    read_latency_s=st.floats(0, 0.1),
    decodes_overlapped=st.booleans(),
    run_s=st.none() | st.floats(0, 0.1),
    load_s=st.floats(0, 0.1),
)


@pytest.mark.full
@given(
    kinds=PIECES,
    prompt=st.integers(1, 60),
    before=st.integers(0, 99),
    rates=RATES,
    recompute=st.booleans(),
)
def test_no_other_set_is_shorter(
    kinds: list[tuple[str, int]], prompt: int, before: int, rates: Rates, recompute: bool
) -> None:
    pieces = pieces_of(kinds, rates)
    plan = plan_load(pieces, prompt, rates, LAYERS, before=before, recompute=recompute)
    times = {
        load: simulated(pieces, load, prompt, rates, before)
        for load in allowed(pieces, rates, recompute=recompute)
    }
    assert plan.predicted_s == pytest.approx(times[plan.load])
    assert plan.predicted_s == pytest.approx(min(times.values()))


@given(
    kinds=st.lists(
        st.tuples(st.sampled_from(["memory", *["disk"] * 8, "nowhere"]), st.integers(1, 400)),
        min_size=9,
        max_size=11,
    ),
    prompt=st.integers(1, 60),
    rates=RATES,
)
@settings(max_examples=examples(25), deadline=None)
def test_of_many_chunks_a_set_is_nearly_the_best(
    kinds: list[tuple[str, int]], prompt: int, rates: Rates
) -> None:
    pieces = pieces_of(kinds, rates)
    plan = plan_load(pieces, prompt, rates, LAYERS)
    times = {
        load: simulated(pieces, load, prompt, rates, 0)
        for load in allowed(pieces, rates, recompute=True)
    }
    assert plan.predicted_s == pytest.approx(times[plan.load])
    assert plan.predicted_s <= 1.05 * min(times.values()) + 1e-9


def test_what_is_slow_to_read_is_computed_in_the_middle_of_a_text() -> None:
    rates = Rates(prefill_s=lambda m, _: 1e-3 * m, read_bytes_per_s=1e6, run_s=1e-3)
    pieces = [rates.load_item(16, 8, 30_000 if i in (2, 3, 9) else 3_000) for i in range(12)]
    load = plan_load(pieces, 16, rates, LAYERS).load
    assert [i for i, is_loaded in enumerate(load) if not is_loaded] in ([2, 3], [2, 3, 9], [3, 9])
    split = plan_load(pieces, 16, replace(rates, run_s=None), LAYERS)
    assert split.predicted_s > plan_load(pieces, 16, rates, LAYERS).predicted_s


def test_a_slow_disk_is_not_read_and_a_fast_one_is() -> None:
    """Around the break-even speed: 1000 bytes and 1 ms a token are 1 MB/s."""
    rates = {
        speed: Rates(prefill_s=lambda m, _: 1e-3 * m, read_bytes_per_s=speed)
        for speed in (1e4, 1e6, 1e8)
    }
    assert rates[1e4].break_even_bytes_per_s(1000) == pytest.approx(1e6)
    stops = [
        sum(plan_load([rate.load_item(16, 8, 16000)] * 20, 16, rate, LAYERS).load)
        for rate in rates.values()
    ]
    assert stops[0] <= 1
    assert 5 < stops[1] < 15, "half of each at once"
    assert stops[2] >= 19


def test_a_plan_of_more_chunks_takes_no_more_calls() -> None:
    """A plan is a fixed number of operations on arrays, which is why it takes a millisecond."""

    def calls(chunks: int) -> Counter[str]:
        pieces = [LoadItem(16, 1e-4, 16000, i % 9 == 4, read_s=1e-3 + i % 7) for i in range(chunks)]
        seconds = held(lambda m, b: 0.01 + 1e-4 * m * (1 + b / 999), longest=32768)
        rates = Rates(prefill_s=seconds, read_bytes_per_s=1e8, run_s=1e-4)
        counted: Counter[str] = Counter()

        def count(frame: FrameType, event: str, called: object) -> None:
            if event == "call":
                counted[frame.f_code.co_name] += 1
            elif event == "c_call":
                counted[getattr(called, "__name__", "")] += 1

        gc.disable()  # hypothesis times each collection
        sys.setprofile(count)
        try:
            plan_load(pieces, 16, rates, LAYERS)
        finally:
            sys.setprofile(None)
            gc.enable()
        return counted

    few, many = calls(256), calls(2048)
    assert few["plan_load"] == many["plan_load"] == 1
    assert few["prefill_s"] + few["__call__"] > 0
    # Building the result reads one flag for each chunk, in C.
    assert many == few
    assert few.total() < 400


def held(
    true: Callable[[int, int], float], off: float = 0.7, longest: int = 4096
) -> CalibratedTimes:
    """Times of a machine whose prompts a profile is wrong about, by another factor for each."""
    points = [
        (m, before, true(m, before))
        for before in (0, min(longest // 2, LONGEST_BEFORE))
        for m in PROMPTS
        if before + m < longest
    ]
    predicted = predict_prompts(
        lambda m, before: off * (1 + 0.02 * np.sin(m)) * true(m, before), longest
    )
    priced = PredictedTimes([(int(m), int(before), s) for m, before, s in predicted])
    return CalibratedTimes(priced, PromptTimes(points), points)


@given(
    base=st.floats(1e-4, 0.05),
    each=st.floats(1e-5, 3e-3),
    seen=st.floats(1e-9, 1e-6),
    off=st.floats(0.5, 2),
    disk=st.floats(1e5, 1e9),
    known=st.integers(1, 120),
    prompt=st.integers(1, 200),
)
def test_a_plan_by_the_cost_model_is_as_good_as_trying_all(
    base: float, each: float, seen: float, off: float, disk: float, known: int, prompt: int
) -> None:
    """Attention grows with what is seen: no line. Only a few prompts are measured, and the profile
    is wrong about the machine; what was decided is then tried on that machine.
    """

    def true(m: int, before: int) -> float:
        return base + each * m + seen * m * (before + m / 2)

    truth = Rates(prefill_s=true, read_bytes_per_s=disk, chunk_s={8: 1e-4})
    rates = Rates(prefill_s=held(true, off), read_bytes_per_s=disk, chunk_s={8: 1e-4})
    pieces = [rates.load_item(16, 8, 16_000)] * known
    plan = plan_load(pieces, prompt, rates, LAYERS)
    loads = [[i < stop for i in range(known)] for stop in range(known + 1)]
    times = [simulated(pieces, load, prompt, truth, 0) for load in loads]
    found = simulated(pieces, plan.load, prompt, truth, 0)
    assert found <= 1.05 * min(times)
    assert plan.predicted_s == pytest.approx(found, rel=0.15)


@pytest.mark.parametrize(("token_s", "before", "most_s"), [(1e-4, 2048, 1.0), (5e-3, 400, 20.0)])
def test_a_slow_device_is_measured_once_and_behind_less(
    token_s: float, before: int, most_s: float
) -> None:
    clock = ManualClock()
    context: Any = SimpleNamespace(home=SimpleNamespace(max_tokens=8000), adopt=lambda tokens: None)
    points = measure_prompts(context, 100, lambda text: clock.sleep(token_s * len(text)), clock.now)
    assert [x[:2] for x in points] == [[m, at] for at in (0, before) for m in PROMPTS]
    assert [x[2] for x in points] == pytest.approx([token_s * x[0] for x in points])
    assert clock.now() < most_s


@pytest.mark.parametrize("longest", [9, 30, 8000])
def test_another_run_of_tokens_costs_what_preparing_its_call_does(longest: int) -> None:
    """Calls that were prepared before are faster, and what is timed would be those."""
    clock, seen = ManualClock(), set[tuple[int, int]]()
    context: Any = SimpleNamespace(home=SimpleNamespace(max_tokens=longest), holes=())
    context.adopt = lambda tokens: setattr(context, "holes", ())

    def prefill(text: Sequence[int]) -> None:
        runs = 1 + len(context.holes)
        tokens = len(text) + sum(b - a for a, b in context.holes)
        prepared = (runs, tokens) in seen
        seen.add((runs, tokens))
        clock.sleep(1e-4 * tokens + 1e-3 * runs + (0.0 if prepared else 2e-3 * runs))

    run_s = measure_run(context, 100, prefill, clock.now)
    assert run_s == pytest.approx(3e-3, abs=1e-4)
    assert context.holes == ()
    context.home.max_tokens = 8
    assert measure_run(context, 100, prefill, clock.now) is None


@pytest.mark.parametrize("longest", [2, 30, 8000])
def test_a_load_costs_what_waiting_for_its_thread_does(longest: int) -> None:
    clock, waited = ManualClock(), [0]
    cache = SimpleNamespace(layout=SimpleNamespace(layers=LAYERS))
    home = SimpleNamespace(max_tokens=longest)
    context: Any = SimpleNamespace(home=home, cache=cache, gate=None, adopt=lambda tokens: None)

    def prefill(text: Sequence[int]) -> None:
        assert len(text) < longest
        clock.sleep(1e-4 * len(text))
        if context.gate is not None:
            for layer in range(LAYERS):
                context.gate.wait(layer)
                clock.sleep(1e-3)
            assert context.gate.done
            waited[0] += 1

    assert measure_load(context, 100, prefill, clock.now) == pytest.approx(LAYERS * 1e-3)
    assert context.gate is None
    assert waited == [4]


def test_where_no_layer_is_waited_for_a_load_costs_nothing() -> None:
    clock = ManualClock()
    cache = SimpleNamespace(layout=SimpleNamespace(layers=LAYERS))
    home = SimpleNamespace(max_tokens=99)
    context: Any = SimpleNamespace(home=home, cache=cache, gate=None, adopt=lambda tokens: None)
    assert measure_load(context, 100, lambda _: clock.sleep(1e-3), clock.now) == 1e-9


def test_held_times_are_the_measured_ones_where_there_are_some() -> None:
    def true(m: int, before: int) -> float:
        return 0.003 + 1e-4 * m + 2e-7 * m * (before + m / 2)

    seconds = held(true, 0.5)
    for before in (0, LONGEST_BEFORE):
        assert seconds(256, before) == pytest.approx(true(256, before))
        many = np.array(PROMPTS), np.full(len(PROMPTS), before)
        assert seconds(*many) == pytest.approx([true(m, before) for m in PROMPTS])
    assert seconds(0, 0) == pytest.approx(seconds(1, 0))
    assert seconds(2000, 1000) == pytest.approx(true(2000, 1000), rel=0.05), "beyond all measured"
    with pytest.raises(ValueError, match="no grid"):
        PredictedTimes([(1, 0, 1.0), (2, 0, 1.0), (1, 5, 1.0)])


def test_times_of_prompts_between_those_measured() -> None:
    seconds = PromptTimes([(1, 0, 0.01), (16, 0, 0.05), (64, 0, 0.02), (128, 0, 0.04)])
    assert seconds(16, 0) == pytest.approx(0.02), "no longer than 64 tokens: that was disturbed"
    assert seconds(96, 0) == pytest.approx(0.03)
    assert seconds(256, 9) == pytest.approx(0.08), "on the last slope"
    assert seconds(0, 0) == seconds(1, 0) == 0.01
    behind = PromptTimes([(1, 0, 0.01), (64, 0, 0.02), (1, 100, 0.03), (64, 100, 0.06)])
    assert behind(64, 50) == pytest.approx(0.04)
    assert behind(64, 200) == pytest.approx(0.10)
    assert behind(np.array([1, 64]), np.array([100, 0])) == pytest.approx([0.03, 0.02])
    alone = PromptTimes([(16, 0, 0.02)])
    assert alone(np.array([1, 16, 32]), 0) == pytest.approx([0.02, 0.02, 0.04])


# --- steps that wait --------------------------------------------------------------------------


@pytest.mark.parametrize("way", [*WAYS])
def test_a_prompt_waits_for_each_layer_and_no_longer(way: str, tmp_path: Path) -> None:
    """Layers come one after another, from another thread, into a cache that was poisoned."""
    if "opencl" in WAYS[way].values():
        pytest.importorskip("pyopencl")
    first, rest = (np.random.default_rng(i).integers(0, 263, 40).tolist() for i in (1, 2))
    with open_llm(tiny_model(tmp_path), way) as llm:
        whole = llm.new_context()
        llm.engine.prefill(whole, first)
        values = whole.cache.read(0, 40)
        wanted = llm.engine.prefill(whole, rest).copy()
        late = llm.new_context()
        late.cache.write(0, np.full_like(values, np.nan))
        late.adopt(first)
        late.gate = gate = LayerGate(values.shape[0])

        def fill() -> None:
            for layer in range(values.shape[0]):
                time.sleep(0.02)
                for into, part in zip(late.cache.layer(layer), values[layer], strict=True):
                    into[:, :40] = part
                gate.open()

        thread = threading.Thread(target=fill)
        thread.start()
        found = llm.engine.prefill(late, rest).copy()
        thread.join()
        assert np.array_equal(found, wanted)
        assert gate.waited_s > 0
        assert np.array_equal(llm.engine.decode(late, 5), llm.engine.decode(whole, 5))
        assert late.gate is None


def test_a_layer_is_waited_for_as_long_as_the_scale_of_time_limits_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(time_limits.VARIABLE, "0.1")
    with pytest.raises(LoadError, match=r"layer 0 did not come within 0\.01 s"):
        LayerGate(1, deadline_s=0.1).wait(0)


def test_a_layer_that_does_not_come_is_an_error_and_the_context_goes_on(tmp_path: Path) -> None:
    with open_llm(tiny_model(tmp_path), "npu") as llm:
        context = llm.new_context()
        llm.engine.prefill(context, [1, 2, 3])
        tokens, wanted = context.tokens, llm.engine.prefill(context, [4, 5]).copy()
        for gate, sentence in (
            (LayerGate(3, deadline_s=0.01), "layer 0 did not come within"),
            (LayerGate(3), "layer 0 did not come: a bad sector"),
        ):
            context.rewind(3)
            context.gate = gate
            if gate.deadline_s > 1:
                gate.fail(OSError("a bad sector"))
            with pytest.raises(LoadError, match=sentence):
                llm.engine.prefill(context, [4, 5])
            assert context.tokens == tokens
            context.gate = None
            assert np.array_equal(llm.engine.prefill(context, [4, 5]), wanted)


class OpenedWhenWaited(LayerGate):
    """Lets the next layer through 10 ms after somebody waits for it."""

    def wait(self, layer: int) -> float:
        threading.Timer(0.01, self.open).start()
        return super().wait(layer)


def test_a_trace_shows_the_wait(tmp_path: Path) -> None:
    with open_llm(tiny_model(tmp_path), "npu") as llm:
        context = llm.new_context()
        llm.engine.prefill(context, [1, 2, 3])
        context.gate = OpenedWhenWaited(3)
        with llm.trace(tmp_path / "t.json"):
            llm.engine.prefill(context, [4, 5])
    assert "keys and values for layer0.attention" in (tmp_path / "t.json").read_text()
