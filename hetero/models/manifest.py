"""`hetero.json`: the contents of a directory written by `hetero quantize`, and their checksums."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Final, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from hetero.backends.formats import StorageFormat, WeightFormat
from hetero.backends.host.files import read_document
from hetero.errors import ModelError
from hetero.models.calibration_record import Calibration
from hetero.models.fields import read_json_object

MANIFEST_FILE = "hetero.json"
WEIGHTS_FILE = "weights.safetensors"
SCHEMA_VERSION: Final = 4  # 1: without `calibration`; 2: `also`; 3: `calibration.excess`
READS: Final = (1, 2, 3, 4)
KIND: Final = "hetero-quantized"

_HASH_READ_BYTES = 1 << 22
_REMEDY = "run hetero quantize again"


class FileRecord(BaseModel):
    """Size and SHA-256 of a file."""

    model_config = ConfigDict(defer_build=True, frozen=True, extra="forbid")

    size_bytes: int = Field(ge=0)
    sha256: str = Field(pattern="^[0-9a-f]{64}$")


class AlsoStored(BaseModel):
    """All matrices in another format, in a weight file of their own."""

    model_config = ConfigDict(defer_build=True, frozen=True, extra="forbid")

    weight_format: WeightFormat
    header_sha256: str = Field(pattern="^[0-9a-f]{64}$")

    @property
    def file(self) -> str:
        """Return the file's name in the directory."""
        return f"weights-{self.weight_format.storage.value}.safetensors"


class Manifest(BaseModel):
    """Contents of `hetero.json`. `files` are the directory's other files, by relative path.

    `header_sha256` is of the weight file's header, which is checked whenever it is opened;
    `tokenizer` says whether text becomes ids by the tokenizer files or byte by byte. `calibration`
    is there if activations have static scales that come from a text; `also` are the matrices in
    other formats.
    """

    model_config = ConfigDict(defer_build=True, frozen=True, extra="forbid")

    kind: Literal["hetero-quantized"] = KIND
    schema_version: Literal[1, 2, 3, 4] = SCHEMA_VERSION
    name: str
    weight_format: WeightFormat
    storage: StorageFormat
    tokenizer: Literal["files", "bytes"]
    header_sha256: str = Field(pattern="^[0-9a-f]{64}$")
    files: dict[str, FileRecord]
    source: str = ""
    hetero_version: str = ""
    calibration: Calibration | None = None
    also: tuple[AlsoStored, ...] = ()

    @property
    def stored(self) -> tuple[WeightFormat, ...]:
        """Return the formats that the weights were stored for, the model's own first."""
        return (self.weight_format, *(x.weight_format for x in self.also))

    @model_validator(mode="after")
    def _also_differs(self) -> Self:
        storages = [x.storage for x in self.stored]
        if len(set(storages)) < len(storages) or (self.also and self.schema_version < 3):
            raise ValueError(
                f"also must name other storages than {self.storage}, each once, in a manifest of "
                f"version 3, got {', '.join(self.stored)} in version {self.schema_version}"
            )
        if any(x.weight_format.activations.static for x in self.also):
            raise ValueError("also cannot have static scales: these are of the first format")
        return self

    @model_validator(mode="after")
    def _calibration_belongs(self) -> Self:
        if self.calibration is None:
            return self
        if self.schema_version == 1 or not self.weight_format.activations.static:
            raise ValueError(
                f"calibration does not belong to {self.weight_format} in a manifest of version "
                f"{self.schema_version}"
            )
        return self


def is_quantised(directory: Path) -> bool:
    """Return whether a directory was written by `hetero quantize`."""
    return os.path.isfile(directory / MANIFEST_FILE)  # false where it cannot be looked for


def read_manifest(directory: Path) -> Manifest:
    """Read `hetero.json`. Raises `ModelError`."""
    path = directory / MANIFEST_FILE
    raw = read_json_object(path)
    version = raw.get("schema_version")
    if raw.get("kind") != KIND:
        raise ModelError(f"{path}: kind must be {KIND!r}, got {raw.get('kind')!r}; {_REMEDY}")
    if version not in READS:
        known = f"{', '.join(map(str, READS[:-1]))} or {READS[-1]}"
        raise ModelError(
            f"{path}: schema_version must be {known}, got {version!r}; upgrade hetero, or {_REMEDY}"
        )
    try:
        return Manifest.model_validate_json(read_document(path))
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"]) or "the manifest"
        raise ModelError(f"{path}: {field}: {first['msg']}; {_REMEDY}") from error


def check_files(directory: Path, manifest: Manifest, *, verify: bool) -> None:
    """Compare the sizes of all files and the hashes of small ones; with `verify`, of all.

    Raises `ModelError` that names the first file that differs.
    """
    weights = (WEIGHTS_FILE, *(x.file for x in manifest.also))
    if not manifest.files.keys() >= {*weights, "config.json"}:
        raise ModelError(
            f"{directory / MANIFEST_FILE}: files must list {', '.join(weights)} and config.json; "
            f"{_REMEDY}"
        )
    for name, record in manifest.files.items():
        path = directory / name
        if Path(name).is_absolute() or ".." in Path(name).parts or not path.is_file():
            raise ModelError(f"{path}: is missing, but {MANIFEST_FILE} names it; {_REMEDY}")
        size = path.stat().st_size
        if size != record.size_bytes:
            raise ModelError(
                f"{path}: must have {record.size_bytes} bytes by {MANIFEST_FILE}, got {size}; "
                f"{_REMEDY}"
            )
        if (verify or name not in weights) and file_sha256(path) != record.sha256:
            raise ModelError(
                f"{path}: does not have the SHA-256 that {MANIFEST_FILE} names; {_REMEDY}"
            )


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file. Raises `ModelError` if it cannot be read."""
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while chunk := file.read(_HASH_READ_BYTES):
                digest.update(chunk)
    except OSError as error:
        raise ModelError(
            f"{path}: cannot be read ({error.strerror or error}); check its permissions"
        ) from error
    return digest.hexdigest()
