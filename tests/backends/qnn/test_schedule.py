"""The compiler's schematic: a recorded one, damaged ones, and one made now."""

from __future__ import annotations

import contextlib
import gzip
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero.backends import ops
from hetero.backends.formats import WeightFormat
from tests.backends.cases import make_weights
from tests.support.selection import examples

qnn = pytest.importorskip("hetero.backends.qnn.opening", exc_type=ImportError)
from hetero.backends.qnn import catalog, integer, optrace  # noqa: E402

# MatMulNBits of 32×512×512 for sm8650, onnxruntime-qnn 2.7.0.
RECORDED = Path(__file__).parent / "data" / "matmul_32x512x512_sm8650.txt.gz"


@pytest.fixture(scope="module")
def text() -> str:
    return gzip.decompress(RECORDED.read_bytes()).decode()


def test_a_recorded_schematic(text: str) -> None:
    """Input 64 KiB, codes 128 KiB, scales 24 KiB, sums 2 KiB in; the float32 result out."""
    found = optrace.read_schedule(text)
    assert found.dram_read_bytes == (64 + 128 + 24 + 2) * 1024
    assert found.dram_write_bytes == 32 * 512 * 4
    assert (found.hmx.ops, found.hmx.vtcm_bytes) == (2, 2 * (296960 + 16384))
    assert found.hvx.ops > found.hmx.ops
    assert found.vtcm_bytes == found.hmx.vtcm_bytes + found.hvx.vtcm_bytes


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("graph_flag0:::", "graph_flag9:::", "has no graph_flag0"),
        ("bandwidth_information", "bandwith_information", "has no bandwidth_information"),
        ('"dram_read"', '"dram_reads"', "form that is not known"),
        ("'flags'", "'flag'", "lists no operations"),
        ('{"opid"', '{"op"', "lists no traffic"),
    ],
)
def test_another_form_is_refused(text: str, old: str, new: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        optrace.read_schedule(text.replace(old, new))


def test_a_text_that_was_cut_is_refused(text: str) -> None:
    for place in ("graph_before", "bandwidth_information", '{"opid"', "# :::END:graph_flag0"):
        with pytest.raises(ValueError, match="the schematic"):
            optrace.read_schedule(text[: text.index(place)])


@settings(max_examples=examples(15), deadline=None)
@given(data=st.data())
def test_damaged_text_is_read_or_refused(data: Any) -> None:
    text = gzip.decompress(RECORDED.read_bytes()).decode()
    start = data.draw(st.integers(0, len(text)))
    stop = data.draw(st.integers(start, min(start + 2000, len(text))))
    damaged = text[:start] + data.draw(st.text(max_size=20)) + text[stop:]
    with contextlib.suppress(ValueError):
        assert optrace.read_schedule(damaged).dram_read_bytes >= 0


def test_the_compiler_is_asked_once(tmp_path: Path) -> None:
    op = ops.MatMul(n=512, k=512, weight_format=WeightFormat.W4A16)
    graph = catalog.graph(op, 32, make_weights(op, np.random.default_rng(0)), "random")
    with qnn.open(cache=None) as device:
        store = optrace.ScheduleStore(device.store.target, tmp_path)
        found = store.find(*graph)
        store.close()
    recorded = optrace.read_schedule(gzip.decompress(RECORDED.read_bytes()).decode())
    assert (found.dram_bytes, found.hmx) == (recorded.dram_bytes, recorded.hmx)
    assert found.prepare_s > 0

    def never() -> bytes:
        raise AssertionError("compiled again")

    with qnn.open(cache=None) as device:
        again = optrace.ScheduleStore(device.store.target, tmp_path)
        assert again.find(graph.identity, never) == found
        (file,) = tmp_path.iterdir()
        file.write_text("{")
        with pytest.raises(AssertionError, match="compiled again"):
            again.find(graph.identity, never)


@pytest.mark.parametrize("tokens", [512, 256])
def test_equal_shapes_of_a_matmul_of_codes(tokens: int, tmp_path: Path) -> None:
    """Of 512 tokens of 5632 features in two dimensions, of 256 in one: what moves less."""
    op = ops.MatMul(n=256, k=5632, weight_format=WeightFormat.W8A8)
    weights = make_weights(op, np.random.default_rng(0))
    own = integer.height(tokens, op.k)
    assert own == (16 if tokens == 512 else 1)
    moved = {}
    with qnn.open(cache=None) as device, pytest.MonkeyPatch.context() as patch:
        store = optrace.ScheduleStore(device.store.target, tmp_path)
        for tall in (1, 16):
            patch.setattr(integer, "height", lambda *_, tall=tall: tall)
            graph = catalog.graph(op, tokens, weights, f"rows of {tall}")
            moved[tall] = store.find(*graph).hmx.vtcm_bytes
        store.close()
    assert moved[own] == min(moved.values())
