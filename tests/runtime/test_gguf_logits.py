"""Logits of GGUF files against the library's own dequantisation, in float64."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
import pytest
from gguf import GGMLQuantizationType as Kind

from hetero import LLM
from hetero.backends.formats import WeightFormat
from hetero.models.gguf import GgufFile
from hetero.profiler.cost import CostModel
from hetero.profiler.records import DeviceProfile
from hetero.profiler.substitutes import file_substitution
from tests.models.gguf_files import write_mixed
from tests.profiler.fakes import only_formats
from tests.support.checkpoints import relative_error

Array = npt.NDArray[np.float64]
# Types of the Q4_K_M mix, and all that are stored, in turn.
FILES: dict[str, tuple[Kind, ...]] = {
    "q4_k_m": (Kind.Q6_K, Kind.Q4_K, Kind.Q4_K, Kind.Q6_K, Kind.Q4_K),
    "every": (
        Kind.Q4_1, Kind.Q8_0, Kind.Q5_0, Kind.IQ4_NL, Kind.Q5_1, Kind.Q3_K, Kind.Q4_0, Kind.Q4_K,
        Kind.F16, Kind.Q5_K, Kind.Q6_K, Kind.MXFP4,
    ),
}  # fmt: skip
TOLERANCE = 1e-3
TOKENS, DECODED = 21, 3


def twin(path: Path, tokens: list[int]) -> Array:
    """A Llama of llama.cpp's conventions: rows of queries and keys rotate in pairs."""
    file = GgufFile(path)
    found = file.metadata
    heads, kv = found["llama.attention.head_count"], found["llama.attention.head_count_kv"]
    size = found["llama.attention.key_length"]

    def tensor(name: str) -> Array:
        info = file.tensors[f"{name}.weight"]
        raw = file.raw(f"{name}.weight").reshape(int(np.prod(info.shape[:-1])), -1)
        return np.asarray(gguf.quants.dequantize(raw, info.kind), np.float64).reshape(info.shape)

    def times(x: Array, name: str) -> Array:
        return np.asarray(x @ tensor(name).T, np.float64)

    def normed(x: Array, name: str) -> Array:
        size = np.sqrt((x * x).mean(axis=-1, keepdims=True) + 1e-5)
        return np.asarray(x / size * tensor(name), np.float64)

    angles = np.outer(np.arange(len(tokens)), 1e4 ** (-np.arange(0, size, 2) / size))
    turns = np.exp(1j * angles)[:, None]

    def rotated(x: Array) -> Array:
        pairs = x.reshape(len(tokens), -1, size // 2, 2)
        turned = (pairs[..., 0] + 1j * pairs[..., 1]) * turns
        return np.stack([turned.real, turned.imag], axis=-1).reshape(len(tokens), -1, size)

    x = tensor("token_embd")[tokens]
    past = np.tril(np.ones((len(tokens), len(tokens)), bool))
    for layer in range(found["llama.block_count"]):
        block = f"blk.{layer}."
        h = normed(x, f"{block}attn_norm")
        q = rotated(times(h, f"{block}attn_q"))
        k = rotated(times(h, f"{block}attn_k")).repeat(heads // kv, axis=1)
        v = times(h, f"{block}attn_v").reshape(len(tokens), kv, size)
        scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(size)
        weights = np.exp(np.where(past, scores, -np.inf) - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        mixed = np.einsum("hqk,khd->qhd", weights, v.repeat(heads // kv, axis=1))
        x = x + times(mixed.reshape(len(tokens), -1), f"{block}attn_output")
        h = normed(x, f"{block}ffn_norm")
        gate = times(h, f"{block}ffn_gate")
        up = times(h, f"{block}ffn_up")
        x = x + times(gate / (1 + np.exp(-gate)) * up, f"{block}ffn_down")
    return times(normed(x, "output_norm"), "output")


@pytest.fixture(scope="module", params=FILES)
def file(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / f"{request.param}.gguf"
    return write_mixed(path, np.random.default_rng(7), FILES[request.param])


@pytest.mark.parametrize(
    ("file", "device"),
    [
        pytest.param(file, device, marks=marks)
        for file, device, marks in (
            ("q4_k_m", "gpu", pytest.mark.full),
            ("q4_k_m", "npu", pytest.mark.full),
            ("q4_k_m", "hetero", pytest.mark.full),
            ("every", "gpu", pytest.mark.full),  # each kind of block compiles for seconds
            ("every", "npu", ()),  # both together run the same kernels
        )
    ],
    indirect=["file"],
)
def test_logits_are_those_of_what_is_stored(file: Path, device: str) -> None:
    tokens = np.random.default_rng().integers(3, 300, TOKENS + DECODED).tolist()
    wanted = twin(file, tokens)
    with LLM(str(file), device=device, kv="f32") as llm:  # type: ignore[arg-type]
        assert llm.model.weights.weight_format == "gguf-a16"
        assert llm.model.weights.requantised() == {}
        prompt = llm.logits(tokens)
        assert relative_error(prompt, wanted) <= TOLERANCE
        last = [llm.logits(tokens[: TOKENS + i + 1])[-1] for i in range(DECODED)]
        assert relative_error(np.stack(last), wanted[TOKENS:]) <= TOLERANCE


def test_a_profile_without_times_of_files_says_what_it_takes(file: Path) -> None:
    from hetero import plan

    profile = DeviceProfile.load("snapdragon-8-gen-3")
    made = plan(str(file), profile, seq_lens=(64,), curves=False)
    note = "gguf-a16 was not measured: predicted from w4a16 by its bytes"
    assert note in made.notes
    found = file_substitution(profile, made.weight_format)
    assert found is not None


@pytest.mark.parametrize("wanted", ["gguf-a16", "gguf-a8"])
def test_every_core_gains_of_a_file_what_it_gains_of_its_substitute(wanted: str) -> None:
    formats = WeightFormat.W4A16, WeightFormat.W4A8
    host = only_formats(DeviceProfile.load("host"), *formats)
    profile = CostModel(host).profile
    known = file_substitution(host, WeightFormat(wanted))
    assert known is not None
    speedups = {(x.weight_format, x.phase): x.speedup for x in profile.every_core}
    for phase in ("prefill", "decode"):
        assert speedups[WeightFormat(wanted), phase] == speedups[WeightFormat(known.source), phase]
