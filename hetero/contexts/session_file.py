"""Sessions on disk: the tokens of a context with its keys and values, verified when loaded.

A safetensors file: `tokens` int32 [position], `k.i` and `v.i` float32 [G, position, D] of every
layer; its metadata names the model and the hash of all bytes of the tensors. The
destination is complete or absent (`hetero.backends.host.files`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np
import numpy.typing as npt

from hetero.arguments import check_messages
from hetero.backends.host.files import atomic_writer
from hetero.errors import ModelError, UserError
from hetero.models import LoadedModel
from hetero.models.safetensors_file import SafetensorsFile
from hetero.runtime.engine import Engine

KIND: Final = "hetero-session"
SCHEMA_VERSION: Final = "1"
_DTYPES: Final = {"tokens": "I32"}
Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Session:
    """What a session file holds besides the keys and values."""

    tokens: list[int]
    messages: list[dict[str, Any]]


def save_session(
    path: Path, model: LoadedModel, engine: Engine, tokens: Sequence[int], messages: Sequence[Any]
) -> None:
    """Write the context. Raises `UserError` if it is empty or cannot be written."""
    if not tokens:
        raise UserError(f"{path}: there is nothing to save yet; generate something first")
    arrays: dict[str, Array] = {"tokens": np.asarray(tokens, dtype=np.int32)}
    for name, cache in _caches(model, engine):
        arrays[name] = np.ascontiguousarray(cache[:, : len(tokens)])
    metadata = _metadata(model, engine) | {
        "messages": json.dumps(list(messages)),
        "sha256": _digest(arrays.values()),
    }
    try:
        with atomic_writer(path) as file:
            _write(file, arrays, metadata)
    except OSError as error:
        raise UserError(
            f"{path}: cannot be written ({error.strerror or error}); choose another place, or make "
            "room"
        ) from error


def load_session(path: Path, model: LoadedModel, engine: Engine) -> Session:
    """Put a saved context into the engine. Raises `ModelError`, and changes nothing, if it is
    broken, of another model, or too long.
    """
    if not path.is_file():
        raise ModelError(f"{path}: there is no such session file; check the path")
    file = SafetensorsFile(path)
    _check_metadata(path, file, _metadata(model, engine))
    count = _check_shapes(path, file, model)
    if count > engine.max_seq_len:
        raise ModelError(
            f"{path}: holds {count} tokens, more than the context of {engine.max_seq_len}; open "
            "the model with a larger max_seq_len"
        )
    names = ["tokens", *(name for name, _ in _caches(model, engine))]
    if _digest(file.array(name) for name in names) != file.metadata.get("sha256"):
        raise ModelError(f"{path}: session file is damaged (its hash differs); save it again")
    tokens = [int(x) for x in file.array("tokens")]
    if any(not 0 <= x < model.config.vocab_size for x in tokens):
        raise ModelError(f"{path}: session file holds ids outside the vocabulary; save it again")
    messages = _messages(path, file.metadata.get("messages", "[]"))
    for name, cache in _caches(model, engine):
        cache[:, :count] = file.array(name)
    engine.position = count
    return Session(tokens, messages)


def _caches(model: LoadedModel, engine: Engine) -> Iterable[tuple[str, Array]]:
    """Every cache [G, C, D] with its name in the file."""
    for layer in range(model.config.num_layers):
        for kind in ("k", "v"):
            yield f"{kind}.{layer}", engine.pool[f"{kind}_cache.{layer}"].array


def _metadata(model: LoadedModel, engine: Engine) -> dict[str, str]:
    """What a session must have in common with the model that loads it."""
    return {
        "kind": KIND,
        "schema_version": SCHEMA_VERSION,
        "model": model.fingerprint,
        "weights": str(model.weights.weight_format),
        "plan": engine.plan.plan_id,
    }


def _digest(arrays: Iterable[Array]) -> str:
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def _write(file: BinaryIO, arrays: Mapping[str, Array], metadata: dict[str, str]) -> None:
    header: dict[str, Any] = {"__metadata__": metadata}
    offset = 0
    for name, array in arrays.items():
        header[name] = {
            "dtype": _DTYPES.get(name, "F32"),
            "shape": list(array.shape),
            "data_offsets": [offset, offset + array.nbytes],
        }
        offset += array.nbytes
    text = json.dumps(header).encode("utf-8")
    text = text.ljust(-(-(8 + len(text)) // 64) * 64 - 8)
    file.write(len(text).to_bytes(8, "little"))
    file.write(text)
    for array in arrays.values():
        file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)


def _check_metadata(path: Path, file: SafetensorsFile, wanted: Mapping[str, str]) -> None:
    if file.metadata.get("kind") != KIND:
        raise ModelError(f"{path}: is not a session file; give one that save_session wrote")
    reasons = {
        "schema_version": "was written by another version of hetero",
        "model": "belongs to another model, or the model has changed",
        "weights": f"was saved with --weights {file.metadata.get('weights')}",
        "plan": "was saved with another plan or device",
    }
    for name, reason in reasons.items():
        if file.metadata.get(name) != wanted[name]:
            raise ModelError(f"{path}: session {reason}; start a new session, or open it as it was")


def _check_shapes(path: Path, file: SafetensorsFile, model: LoadedModel) -> int:
    """Tokens of the session, when every tensor is there in its shape."""
    entry = file.entries.get("tokens")
    count = entry.shape[0] if entry is not None and len(entry.shape) == 1 else 0
    cache = ("F32", (model.config.kv_heads, count, model.config.head_dim))
    expected: dict[str, tuple[str, tuple[int, ...]]] = {"tokens": ("I32", (count,))}
    for layer in range(model.config.num_layers):
        expected |= {f"k.{layer}": cache, f"v.{layer}": cache}
    found = {name: (x.dtype, x.shape) for name, x in file.entries.items()}
    if not count or found != expected:
        raise ModelError(f"{path}: session file does not hold this model's cache; save it again")
    return count


def _messages(path: Path, text: object) -> list[dict[str, Any]]:
    try:
        found = json.loads(text) if isinstance(text, str) else None
        return check_messages(found) if found else []
    except (ValueError, RecursionError) as error:
        raise ModelError(
            f"{path}: session's messages are broken ({error}); save it again"
        ) from error
