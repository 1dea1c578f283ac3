"""Writing quantised directories: block by block, and all or nothing.

Everything goes to a sibling directory that is renamed at the end (`hetero.backends.host.files`).
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from hetero.backends.formats import StorageFormat
from hetero.backends.host.files import (
    remove_partials,
    replace_directory,
    scratch_directory,
    sync_directory,
)
from hetero.backends.host.folders import expand_user
from hetero.backends.host.versions import installed_version
from hetero.errors import ModelError
from hetero.models.layout import block_matrices, embedding_matrices, model_vectors, page_padded
from hetero.models.manifest import (
    MANIFEST_FILE,
    WEIGHTS_FILE,
    AlsoStored,
    FileRecord,
    Manifest,
    file_sha256,
    is_quantised,
    read_manifest,
)
from hetero.models.model_weights import ModelWeights
from hetero.models.packed_file import (
    PlannedTensor,
    block_arrays,
    file_header,
    matrices_plan,
    matrix_arrays,
    open_directory,
    weight_plan,
)
from hetero.models.pooling import POOLING_FILE, pooling_document, stored_pooling

__all__ = ["Progress", "check_destination", "open_directory", "save"]

Progress: TypeAlias = Callable[[int, int], None]

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "generation_config.json",
    "modules.json",
    "1_Pooling/config.json",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/*.jinja",
)
_SPARE_BYTES = 1 << 20


def save(
    weights: ModelWeights,
    out_dir: str | Path,
    *,
    name: str | None = None,
    progress: Progress | None = None,
    overwrite: bool = False,
    also: Sequence[ModelWeights] = (),
) -> Path:
    """Write `weights`, their configuration and their tokenizer's files to `out_dir`.

    Of `also`, the same model in formats of other storages, the matrices are written.
    `progress(done_bytes, total_bytes)` is called after every block. At most one block and the
    output head are in memory beyond what the weights keep; every block is released once written. An
    existing directory is replaced only if it is empty, or if `overwrite` and `hetero quantize`
    wrote everything in it. Raises `ModelError`, and leaves nothing behind if it fails.
    """
    for one in (weights, *also):
        if one.weight_format.of_file:
            raise ModelError(
                f"{one.weight_format} is what a GGUF file stores, which is used as it is; give the "
                "file itself as MODEL, or choose --weights w4a16"
            )
    out = expand_user(out_dir).resolve()
    remove_partials(out)  # they take room
    check_destination(out, overwrite=overwrite)
    _check_space(out, weights, also)
    try:
        with scratch_directory(out) as temporary:
            named = name or (out if weights.source is None else weights.source.resolve()).name
            _write_directory(weights, also, temporary, named, progress)
            replace_directory(temporary, out)
    except OSError as error:
        raise ModelError(
            f"{out}: cannot be written ({error.strerror or error}); choose another directory, or "
            "make room"
        ) from error
    return out


def check_destination(out: Path, *, overwrite: bool) -> None:
    """Raise `ModelError` unless `save` may write there."""
    if not out.parent.is_dir():
        raise ModelError(f"{out.parent}: there is no such directory; create it first")
    if not out.exists():
        return
    if not out.is_dir():
        raise ModelError(f"{out}: is a file; choose a directory")
    if not any(out.iterdir()):
        return
    if not is_quantised(out):
        raise ModelError(
            f"{out}: holds files that hetero quantize did not write; choose a new directory"
        )
    if not overwrite:
        raise ModelError(
            f"{out}: already holds a quantised model; choose a new directory, or use --overwrite"
        )
    _refuse_foreign_files(out)


def _refuse_foreign_files(out: Path) -> None:
    known = {MANIFEST_FILE, *read_manifest(out).files}
    names = (x.relative_to(out).as_posix() for x in sorted(out.rglob("*")) if not x.is_dir())
    foreign = next((x for x in names if x not in known), None)
    if foreign is not None:
        raise ModelError(
            f"{out}: holds {foreign}, which hetero quantize did not write; choose a new directory, "
            "or move the file away"
        )


def _check_space(out: Path, weights: ModelWeights, also: Sequence[ModelWeights]) -> None:
    plan = weight_plan(weights.config, weights.weight_format.storage, weights.calibration)
    for one in also:
        plan += matrices_plan(one.config, one.weight_format.storage)
    needed = sum(page_padded(tensor.nbytes) for tensor in plan) + _SPARE_BYTES
    free = shutil.disk_usage(out.parent).free
    if free < needed:
        raise ModelError(
            f"{out}: needs {needed} bytes, but only {free} are free; choose another disk, or make "
            "room"
        )


def _write_directory(
    weights: ModelWeights,
    also: Sequence[ModelWeights],
    directory: Path,
    name: str,
    progress: Progress | None,
) -> None:
    storage = weights.weight_format.storage
    plan = weight_plan(weights.config, storage, weights.calibration)
    header_sha256, record = _write_weights(
        plan, storage, _parts(weights), directory / WEIGHTS_FILE, progress
    )
    records, besides = {WEIGHTS_FILE: record}, []
    for one in also:
        stored, record = _write_also(one, directory, progress)
        besides.append(stored)
        records[stored.file] = record
    _write_text(directory / "config.json", json.dumps(weights.config.to_dict(), indent=2) + "\n")
    if weights.source is not None and weights.source.is_file():
        from hetero.models.gguf import GgufFile, read_tokenizer  # the library behind it is heavy

        for path in read_tokenizer(GgufFile(weights.source)).save(directory):
            _sync_file(path)
        if (pooling := stored_pooling(weights.source)) is not None:
            (directory / POOLING_FILE).parent.mkdir()
            _write_text(directory / POOLING_FILE, json.dumps(pooling_document(pooling)) + "\n")
    elif weights.source is not None:
        _copy_tokenizer(weights.source, directory)
    others = [x for x in directory.rglob("*") if x.is_file() and x.name not in records]
    files = {x.relative_to(directory).as_posix(): _record(x) for x in sorted(others)}
    manifest = Manifest(
        name=name,
        schema_version=_schema_version(weights, besides),
        weight_format=weights.weight_format,
        storage=weights.weight_format.storage,
        tokenizer="bytes" if _has_byte_tokenizer(weights) else "files",
        header_sha256=header_sha256,
        files={**records, **files},
        source="" if weights.source is None else weights.source.resolve().name,
        hetero_version=installed_version("hetero") or "",
        calibration=weights.calibration,
        also=tuple(besides),
    )
    left_out: dict[str, Any] = {
        x: True for x in ("calibration", "also") if not getattr(manifest, x)
    }
    if manifest.calibration is not None and not manifest.calibration.excess:
        left_out["calibration"] = {"excess"}
    text = manifest.model_dump_json(indent=2, exclude=left_out)
    _write_text(directory / MANIFEST_FILE, text + "\n")
    sync_directory(directory)


def _schema_version(weights: ModelWeights, also: Sequence[AlsoStored]) -> Literal[1, 2, 3, 4]:
    """Return the oldest version that can say what is stored."""
    if weights.calibration is not None and weights.calibration.excess:
        return 4
    return 3 if also else 1 if weights.calibration is None else 2


def _write_also(
    weights: ModelWeights, directory: Path, progress: Progress | None
) -> tuple[AlsoStored, FileRecord]:
    """Write the matrices in another storage to a file of their own."""
    stored = AlsoStored(weight_format=weights.weight_format, header_sha256="0" * 64)
    storage = weights.weight_format.storage
    plan = matrices_plan(weights.config, storage)
    header_sha256, record = _write_weights(
        plan, storage, _matrices(weights), directory / stored.file, progress
    )
    return stored.model_copy(update={"header_sha256": header_sha256}), record


def _write_weights(
    plan: list[PlannedTensor],
    storage: StorageFormat,
    parts: Iterator[Iterator[npt.NDArray[Any]]],
    path: Path,
    progress: Progress | None,
) -> tuple[str, FileRecord]:
    """Write the weight file; return the hash of its header, and the file's record."""
    metadata = {"format": f"hetero-{storage.value}", "schema_version": "1"}
    header = file_header(plan, metadata)
    total = len(header) + sum(page_padded(tensor.nbytes) for tensor in plan)
    with path.open("wb") as file:
        writer = _HashingWriter(file)
        writer.write(header)
        for arrays in parts:
            for array in arrays:
                writer.write_padded(array)
            if progress is not None:
                progress(writer.written, total)
        file.flush()
        os.fsync(file.fileno())
    assert writer.written == total
    return hashlib.sha256(header[8:]).hexdigest(), FileRecord(
        size_bytes=total, sha256=writer.digest.hexdigest()
    )


