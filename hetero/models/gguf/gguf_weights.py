"""`GgufWeights`: the tensors of a GGUF file as packed weights, block by block."""

from __future__ import annotations

import itertools
import math
from collections.abc import Container, Sequence
from pathlib import Path
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from hetero.backends.formats import StorageFormat, WeightFormat
from hetero.backends.weights import ROW_BLOCK, Float32Array, PackedWeight, packed_bytes
from hetero.errors import ModelError
from hetero.models.architectures import ARCHITECTURES
from hetero.models.architectures.base import halves_of_pairs
from hetero.models.architectures.qwen3_5 import queries_first
from hetero.models.checkpoint import input_norm, is_taps
from hetero.models.config import ModelConfig, mtp_head
from hetero.models.gguf.families import FAMILIES
from hetero.models.gguf.file import GgufFile, TensorInfo
from hetero.models.gguf.packed_store import PartShape, StoreReader, StoreWriter, joined, open_store
from hetero.models.gguf.tensors import (
    FLOATS,
    ROUTER,
    GgufTensor,
    Loss,
    check_kind,
    is_matrix,
    rows_of,
    stored_as,
    tensor_rows,
)
from hetero.models.layout import (
    EXPERTS,
    MAPPED,
    MTP_HALVES,
    block_matrices,
    embedding_matrices,
    expert_matrices,
    model_vectors,
    stored_shape,
)
from hetero.models.model_weights import BlockWeights, ModelWeights
from hetero.models.packing import Destination, check_finite, pack_rows
from hetero.models.row_tables import RowTable
from hetero.terminal.notices import notify_once

FUSED_EXPERTS: Final = "ffn_gate_up_exps"  # of each expert gate, then up
# Our weights and the tensors that hold them, the fused spelling first.
_MATRICES: Final = {
    "qkv": (("attn_qkv",), ("attn_q", "attn_k", "attn_v")),
    "q_only": (("attn_q",),),
    "input_in": (("per_layer_model_proj",),),
    "input_gate": (("inp_gate",),),
    "input_out": (("proj",),),
    "o": (("attn_output",),),
    "conv_in": (("shortconv.in_proj",),),
    "conv_out": (("shortconv.out_proj",),),
    "gate_up": (("ffn_gate", "ffn_up"), ("ffn_up",)),
    "down": (("ffn_down",),),
    "experts_gate": ((FUSED_EXPERTS,), ("ffn_gate_exps",)),
    "experts_up": ((FUSED_EXPERTS,), ("ffn_up_exps",)),
    "experts_down": (("ffn_down_exps",),),
    "delta_in": (("attn_qkv", "attn_gate", "ssm_beta", "ssm_alpha"),),
    "delta_out": (("ssm_out",),),
}
_VECTORS: Final = {
    "input_norm": "attn_norm",
    "post_norm": "ffn_norm",
    "o_norm": "post_attention_norm",
    "down_norm": "post_ffw_norm",
    "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm",
    "input_in_norm": "per_layer_proj_norm",
    "input_out_norm": "post_norm",
    "layer_scale": "layer_output_scale",
    "router": "ffn_gate_inp",
    "shared_gate": "ffn_gate_inp_shexp",
    "experts_norm": "pre_ffw_norm_2",
    "plain_norm": "post_ffw_norm_1",
    "chosen_norm": "post_ffw_norm_2",
}
_ENDS: Final = {
    "embed": "token_embd",
    "embed_inputs": "per_layer_token_embd",
    "lm_head": "output",
    "final_norm": "output_norm",
    "mtp_embed": "nextn.eh_proj",
    "mtp_hidden": "nextn.eh_proj",
    "mtp_embed_norm": "nextn.enorm",
    "mtp_hidden_norm": "nextn.hnorm",
}
_HEAD_NORM: Final = "nextn.shared_head_norm.weight"
_TAPS: Final = tuple(x.tensors["conv_taps"] for x in FAMILIES.values() if "conv_taps" in x.tensors)
_NO_MATRICES: Final = (*_TAPS, *ROUTER)
_SHARED: Final = {"gate_up": ("ffn_gate_shexp", "ffn_up_shexp"), "down": ("ffn_down_shexp",)}
_UNOPENED: Final = "unopened"
_FREQUENCIES: Final = "rope_freqs.weight"
_FACTORS: Final = ("rope_factors_long.weight", "rope_factors_short.weight")


