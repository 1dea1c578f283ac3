"""gpt-oss as it is published: experts in MXFP4, in directories and in GGUF files."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from safetensors.numpy import load_file, save_file

from hetero import LLM
from hetero.backends.errors import DeviceError
from hetero.backends.formats import StorageFormat, WeightFormat
from hetero.backends.ops import Attention
from hetero.errors import ModelError
from hetero.models import default_weights, model_spec, open_model
from hetero.models.layout import EXPERTS
from hetero.solver.non_matmul_devices import device_of_other
from tests.models.gguf_files import convert
from tests.runtime.test_routed_logits import DEVICES, GPT_OSS_GGUF, drawn
from tests.support.checkpoints import relative_error

TOKENS = np.random.default_rng(0).integers(3, 263, 40).tolist()
FIRST = "model.layers.0.mlp.experts"


def coded(values: Any) -> tuple[Any, Any]:
    """Blocks and scales of floats [experts, features, rows], as files of gpt-oss have them."""
    rows = np.ascontiguousarray(values.swapaxes(1, 2), np.float32)
    experts, count, features = rows.shape
    data = gguf.quants.quantize(rows.reshape(-1, features), Kind.MXFP4)
    groups = data.reshape(experts, count, features // 32, 17)
    low, high = groups[..., 1:] & 15, groups[..., 1:] >> 4
    codes = np.concatenate([low, high], axis=-1)
    return codes[..., ::2] | codes[..., 1::2] << 4, np.ascontiguousarray(groups[..., 0])


@pytest.fixture
def published(tmp_path: Path) -> Path:
    """The tiny checkpoint with its experts in MXFP4."""
    folder, _ = drawn("GptOss", GPT_OSS_GGUF)
    shutil.copytree(folder, tmp_path / "mxfp4")
    tensors = load_file(folder / "model.safetensors")
    for name in [x for x in tensors if x.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = coded(tensors.pop(name))
    save_file(tensors, tmp_path / "mxfp4" / "model.safetensors")
    change(tmp_path / "mxfp4", quantization_config={"quant_method": "mxfp4"})
    return tmp_path / "mxfp4"


def change(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    raw = json.loads(path.read_text(encoding="utf-8")) | fields
    path.write_text(json.dumps(raw), encoding="utf-8")


def logits(path: Path, device: Any, weights: str | None) -> Any:
    with LLM(str(path), device=device, weights=weights, kv="f32") as llm:
        return llm.logits(TOKENS)


@pytest.mark.full
@pytest.mark.parametrize("device", DEVICES)
def test_the_same_numbers_from_both_kinds_of_files(
    device: Any, published: Path, tmp_path: Path
) -> None:
    folder, _ = drawn("GptOss", GPT_OSS_GGUF)
    convert(folder, tmp_path / "m.gguf", experts=Kind.MXFP4)
    expected = logits(published, device, "f32")
    np.testing.assert_array_equal(logits(tmp_path / "m.gguf", device, "f32"), expected)
    assert relative_error(logits(tmp_path / "m.gguf", device, None), expected) <= 3e-3


@pytest.mark.full
def test_a_gpu_and_qnn_share_the_model_and_qnn_alone_says_what_it_lacks(published: Path) -> None:
    """Attention with sinks and the experts are the GPU's."""
    pytest.importorskip("onnxruntime_qnn")
    sinks = Attention(heads=4, kv_heads=2, head_dim=16, capacity=70, sinks=True)
    assert device_of_other(sinks, "npu", ("gpu", "npu")) == "gpu"
    exact = logits(published, "gpu", "f32")
    with LLM(str(published), device="hetero", npu="qnn", weights="f16", kv="f32") as llm:
        assert llm.devices.devices["npu"].info.backend == "qnn"
        assert relative_error(llm.logits(TOKENS), exact) < 2e-2
        refused = llm.devices.devices["npu"].accepts(sinks)
    assert refused.reason == "its graphs have no sinks of attention"
    with pytest.raises(DeviceError, match="use --device hetero, where the GPU computes"):
        LLM(str(published), device="npu", npu="qnn", weights="f16", kv="f32")


