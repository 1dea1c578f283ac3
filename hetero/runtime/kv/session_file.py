"""Contexts on disk: their tokens with keys and values, verified when loaded.

A safetensors file: `tokens` int32 [tokens], `k.i` and `v.i` float32 [G, cached, D] of every layer
for the first of them (all but what was chosen last). Where windows have lost tokens it is of
version 3: `first` int32 [1] is the first that layers with a window hold. Its metadata has the
`Identity` and the hash of all bytes of the tensors. Caches of codes are saved as stored: int8, of
the shape `CacheFormat.Q8.shape(G, cached, D)`. Any file is read into caches of any format. The
destination is complete or absent (`hetero.backends.host.files`).

Keys and values depend on the model and on the format that it computes in. They do not depend on
which device computed which part of a matmul, so a file says nothing of the plan (files of version 1
name one, which is not looked at).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np
import numpy.typing as npt

from hetero.arguments import check_messages
from hetero.backends.formats import CacheFormat
from hetero.backends.host.files import atomic_writer
from hetero.backends.kv_rows import CacheRows
from hetero.errors import ModelError, UserError
from hetero.models.safetensors_file import SafetensorsFile
from hetero.runtime.kv.kv_cache import KvCache

KIND: Final = "hetero-session"
WHOLE: Final = "2"  # schema version of files that have all tokens of every layer
SLID: Final = "3"
READABLE: Final = ("1", WHOLE, SLID)
NUMERICS: Final = "float32, keys after RoPE"
CODED: Final = "q8, keys after RoPE"
_DTYPES: Final = {"float32": "F32", "int32": "I32", "int8": "I8"}
Array = npt.NDArray[Any]


@dataclass(frozen=True, kw_only=True)
class Identity:
    """Everything that keys and values of equal tokens depend on, but the layout of the cache.

    `model` is `LoadedModel.fingerprint`, `weights` the weight format, `vocabulary` the number of
    ids.
    """

    model: str
    weights: str
    vocabulary: int

    @property
    def metadata(self) -> dict[str, str]:
        """Return the metadata of a file."""
        return {"model": self.model, "weights": self.weights, "numerics": NUMERICS}

    def of_file(self, *, coded: bool) -> dict[str, str]:
        """Return the identity in a file's metadata."""
        return self.metadata | {"numerics": CODED if coded else NUMERICS}


@dataclass(frozen=True)
class Session:
    """A file's contents: `cached` of the `tokens` have keys and values, which are still on disk.

    In layers with a window those from `first` on have them.
    """

    tokens: list[int]
    cached: int
    first: int
    messages: list[dict[str, Any]]
    file: SafetensorsFile

    def restore(self, cache: KvCache) -> None:
        """Copy the keys and values into a cache."""
        kv = _format_of(self.file)
        cache.begin(self.first, self.cached)
        for layer in range(cache.layout.layers):
            low, base = cache.resident(layer)
            start = self.first if cache.layout.windowed(layer) else 0
            size = cache.layout.heads(layer)[1]
            for kind, into in zip("kv", cache.rows(layer), strict=True):
                source = CacheRows(self.file.array(f"{kind}.{layer}"), kv, size)
                if kv.coded and cache.layout.kv.coded:
                    into.channels[:] = source.channels
                into.copy(low - base, source, low - start, self.cached - start)
            cache.wrote(layer, low, self.cached)
            if kv.coded and cache.layout.kv.coded:
                cache.wrote_channels(layer)
        cache.load_states([self.file.array(x) for x in _state_names(cache)], self.cached)


