"""Hugging Face directories: the numbers, the layout, the memory, and what is wrong with files."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from safetensors.numpy import load_file, save_file

from hetero.backends.formats import StorageFormat, WeightFormat
from hetero.backends.weights import PackedWeight, pack
from hetero.errors import ModelError
from hetero.models import open_model
from hetero.models.checkpoint import CheckpointWeights
from hetero.models.config import ModelConfig
from hetero.models.model_weights import BlockWeights, ModelWeights
from tests.models.model_helpers import UNCALIBRATED, random_tensors, small_config

Tensors = dict[str, npt.NDArray[Any]]
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "mistral": {"sliding_window": 8},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 10},
}


def transformers_checkpoint(architecture: str, path: Path, **changes: Any) -> Tensors:
    """A random model saved by `transformers`; returns its tensors as float32."""
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    sizes = {
        "hidden_size": 24,
        "intermediate_size": 43,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 101,
        "max_position_embeddings": 64,
    }
    name = architecture.capitalize()
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**sizes, **ARCHITECTURES[architecture])
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    for parameter in model.parameters():  # biases and norms would be zeros and ones
        torch.nn.init.normal_(parameter)
    shards = changes.pop("max_shard_size", "1GB")
    model = model.to(changes.pop("dtype", torch.float32))
    model.save_pretrained(path, max_shard_size=shards)
    return {key: value.float().numpy() for key, value in model.state_dict().items()}


def check_equal(weights: ModelWeights, tensors: Tensors) -> None:
    """Every weight, dequantised, is the checkpoint's."""
    config = weights.config
    for index in range(config.num_layers):
        check_block(weights.block(index), tensors, f"model.layers.{index}.", config)
    embed, head = tensors["model.embed_tokens.weight"], tensors.get("lm_head.weight")
    np.testing.assert_array_equal(weights.embed().dequantize(), embed)
    np.testing.assert_array_equal(
        weights.lm_head().dequantize(), embed if config.tie_word_embeddings else head
    )
    np.testing.assert_array_equal(weights.final_norm(), tensors["model.norm.weight"])