@pytest.mark.full
def test_codes_of_a_directory_stay_as_they_are(published: Path, tmp_path: Path) -> None:
    folder, _ = drawn("GptOss", GPT_OSS_GGUF)
    convert(folder, tmp_path / "m.gguf", experts=Kind.MXFP4)
    assert default_weights(published) == "gguf-a16"
    ours, theirs = (open_model(x).weights for x in (published, tmp_path / "m.gguf"))
    assert ours.weight_format is theirs.weight_format is WeightFormat.GGUF_A16
    total = 0
    for i in range(2):
        one, other = ours.block(i), theirs.block(i)
        for name in EXPERTS:
            ((_, part),), ((_, wanted),) = (x.matrix(name).spans() for x in (one, other))
            assert part.storage is StorageFormat.MXFP4
            np.testing.assert_array_equal(part.data, wanted.data)
            np.testing.assert_array_equal(part.scales, wanted.scales)
        ((_, part),) = one.matrix("qkv").spans()
        assert part.storage is StorageFormat.Q8
        total += sum(x.nbytes for x in one.matrices.values())
        total += sum(x.nbytes for x in one.vectors.values())
    total += ours.embed().nbytes + ours.final_norm().nbytes
    total += 0 if ours.config.tie_word_embeddings else ours.lm_head().nbytes
    assert ours.nbytes == total
    exact = logits(published, "gpu", "f32")
    assert relative_error(logits(published, "gpu", None), exact) < 2e-2  # others have 8 bits
    assert relative_error(logits(published, "gpu", "w4a16"), exact) > 4e-2
    assert model_spec(published).weight_format is WeightFormat.GGUF_A16


def test_codes_are_what_transformers_reads(published: Path) -> None:
    torch: Any = pytest.importorskip("torch")
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    tensors = load_file(published / "model.safetensors")
    for name, matrices in (
        ("gate_up_proj", ("experts_gate", "experts_up")),
        ("down_proj", ("experts_down",)),
    ):
        parts = [torch.from_numpy(tensors[f"{FIRST}.{name}_{x}"]) for x in ("blocks", "scales")]
        wanted = convert_moe_packed_tensors(*parts, dtype=torch.float32).mT.numpy()
        block = open_model(published, weights="f32").weights.block(0)
        for i, matrix in enumerate(matrices):
            own = wanted[:, i :: len(matrices)]
            got = block.matrix(matrix).dequantize().reshape(own.shape)
            np.testing.assert_array_equal(got, own)


def test_what_is_wrong_with_codes_is_said(published: Path) -> None:
    file = published / "model.safetensors"
    tensors = load_file(file)
    blocks, scales = (f"{FIRST}.down_proj_{x}" for x in ("blocks", "scales"))
    no_number = tensors[scales].copy()
    no_number[0, 0, 0] = 255
    for changes, rule in (
        ({scales: None}, f"tensor {scales} is missing"),
        ({blocks: tensors[blocks][:, :8]}, f"tensor {blocks} must have the shape"),
        ({scales: tensors[scales].astype(np.float32)}, f"tensor {scales} must be one of U8"),
        ({scales: no_number}, "down_proj holds a value that is not finite"),
    ):
        kept = {key: x for key, x in (tensors | changes).items() if x is not None}
        save_file(kept, file)
        with pytest.raises(ModelError, match=rule):
            open_model(published, weights="f32").weights.block(0)


@pytest.mark.parametrize(
    ("fields", "rule"),
    [
        ({"swiglu_limit": 6.0}, "swiglu_limit other than 7.0 is not supported"),
        ({"swiglu_alpha": 1.0}, "swiglu_alpha other than 1.702 is not supported"),
        ({"num_local_experts": 2}, "num_experts_per_tok must be at most the 2 of num_local_exper"),
        ({"layer_types": ["chunked_attention"] * 2}, "layer_types must list full_attention or"),
        ({"quantization_config": {"quant_method": "awq"}}, "weights quantised with 'awq' are not"),
    ],
)
def test_what_is_wrong_is_said(fields: dict[str, Any], rule: str, tmp_path: Path) -> None:
    folder, _ = drawn("GptOss", GPT_OSS_GGUF)
    shutil.copytree(folder, tmp_path / "bad")
    change(tmp_path / "bad", **fields)
    with pytest.raises(ModelError, match=rule):
        open_model(tmp_path / "bad")


def test_a_router_of_another_kind_is_refused(tmp_path: Path) -> None:
    folder, _ = drawn("GptOss", GPT_OSS_GGUF)
    convert(folder, tmp_path / "m.gguf", **{"gpt-oss__expert_gating_func": 2})
    with pytest.raises(ModelError, match=r"gpt-oss\.expert_gating_func must be 3 for the archi"):
        open_model(tmp_path / "m.gguf")