Run: TypeAlias = tuple[StorageFormat, list[GgufTensor]]  # rows of one storage


class GgufWeights(ModelWeights):
    """Weights of a GGUF file, packed on demand; `loss` is the loss of quantising again so far."""

    source: Path

    def __init__(self, file: GgufFile, config: ModelConfig, weight_format: WeightFormat) -> None:
        super().__init__(config, weight_format)
        self.source = file.path
        self.file = file
        self.loss = Loss()
        self._store: StoreReader | StoreWriter | str | None = None if config.mtp else _UNOPENED
        self._family = FAMILIES[file.metadata["general.architecture"]]
        self._ends = _ENDS | {"final_norm": self._family.final_norm}
        self._check()
        _keep_head(self)

    def model_vector(self, name: str) -> Float32Array:
        """Return a vector outside of the blocks."""
        if self._is_left_out(name):
            return np.zeros(self.config.hidden_size, np.float32)
        module, suffix = _named(self._ends, name)
        return self._with_logit_scale(name, self._vector(f"{module}.{suffix}"))

    @property
    def nbytes(self) -> int:
        """Return the bytes of all packed weights, norms and biases."""
        if not self.weight_format.of_file:
            return super().nbytes
        total, behind = 0, set(_blocks_behind(self.file, self.config.num_layers))
        for name, info in ((x, y) for x, y in self.file.tensors.items() if x not in behind):
            if is_matrix(name, info) and not name.endswith(_NO_MATRICES):
                total += packed_bytes(stored_as(info.kind), *rows_of(info.shape))
            else:
                total += 4 * math.prod(info.shape)
        return total

    @property
    def mapped(self) -> bool:
        """Return whether a store has, or will have, the packed weights."""
        store = self._opened_store()
        return isinstance(store, StoreReader) or (
            store is not None
            and not any(
                source.watch and source.codes(0, 1, kind) is None
                for name in _matrix_names(self.config)
                for kind, members in self._runs(name)
                for source in members
            )
        )

    def requantised(self) -> dict[str, float]:
        """Return the relative errors of `Loss`."""
        return self.loss.by_kind()

    def release(self, index: int) -> None:
        """Drop a block; the pages of its tensors leave memory."""
        super().release(index)
        for name in self.file.tensors:
            if name.startswith(f"blk.{index}."):
                self.file.forget(name)
        if isinstance(self._store, StoreReader | StoreWriter):
            for matrix in block_matrices(self.config, index):
                self._store.forget(f"blk.{index}.{matrix.name}")

    def _load_block(self, index: int) -> BlockWeights:
        prefix = f"blk.{index}."
        shapes = block_matrices(self.config, index)
        packed = {x.name: self._packed(prefix + x.name) for x in shapes}
        vectors = {x.name: self._block_vector(prefix, x.name) for x in self.vectors(index)}
        return BlockWeights(packed, vectors)

    def _load_matrix(self, name: str) -> PackedWeight:
        return self._packed(name)

    def table(self, name: str) -> RowTable:
        """Return the rows of a matrix of `layout.MAPPED`, read from the file."""
        return tensor_rows(self.file, f"{self._ends[name]}.weight")

    def _packed(self, name: str) -> PackedWeight:
        """Return a matrix (`blk.3.qkv`, `embed`) from the store, or packed into it."""
        store = None if name in MAPPED else self._opened_store()
        parts = None if store is None else store.matrix(name)
        if parts is None:
            assert not isinstance(store, StoreReader)
            parts = self._pack(name, store)
        return joined(self.weight_format, parts)

    def _pack(self, name: str, store: StoreWriter | None) -> list[PackedWeight]:
        """Pack a matrix into the store, or without one into memory of this process."""
        runs = self._runs(name)
        if store is None:
            return _packed(self.file, runs)
        try:
            parts = _packed(self.file, runs, store.places(name))
        except OSError:  # the disk is full
            self._leave(store)
            return _packed(self.file, runs)
        store.add(name)
        if self.loss.by_kind():  # it would not be said of the store
            self._leave(store)
        return parts

    def _leave(self, store: StoreWriter) -> None:
        store.abandon()
        self._store = None

    def _opened_store(self) -> StoreReader | StoreWriter | None:
        """Return the store, opened for the first matrix; None while tests measure the loss."""
        if self._store is _UNOPENED:
            runs = {name: self._runs(name) for name in _matrix_names(self.config)}
            shapes = {name: [_part_shape(*run) for run in x] for name, x in runs.items()}
            self._store = open_store(self.file, self.weight_format, shapes)
        assert not isinstance(self._store, str)
        return self._store

    def release_embeddings(self) -> None:
        """Drop embeddings and output head, once all is prepared and the file's hash is known.

        Raises `ModelError` where the file is not the one that was packed.
        """
        super().release_embeddings()
        if isinstance(self._store, StoreReader | StoreWriter):
            self._store.check()

    def prefetch(self) -> None:
        """Read the mapped store ahead."""
        if isinstance(self._store, StoreReader | StoreWriter):
            self._store.prefetch()

    def close(self) -> None:
        """Wait for the store that is being written; release the file."""
        if isinstance(self._store, StoreWriter):
            self._store.close()
        self.file.release()

    def _runs(self, name: str) -> list[Run]:
        """Return the tensors of a matrix by their storage, neighbours of one storage merged.

        In the formats of files each has its own storage, but all are float32 where a part would not
        start at a block of rows.
        """
        prefix, _, last = name.rpartition(".")
        modules = self._modules(f"{prefix}.", last) if prefix else (self._ends[name],)
        loss = self.loss if self.weight_format.storage.quantised else None
        orders = [self._order(x, f"{prefix}.", last) if prefix else None for x in modules]
        names = [_path(f"{prefix}.", x) if prefix else x for x in modules]
        sources = [
            GgufTensor(self.file, f"{x}.weight", loss, order, _half(last))
            for x, order in zip(names, orders, strict=True)
        ]
        if not self.weight_format.of_file:
            return [(self.weight_format.storage, sources)]
        runs = [
            (storage, list(members))
            for storage, members in itertools.groupby(sources, lambda x: stored_as(x.kind))
        ]
        if any(sum(x.shape[0] for x in members) % ROW_BLOCK for _, members in runs[:-1]):
            runs = [(StorageFormat.F32, sources)]
        return runs

    def _modules(self, prefix: str, name: str) -> tuple[str, ...]:
        """Return the tensors that hold a weight; the first spelling where none is complete."""
        if name in _SHARED and self.config.experts is not None and self.config.experts.shared:
            return _SHARED[name]
        spellings = [x for x in _MATRICES[name] if self.config.gated or "ffn_gate" not in x]
        full = not self.config.windows[_layer(prefix)]
        if name == "qkv" and full and self.config.keys_are_values:
            return "attn_q", "attn_k", "attn_k"
        for modules in spellings:
            if all(f"{_path(prefix, module)}.weight" in self.file.tensors for module in modules):
                return modules
        return spellings[-1] if name == "qkv" or name in EXPERTS else spellings[0]

    def _order(self, module: str, prefix: str, name: str) -> npt.NDArray[np.int64] | None:
        """Return the order of rows: of pairs, with gates between, or those of matrix `name`."""
        config = self.config
        if module == FUSED_EXPERTS:
            return _fused_rows(config, name)
        if module == _MATRICES["input_in"][0][0]:
            return _layer(prefix) * config.layer_inputs + np.arange(config.layer_inputs)
        if module == "attn_q" and config.output_gate:
            return queries_first(config)
        rotated = config.rotary_dim or config.head_dim
        queries, keys = (
            halves_of_pairs(x, config.head_dim, rotated) for x in (config.heads, config.kv_heads)
        )
        if module == "attn_qkv" and self._family.pairs:
            values = np.arange(len(keys))
            return np.concatenate([queries, keys + len(queries), values + len(queries) + len(keys)])
        return {"attn_q": queries, "attn_k": keys}.get(module) if self._family.pairs else None

    def _block_vector(self, prefix: str, name: str) -> Float32Array:
        matmul = name.removesuffix("_bias")
        if self._is_left_out(name):
            return np.zeros(self.config.hidden_size, np.float32)
        if matmul in EXPERTS:
            return self._vector(f"{prefix}{_MATRICES[matmul][-1][0]}.bias")
        if matmul not in _MATRICES:
            values = self._vector(_path(prefix, self._tensor_of(name))) * _factor(self.config, name)
            if name == "input_in_norm":
                return input_norm(values)
            return (
                values.reshape(-1, self.config.conv_taps).T.reshape(-1) if is_taps(name) else values
            )
        parts = []
        for module, n in self._bias_rows(prefix, matmul):
            order, bias = self._order(module, prefix, matmul), f"{prefix}{module}.bias"
            values = self._vector(bias) if bias in self.file.tensors else np.zeros(n, np.float32)
            parts.append(values if order is None else values[order])
        return np.concatenate(parts)

    def _is_left_out(self, name: str) -> bool:
        """Return whether a vector is the bias of a norm that the family has without one."""
        return name.endswith("norm_bias") and not ARCHITECTURES[self.config.architecture].norm_bias

    def _bias_rows(self, prefix: str, name: str) -> list[tuple[str, int]]:
        """Return the modules of a matmul's biases; those of a fused qkv may be separate."""
        matmul = next(x for x in self.config.block_matmuls(_layer(prefix)) if x.name == name)
        apart = name == "qkv" and f"{prefix}attn_qkv.bias" not in self.file.tensors
        return self._rows(prefix, name, matmul.n, _MATRICES["qkv"][-1] if apart else None)

    def _vector(self, name: str) -> Float32Array:
        info = self.file.tensors[name]
        values = self.file.raw(name).view(FLOATS[info.kind]).astype(np.float32).reshape(-1)
        check_finite(name, values)
        return values

    def _check(self) -> None:
        """Raise `ModelError` unless the file has exactly the tensors of its configuration."""
        path, tensors = self.file.path, self.file.tensors
        expected = self._expected()
        missing = [name for name in expected if name not in tensors]
        if missing:
            raise ModelError(
                f"{path}: tensor {missing[0]} is missing{_more(missing)}; download the file again"
            )
        others = {*self._read_before(), *_blocks_behind(self.file, self.config.num_layers)}
        unknown = [x for x in tensors if x not in expected and x not in others]
        if unknown:
            raise ModelError(
                f"{path}: tensor {unknown[0]} does not belong to a {self.config.architecture} "
                f"model of this file's metadata{_more(unknown)}; choose another file"
            )
        for name, shape in expected.items():
            _check_tensor(path, name, tensors[name], shape)

    def _read_before(self) -> tuple[str, ...]:
        """Return the tensors that the configuration was read from."""
        reads = self._family.frequencies or self._family.rotated_part
        if reads and _FREQUENCIES in self.file.tensors:
            return (_FREQUENCIES,)
        return _FACTORS if self.config.rope_scaling.kind == "longrope" else ()

    def _expected(self) -> dict[str, tuple[int, ...]]:
        shapes: dict[str, tuple[int, ...]] = {}
        for matrix in embedding_matrices(self.config):
            shapes[f"{self._ends[matrix.name]}.weight"] = stored_shape(matrix)
        for vector in model_vectors(self.config, self.weight_format.storage):
            if not self._is_left_out(vector.name):
                shapes[".".join(_named(self._ends, vector.name))] = (vector.n,)
        for index in range(self.config.num_layers):
            prefix = f"blk.{index}."
            for matmul in self.config.block_matmuls(index):
                for module, n in self._rows(prefix, matmul.name, matmul.n):
                    of_all = self.config.num_layers if matmul.name == "input_in" else 1
                    shapes[f"{_path(prefix, module)}.weight"] = (of_all * n, matmul.k)
                if matmul.bias:
                    shapes |= self._expected_biases(prefix, matmul.name)
            shapes |= _expert_shapes(self.config, index, self.file.tensors)
            for vector in self.vectors(index):
                of_matmul = vector.name.removesuffix("_bias") in _MATRICES
                if not of_matmul and not self._is_left_out(vector.name):
                    taps = self.config.conv_taps
                    shape = (vector.n // taps, taps) if is_taps(vector.name) else vector.shape
                    name = _path(prefix, self._tensor_of(vector.name))
                    shapes[name] = shape if vector.name != "shared_gate" else (vector.n,)
        return shapes

    def _tensor_of(self, vector: str) -> str:
        """Return the tensor of a block's vector."""
        return self._family.tensors.get(vector) or ".".join(_named(_VECTORS, vector))

    def _expected_biases(self, prefix: str, name: str) -> dict[str, tuple[int, ...]]:
        """Return the biases that are there; only Phi-2 must have them, and not those of qkv."""
        required = self.config.head_bias and name != "qkv"
        rows = self._bias_rows(prefix, name)
        biases = {f"{prefix}{module}.bias": (n,) for module, n in rows}
        return {x: shape for x, shape in biases.items() if required or x in self.file.tensors}

    def _rows(
        self, prefix: str, name: str, n: int, modules: tuple[str, ...] | None = None
    ) -> list[tuple[str, int]]:
        modules = modules or self._modules(prefix, name)
        if len(modules) == 3:
            own = self.config.at(_layer(prefix))
            keys = own.kv_heads * own.head_dim
            return list(zip(modules, (n - 2 * keys, keys, keys), strict=True))
        if name == "delta_in" and self.config.delta is not None:
            return list(zip(modules, self.config.delta.projections, strict=True))
        return [(module, n // len(modules)) for module in modules]


def _matrix_names(config: ModelConfig) -> list[str]:
    """Return the names of the matrices in a store, in the order in which they are packed."""
    blocks = range(config.num_layers)
    names = [f"blk.{i}.{x.name}" for i in blocks for x in block_matrices(config, i)]
    return names + [x.name for x in embedding_matrices(config) if x.name not in MAPPED]


def _part_shape(storage: StorageFormat, members: Sequence[GgufTensor]) -> PartShape:
    return PartShape(storage, sum(x.shape[0] for x in members), members[0].shape[1])


def _packed(
    file: GgufFile, runs: Sequence[Run], places: Sequence[Destination] = ()
) -> list[PackedWeight]:
    """Pack a matrix to its places (none: in memory), and drop the file's pages on the way."""

    def forget() -> None:
        for _, members in runs:
            for source in members:
                file.forget(source.name)

    return [
        pack_rows(members, kind, after_batch=forget, destination=place)
        for (kind, members), place in itertools.zip_longest(runs, places)
    ]


def _check_tensor(path: Path, name: str, info: TensorInfo, shape: tuple[int, ...]) -> None:
    """Raise `ModelError` unless a tensor has the shape, in a type that is supported."""
    if info.shape != shape and not (name.endswith(ROUTER) and info.shape == (1, *shape)):
        raise ModelError(
            f"{path}: tensor {name} must have the shape {list(shape)} by the file's "
            f"metadata, got {list(info.shape)}; download the file again"
        )
    check_kind(str(path), name, info)
    vector = not is_matrix(name, info) or name.endswith(_NO_MATRICES)
    if vector and info.kind not in FLOATS:
        raise ModelError(
            f"{path}: tensor {name} must be one of "
            f"{', '.join(x.name for x in FLOATS)}, got {info.kind.name}; choose another file"
        )


def _blocks_behind(file: GgufFile, layers: int) -> tuple[str, ...]:
    """Return the tensors of blocks behind the model's, which predict more tokens."""
    count = file.metadata.get(f"{file.metadata['general.architecture']}.block_count")
    blocks = [f"blk.{i}." for i in range(layers, count if isinstance(count, int) else layers)]
    return tuple(name for name in file.tensors if name.startswith(tuple(blocks)))


def _keep_head(weights: GgufWeights) -> None:
    """Open the head for multi-token prediction that a model's file has, if it has one."""
    file, config = weights.file, weights.config
    own = {} if config.mtp else _head_tensors(file, config)
    if not own:
        return
    ends = (f"{_ENDS[x]}.weight" for x in ("embed", "lm_head"))
    view = file.renamed(own | {x: x for x in ends if x in file.tensors})
    size = sum(x.stop - x.start for x in (file.tensors[y] for y in own.values()))
    weights.keep_head(lambda: GgufWeights(view, mtp_head(config), weights.weight_format), size)


def _head_tensors(file: GgufFile, config: ModelConfig) -> dict[str, str]:
    """Return the tensors of a head for multi-token prediction: by a model's names those in files.

    It is the block behind the model's.
    """
    prefix = f"blk.{config.num_layers}."
    behind = _blocks_behind(file, config.num_layers)
    first = [name for name in behind if name.startswith(prefix)]
    if len(first) < len(behind):
        notify_once(
            f"{file.path}: blocks behind its first head for multi-token prediction are left out "
            f"({len(behind) - len(first)} tensors)"
        )
    names = {}
    for name in first:
        own = name.removeprefix(prefix)
        model_name = own if own.startswith("nextn.") else f"blk.0.{own}"
        names["output_norm.weight" if own == _HEAD_NORM else model_name] = name
    return names


def _factor(config: ModelConfig, vector: str) -> np.float32:
    """Return the factor of a block's vector that the file leaves to the reader."""
    return np.float32(config.hidden_size**-0.5 if vector == "router_norm" else 1.0)


def _fused_rows(config: ModelConfig, name: str) -> npt.NDArray[np.int64]:
    """Return the rows of experts' gates, or ups, where each expert has gate, then up."""
    assert config.experts is not None
    width, up = config.experts.width, name == "experts_up"
    first = 2 * width * np.arange(config.experts.count)[:, None]
    return (first + up * width + np.arange(width)).reshape(-1)


def _expert_shapes(
    config: ModelConfig, layer: int, present: Container[str]
) -> dict[str, tuple[int, ...]]:
    """Return the tensors of a layer's routed experts.

    Matrices are [experts, rows, features], biases [experts, rows]. Gate and up are one tensor where
    it is `present`.
    """
    experts = config.routed(layer)
    shapes: dict[str, tuple[int, ...]] = {}
    if experts is None:
        return {}
    fused = f"blk.{layer}.{FUSED_EXPERTS}.weight"
    for matrix in expert_matrices(config, layer):
        rows = matrix.n // experts.count
        if matrix.name != "experts_down" and fused in present and not experts.bias:
            shapes[fused] = (experts.count, 2 * rows, matrix.k)
            continue
        module = f"blk.{layer}.{_MATRICES[matrix.name][-1][0]}"
        shapes[f"{module}.weight"] = (experts.count, rows, matrix.k)
        if experts.bias:
            shapes[f"{module}.bias"] = (experts.count, rows)
    return shapes


def _half(matrix: str) -> int | None:
    """Return which half of its tensor's features a matrix has; None: all of them."""
    return MTP_HALVES.index(matrix) if matrix in MTP_HALVES else None


def _layer(prefix: str) -> int:
    """Return the layer of a block's prefix (`blk.3.`)."""
    return int(prefix.split(".")[1])


def _path(prefix: str, module: str) -> str:
    """Return a module's name in the file; some have the rows of all layers."""
    return module if module.startswith("per_layer_") else f"{prefix}{module}"


def _named(names: dict[str, str], vector: str) -> tuple[str, str]:
    """Return the tensor of a vector: its module and `weight` or `bias`."""
    if vector.endswith("_bias"):
        return names[vector.removesuffix("_bias")], "bias"
    return names[vector], "weight"


def _more(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""
