"""Caches of halves: the same answers, half the memory, on every device and through every state."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hetero.errors import ModelError, UserError
from hetero.generation.llm import LLM

PROMPT = "Once upon a time, in a castle by the sea, there was a small girl who liked"
MODES = ("gpu", "npu", "hetero")


def opened(mode: str, kv: str, gpu: str = "opencl") -> LLM:
    if gpu == "opencl":
        pytest.importorskip("pyopencl")
    return LLM("demo", device=mode, gpu=gpu, kv=kv)  # type: ignore[arg-type]


@pytest.mark.parametrize("mode", MODES)
def test_logits_are_those_of_floats_but_for_the_rounding(mode: str) -> None:
    with opened(mode, "f32") as floats, opened(mode, "f16") as halves:
        tokens = floats.encode(PROMPT)
        exact, got = floats.logits(tokens), halves.logits(tokens)
        assert not np.array_equal(exact, got)  # or nothing was rounded
        assert np.abs(exact - got).max() <= 0.02
        assert floats.generate(PROMPT, max_tokens=20).text == halves.generate(
            PROMPT, max_tokens=20
        ).text  # fmt: skip


@pytest.mark.parametrize("mode", MODES)
def test_devices_agree_with_the_reference_on_halves(mode: str) -> None:
    with opened(mode, "f16") as llm, opened("gpu", "f16", gpu="reference") as reference:
        tokens = reference.encode(PROMPT)
        assert np.abs(llm.logits(tokens) - reference.logits(tokens)).max() <= 0.02


def test_a_context_takes_half_of_the_memory() -> None:
    with opened("gpu", "f32", "reference") as floats, opened("gpu", "f16", "reference") as halves:
        wide, narrow = floats.engine.needs.context_bytes, halves.engine.needs.context_bytes
        assert narrow == pytest.approx(wide / 2, rel=0.05)
        assert halves.context.cache.nbytes == narrow


def test_contexts_of_halves_are_forked_cut_and_kept(tmp_path: Path) -> None:
    """What is saved is what was computed with: the answer goes on as if it had not been."""
    with opened("gpu", "f16", "reference") as llm:
        whole = llm.generate(PROMPT, max_tokens=12, context=llm.new_context()).text
        first = llm.new_context()
        part = llm.generate(PROMPT, max_tokens=5, context=first).text
        fork = first.fork()
        path = tmp_path / "session.safetensors"
        first.save(path)
        last = llm.encode(part)[-1:]
        loaded = llm.load_context(path)
        for context in (first, fork, loaded):
            assert context.tokens == first.tokens or context is first
        rest = [llm.generate(last, max_tokens=6, context=c).text for c in (first, fork, loaded)]
        assert rest[0] == rest[1] == rest[2]
        assert whole.startswith(part)


def test_floats_that_were_saved_are_rounded_when_they_are_loaded(tmp_path: Path) -> None:
    path = tmp_path / "session.safetensors"
    with opened("gpu", "f32", "reference") as floats:
        context = floats.new_context()
        floats.generate(PROMPT, max_tokens=3, context=context)
        context.save(path)
        kept = context.cache.read(0, 8)
    with opened("gpu", "f16", "reference") as halves:
        loaded = halves.load_context(path)
        np.testing.assert_array_equal(loaded.cache.read(0, 8), kept.astype(np.float16))


def test_unknown_formats_are_refused() -> None:
    with pytest.raises(UserError, match="kv is f32 or f16, got 'q3'"):
        LLM("demo", kv="q3")


def test_an_npu_alone_that_reads_floats_only_refuses() -> None:
    pytest.importorskip("onnxruntime_qnn")
    with pytest.raises(ModelError, match=r"qnn: .* use --kv f32"):
        LLM("demo", device="npu", npu="qnn", kv="f16")