def check_block(block: BlockWeights, tensors: Tensors, prefix: str, config: ModelConfig) -> None:
    parts = {
        "qkv": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
        "o": ["self_attn.o_proj"],
        "gate_up": ["mlp.gate_proj", "mlp.up_proj"],
        "down": ["mlp.down_proj"],
    }
    for name, modules in parts.items():
        rows = np.concatenate([tensors[f"{prefix}{x}.weight"] for x in modules])
        np.testing.assert_array_equal(block.matrix(name).dequantize(), rows)
        bias = block.vectors.get(f"{name}_bias")
        biases = [tensors[x] for m in modules if (x := f"{prefix}{m}.bias") in tensors]
        assert (bias is None) == (not biases)
        if biases:
            np.testing.assert_array_equal(bias, np.concatenate(biases))
    norms = {"input_norm": "input_layernorm", "post_norm": "post_attention_layernorm"}
    if config.qk_norm:
        norms |= {"q_norm": "self_attn.q_norm", "k_norm": "self_attn.k_norm"}
    for name, module in norms.items():
        np.testing.assert_array_equal(block.vectors[name], tensors[f"{prefix}{module}.weight"])


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_architecture_of_transformers(architecture: str, tmp_path: Path) -> None:
    tensors = transformers_checkpoint(architecture, tmp_path)
    check_equal(open_model(tmp_path, weights="f32").weights, tensors)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_read_exactly(dtype: str, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    tensors = transformers_checkpoint("llama", tmp_path, dtype=getattr(torch, dtype))
    model = open_model(tmp_path, weights="f32")
    assert model.config.dtype == dtype
    check_equal(model.weights, tensors)


def test_shards_of_transformers(tmp_path: Path) -> None:
    tensors = transformers_checkpoint("qwen3", tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    check_equal(open_model(tmp_path, weights="f32").weights, tensors)


def test_the_real_model(stories: Path) -> None:
    check_equal(
        open_model(stories, weights="f32").weights, load_file(stories / "model.safetensors")
    )


@pytest.mark.parametrize("weight_format", UNCALIBRATED)
def test_pieces_pack_as_the_whole(
    make_checkpoint: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    weight_format: WeightFormat,
) -> None:
    monkeypatch.setattr("hetero.models.packing.CHUNK_ELEMENTS", 1)  # 16 rows at a time
    config = small_config()
    tensors = random_tensors(config)
    weights = CheckpointWeights(make_checkpoint(config, tensors), config, weight_format)
    prefix = "model.layers.1.self_attn."
    rows = np.concatenate([tensors[f"{prefix}{x}_proj.weight"] for x in "qkv"])
    check_packed(weights.block(1).matrix("qkv"), pack(rows, weight_format.storage))
    embed = pack(tensors["model.embed_tokens.weight"], weight_format.storage)
    check_packed(weights.embed(), embed)


def check_packed(found: PackedWeight, expected: PackedWeight) -> None:
    assert (found.n, found.k, found.storage) == (expected.n, expected.k, expected.storage)
    np.testing.assert_array_equal(found.data, expected.data)
    assert (found.scales is None) == (expected.scales is None)
    if found.scales is not None and expected.scales is not None:
        np.testing.assert_array_equal(found.scales, expected.scales)
        assert found.scales.ctypes.data % 4096 == 0
    assert found.data.ctypes.data % 4096 == 0


def test_blocks_are_kept_until_released(make_checkpoint: Callable[..., Path]) -> None:
    weights = open_model(make_checkpoint(small_config())).weights
    first, embed = weights.block(0), weights.embed()
    assert weights.block(0) is first
    assert weights.embed() is embed
    weights.release(0)
    weights.release_embeddings()
    assert weights.block(0) is not first
    assert weights.embed() is not embed
    check_packed(weights.block(0).matrix("o"), first.matrix("o"))
    for index in (-1, 3):
        with pytest.raises(IndexError, match=f"block {index} of a model of 3 blocks"):
            weights.block(index)


def test_tied_embeddings_are_one_object(make_checkpoint: Callable[..., Path]) -> None:
    config = small_config(tie_word_embeddings=True)
    tensors = random_tensors(config)
    extra = {"lm_head.weight": tensors["model.embed_tokens.weight"]}
    inverse = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(3, dtype=np.float32)}
    weights = open_model(make_checkpoint(config, tensors | extra | inverse)).weights
    assert weights.lm_head() is weights.embed()


@pytest.mark.parametrize("weight_format", UNCALIBRATED)
@pytest.mark.parametrize("tied", [False, True])
def test_nbytes_counts_everything(
    make_checkpoint: Callable[..., Path], weight_format: WeightFormat, tied: bool
) -> None:
    config = small_config(tie_word_embeddings=tied, qkv_bias=True, o_bias=True)
    weights = open_model(make_checkpoint(config), weights=weight_format).weights
    blocks = [weights.block(i) for i in range(config.num_layers)]
    assert not any(block.shadows for block in blocks)
    values = [x for b in blocks for x in (*b.matrices.values(), *b.vectors.values())]
    ends = [weights.embed(), *([] if tied else [weights.lm_head()]), weights.final_norm()]
    assert weights.nbytes == sum(x.nbytes for x in [*values, *ends])


# What is wrong with files. Each sentence is complete: the thing, the rule, the remedy.


def broken(
    make: Callable[..., Path], change: Callable[[Tensors], Any], **config: Any
) -> tuple[Path, ModelError]:
    """Open a checkpoint whose tensors were changed; returns the error."""
    tensors = random_tensors(small_config(**config))
    change(tensors)
    path = make(small_config(**config), tensors)
    with pytest.raises(ModelError) as caught:
        open_model(path).weights.block(2)
    return path, caught.value


def test_a_missing_tensor(make_checkpoint: Callable[..., Path]) -> None:
    path, error = broken(make_checkpoint, lambda x: x.pop("model.layers.2.mlp.up_proj.weight"))
    assert str(error) == (
        f"{path}: tensor model.layers.2.mlp.up_proj.weight is missing; download the model again, "
        "or check that config.json belongs to it"
    )


def test_missing_layers_are_counted(make_checkpoint: Callable[..., Path]) -> None:
    path = make_checkpoint(small_config(), random_tensors(small_config(num_layers=2)))
    with pytest.raises(ModelError, match=r"tensor model\.layers\.2\.\S+ is missing \(and 8 more\)"):
        open_model(path)


@pytest.mark.parametrize("part", ["q_proj.bias", "sinks"])
def test_an_unexpected_tensor(make_checkpoint: Callable[..., Path], part: str) -> None:
    name = f"model.layers.0.self_attn.{part}"
    path, error = broken(make_checkpoint, lambda x: x.update({name: np.zeros(24, np.float32)}))
    assert str(error) == (
        f"{path}: tensor {name} does not belong to a llama model of this config.json; check that "
        "config.json belongs to it"
    )


def test_a_wrong_shape(make_checkpoint: Callable[..., Path]) -> None:
    name = "model.layers.1.mlp.down_proj.weight"
    path, error = broken(make_checkpoint, lambda x: x.update({name: x[name].T.copy()}))
    assert str(error) == (
        f"{path}: tensor {name} must have the shape [24, 43] by config.json, got [43, 24]; check "
        "that config.json belongs to the weights"
    )


def test_a_wrong_data_type(make_checkpoint: Callable[..., Path]) -> None:
    name = "model.norm.weight"
    path, error = broken(make_checkpoint, lambda x: x.update({name: x[name].astype(np.int8)}))
    assert str(error) == (
        f"{path}: tensor {name} must be one of F32, F16, BF16, got I8; convert the model to one "
        "of these"
    )


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(
    "module", ["self_attn.k_proj", "mlp.down_proj", "post_attention_layernorm"]
)
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_values_that_are_not_finite(
    make_checkpoint: Callable[..., Path], value: float, module: str, dtype: npt.DTypeLike
) -> None:
    name = f"model.layers.2.{module}.weight"

    def spoil(tensors: Tensors) -> None:
        tensors[name].reshape(-1)[-1] = value
        tensors[name] = tensors[name].astype(dtype)

    _, error = broken(make_checkpoint, spoil)
    assert str(error) == (
        f"tensor {name} holds a value that is not finite; download the model again"
    )


def test_values_beyond_fp16(make_checkpoint: Callable[..., Path]) -> None:
    config, name = small_config(), "model.layers.0.self_attn.o_proj.weight"
    tensors = random_tensors(config)
    tensors[name][3, 4] = -1e6
    path = make_checkpoint(config, tensors)
    for weights, limit in (("f16", "65504"), ("w4a16", "524032")):
        with pytest.raises(ModelError) as caught:
            open_model(path, weights=weights).weights.block(0)
        assert str(caught.value) == (
            f"tensor {name} holds the magnitude 1e+06, beyond what this weight format stores "
            f"({limit}); load it with --weights f32"
        )
    assert open_model(path, weights="f32").weights.block(0).matrix("o").dequantize()[3, 4] == -1e6
    assert open_model(path, weights="w8a16").weights.block(0).matrix("o").dequantize()[3, 4] < -9e5


def sharded(make: Callable[..., Path]) -> tuple[Path, dict[str, Any]]:
    """A checkpoint in two shards and its index."""
    config = small_config()
    tensors = random_tensors(config)
    path = make(config, tensors)
    (path / "model.safetensors").unlink()
    names = sorted(tensors)
    halves = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, members in halves.items():
        save_file({name: tensors[name] for name in members}, path / file)
    index = {"weight_map": {name: file for file, members in halves.items() for name in members}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return path, index


def test_a_missing_shard(make_checkpoint: Callable[..., Path]) -> None:
    path, _ = sharded(make_checkpoint)
    (path / "b.safetensors").unlink()
    with pytest.raises(ModelError) as caught:
        open_model(path)
    assert str(caught.value) == (
        f"{path / 'b.safetensors'}: is missing, but model.safetensors.index.json names it; "
        "download it into the directory"
    )


@pytest.mark.parametrize(
    ("weight_map", "sentence"),
    [
        ({}, "weight_map must be an object of tensor names and files; download the file again"),
        (["x"], "weight_map must be an object of tensor names and files; download the file again"),
        ({"x": "../a.safetensors"}, "tensor x must lie in a file of this directory, got "
         "'../a.safetensors'; download the file again"),
        ({"x": 3}, "tensor x must lie in a file of this directory, got 3; download the file again"),
    ],
)  # fmt: skip
def test_a_broken_index(
    make_checkpoint: Callable[..., Path], weight_map: Any, sentence: str
) -> None:
    path, index = sharded(make_checkpoint)
    index_file = path / "model.safetensors.index.json"
    index_file.write_text(json.dumps(index | {"weight_map": weight_map}))
    with pytest.raises(ModelError) as caught:
        open_model(path)
    assert str(caught.value) == f"{index_file}: {sentence}"


def test_a_shard_without_its_tensor(make_checkpoint: Callable[..., Path]) -> None:
    path, index = sharded(make_checkpoint)
    index["weight_map"]["lm_head.weight"] = "b.safetensors"
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match=r"b\.safetensors: tensor lm_head\.weight is missing, but"):
        open_model(path)


def test_pickled_weights_are_refused(make_checkpoint: Callable[..., Path]) -> None:
    path = make_checkpoint(small_config())
    (path / "model.safetensors").unlink()
    with pytest.raises(ModelError) as caught:
        open_model(path)
    assert str(caught.value) == (
        f"{path}: has no model.safetensors; download the model's safetensors files into it"
    )
    (path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ModelError) as caught:
        open_model(path)
    assert str(caught.value) == (
        f"{path}: has no model.safetensors, and pickled weights (pytorch_model.bin) are not "
        "supported; download the model's safetensors files, or convert it with transformers' "
        "save_pretrained"
    )


# Memory: peak resident size beyond the start, in a process of its own.

MEASURE = """
import sys
from hetero.models import open_model, quantized

def kilobytes(field):
    return next(int(x.split()[1]) for x in open("/proc/self/status") if x.startswith(field))

open_model("random:tinyllama-1.1b")  # whatever is imported late
model = open_model(sys.argv[1], weights="w4a16")
open("/proc/self/clear_refs", "w").write("5")  # forget the peak so far
before = kilobytes("VmRSS")
if sys.argv[2] == "load":
    kept = [model.weights.block(i) for i in range(model.config.num_layers)]
    kept.append(model.weights.embed())
else:
    quantized.save(model.weights, sys.argv[2])
print(1024 * (kilobytes("VmHWM") - before), model.weights.nbytes)
"""


@pytest.mark.full
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("job", ["load", "save"])
def test_the_peak_is_the_final_size_and_two_layers(
    make_checkpoint: Callable[..., Path], tmp_path: Path, job: str
) -> None:
    config = small_config(
        hidden_size=512, intermediate_size=2048, num_layers=8, heads=8, head_dim=64,
        vocab_size=4000, tie_word_embeddings=True,
    )  # fmt: skip
    path = make_checkpoint(config)
    layer = 4 * (512 * (12 * 64 + 512) + 3 * 512 * 2048)
    target = "load" if job == "load" else str(tmp_path / "out")
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(path), target],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    peak, final = map(int, done.stdout.split())
    assert peak < (final if job == "load" else 4000 * 512) + 2 * layer
    assert (path / "model.safetensors").stat().st_size > 2 * (final + 2 * layer)


def test_formats_share_a_storage() -> None:
    assert WeightFormat.W4A8.storage is WeightFormat.W4A16.storage is StorageFormat.Q4
