"""Contexts that lack keys and values in the middle: one call fills holes and reads the prompt."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero import LLM
from hetero.contexts.service import Service
from hetero.runtime.filling import filled, scatters
from hetero.runtime.holes import MOST_PIECES, cut, without
from hetero.runtime.kv.layer_gate import LayerGate
from tests.contexts.models import VOCABULARY, WAYS, open_llm
from tests.contexts.test_service import evicted
from tests.runtime.models import tiny_model

HOLES = ((5, 12), (16, 32), (48, 50))
TEXT = np.random.default_rng(7).integers(0, VOCABULARY, 80).tolist()
STOP = 60


def holed(llm: LLM, values: Any, holes: tuple[tuple[int, int], ...] = HOLES) -> Any:
    """A context with the text up to `STOP`, whose holes are poison."""
    context = llm.new_context()
    spoilt = values.copy()
    for start, stop in holes:
        spoilt[:, :, :, start:stop] = np.nan
    context.cache.write(0, spoilt)
    context.adopt(TEXT[:STOP])
    context.holes = holes
    return context


@pytest.mark.full
@pytest.mark.parametrize("way", [*WAYS])
def test_one_call_fills_holes_and_reads_the_prompt(way: str, tmp_path: Path) -> None:
    if "opencl" in WAYS[way].values():
        pytest.importorskip("pyopencl")
    with open_llm(tiny_model(tmp_path), way) as llm:
        engine = llm.engine
        assert scatters(engine.deployment)
        whole = llm.new_context()
        wanted = engine.prefill(whole, TEXT).copy()
        values = whole.cache.read(0, len(TEXT))
        context = holed(llm, values[:, :, :, :STOP])
        steps = list(engine.prefill_calls(context, TEXT[STOP:]))
        assert len(steps) <= 2, "40 tokens are a call of these plans"
        assert steps[-1] is not None
        assert np.allclose(steps[-1], wanted, atol=1e-4)
        assert np.allclose(context.cache.read(0, len(TEXT)), values, atol=1e-4)
        assert context.tokens == tuple(TEXT)
        assert not context.holes
        again = engine.decode(context, 5).copy()
        assert np.allclose(again, engine.decode(whole, 5), atol=1e-4)


@pytest.mark.full
@pytest.mark.parametrize("way", ["gpu", "npu"])
def test_whatever_comes_next_fills_the_holes_first(way: str, tmp_path: Path) -> None:
    """A token, tokens that are scored, rows of several contexts."""
    if way == "gpu":
        pytest.importorskip("pyopencl")
    with open_llm(tiny_model(tmp_path), way) as llm:
        engine, whole = llm.engine, llm.new_context()
        engine.prefill(whole, TEXT[:STOP])
        values = whole.cache.read(0, STOP)
        wanted = engine.score(whole, TEXT[STOP:])
        one, other, third = (holed(llm, values) for _ in range(3))
        assert np.allclose(engine.score(one, TEXT[STOP:]), wanted, atol=1e-4)
        assert np.allclose(engine.decode(other, TEXT[STOP]), wanted[0], atol=1e-4)
        rows = engine.decode_rows([(third, TEXT[STOP]), (other, TEXT[STOP + 1])])
        for row, expected in zip(rows, wanted, strict=False):
            assert row is not None
            assert np.allclose(row, expected, atol=1e-4)
        third.holes = ((3, 9), (70, 90))
        third.rewind(8)
        assert third.holes == ((3, 8),)


def test_a_call_waits_for_the_layers_between_the_holes(tmp_path: Path) -> None:
    with open_llm(tiny_model(tmp_path), "npu") as llm:
        engine, whole = llm.engine, llm.new_context()
        wanted = engine.prefill(whole, TEXT).copy()
        values = whole.cache.read(0, STOP)
        context = holed(llm, np.full_like(values, np.nan))
        context.gate = gate = LayerGate(values.shape[0])
        loaded = [i for i in range(STOP) if not any(a <= i < b for a, b in HOLES)]

        def fill() -> None:
            for layer in range(values.shape[0]):
                time.sleep(0.02)
                for into, part in zip(context.cache.layer(layer), values[layer], strict=True):
                    into[:, loaded] = part[:, loaded]
                gate.open()

        thread = threading.Thread(target=fill)
        thread.start()
        found = engine.prefill(context, TEXT[STOP:]).copy()
        thread.join()
        assert gate.waited_s > 0
        assert np.allclose(found, wanted, atol=1e-4)


def test_a_plan_without_such_calls_computes_all_from_the_first_hole_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device may fail between loading and the prompt."""
    with open_llm(tiny_model(tmp_path), "npu") as llm:
        engine, whole = llm.engine, llm.new_context()
        wanted = engine.prefill(whole, TEXT).copy()
        context = holed(llm, whole.cache.read(0, STOP))
        monkeypatch.setattr("hetero.runtime.filling.scatters", lambda _: False)
        assert np.allclose(engine.prefill(context, TEXT[STOP:]), wanted, atol=1e-4)
        assert context.tokens == tuple(TEXT)
        context.holes = ((3, 200),)  # of a text that is gone
        assert list(filled(engine, context, (), head=False)) == []
        assert context.holes == ()


