"""One bad input, and what makes it."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

GENERATE = ("generate", "{dir}", "hi", "--device", "npu", "--max-tokens", "1")
CHAT = (*GENERATE, "--chat")
OPEN_GGUF = ("generate", "{gguf}", "hi", "--device", "npu", "--max-tokens", "1")
OPEN_QUANTISED = ("generate", "{quantised}", "hi", "--device", "npu", "--max-tokens", "1")
LOAD_SESSION = ("chat", "{dir}", "--device", "npu", "--session", "{session}")
Change = Callable[[Path], None]


@dataclass(frozen=True)
class BadInput:
    """Words of a command in which `{dir}`, `{gguf}`, `{quantised}`, `{session}` and `{work}` stand
    for files of a work folder that `change` has spoilt, and what the sentence must say.

    `file_limit` is the largest file that may be written, bytes: a full disk.
    """

    name: str
    sentence: str
    words: Sequence[str] = GENERATE
    change: Change = field(default=lambda _: None)
    file_limit: int | None = None


def replaced(name: str, content: bytes | str | None) -> Change:
    """A file with other contents, or taken away."""

    def change(work: Path) -> None:
        path = work / name
        if content is None:
            path.unlink()
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())

    return change


def cut(name: str, length: int) -> Change:
    """A file that ends early (`length` negative: that many bytes are missing)."""

    def change(work: Path) -> None:
        data = (work / name).read_bytes()
        (work / name).write_bytes(data[:length])

    return change


def json_set(name: str, values: Mapping[str, Any], drop: Sequence[str] = ()) -> Change:
    """Fields of a JSON file, changed or dropped."""

    def change(work: Path) -> None:
        raw = json.loads((work / name).read_text(encoding="utf-8"))
        found = {k: v for k, v in (raw | dict(values)).items() if k not in drop}
        (work / name).write_text(json.dumps(found), encoding="utf-8")

    return change


def config(**values: Any) -> Change:
    """Fields of config.json."""
    return json_set("model/config.json", values)


def no_config(*names: str) -> Change:
    """config.json without these fields."""
    return json_set("model/config.json", {}, names)


def tensors(edit: Callable[[dict[str, Any]], None]) -> Change:
    """Tensors of model.safetensors, edited in place."""

    def change(work: Path) -> None:
        path = work / "model/model.safetensors"
        found = load_file(path)
        edit(found)
        save_file(found, path)

    return change


def spoilt(name: str, value: float) -> Change:
    """One value of a tensor."""

    def edit(found: dict[str, Any]) -> None:
        changed = found[name].copy()
        changed.reshape(-1)[3] = value
        found[name] = changed

    return tensors(edit)


def header(edit: Callable[[dict[str, Any]], Any], name: str = "model/model.safetensors") -> Change:
    """The JSON header of a safetensors file; `edit` changes it or returns another."""

    def change(work: Path) -> None:
        data = (work / name).read_bytes()
        length = int.from_bytes(data[:8], "little")
        raw = json.loads(data[8 : 8 + length])
        found = edit(raw)
        if not isinstance(found, bytes):
            found = json.dumps(raw if found is None else found).encode()
        (work / name).write_bytes(len(found).to_bytes(8, "little") + found + data[8 + length :])

    return change


# GGUF by hand: the writer of the library writes no broken files.


def text(value: str | bytes, length: int | None = None) -> bytes:
    """A string; `length` is what it says of itself."""
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data) if length is None else length) + data


def entry(name: str, kind: int, value: bytes) -> bytes:
    """A metadata entry of a type (4: uint32, 8: string, 9: array)."""
    return text(name) + struct.pack("<I", kind) + value


def array(kind: int, count: int, values: bytes = b"") -> bytes:
    """The value of an array entry."""
    return struct.pack("<IQ", kind, count) + values


def tensor_info(name: str, shape: Sequence[int], kind: int = 0, offset: int = 0) -> bytes:
    """A tensor's place."""
    return (
        text(name)
        + struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
        + struct.pack("<IQ", kind, offset)
    )


def raw_gguf(
    entries: Sequence[bytes] = (),
    infos: Sequence[bytes] = (),
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    entry_count: int | None = None,
    tensor_count: int | None = None,
    body: int = 64,
) -> Change:
    """A GGUF file of these parts; the counts may lie."""
    counts = (
        len(infos) if tensor_count is None else tensor_count,
        len(entries) if entry_count is None else entry_count,
    )
    data = magic + struct.pack("<IQQ", version, *counts) + b"".join(entries) + b"".join(infos)
    data += bytes(-len(data) % 32) + bytes(body)
    return replaced("model.gguf", data)


def gguf_tensor(name: str, value: float) -> Change:
    """One value of a tensor of the good GGUF file."""

    def change(work: Path) -> None:
        from hetero.models.gguf import GgufFile

        path = work / "model.gguf"
        start = GgufFile(path).tensors[name].start
        data = bytearray(path.read_bytes())
        data[start : start + 4] = np.float32(value).tobytes()
        path.write_bytes(data)

    return change
