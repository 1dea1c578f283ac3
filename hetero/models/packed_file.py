"""The weights of a quantised directory: one safetensors file that devices map in place.

Every tensor starts and ends on a page of 4096 bytes. safetensors allows no holes, so a last page is
filled by a tensor of zeros named `__pad.N`, and the header is padded with spaces. Blocks come one
after the other, then the tensors outside of them.

    blocks.3.qkv.data, blocks.3.qkv.scales    layout of `hetero.backends.weights`
    blocks.3.input_norm, blocks.3.qkv_bias    float32
    blocks.3.down_hot, blocks.3.down_hot_weight    int32 [h], float16 [n, h]: where `hetero.json`
                                              says that h channels are hot
    embed.*, lm_head.* (unless tied), final_norm
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hetero.backends.formats import StorageFormat, WeightFormat
from hetero.backends.weights import Float32Array, PackedWeight, data_shape, scales_shape
from hetero.errors import ModelError
from hetero.models.calibration_record import Calibration, matmul_shapes
from hetero.models.config import ModelConfig
from hetero.models.layout import (
    FILE_PAGE_BYTES,
    MatrixShape,
    VectorShape,
    block_matrices,
    block_vectors,
    embedding_matrices,
    model_vectors,
    page_padded,
    scaled_inputs,
)
from hetero.models.manifest import (
    MANIFEST_FILE,
    WEIGHTS_FILE,
    AlsoStored,
    Manifest,
    check_files,
    read_manifest,
)
from hetero.models.model_weights import BlockWeights, DerivedWeights, ModelWeights, Shadow
from hetero.models.safetensors_file import SafetensorsFile

PAD_PREFIX = "__pad."
_DTYPES = {"q4": "U32", "q8": "I8", "q8r": "I8", "f16": "F16", "f32": "F32"}
_ITEM_BYTES = {"U32": 4, "I32": 4, "I8": 1, "F16": 2, "F32": 4, "U8": 1}


@dataclass(frozen=True)
class PlannedTensor:
    """A tensor of the weight file, in file order."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Return the bytes of the elements."""
        total = _ITEM_BYTES[self.dtype]
        for size in self.shape:
            total *= size
        return total


class QuantizedWeights(ModelWeights):
    """Weights of a quantised directory: views of the mapped file, nothing is parsed or copied."""

    source: Path

    def __init__(
        self,
        directory: Path,
        config: ModelConfig,
        weight_format: WeightFormat,
        calibration: Calibration | None = None,
        also: Sequence[AlsoStored] = (),
    ) -> None:
        super().__init__(config, weight_format)
        self.calibration = calibration
        self.source = directory
        self.file = SafetensorsFile(directory / WEIGHTS_FILE)
        _check_plan(self.file, weight_plan(config, weight_format.storage, calibration))
        self._check_scales()
        self.also = tuple(x.weight_format for x in also)
        self.besides = {
            x.weight_format.storage: StoredMatrices(directory / x.file, config, x) for x in also
        }

    @property
    def mapped(self) -> bool:
        """Return True: all are views of the file."""
        return True

    def model_vector(self, name: str) -> Float32Array:
        """Return a vector outside of the blocks."""
        return self.file.array(name)

    def release(self, index: int) -> None:
        """Drop a block; its pages leave memory until they are read again."""
        super().release(index)
        self.file.forget(
            [x.name for x in block_plan(self.config, self._storage, index, self.calibration)]
        )
        for one in self.besides.values():
            one.release(index)

    def release_embeddings(self) -> None:
        """Drop embeddings and output head; their pages leave memory."""
        super().release_embeddings()
        self.file.forget([x.name for x in embedding_plan(self.config, self._storage)])
        for one in self.besides.values():
            one.release(None)

    def prefetch(self) -> None:
        """Read the mapped file ahead."""
        self.file.prefetch()

    def head_in(self, storage: StorageFormat) -> PackedWeight:
        """Return the output head in another storage."""
        return self.besides[storage].embedding(
            "embed" if self.config.tie_word_embeddings else "lm_head"
        )

    @property
    def _storage(self) -> StorageFormat:
        return self.weight_format.storage

    def _load_block(self, index: int) -> BlockWeights:
        prefix = f"blocks.{index}."
        shapes = block_matrices(self.config, index)
        packed = {x.name: self._packed(prefix, x) for x in shapes}
        vectors = {x.name: self.file.array(prefix + x.name) for x in self.vectors(index)}
        shadows = {x.name: self._shadow(prefix + x.name, x.k) for x in shapes}
        shadows_here = {name: shadow for name, shadow in shadows.items() if shadow is not None}
        also = {storage: one.block(index) for storage, one in self.besides.items()}
        return BlockWeights(packed, vectors, shadows=shadows_here, also=also)

    def _shadow(self, name: str, k: int) -> Shadow | None:
        if self.calibration is None or not self.calibration.hot(name):
            return None
        channels = self.file.array(f"{name}_hot")
        rising = bool((np.diff(channels) > 0).all())
        if not rising or channels[0] < 0 or channels[-1] >= k:
            raise ModelError(
                f"{self.file.path}: tensor {name}_hot must hold rising channels of {k}; "
                "run hetero quantize again"
            )
        weight = self.file.array(f"{name}_hot_weight")
        if not np.isfinite(weight).all():
            raise ModelError(
                f"{self.file.path}: tensor {name}_hot_weight holds a value that is not finite; "
                "run hetero quantize again"
            )
        return Shadow(channels, weight)

    def _check_scales(self) -> None:
        """Raise `ModelError` unless static scales are usable and match the manifest's."""
        if not scaled_inputs(self._storage):
            return
        for name in matmul_shapes(self.config):
            scale = self.file.array(f"{name}_x_scale")[0]
            known = None if self.calibration is None else self.calibration.matmuls[name].x_scale
            if not (np.isfinite(scale) and scale > 0) or known not in (None, float(scale)):
                rule = "a positive number" if known is None else f"the {known} of hetero.json"
                raise ModelError(
                    f"{self.file.path}: tensor {name}_x_scale must be {rule}, got {scale}; "
                    "run hetero quantize again"
                )

    def _load_matrix(self, name: str) -> PackedWeight:
        return self._packed("", next(x for x in embedding_matrices(self.config) if x.name == name))

    def _packed(self, prefix: str, shape: MatrixShape) -> PackedWeight:
        return _packed(self.file, self._storage, prefix, shape)


