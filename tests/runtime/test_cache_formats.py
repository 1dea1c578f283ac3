"""Caches of halves and codes: the same answers, a part of the memory, on every device and through
every state.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hetero.errors import ModelError, UserError
from hetero.generation.llm import LLM

PROMPT = "Once upon a time, in a castle by the sea, there was a small girl who liked"
MODES = ("gpu", "npu", "hetero")
NARROW = {"f16": 0.02, "q8": 0.4}  # by how much logits of the demo may move


def opened(mode: str, kv: str, gpu: str = "opencl") -> LLM:
    if gpu == "opencl":
        pytest.importorskip("pyopencl")
    return LLM("demo", device=mode, gpu=gpu, kv=kv)  # type: ignore[arg-type]


@pytest.mark.full
@pytest.mark.parametrize("kv", NARROW)
@pytest.mark.parametrize("mode", MODES)
def test_logits_are_those_of_floats_but_for_the_rounding(mode: str, kv: str) -> None:
    with opened(mode, "f32") as floats, opened(mode, kv) as halves:
        tokens = floats.encode(PROMPT)
        exact, got = floats.logits(tokens), halves.logits(tokens)
        assert not np.array_equal(exact, got)  # or nothing was rounded
        assert np.abs(exact - got).max() <= NARROW[kv]
        assert floats.generate(PROMPT, max_tokens=20).text == halves.generate(
            PROMPT, max_tokens=20
        ).text  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("kv", NARROW)
@pytest.mark.parametrize("mode", MODES)
def test_devices_agree_with_the_reference(mode: str, kv: str) -> None:
    with opened(mode, kv) as llm, opened("gpu", kv, gpu="reference") as reference:
        tokens = reference.encode(PROMPT)
        assert np.abs(llm.logits(tokens) - reference.logits(tokens)).max() <= NARROW[kv]


@pytest.mark.parametrize(("kv", "part"), [("f16", 1 / 2), ("q8", 36 / 128)])
def test_a_context_takes_a_part_of_the_memory(kv: str, part: float) -> None:
    with opened("gpu", "f32", "reference") as floats, opened("gpu", kv, "reference") as halves:
        wide, narrow = (
            floats.engine.memory.context_bytes,
            halves.engine.memory.context_bytes,
        )
        assert narrow == pytest.approx(wide * part, rel=0.05)
        assert halves.context.cache.nbytes == narrow


@pytest.mark.parametrize("kv", NARROW)
def test_narrow_contexts_are_forked_cut_and_kept(tmp_path: Path, kv: str) -> None:
    """What is saved is what was computed with: the answer goes on as if it had not been."""
    with opened("gpu", kv, "reference") as llm:
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
            was, now = (x.cache.read(0, first.cached) for x in (first, context))
            np.testing.assert_array_equal(was, now)
        rest = [llm.generate(last, max_tokens=6, context=c).text for c in (first, fork, loaded)]
        assert rest[0] == rest[1] == rest[2]
        assert whole.startswith(part)


@pytest.mark.parametrize(("saved", "opens"), [("f32", "q8"), ("q8", "f32"), ("q8", "f16")])
def test_sessions_are_read_into_caches_of_another_format(
    tmp_path: Path, saved: str, opens: str
) -> None:
    path = tmp_path / "session.safetensors"
    with opened("gpu", saved, "reference") as llm:
        context = llm.new_context()
        llm.generate(PROMPT, max_tokens=3, context=context)
        context.save(path)
        kept = context.cache.read(0, context.cached)
    with opened("gpu", opens, "reference") as other:
        loaded = other.load_context(path)
        found = loaded.cache.read(0, loaded.cached)
        off = np.abs(found - kept) / np.abs(kept).max(axis=-1, keepdims=True)
        assert off.max() <= {"q8": 1 / 250, "f16": 2**-11, "f32": 0}[opens]


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
    with pytest.raises(UserError, match="kv is f32, f16 or q8, got 'q3'"):
        LLM("demo", kv="q3")


def test_an_npu_alone_that_reads_floats_only_refuses() -> None:
    pytest.importorskip("onnxruntime_qnn")
    with pytest.raises(ModelError, match=r"qnn: .* use --kv f32"):
        LLM("demo", device="npu", npu="qnn", kv="f16")
