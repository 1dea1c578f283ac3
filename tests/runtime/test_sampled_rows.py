"""Prompts pass through layers without caches of their own for the rows that are sampled alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hetero import LLM
from hetero.runtime.engine import Engine
from hetero.runtime.schedule import ordered
from hetero.runtime.step import Step
from tests.runtime.models import context_of
from tests.runtime.test_chunks import CHUNKS, chunked, engine_of, one_after_another, run
from tests.support.checkpoints import GEMMA4, make_checkpoint, reference_logits, relative_error

TOLERANCE = 2e-5
PAIRS = ["opencl+ort-cpu", "reference", "reference, both queued"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: Any) -> Path:
    """Five layers, the last two of which read the caches of others."""
    folder: Path = tmp_path_factory.mktemp("shared")
    make_checkpoint(GEMMA4, folder)
    return folder


def prompt_of(tokens: int) -> list[int]:
    return np.random.default_rng(tokens).integers(3, 263, tokens).tolist()


def expected_logits(tokens: list[int], folder: Path) -> Any:
    return reference_logits(make_checkpoint(GEMMA4, folder), tokens)


def rows_by_layer(engine: Engine, step: Step) -> dict[int, set[int]]:
    """The rows that the launches of each layer compute in a step."""
    layers = {node.name: node.layer for node in engine.placement.graph.nodes}
    rows: dict[int, set[int]] = {}
    for launch in step.launches:
        layer = layers[launch.node]
        if layer is not None:
            rows.setdefault(layer, set()).add(launch.call.m)
    return rows


@pytest.mark.full
@pytest.mark.parametrize("device", ["gpu", "npu", "hetero"])
def test_shared_layers_compute_sampled_rows_alone(folder: Path, device: str) -> None:
    with LLM(str(folder), device=device, weights="f32", kv="f32", order="fifo") as llm:
        engine, context = llm.engine, llm.context
        assert engine.placement.graph.prompt_layers == 3
        step = engine.steps.step(context, "prefill", 32, 1)
        all_rows, sampled = {x: {32} for x in range(3)}, {x: {1} for x in (3, 4)}
        assert rows_by_layer(engine, step) == all_rows | sampled
        step = engine.steps.step(context, "prefill", 32, 0)
        assert rows_by_layer(engine, step) == all_rows
        assert step.logits is None
        step = engine.steps.step(context, "prefill", 32, 32)  # logits of every row
        assert rows_by_layer(engine, step) == {x: {32} for x in range(5)}
        step = engine.steps.step(context, "decode", 4, 4)  # guesses
        assert rows_by_layer(engine, step) == {x: {4} for x in range(5)}


@pytest.mark.few(2)
@pytest.mark.parametrize("backends", PAIRS)
@pytest.mark.parametrize("seed", range(6))
def test_logits_are_those_of_transformers_however_it_is_cut(
    folder: Path, tmp_path: Path, seed: int, backends: str
) -> None:
    """In calls of 45 tokens, then token by token, guesses, and the logits of every row."""
    length = sum(CHUNKS) - seed
    tokens = prompt_of(length + 6)
    expected = expected_logits(tokens, tmp_path)
    with engine_of(folder, seed, backends) as engine:
        context = context_of(engine)
        got = [engine.prefill(context, tokens[:length]).copy()]
        got += [engine.decode(context, token).copy() for token in tokens[length : length + 3]]
        got += [*engine.verify(context, tokens[length + 3 :])]
        context.rewind(20)
        scored = engine.score(context, tokens[20:])
    assert relative_error(np.stack(got), expected[length - 1 :]) <= TOLERANCE
    assert relative_error(scored, expected[20:]) <= TOLERANCE


@pytest.mark.full
@pytest.mark.few(2)
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("backends", PAIRS)
def test_chunks_in_flight_sample_the_last_one_alone(folder: Path, backends: str, seed: int) -> None:
    ids = prompt_of(sum(CHUNKS))
    with engine_of(folder, seed, backends) as engine:
        expected = one_after_another(engine, ids)
        pool, lowering = chunked(engine, len(CHUNKS))
        placed = lowering.place("prefill", CHUNKS, 1)
        order = sorted(range(len(placed.specs)), key=lambda i: placed.specs[i].stage)
        step = placed.bound(ordered(placed.graph(), order), {})
        found = run(engine, pool, step, ids)
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("sync", ["finish", "copy"])
def test_by_other_waits_the_logits_are_the_same(folder: Path, tmp_path: Path, sync: str) -> None:
    tokens = prompt_of(70)
    expected = expected_logits(tokens, tmp_path)
    with engine_of(folder, 4, "reference", sync) as engine:
        logits = engine.prefill(context_of(engine), tokens)
    assert relative_error(logits, expected[-1]) <= TOLERANCE


@pytest.mark.full
@pytest.mark.parametrize("device", ["npu", "hetero"])
def test_guesses_do_not_change_the_text(folder: Path, device: str) -> None:
    prompt = "abcabcabcabcabcabc"
    with LLM(str(folder), device=device, weights="f32", kv="f32") as llm:
        plain = llm.generate(prompt, max_tokens=24, temperature=0.0)
        guessed = llm.generate(prompt, max_tokens=24, temperature=0.0, speculative=5)
    assert guessed.tokens == plain.tokens