class StoredMatrices:
    """A model's matrices in another storage, mapped from a file of their own.

    Raises `ModelError` for another file than the manifest names.
    """

    def __init__(self, path: Path, config: ModelConfig, record: AlsoStored) -> None:
        self.config, self.storage = config, record.weight_format.storage
        self.file = SafetensorsFile(path)
        _check_plan(self.file, matrices_plan(config, self.storage))
        _check_header(self.file, record.header_sha256)

    def block(self, index: int) -> dict[str, PackedWeight]:
        """Return the matrices of a block, by name."""
        prefix = f"blocks.{index}."
        shapes = block_matrices(self.config, index)
        return {x.name: _packed(self.file, self.storage, prefix, x) for x in shapes}

    def embedding(self, name: str) -> PackedWeight:
        """Return `embed` or `lm_head`."""
        shape = next(x for x in embedding_matrices(self.config) if x.name == name)
        return _packed(self.file, self.storage, "", shape)

    def release(self, index: int | None) -> None:
        """Drop the pages of a block (None: of embeddings and head) until they are read again."""
        prefix, shapes = "", embedding_matrices(self.config)
        if index is not None:
            prefix, shapes = f"blocks.{index}.", block_matrices(self.config, index)
        self.file.forget([y.name for x in shapes for y in _matrix_plan(prefix, x, self.storage)])


class OtherStorage(DerivedWeights):
    """A quantised directory in another storage that it has too; everything else is `inner`'s."""

    source: Path

    def __init__(self, inner: QuantizedWeights, weight_format: WeightFormat) -> None:
        super().__init__(inner, weight_format)
        self.calibration, self._stored = inner.calibration, inner.besides[weight_format.storage]

    @property
    def mapped(self) -> bool:
        """Return True: all are views of files."""
        return True

    def release_embeddings(self) -> None:
        """Drop embeddings and output head here and in the files."""
        super().release_embeddings()
        self.inner.release_embeddings()

    def _load_block(self, index: int) -> BlockWeights:
        whole = self.inner.block(index)
        vectors = {x.name: whole.vectors[x.name] for x in self.vectors(index)}
        stored = self._stored.block(index)
        return BlockWeights(stored, vectors, shadows=whole.shadows)

    def _load_matrix(self, name: str) -> PackedWeight:
        return self._stored.embedding(name)