@given(
    edges=st.lists(st.integers(0, 300), min_size=1, max_size=12, unique=True).map(sorted),
    more=st.integers(0, 90),
    count=st.integers(1, 200),
    sizes=st.sampled_from([(), (1,), (1, 32, 128), (1, 2, 4, 8, 32, 64, 128, 256)]),
)
def test_pieces_are_the_first_tokens_in_their_order(
    edges: list[int], more: int, count: int, sizes: tuple[int, ...]
) -> None:
    spans = [(a, b) for a, b in zip(edges[::2], edges[1::2], strict=False)]
    prompt = edges[-1] + 1, edges[-1] + 1 + more
    every = [i for a, b in (*spans, prompt) for i in range(a, b)]
    pieces = cut(spans, prompt, count, sizes, 2 * count)
    covered = [i for x in pieces for i in range(x.position, x.position + x.tokens)]
    assert covered == every[: len(covered)]
    assert len(covered) == min(count, len(every)) or len(pieces) == MOST_PIECES
    row = 0
    for piece in pieces:
        assert not sizes or piece.graph in sizes
        behind = piece.position >= prompt[0]
        assert piece.graph == piece.tokens or (behind and piece is pieces[-1])
        assert row + piece.graph <= 2 * count
        row += piece.tokens
    if pieces:
        left = [i for a, b in without(spans, pieces) for i in range(a, b)]
        assert left == [i for i in every[len(covered) :] if i < prompt[0]]


def test_chunks_lost_in_the_middle_are_computed_in_the_prompts_call(tmp_path: Path) -> None:
    """Wherever they are; the answer is that of a context that stayed."""
    prompt, more = "Once upon a time there was a fox " * 16, " The fox saw"
    with (
        LLM("demo", device="npu") as llm,
        Service(llm, directory=tmp_path, kv_bits="raw", context_memory="8MiB") as service,
    ):
        wanted = []
        with llm.new_context() as stays:
            wanted = [
                llm.generate(x, context=stays, max_tokens=12, temperature=0).tokens
                for x in (prompt, more)
            ]
        context = service.bind("a").new_context(chat=False)
        assert context.call(prompt, max_tokens=12, temperature=0).tokens == wanted[0]
        service.swap.drain()
        lost = [context._cached.chunks[i] for i in (1, 2, 4)]
        for chunk in lost:
            service.memory.evict(chunk)
            assert chunk.place is not None
            context.app.files.drop(chunk.place)
            chunk.place = None
        service._working.forget()
        assert context.call(more, max_tokens=12, temperature=0).tokens == wanted[1]
        switch = context.last_switch
        assert switch is not None
        assert switch.recomputed_tokens - switch.tail_tokens == 48
        assert switch.loaded_tokens >= 32
        evicted(service, disk=True)
