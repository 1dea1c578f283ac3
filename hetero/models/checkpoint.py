"""Hugging Face directories: `config.json` and one or several safetensors files.

Blocks are packed when they are asked for, and the pages of their source are given back at once:
memory grows by the packed bytes only.
"""

from __future__ import annotations

import copy
import hashlib
import os
from collections.abc import Container, Iterable, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import numpy.typing as npt

from hetero.backends.formats import StorageFormat, WeightFormat
from hetero.backends.weights import Float32Array, PackedWeight, stacked
from hetero.errors import ModelError
from hetero.models.architectures import ARCHITECTURES
from hetero.models.architectures.base import RowOrder
from hetero.models.config import ModelConfig, mtp_head
from hetero.models.fields import read_json_object
from hetero.models.layout import (
    EXPERTS,
    MTP_HALVES,
    MTP_NORMS,
    MatrixShape,
    block_matrices,
    block_vectors,
    embedding_matrices,
    model_vectors,
    stored_shape,
)
from hetero.models.model_weights import BlockWeights, ModelWeights
from hetero.models.packing import RowSource, SourceTensor, check_finite, pack_rows
from hetero.models.row_tables import Ids, RowTable
from hetero.models.safetensors_file import FLOAT_DTYPES, SafetensorsFile
from hetero.models.stacked_experts import MXFP4_PARTS, Mxfp4Tensor, Stacked, stacked_tensor
from hetero.models.wrapper import text_tensors
from hetero.terminal.notices import notify_once

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
MTP = "mtp."  # prefix of the tensors of a head for multi-token prediction