def _packed(
    file: SafetensorsFile, storage: StorageFormat, prefix: str, shape: MatrixShape
) -> PackedWeight:
    name = prefix + shape.name
    scales = file.array(f"{name}.scales") if storage.quantised else None
    return PackedWeight(storage, shape.n, shape.k, file.array(f"{name}.data"), scales)


def open_directory(
    directory: Path,
    weight_format: WeightFormat | None = None,
    *,
    verify: bool = False,
    besides: bool = False,
) -> tuple[Manifest, QuantizedWeights | OtherStorage]:
    """Open what `hetero.models.quantized.save` wrote.

    `weight_format` defaults to the one it was saved for; with `besides` its other storages are
    opened as well. Checks sizes, schema, header and the small files' hashes; with `verify` the
    weights' hash too. Raises `ModelError`.
    """
    manifest = read_manifest(directory)
    wanted = weight_format or manifest.weight_format
    if wanted.storage not in {x.storage for x in manifest.stored}:
        raise _other_storage(directory, manifest, wanted)
    check_files(directory, manifest, verify=verify)
    config = ModelConfig.from_directory(directory)
    _check_calibration(directory, manifest, config)
    other = wanted.storage is not manifest.storage
    also = manifest.also if other or besides else ()
    own = manifest.weight_format if other else wanted
    weights = QuantizedWeights(directory, config, own, manifest.calibration, also)
    _check_header(weights.file, manifest.header_sha256)
    return manifest, OtherStorage(weights, wanted) if other else weights


def _check_header(file: SafetensorsFile, sha256: str) -> None:
    if hashlib.sha256(file.header()).hexdigest() != sha256:
        raise ModelError(
            f"{file.path}: header does not have the SHA-256 that hetero.json names; "
            "run hetero quantize again"
        )


def weight_plan(
    config: ModelConfig, storage: StorageFormat, calibration: Calibration | None = None
) -> list[PlannedTensor]:
    """Return every tensor of the weight file in file order, padding excluded."""
    plan: list[PlannedTensor] = []
    for index in range(config.num_layers):
        plan += block_plan(config, storage, index, calibration)
    return plan + embedding_plan(config, storage)


def matrices_plan(config: ModelConfig, storage: StorageFormat) -> list[PlannedTensor]:
    """Return the tensors of a weight file that has only matrices, in file order."""
    places = [
        (f"blocks.{i}.", x) for i in range(config.num_layers) for x in block_matrices(config, i)
    ]
    places += [("", shape) for shape in embedding_matrices(config)]
    return [tensor for prefix, x in places for tensor in _matrix_plan(prefix, x, storage)]


def block_plan(
    config: ModelConfig,
    storage: StorageFormat,
    index: int,
    calibration: Calibration | None = None,
) -> list[PlannedTensor]:
    """Return the tensors of one block."""
    prefix, matrices = f"blocks.{index}.", block_matrices(config, index)
    plan = [x for shape in matrices for x in _matrix_plan(prefix, shape, storage)]
    plan += [_vector_plan(prefix, shape) for shape in block_vectors(config, storage, index)]
    for shape in matrices:
        plan += _shadow_plan(prefix + shape.name, shape.n, calibration)
    return plan


def embedding_plan(config: ModelConfig, storage: StorageFormat) -> list[PlannedTensor]:
    """Return the tensors outside of the blocks: embeddings, output head unless tied, vectors."""
    plan = [x for shape in embedding_matrices(config) for x in _matrix_plan("", shape, storage)]
    return plan + [_vector_plan("", shape) for shape in model_vectors(config, storage)]


def file_header(plan: list[PlannedTensor], metadata: dict[str, str]) -> bytes:
    """Return length and JSON header of a weight file, padded with spaces to whole pages."""
    header: dict[str, Any] = {"__metadata__": metadata}
    offset = 0
    for index, tensor in enumerate(plan):
        end = offset + tensor.nbytes
        header[tensor.name] = _header_entry(tensor.dtype, list(tensor.shape), offset, end)
        offset = page_padded(end)
        if offset > end:
            header[f"{PAD_PREFIX}{index}"] = _header_entry("U8", [offset - end], end, offset)
    text = json.dumps(header, separators=(",", ":")).encode("utf-8")
    length = page_padded(8 + len(text)) - 8
    return length.to_bytes(8, "little") + text.ljust(length)


