"""Hugging Face directories: `config.json` and one or several safetensors files.

Blocks are packed when they are asked for, and the pages of their source are given back at once:
memory grows by the packed bytes only.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import numpy.typing as npt

from hetero.backends.ops import WeightFormat
from hetero.backends.weights import Float32Array, PackedWeight
from hetero.errors import ModelError
from hetero.models.config import ModelConfig
from hetero.models.fields import read_json_object
from hetero.models.packing import SourceTensor, check_finite, pack_rows
from hetero.models.safetensors_file import FLOAT_DTYPES, SafetensorsFile
from hetero.models.weights import BlockWeights, ModelWeights

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

# Modules of a block in the checkpoint, by the name of our fused weight.
_MODULES = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "o": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}
_NORMS = {"input_norm": "input_layernorm", "post_norm": "post_attention_layernorm"}
_HEAD_NORMS = {"q_norm": "self_attn.q_norm", "k_norm": "self_attn.k_norm"}
_ENDS = {"embed": "model.embed_tokens.weight", "lm_head": "lm_head.weight"}
_FINAL_NORM = "model.norm.weight"


class CheckpointFiles:
    """The tensors of a directory by name, wherever they are sharded to."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.files: dict[str, SafetensorsFile] = {}
        self._file_of: dict[str, SafetensorsFile] = {}
        if (directory / INDEX_FILE).is_file():
            self._open_shards()
        else:
            self._open_single()

    def __iter__(self) -> Iterable[str]:
        return iter(self._file_of)

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def names(self) -> list[str]:
        """All tensor names."""
        return list(self._file_of)

    def array(self, name: str) -> npt.NDArray[Any]:
        """A view of a tensor in its mapped file."""
        return self._file_of[name].array(name)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor."""
        return self._file_of[name].entries[name].shape

    def dtype(self, name: str) -> str:
        """Data type of a tensor, as safetensors spells it."""
        return self._file_of[name].entries[name].dtype

    def forget(self, names: Iterable[str]) -> None:
        """Let the pages of these tensors leave memory."""
        by_file: dict[str, list[str]] = {}
        for name in names:
            by_file.setdefault(self._file_of[name].path.name, []).append(name)
        for file, members in by_file.items():
            self.files[file].forget(members)

    def fingerprint(self) -> str:
        """Hash of every file's name, size, time of change and header; no weight is read."""
        digest = hashlib.sha256()
        for name, file in sorted(self.files.items()):
            changed = file.path.stat().st_mtime_ns
            digest.update(f"{name}|{file.nbytes}|{changed}|".encode())
            digest.update(file.header())
        return digest.hexdigest()

    def _open_single(self) -> None:
        path = self.directory / SINGLE_FILE
        if not path.is_file():
            raise _no_weights(self.directory)
        file = SafetensorsFile(path)
        self.files[path.name] = file
        self._file_of = dict.fromkeys(file.entries, file)

    def _open_shards(self) -> None:
        index = self.directory / INDEX_FILE
        weight_map = read_json_object(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ModelError(
                f"{index}: weight_map must be an object of tensor names and files; "
                "download the file again"
            )
        for tensor, name in weight_map.items():
            self._file_of[tensor] = self._shard(index, tensor, name)

    def _shard(self, index: Path, tensor: str, name: object) -> SafetensorsFile:
        if not isinstance(name, str) or PurePath(name).name != name:
            raise ModelError(
                f"{index}: tensor {tensor} must lie in a file of this directory, got {name!r}; "
                "download the file again"
            )
        if name not in self.files:
            path = self.directory / name
            if not path.is_file():
                raise ModelError(
                    f"{path}: is missing, but {INDEX_FILE} names it; download it into the directory"
                )
            self.files[name] = SafetensorsFile(path)
        if tensor not in self.files[name].entries:
            raise ModelError(
                f"{self.directory / name}: tensor {tensor} is missing, but {INDEX_FILE} names it; "
                "download the file again"
            )
        return self.files[name]


class CheckpointWeights(ModelWeights):
    """Weights of a Hugging Face directory, packed on demand."""

    source: Path

    def __init__(self, directory: Path, config: ModelConfig, weight_format: WeightFormat) -> None:
        super().__init__(config, weight_format)
        self.source = directory
        self.files = CheckpointFiles(directory)
        _check_tensors(self.files, config)

    def final_norm(self) -> Float32Array:
        """Weight [d] of the norm before the output head."""
        return self._vector(_FINAL_NORM)

    def _load_block(self, index: int) -> BlockWeights:
        prefix = f"model.layers.{index}."
        packed = {name: self._pack(prefix, modules) for name, modules in _MODULES.items()}
        vectors = {
            name: self._vector(f"{prefix}{module}.weight")
            for name, module in (_NORMS | (_HEAD_NORMS if self.config.qk_norm else {})).items()
        }
        for matmul in self.config.matmuls():
            if matmul.bias:
                parts = [self._vector(f"{prefix}{x}.bias") for x in _MODULES[matmul.name]]
                vectors[f"{matmul.name}_bias"] = np.concatenate(parts)
        return BlockWeights(**packed, **vectors)  # type: ignore[arg-type]

    def _load_matrix(self, name: str) -> PackedWeight:
        return self._pack_tensors([_ENDS[name]])

    def _pack(self, prefix: str, modules: Iterable[str]) -> PackedWeight:
        return self._pack_tensors([f"{prefix}{module}.weight" for module in modules])

    def _pack_tensors(self, names: list[str]) -> PackedWeight:
        sources = [SourceTensor(name, self.files.array(name)) for name in names]
        return pack_rows(
            sources, self.weight_format.storage, after_batch=lambda: self.files.forget(names)
        )

    def _vector(self, name: str) -> Float32Array:
        values: Float32Array = self.files.array(name).astype(np.float32)
        check_finite(name, values)
        return values


def expected_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors that a checkpoint of this configuration has."""
    d, vocab = config.hidden_size, config.vocab_size
    shapes: dict[str, tuple[int, ...]] = {_ENDS["embed"]: (vocab, d), _FINAL_NORM: (d,)}
    if not config.tie_word_embeddings:
        shapes[_ENDS["lm_head"]] = (vocab, d)
    for index in range(config.num_layers):
        for name, shape in _block_tensors(config).items():
            shapes[f"model.layers.{index}.{name}"] = shape
    return shapes


def _block_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    d, f, size = config.hidden_size, config.intermediate_size, config.head_dim
    queries, keys = config.heads * size, config.kv_heads * size
    rows = {"qkv": (queries, keys, keys), "o": (d,), "gate_up": (f, f), "down": (d,)}
    shapes: dict[str, tuple[int, ...]] = {f"{x}.weight": (d,) for x in _NORMS.values()}
    if config.qk_norm:
        shapes |= {f"{x}.weight": (size,) for x in _HEAD_NORMS.values()}
    for matmul in config.matmuls():
        for module, n in zip(_MODULES.get(matmul.name, ()), rows.get(matmul.name, ()), strict=True):
            shapes[f"{module}.weight"] = (n, matmul.k)
            if matmul.bias:
                shapes[f"{module}.bias"] = (n,)
    return shapes


def _check_tensors(files: CheckpointFiles, config: ModelConfig) -> None:
    expected = expected_tensors(config)
    missing = [name for name in expected if name not in files]
    if missing:
        raise ModelError(
            f"{files.directory}: tensor {missing[0]} is missing{_more(missing)}; download the "
            "model again, or check that config.json belongs to it"
        )
    unknown = [x for x in files.names() if x not in expected and not _is_derived(x, config)]
    if unknown:
        raise ModelError(
            f"{files.directory}: tensor {unknown[0]} does not belong to a {config.architecture} "
            f"model of this config.json{_more(unknown)}; check that config.json belongs to it"
        )
    for name, shape in expected.items():
        _check_tensor(files, name, shape)


def _check_tensor(files: CheckpointFiles, name: str, shape: tuple[int, ...]) -> None:
    if files.shape(name) != shape:
        raise ModelError(
            f"{files.directory}: tensor {name} must have the shape {list(shape)} by config.json, "
            f"got {list(files.shape(name))}; check that config.json belongs to the weights"
        )
    if files.dtype(name) not in FLOAT_DTYPES:
        raise ModelError(
            f"{files.directory}: tensor {name} must be one of {', '.join(FLOAT_DTYPES)}, "
            f"got {files.dtype(name)}; convert the model to one of these"
        )


def _is_derived(name: str, config: ModelConfig) -> bool:
    """Tensors that say nothing new: stored rotary tables, a copy of tied embeddings."""
    return name.endswith("rotary_emb.inv_freq") or (
        config.tie_word_embeddings and name == _ENDS["lm_head"]
    )


def _more(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""


def _no_weights(directory: Path) -> ModelError:
    pickled = next((x.name for x in sorted(directory.glob("*.bin"))), None)
    if pickled is None:
        return ModelError(
            f"{directory}: has no {SINGLE_FILE}; download the model's safetensors files into it"
        )
    return ModelError(
        f"{directory}: has no {SINGLE_FILE}, and pickled weights ({pickled}) are not supported; "
        "download the model's safetensors files, or convert it with transformers' save_pretrained"
    )