class CheckpointFiles:
    """The tensors of a directory by name, across its shards.

    With `mtp` those of a head for multi-token prediction are apart (`head`).
    """

    def __init__(self, directory: Path, *, mtp: bool = False) -> None:
        self.directory = directory
        self.files: dict[str, SafetensorsFile] = {}
        self._file_of: dict[str, SafetensorsFile] = {}
        if (directory / INDEX_FILE).is_file():
            self._open_shards()
        else:
            self._open_single()
        self._head = {x: file for x, file in self._file_of.items() if mtp and x.startswith(MTP)}
        self._stored, left_out = text_tensors(x for x in self._file_of if x not in self._head)
        if left_out:
            parts = sorted({name.removeprefix("model.").partition(".")[0] for name in left_out})
            notify_once(
                f"{directory}: only the text part is loaded; {', '.join(parts)} "
                f"({len(left_out)} tensors) left out"
            )
        self._file_of = {name: self._file_of[old] for name, old in self._stored.items()}

    def head(self, shared: Iterable[str]) -> CheckpointFiles | None:
        """Return the head's tensors by the names of a model of one block, with `shared` ones."""
        if not self._head:
            return None
        files = copy.copy(self)
        files._stored = {model_name_of(x): x for x in self._head}
        files._file_of = {model_name_of(x): file for x, file in self._head.items()}
        for name in (x for x in shared if x in self):
            files._stored[name], files._file_of[name] = self._stored[name], self._file_of[name]
        files._head = {}
        return files

    @property
    def head_bytes(self) -> int:
        """Return the bytes of a head for multi-token prediction."""
        entries = (file.entries[x] for x, file in self._head.items())
        return sum(x.stop - x.start for x in entries)

    def __iter__(self) -> Iterable[str]:
        return iter(self._file_of)

    def __contains__(self, name: object) -> bool:
        return name in self._file_of

    def names(self) -> list[str]:
        """Return the names of all tensors."""
        return list(self._file_of)

    def array(self, name: str) -> npt.NDArray[Any]:
        """Return a view of a tensor in its mapped file."""
        return self._file_of[name].array(self._stored[name])

    def rows(self, name: str, ids: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return a copy of some rows of a matrix; no others are read."""
        return self._file_of[name].rows(self._stored[name], ids)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return self._file_of[name].entries[self._stored[name]].shape

    def dtype(self, name: str) -> str:
        """Return the data type of a tensor, as safetensors spells it."""
        return self._file_of[name].entries[self._stored[name]].dtype

    def forget(self, names: Iterable[str]) -> None:
        """Drop the pages of these tensors from memory."""
        by_file: dict[str, list[str]] = {}
        for name in names:
            by_file.setdefault(self._file_of[name].path.name, []).append(self._stored[name])
        for file, members in by_file.items():
            self.files[file].forget(members)

    def fingerprint(self) -> str:
        """Return a hash of every file's name, size, mtime and header; no weight is read."""
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

    def __init__(
        self,
        directory: Path,
        config: ModelConfig,
        weight_format: WeightFormat,
        files: CheckpointFiles | None = None,
    ) -> None:
        super().__init__(config, weight_format)
        self.source = directory
        self._architecture = ARCHITECTURES[config.architecture]
        self.files = files or CheckpointFiles(directory, mtp=self._architecture.mtp)
        _check_tensors(self.files, config)
        self._names = self._architecture.names
        modules = self._names.model_modules
        head = self.files.head(f"{modules[x]}.weight" for x in ("embed", "lm_head"))
        if head is not None:
            of_head = (directory, mtp_head(config), weight_format, head)
            self.keep_head(lambda: CheckpointWeights(*of_head), self.files.head_bytes)

    @property
    def nbytes(self) -> int:
        """Return the bytes of all packed weights, norms and biases."""
        if not self.weight_format.of_file:
            return super().nbytes
        total = sum(x.nbytes(self._storage(False)) for x in embedding_matrices(self.config))
        total += sum(4 * x.n for x in model_vectors(self.config, self.weight_format.storage))
        for i in range(self.config.num_layers):
            prefix = self._names.block.format(i)
            for matrix in block_matrices(self.config, i):
                place = stacked_place(self.config, prefix, matrix.name, self.files)
                coded = place is not None and place.is_coded(prefix, self.files)
                total += matrix.nbytes(self._storage(coded))
            total += sum(4 * x.n for x in self.vectors(i))
        return total

    def model_vector(self, name: str) -> Float32Array:
        """Return a vector outside of the blocks."""
        if (zeros := self._norm_bias(name)) is not None:
            return zeros
        module, suffix = vector_module(self._names.model_modules, name)
        vector = self._vector(f"{module}.{suffix}", norm=name in ("final_norm", *MTP_NORMS))
        return self._with_logit_scale(name, vector)

    def table(self, name: str) -> RowTable:
        """Return the rows of a matrix of `layout.MAPPED`, read from the file."""
        tensor, files = f"{self._names.model_modules[name]}.weight", self.files

        def rows(ids: Ids) -> Float32Array:
            values: Float32Array = files.rows(tensor, ids).astype(np.float32)
            check_finite(tensor, values)
            return values

        return rows

    def _load_block(self, index: int) -> BlockWeights:
        prefix = self._names.block.format(index)
        packed = {x.name: self._pack(index, x.name) for x in block_matrices(self.config, index)}
        vectors = {x.name: self._block_vector(prefix, x.name) for x in self.vectors(index)}
        return BlockWeights(packed, vectors)

    def _load_matrix(self, name: str) -> PackedWeight:
        tensor = f"{self._names.model_modules[name]}.weight"
        values = self.files.array(tensor)
        if name in MTP_HALVES:
            values = np.split(values, 2, axis=1)[MTP_HALVES.index(name)]
        return self._pack_tensors([SourceTensor(tensor, values)])

    def _pack(self, layer: int, name: str) -> PackedWeight:
        orders = self._architecture.row_order, self._architecture.column_order
        prefix, sources = self._names.block.format(layer), []
        place = stacked_place(self.config, prefix, name, self.files)
        if place is not None:
            source = stacked_tensor(self.files, prefix, place)
            return self._pack_tensors([source], source.names)
        if name in self._names.shared:
            tensor = f"{self._names.shared[name]}.weight"
            rows = self.config.layer_inputs
            own = self.files.array(tensor)[layer * rows : (layer + 1) * rows]
            return self._pack_tensors([SourceTensor(tensor, own)])
        for module in matrix_modules(self.config, layer, name):
            tensor = f"{prefix}{module}.weight"
            order, columns = (self._order(x, module) for x in orders)
            sources.append(SourceTensor(tensor, self.files.array(tensor), order, columns))
        return self._pack_tensors(sources)

    def _pack_tensors(
        self, sources: Sequence[RowSource], names: Sequence[str] | None = None
    ) -> PackedWeight:
        names = [source.name for source in sources] if names is None else names
        storage = self._storage(isinstance(sources[0], Mxfp4Tensor))
        packed = pack_rows(sources, storage, after_batch=lambda: self.files.forget(names))
        return stacked([packed]) if self.weight_format.of_file else packed

    def _storage(self, coded: bool) -> StorageFormat:
        """Return how a matrix is stored, which the checkpoint may have in MXFP4."""
        if not self.weight_format.of_file:
            return self.weight_format.storage
        return StorageFormat.MXFP4 if coded else StorageFormat.Q8

    def _order(self, orders: Mapping[str, RowOrder], module: str) -> npt.NDArray[np.int64] | None:
        order = orders.get(module)
        return None if order is None else order(self.config)

    def _block_vector(self, prefix: str, name: str) -> Float32Array:
        if (zeros := self._norm_bias(name)) is not None:
            return zeros
        matrix = name.removesuffix("_bias")
        if matrix in EXPERTS:
            place = self._names.stacked[matrix]
            biases = self.files.array(f"{prefix}{place.module}_bias")
            check_finite(name, values := place.own(biases).astype(np.float32).reshape(-1))
            return values
        if matrix not in self._names.matmuls:
            return self._own_vector(prefix, name)
        layer = int(prefix.rstrip(".").rpartition(".")[2])
        parts = [
            self._ordered(x, self._vector(f"{prefix}{x}.bias"))
            for x in matrix_modules(self.config, layer, matrix)
        ]
        return np.concatenate(parts)

    def _norm_bias(self, name: str) -> Float32Array | None:
        """Return zeros for the bias of a norm that the family has without one."""
        absent = name.endswith("norm_bias") and not self._architecture.norm_bias
        return np.zeros(self.config.hidden_size, np.float32) if absent else None

    def _own_vector(self, prefix: str, name: str) -> Float32Array:
        """Return a vector of a block that is no matmul's bias."""
        if name in self._names.parameters:
            tensor = self._names.parameters[name]
            values = self._ordered(tensor, self._vector(prefix + tensor))
            if name == "router_norm":
                return values * np.float32(self.config.hidden_size**-0.5)
            return -np.exp(values) if name == "delta_decay" else values
        if name in self._names.shared:
            return input_norm(self._vector(f"{self._names.shared[name]}.weight"))
        module, suffix = vector_module(self._names.vectors, name)
        if is_taps(name):
            taps = self._vector(f"{prefix}{module}.{suffix}").reshape(-1, self.config.conv_taps)
            return self._ordered(module, taps).T.reshape(-1)
        norm = suffix == "weight" and name not in ("delta_norm", "router", "shared_gate")
        return self._vector(f"{prefix}{module}.{suffix}", norm=norm)

    def _ordered(self, module: str, values: Float32Array) -> Float32Array:
        order = self._order(self._architecture.row_order, module)
        return values if order is None else values[order]

    def _vector(self, name: str, *, norm: bool = False) -> Float32Array:
        values: Float32Array = self.files.array(name).astype(np.float32).reshape(-1)
        check_finite(name, values)
        return values + np.float32(self._architecture.norm_offset) if norm else values


def model_name_of(name: str) -> str:
    """Return the name that a tensor of a head for multi-token prediction has in a model."""
    for part in ("layers.", "norm."):
        if name.startswith(MTP + part):
            return "model." + name.removeprefix(MTP)
    return name


def input_norm(weight: Float32Array) -> Float32Array:
    """Return the weight of the norm of a layer's inputs: their sum with another has the factor."""
    return weight * np.float32(0.5**0.5)


def has_mxfp4(directory: Path) -> bool:
    """Return whether a checkpoint says that it has matrices in MXFP4."""
    path = directory / "config.json"
    known = os.path.isfile(path)  # false where it cannot be looked for
    config = read_json_object(path).get("quantization_config") if known else None
    return isinstance(config, dict) and config.get("quant_method") == "mxfp4"


def has_weights(directory: Path) -> bool:
    """Return whether a directory has a checkpoint's tensors."""
    return any((directory / name).is_file() for name in (SINGLE_FILE, INDEX_FILE))


def matrix_modules(config: ModelConfig, layer: int, name: str) -> Sequence[str]:
    """Return the modules whose rows, one after the other, are a matrix of a block."""
    names, experts = ARCHITECTURES[config.architecture].names, config.experts
    if experts is None or name not in names.experts:
        modules = names.matmuls.get(name, ())
        if name == "qkv" and config.keys_are_values and not config.windows[layer]:
            return (*modules[:2], modules[1])
        return modules
    return [names.experts[name].format(i) for i in range(experts.count)]


def stacked_place(
    config: ModelConfig, prefix: str, name: str, present: Container[str]
) -> Stacked | None:
    """Return where a checkpoint has a matrix of experts; None: not in a tensor of all experts."""
    names = ARCHITECTURES[config.architecture].names
    place = names.stacked.get(name)
    if place is None or name not in names.experts:
        return place
    return place if f"{prefix}{place.module}" in present else None


def vector_module(modules: Mapping[str, str], name: str) -> tuple[str, str]:
    """Return the module of a vector, and its tensor in that module."""
    if name.endswith("_bias"):
        return modules[name.removesuffix("_bias")], "bias"
    return modules[name.removesuffix("_taps")], "weight"


def expected_tensors(
    config: ModelConfig, present: Container[str] = ()
) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes of the tensors of a checkpoint of this configuration.

    Where there is a choice it is by the tensors that are `present`.
    """
    architecture, d = ARCHITECTURES[config.architecture], config.hidden_size
    names = architecture.names
    shapes: dict[str, tuple[int, ...]] = {}
    for matrix in embedding_matrices(config):
        shapes[f"{names.model_modules[matrix.name]}.weight"] = stored_shape(matrix)
    for vector in model_vectors(config, StorageFormat.F32):
        if vector.name == "final_norm_bias" and not architecture.norm_bias:
            continue
        rows = (vector.n // d, d) if vector.name == "positions" else (vector.n,)
        shapes[".".join(vector_module(names.model_modules, vector.name))] = rows
    for index in range(config.num_layers):
        prefix = names.block.format(index)
        for name, shape in _block_tensors(config, index, prefix, present).items():
            shapes[f"{prefix}{name}"] = shape
    if config.layer_inputs:
        width = config.layer_inputs
        shapes[f"{names.shared['input_in']}.weight"] = (config.num_layers * width, d)
        shapes[f"{names.shared['input_in_norm']}.weight"] = (width,)
    return shapes


def _block_tensors(
    config: ModelConfig, layer: int, prefix: str, present: Container[str]
) -> dict[str, tuple[int, ...]]:
    architecture = ARCHITECTURES[config.architecture]
    names = architecture.names
    shapes: dict[str, tuple[int, ...]] = {}
    for vector in block_vectors(config, StorageFormat.F32, layer):
        left_out = vector.name.endswith("norm_bias") and not architecture.norm_bias
        if left_out or vector.name in names.shared:
            continue
        if vector.name.removesuffix("_bias") not in (*names.matmuls, *EXPERTS):
            taps = config.conv_taps
            shape = (vector.n // taps, 1, taps) if is_taps(vector.name) else vector.shape
            own = names.parameters.get(vector.name)
            shapes[own or ".".join(vector_module(names.vectors, vector.name))] = shape
    biased = {x.name for x in config.block_matmuls(layer) if x.bias}
    for matrix in block_matrices(config, layer):
        place = stacked_place(config, prefix, matrix.name, present)
        if place is not None and config.experts is not None:
            count, bias = config.experts.count, config.experts.bias
            rows = matrix.n // count
            shapes |= place.shapes(prefix, count, rows, matrix.k, bias=bias, present=present)
            continue
        for module, n in _module_rows(config, layer, matrix):
            shapes[f"{module}.weight"] = (n, matrix.k)
            if matrix.name in biased:
                shapes[f"{module}.bias"] = (n,)
    return shapes


def is_taps(vector: str) -> bool:
    """Return whether a vector of a block has the taps of a convolution, of each feature in turn.

    Files have them feature by feature, ours tap by tap.
    """
    return vector == "conv_taps"


def _module_rows(config: ModelConfig, layer: int, matrix: MatrixShape) -> list[tuple[str, int]]:
    """Return the modules of a block's fused weight, and how many rows each has."""
    modules, n = matrix_modules(config, layer, matrix.name), matrix.n
    if matrix.name == "qkv" and len(modules) == 3:
        own = config.at(layer)
        keys = own.kv_heads * own.head_dim
        return list(zip(modules, (n - 2 * keys, keys, keys), strict=True))
    if matrix.name == "delta_in" and config.delta is not None:
        return list(zip(modules, config.delta.projections, strict=True))
    return [(module, n // len(modules)) for module in modules]


def _check_tensors(files: CheckpointFiles, config: ModelConfig) -> None:
    expected = expected_tensors(config, files)
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
    wanted = ("U8",) if name.endswith(MXFP4_PARTS) else FLOAT_DTYPES
    if files.dtype(name) not in wanted:
        raise ModelError(
            f"{files.directory}: tensor {name} must be one of {', '.join(wanted)}, "
            f"got {files.dtype(name)}; convert the model to one of these"
        )


def _is_derived(name: str, config: ModelConfig) -> bool:
    """Return whether a tensor is redundant.

    Such are stored rotary tables, a copy of tied embeddings, and keys and values of layers that
    read those of others.
    """
    head = ARCHITECTURES[config.architecture].names.model_modules["lm_head"]
    unused = ("self_attn.k_proj.", "self_attn.v_proj.", "self_attn.k_norm.")
    layer = name.partition("layers.")[2].partition(".")[0]
    if any(x in name for x in unused) and layer.isdecimal() and int(layer) < config.num_layers:
        return config.reads(int(layer))
    return name.endswith("rotary_emb.inv_freq") or (
        config.tie_word_embeddings and name == f"{head}.weight"
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