def block_arrays(
    block: BlockWeights, config: ModelConfig, storage: StorageFormat, index: int
) -> Iterator[npt.NDArray[Any]]:
    """Return the arrays of a block in the order of `block_plan`."""
    for matrix in block_matrices(config, index):
        yield from matrix_arrays(block.matrix(matrix.name))
    for vector in block_vectors(config, storage, index):
        yield np.asarray(block.vectors[vector.name], dtype=np.float32)
    for matrix in block_matrices(config, index):
        yield from shadow_arrays(block.shadows.get(matrix.name))


def matrix_arrays(packed: PackedWeight) -> Iterator[npt.NDArray[Any]]:
    """Return data, then scales if there are any."""
    yield packed.data
    if packed.scales is not None:
        yield packed.scales


def shadow_arrays(shadow: Shadow | None) -> Iterator[npt.NDArray[Any]]:
    """Return hot channels, then their weights, if there are any."""
    if shadow is not None:
        yield np.asarray(shadow.channels, dtype=np.int32)
        yield np.asarray(shadow.weight, dtype=np.float16)


def _shadow_plan(name: str, n: int, calibration: Calibration | None) -> list[PlannedTensor]:
    hot = 0 if calibration is None else calibration.hot(name)
    if not hot:
        return []
    return [
        PlannedTensor(f"{name}_hot", "I32", (hot,)),
        PlannedTensor(f"{name}_hot_weight", "F16", (n, hot)),
    ]


def _matrix_plan(prefix: str, shape: MatrixShape, storage: StorageFormat) -> list[PlannedTensor]:
    name = prefix + shape.name
    data = PlannedTensor(
        f"{name}.data", _DTYPES[storage.value], data_shape(storage, shape.n, shape.k)
    )
    if not storage.quantised:
        return [data]
    kind = "F32" if storage.scales == "row" else "F16"
    scales = PlannedTensor(f"{name}.scales", kind, scales_shape(storage, shape.n, shape.k))
    return [data, scales]


def _vector_plan(prefix: str, shape: VectorShape) -> PlannedTensor:
    return PlannedTensor(prefix + shape.name, "F32", (shape.n,))


def _header_entry(dtype: str, shape: list[int], start: int, stop: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


def _check_plan(file: SafetensorsFile, tensors: list[PlannedTensor]) -> None:
    """Raise `ModelError` unless the file has exactly the planned tensors, on whole pages."""
    plan = {x.name: x for x in tensors}
    entries = {x: entry for x, entry in file.entries.items() if not x.startswith(PAD_PREFIX)}
    for name in plan.keys() | entries.keys():
        planned, entry = plan.get(name), entries.get(name)
        if (
            planned is None
            or entry is None
            or (planned.dtype, planned.shape) != (entry.dtype, entry.shape)
            or entry.start % FILE_PAGE_BYTES
        ):
            raise ModelError(
                f"{file.path}: tensor {name} is not as config.json asks for; "
                "run hetero quantize again"
            )


def _check_calibration(directory: Path, manifest: Manifest, config: ModelConfig) -> None:
    """Raise `ModelError` unless the manifest's scales are those of this model's matmuls."""
    if manifest.calibration is None:
        return
    sizes = {name: shape.k for name, shape in matmul_shapes(config).items()}
    wanted, stored = set(sizes), manifest.calibration.matmuls
    where = f"{directory / MANIFEST_FILE}: calibration.matmuls"
    for name in sorted(wanted ^ stored.keys()):
        what = "is missing" if name in wanted else "is not a matmul of this model"
        raise ModelError(f"{where}: {name} {what}; run hetero quantize again")
    for name, record in stored.items():
        k = sizes[name]
        if record.hot > k:
            raise ModelError(
                f"{where}: {name}: hot must be at most {k}, got {record.hot}; "
                "run hetero quantize again"
            )


def _other_storage(directory: Path, manifest: Manifest, wanted: WeightFormat) -> ModelError:
    storages = [x.storage for x in manifest.stored]
    served = [x.value for x in WeightFormat if x.storage in storages]
    return ModelError(
        f"{directory}: holds {' and '.join(storages)} weights, which serve "
        f"{' and '.join(served)}, not {wanted}; use --weights {served[0]}, or run hetero "
        f"quantize on the original model with --weights {wanted}"
    )