def _matrices(weights: ModelWeights) -> Iterator[Iterator[npt.NDArray[Any]]]:
    """Yield the arrays in the order of `matrices_plan`; each part is released as in `_parts`."""
    for index in range(weights.config.num_layers):
        block = weights.block(index)
        for shape in block_matrices(weights.config, index):
            yield matrix_arrays(block.matrix(shape.name))
        weights.release(index)
    for shape in embedding_matrices(weights.config):
        yield matrix_arrays(weights.outer_matrix(shape.name))
    weights.release_embeddings()


def _parts(weights: ModelWeights) -> Iterator[Iterator[npt.NDArray[Any]]]:
    """Yield the arrays in the order of `weight_plan`.

    Each part is released when the next is asked for.
    """
    config, storage = weights.config, weights.weight_format.storage
    for index in range(config.num_layers):
        yield block_arrays(weights.block(index), config, storage, index)
        weights.release(index)
    for i, shape in enumerate(embedding_matrices(config)):
        if i:
            weights.release_embeddings()
        yield matrix_arrays(weights.outer_matrix(shape.name))
    vectors = model_vectors(config, storage)
    yield (np.asarray(weights.model_vector(x.name), dtype=np.float32) for x in vectors)
    weights.release_embeddings()


class _HashingWriter:
    """A writer to a file that hashes what it writes."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.digest = hashlib.sha256()
        self.written = 0

    def write(self, data: bytes | memoryview) -> None:
        """Write bytes unchanged."""
        self._file.write(data)
        self.digest.update(data)
        self.written += len(data)

    def write_padded(self, array: npt.NDArray[Any]) -> None:
        """Write the array's bytes, then zeros to the end of the page."""
        flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        self.write(flat.data)
        self.write(bytes(page_padded(flat.nbytes) - flat.nbytes))


def _copy_tokenizer(source: Path, directory: Path) -> None:
    for pattern in TOKENIZER_FILES:
        for path in sorted(source.glob(pattern)):
            target = directory / path.relative_to(source)
            target.parent.mkdir(exist_ok=True)
            shutil.copyfile(path, target)
            _sync_file(target)


def _has_byte_tokenizer(weights: ModelWeights) -> bool:
    source = weights.source
    if source is None:
        return True
    return source.is_dir() and is_quantised(source) and read_manifest(source).tokenizer == "bytes"


def _record(path: Path) -> FileRecord:
    return FileRecord(size_bytes=path.stat().st_size, sha256=file_sha256(path))


def _write_text(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8", newline="\n")
    _sync_file(path)


def _sync_file(path: Path) -> None:
    with path.open("rb+") as file:
        os.fsync(file.fileno())