def save_session(
    path: Path,
    identity: Identity,
    cache: KvCache,
    tokens: Sequence[int],
    cached: int,
    messages: Sequence[Any] = (),
) -> None:
    """Write a context. Raises `UserError` if it is empty or cannot be written."""
    if not cached:
        what = f"no keys and values of its {len(tokens)} tokens" if tokens else "nothing to save"
        raise UserError(f"{path}: there is {what} yet; generate something first")
    arrays: dict[str, Array] = {"tokens": np.asarray(tokens, dtype=np.int32)}
    arrays |= {"first": np.array([cache.low], dtype=np.int32)} if cache.low else {}
    arrays |= {name: _saved(x, *rows) for name, x, rows in _caches(cache, cached)}
    arrays |= dict(zip(_state_names(cache), cache.state_arrays(), strict=True))
    metadata = identity.of_file(coded=cache.layout.kv.coded) | {
        "kind": KIND,
        "schema_version": SLID if cache.low else WHOLE,
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


def read_session(path: Path, identity: Identity, cache: KvCache, limit: int) -> Session:
    """Return a saved context, checked completely.

    `cache` is one that it must fit, `limit` the most tokens. Raises `ModelError` if it is broken,
    of another model, or too long.
    """
    if not path.is_file():
        raise ModelError(f"{path}: there is no such session file; check the path")
    file = SafetensorsFile(path)
    _check_metadata(path, file, identity)
    count, cached, first = _check_shapes(path, file, cache)
    if count > limit:
        raise ModelError(
            f"{path}: holds {count} tokens, more than the context of {limit}; open the model with "
            "a larger max_seq_len"
        )
    names = [
        "tokens",
        *(["first"] if first else []),
        *(name for name, *_ in _caches(cache, cached)),
        *_state_names(cache),
    ]
    if _digest(file.array(name) for name in names) != file.metadata.get("sha256"):
        raise ModelError(f"{path}: session file is damaged (its hash differs); save it again")
    tokens = [int(x) for x in file.array("tokens")]
    if any(not 0 <= x < identity.vocabulary for x in tokens):
        raise ModelError(f"{path}: session file holds ids outside the vocabulary; save it again")
    messages = _messages(path, file.metadata.get("messages", "[]"))
    return Session(tokens, cached, first, messages, file)


def _caches(cache: KvCache, cached: int) -> Iterator[tuple[str, CacheRows, tuple[int, int]]]:
    """Yield every cache with its name in the file, and the rows of the tokens that are there."""
    for layer in range(cache.layout.layers):
        low, base = cache.resident(layer)
        for kind, rows in zip("kv", cache.rows(layer), strict=True):
            yield f"{kind}.{layer}", rows, (low - base, cached - base)


def _state_names(cache: KvCache) -> list[str]:
    """Return the names of the layers' states in the file."""
    return [f"s.{i}" for i in range(len(cache.layout.states))]


def _saved(rows: CacheRows, start: int, stop: int) -> Array:
    """Return the rows of a cache, with the scales of coded channels."""
    if not rows.kv.coded:
        return np.ascontiguousarray(rows.array[:, start:stop], np.float32)
    return np.concatenate([rows.array[:, start:stop], rows.array[:, rows.tokens :]], axis=1)


def _format_of(file: SafetensorsFile) -> CacheFormat:
    """Return the format of its keys and values."""
    return CacheFormat.Q8 if file.metadata.get("numerics") == CODED else CacheFormat.F32


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
            "dtype": _DTYPES[array.dtype.name],
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


def _check_metadata(path: Path, file: SafetensorsFile, identity: Identity) -> None:
    metadata = file.metadata
    if metadata.get("kind") != KIND:
        raise ModelError(f"{path}: is not a session file; give one that save_session wrote")
    wanted = identity.metadata
    if metadata.get("schema_version") == "1":  # had no other
        metadata = {"numerics": NUMERICS, **metadata}
    reasons = {
        "model": "belongs to another model, or the model has changed",
        "weights": f"was saved with --weights {metadata.get('weights')}",
        "numerics": f"holds keys and values as {metadata.get('numerics')}",
    }
    known = {name: (value,) for name, value in wanted.items()} | {"numerics": (NUMERICS, CODED)}
    wrong = [reason for name, reason in reasons.items() if metadata.get(name) not in known[name]]
    if metadata.get("schema_version") not in READABLE:
        wrong.insert(0, "was written by another version of hetero")
    if wrong:
        raise ModelError(f"{path}: session {wrong[0]}; start a new session, or open it as it was")


def _check_shapes(path: Path, file: SafetensorsFile, cache: KvCache) -> tuple[int, int, int]:
    """Return the session's tokens, how many are cached, and the first that windows have.

    Every tensor must be there in its shape.
    """
    layout, kv = cache.layout, _format_of(file)
    own = file.entries.get("first")
    slid = own is not None and (own.dtype, own.shape) == ("I32", (1,))
    first = int(file.array("first")[0]) if slid else 0
    starts = [first * layout.windowed(layer) for layer in range(layout.layers)]
    count, dtype = _length(file, "tokens", 0), _DTYPES[kv.dtype.name]
    cached = _length(file, "k.0", 1) - kv.shape(0, 0, 0)[1] + starts[0]
    expected: dict[str, tuple[str, tuple[int, ...]]] = {"tokens": ("I32", (count,))}
    expected |= {"first": ("I32", (1,))} if slid else {}
    for layer, start in enumerate(starts):
        heads, size = layout.heads(layer)
        shape = kv.shape(heads, cached - start, size)
        expected |= {f"{kind}.{layer}": (dtype, shape) for kind in "kv"}
    for name, (_, state) in zip(_state_names(cache), layout.states, strict=True):
        expected[name] = ("F32", state)
    stored = {name: (x.dtype, x.shape) for name, x in file.entries.items()}
    seen = 0 if layout.sliding is None else layout.sliding.seen(cached)
    if not (0 < cached <= min(count, layout.capacity) and 0 <= first <= seen) or stored != expected:
        raise ModelError(f"{path}: session file does not hold this model's cache; save it again")
    return count, cached, first


def _length(file: SafetensorsFile, name: str, axis: int) -> int:
    """Return a tensor's length along an axis; 0 if it is absent."""
    entry = file.entries.get(name)
    return entry.shape[axis] if entry is not None and len(entry.shape) > axis else 0


def _messages(path: Path, text: object) -> list[dict[str, Any]]:
    try:
        messages = json.loads(text) if isinstance(text, str) else None
        return check_messages(messages) if messages else []
    except (ValueError, RecursionError) as error:
        raise ModelError(
            f"{path}: session's messages are broken ({error}); save it again"
        ) from error
