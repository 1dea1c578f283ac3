"""A full context forgets its oldest tokens but the first; the others move up as they are."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hetero import LLM, UserError
from hetero.backends.formats import CacheFormat
from hetero.backends.frequency_scaling import RopeScaling
from hetero.backends.memory import HostBuffer
from hetero.backends.ops import Rope
from hetero.backends.rope_tables import tables
from hetero.runtime.kv.kv_cache import CacheLayout, KvCache
from hetero.runtime.kv.shift import forget, turned_back
from tests.contexts.models import open_llm
from tests.contexts.test_contexts import ids
from tests.runtime.models import tiny_model
from tests.support.checkpoints import CASES, Case, make_checkpoint

FULL = 32


@pytest.fixture(scope="module")
def shallow(tmp_path_factory: Any) -> Path:
    """A model of one layer: keys and values of a token do not depend on others."""
    return tiny_model(tmp_path_factory.mktemp("shallow"), num_hidden_layers=1)


@pytest.fixture(scope="module", params=["gpu", "npu", "tensor level"])
def llm(shallow: Path, request: pytest.FixtureRequest) -> Iterator[LLM]:
    with open_llm(shallow, request.param, max_seq_len=FULL) as opened:
        yield opened


def by_hand(llm: LLM, prompt: list[int], count: int, keep: int) -> tuple[list[int], int]:
    """The same answer, every token of it from an empty context; tokens that were forgotten."""
    seen, found, forgotten = list(prompt), [], 0
    for _ in range(count):
        if len(seen) >= FULL:
            drop = (len(seen) - 1 - keep) // 2
            del seen[keep : keep + drop]
            forgotten += drop
        token = llm.generate(seen, max_tokens=1).tokens[0]
        found.append(token)
        seen.append(token)
    return found, forgotten


@pytest.mark.parametrize("keep", [0, 4, 11])
def test_an_answer_goes_on_as_if_the_rest_were_all_that_was_said(llm: LLM, keep: int) -> None:
    prompt = ids(3 + keep, 20)
    wanted, forgotten = by_hand(llm, prompt, 60, keep)
    with llm.new_context() as context:
        answer = llm.generate(prompt, max_tokens=60, context=context, context_shift=True, keep=keep)
        assert list(answer.tokens) == wanted
        assert answer.stats.shifted_tokens == forgotten > 0
        assert answer.finish_reason == "length"
        assert len(context) <= FULL
        again = llm.generate([5], max_tokens=2, context=context, context_shift=True)
        assert len(again.tokens) == 2


def test_without_it_the_answer_ends_there(llm: LLM) -> None:
    assert llm.generate(ids(1, 20), max_tokens=60).finish_reason == "context"


def test_a_context_is_shifted(llm: LLM) -> None:
    text = ids(9, 20)
    with llm.new_context() as long, llm.new_context() as short:
        llm.generate(text, max_tokens=1, context=long)
        long.truncate(20)
        long.shift(3, 10)
        assert long.tokens == tuple(text[:3] + text[13:])
        llm.generate([*text[:3], *text[13:]], max_tokens=1, context=short)
        end = min(long.cached, short.cached, 9)
        found, wanted = long.cache.read(0, end), short.cache.read(0, end)
        np.testing.assert_allclose(found, wanted, rtol=2e-5, atol=2e-5)
        with pytest.raises(UserError, match="cannot forget 10 after the first 3"):
            long.shift(3, 10)


@pytest.mark.parametrize("rotary", [0, 6])
@pytest.mark.parametrize("kv", list(CacheFormat))
@pytest.mark.parametrize("scaling", [RopeScaling(), RopeScaling(kind="linear", factor=4.0)])
def test_keys_turn_back(rotary: int, kv: CacheFormat, scaling: RopeScaling) -> None:
    """Against keys that were turned to their new positions from the first, in float64."""
    rng = np.random.default_rng()
    op = Rope(
        heads=4, kv_heads=2, head_dim=8, theta=1e4, max_position=3000, rotary_dim=rotary,
        scaling=scaling,
    )  # fmt: skip
    raw = rng.standard_normal((2, 2600, 8))
    half = op.rotated // 2
    cos, sin = tables(op)

    def at(positions: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        turned = raw.copy()
        first, second = raw[..., :half], raw[..., half : 2 * half]
        c, s = cos[positions], sin[positions]
        turned[..., :half], turned[..., half : 2 * half] = (
            first * c - second * s,
            second * c + first * s,
        )
        return turned

    layout = CacheLayout(layers=1, kv_heads=2, capacity=2600, head_dim=8, kv=kv)
    cache = KvCache(layout, HostBuffer)
    before, said = at(np.arange(2600)).astype(np.float32), rng.standard_normal(raw.shape)
    cache.write(0, np.stack([before, said]).astype(np.float32)[None])
    said = cache.read(0, 2600)[0, 1]
    forget(cache, [op], 5, 25, 2500)
    moved = np.r_[0:5, 5:2480]
    source = np.r_[0:5, 25:2500]
    wanted = at(np.concatenate([np.arange(25), np.arange(25, 2600) - 20]))
    keys, values = cache.read(0, 2600)[0]
    bound = {CacheFormat.F32: 2e-6, CacheFormat.F16: 4e-3, CacheFormat.Q8: 0.05}[kv]
    np.testing.assert_allclose(keys[:, moved[5:]], wanted[:, source[5:]], atol=bound, rtol=bound)
    np.testing.assert_array_equal(values[:, moved], said[:, source])
    np.testing.assert_array_equal(turned_back(keys[:, :3], op, 0), keys[:, :3])


def test_every_layer_has_its_own_rotary_embedding() -> None:
    """Keys of a layer without one stay as they are."""
    rng = np.random.default_rng(2)
    local = Rope(heads=4, kv_heads=2, head_dim=8, theta=1e4, max_position=64)
    far = replace(local, theta=1e6, scaling=RopeScaling(kind="linear", factor=8.0))
    layout = CacheLayout(layers=3, kv_heads=2, capacity=40, head_dim=8, kv=CacheFormat.F32)
    cache = KvCache(layout, HostBuffer)
    before = rng.standard_normal((3, 2, 2, 40, 8), dtype=np.float32)  # layers, keys and values
    cache.write(0, before)
    forget(cache, [local, None, far], 3, 8, 40)
    after = cache.read(0, 35)
    for layer, rope in enumerate((local, None, far)):
        keys = before[layer, 0, :, 8:]
        moved = keys if rope is None else turned_back(keys, rope, 5)
        np.testing.assert_array_equal(after[layer, 0, :, 3:], moved)
        np.testing.assert_array_equal(after[layer, 1, :, 3:], before[layer, 1, :, 8:])


def test_keys_that_are_normed_after_their_rotation_do_not_move(tmp_path: Path) -> None:
    make_checkpoint(Case("hunyuan", "HunYuanDenseV1", {"head_dim": 16}), tmp_path)
    with open_llm(tmp_path, "npu", max_seq_len=FULL) as llm, llm.new_context() as context:
        llm.generate([1, 2, 3], max_tokens=1, context=context)
        with pytest.raises(UserError, match="keys are normed after their rotation"):
            context.shift(1, 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"keep": FULL - 1}, "leaves nothing to forget"),
        ({"speculative": 3}, "cannot be guessed with context_shift"),
        ({"keep": -1}, "keep must be"),
    ],
)
def test_refused(llm: LLM, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        llm.generate([1, 2], context_shift=True, **options)
    with pytest.raises(UserError, match="share its context"):
        llm.generate_many([[1, 2]], n=2, context_shift=True)


def test_learned_positions_do_not_move(tmp_path: Path) -> None:
    case = next(case for case in CASES if case.name == "opt")
    make_checkpoint(case, tmp_path)
    with LLM(str(tmp_path), device="npu", npu="reference", weights="f32") as llm:
        with pytest.raises(UserError, match="positions are learned"):
            llm.generate([1, 2], max_tokens=2, context_shift=True)
        with llm.new_context() as context:
            llm.generate([1, 2, 3], max_tokens=1, context=context)
            with pytest.raises(UserError, match="positions are learned"):
                context.shift(1, 1)
