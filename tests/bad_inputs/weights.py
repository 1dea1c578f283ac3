"""safetensors: headers, shapes, shards, values; directories of `hetero quantize`; sessions."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np

from tests.bad_inputs.case import (
    GENERATE,
    LOAD_SESSION,
    OPEN_QUANTISED,
    BadInput,
    Change,
    cut,
    header,
    json_set,
    replaced,
    spoilt,
    tensors,
)

FILE = "model/model.safetensors"
Q, K = "model.layers.0.self_attn.q_proj.weight", "model.layers.0.self_attn.k_proj.weight"
NORM, EMBED = "model.norm.weight", "model.embed_tokens.weight"


def entry(**values: Any) -> Change:
    """Fields of one tensor's entry."""
    return header(lambda raw: raw[Q].update(values))


def length(value: int) -> Change:
    """What the file says of its header's length."""

    def change(work: Path) -> None:
        data = (work / FILE).read_bytes()
        (work / FILE).write_bytes(value.to_bytes(8, "little") + data[8:])

    return change


def shards(index: Any) -> Change:
    """An index of shards in place of the single file."""

    def change(work: Path) -> None:
        (work / FILE).rename(work / "model/a.safetensors")
        text = index if isinstance(index, str) else json.dumps(index)
        (work / "model/model.safetensors.index.json").write_text(text, encoding="utf-8")

    return change


def pickled(work: Path) -> None:
    (work / FILE).rename(work / "model/pytorch_model.bin")


def folder(work: Path) -> None:
    (work / FILE).unlink()
    (work / FILE).mkdir()


def swap(first: str, second: str) -> Change:
    """Two tensors' entries, exchanged."""

    def edit(raw: dict[str, Any]) -> None:
        raw[first], raw[second] = raw[second], raw[first]

    return header(edit)


def renamed(old: str, new: str) -> Change:
    return tensors(lambda found: found.update({new: found.pop(old)}))


def value(name: str, array: Any) -> Change:
    return tensors(lambda found: found.update({name: array}))


HEADERS: tuple[tuple[str, Change, str], ...] = (
    ("no bytes", replaced(FILE, b""), "a safetensors file has at least 8 bytes, got 0"),
    ("seven bytes", replaced(FILE, b"1234567"), "at least 8 bytes, got 7"),
    ("length 2^64-1", length(2**64 - 1), "header of 18446744073709551615 bytes does not fit"),
    ("length 2^63", length(2**63), "does not fit the file"),
    ("length 90 MB", length(90_000_000), "does not fit the file"),
    ("length 0", length(0), "header is not valid JSON"),
    ("no UTF-8", header(lambda _: b"\xff\xfe{}"), "header is not valid JSON"),
    ("no JSON", header(lambda _: b"{'a': 1}"), "header is not valid JSON"),
    ("a list", header(lambda _: b"[]"), "header must be a JSON object"),
    ("nested deep", header(lambda _: b"[" * 100_000), "header is not valid JSON"),
    ("a number of 5000 digits", header(lambda _: b'{"a": ' + b"9" * 5000 + b"}"),
     "header is not valid JSON"),
    ("a name twice", header(lambda _: b'{"a": {}, "a": {}}'), "a name occurs twice"),
    ("dtype missing", header(lambda raw: raw[Q].pop("dtype") and None), "needs dtype, shape and"),
    ("dtype null", entry(dtype=None), "has the data type None, supported are F32, F16, BF16"),
    ("dtype unknown", entry(dtype="F8_E4M3"), "has the data type F8_E4M3, supported are F32"),
    ("dtype a list", entry(dtype=["F32"]), "has the data type ['F32'], supported are"),
    ("shape a number", entry(shape=64), "has the shape 64"),
    ("shape a text", entry(shape="8,8"), "has the shape 8,8"),
    ("shape negative", entry(shape=[-8, -8]), "which are not sizes"),
    ("shape floating", entry(shape=[8.0, 8]), "which are not sizes"),
    ("shape nested", entry(shape=[[8], 8]), "which are not sizes"),
    ("shape of 2^64", entry(shape=[2**64, 2**64]), "in F32 has"),
    ("shape of a million", entry(shape=[1] * 100_000), "in F32 has 4 bytes, got 256"),
    ("shape with zero", entry(shape=[0, 8]), "has 0 bytes, got 256"),
    ("offsets missing", header(lambda raw: raw[Q].pop("data_offsets") and None), "needs dtype"),
    ("offsets of three", entry(data_offsets=[0, 256, 1]), "needs dtype, shape and data_offsets"),
    ("offsets backwards", entry(data_offsets=[256, 0]), "has 256 bytes, got -256"),
    ("offsets negative", entry(data_offsets=[-256, 0]), "which are not sizes"),
    ("offsets beyond the file", entry(data_offsets=[2**60, 2**60 + 256]), "starts at byte"),
    ("offsets true", entry(data_offsets=[True, 256]), "which are not sizes"),
    ("an entry that is a number", header(lambda raw: raw.update({Q: 5})), "needs dtype, shape"),
    ("two at one place", header(lambda raw: raw.update({"copy": raw[Q]})), "starts at byte"),
    ("a hole", header(lambda raw: raw.pop(K) and None), "instead of"),
    ("cut in the header", cut(FILE, 100), "does not fit the file"),
    ("cut in the data", cut(FILE, -100), "tensors end at byte"),
    ("metadata a list", header(lambda raw: raw.update({"__metadata__": 5, Q: 5})), "needs dtype"),
    ("a folder", folder, "has no model.safetensors"),
    ("not there", replaced(FILE, None), "has no model.safetensors; download"),
    ("pickled", pickled, "pickled weights (pytorch_model.bin) are not supported"),
)  # fmt: skip
TENSORS: tuple[tuple[str, Change, str], ...] = (
    ("missing", tensors(lambda x: [x.pop(NORM)].clear()), f"tensor {NORM} is missing; download"),
    ("none", tensors(lambda x: x.clear()), "is missing (and"),
    ("another name", renamed(NORM, "norm.weight"), "is missing"),
    ("one too many", value("extra", np.zeros(4, np.float32)), "tensor extra does not belong to a"),
    ("two exchanged", swap(Q, K), "must have the shape"),
    ("a wrong shape", value(Q, np.zeros((8, 9), np.float32)), "must have the shape [8, 8] by"),
    ("a wrong rank", value(NORM, np.zeros((8, 1), np.float32)), "must have the shape [8] by"),
    ("integers", value(Q, np.zeros((8, 8), np.int32)), "must be one of F32, F16, BF16, got I32"),
    ("doubles", value(Q, np.zeros((8, 8))), "must be one of F32, F16, BF16, got F64"),
    ("a matrix with nan", spoilt(Q, float("nan")), f"tensor {Q} holds a value that is not finite"),
    ("a matrix with inf", spoilt(Q, float("inf")), f"tensor {Q} holds a value that is not finite"),
    ("embeddings with -inf", spoilt(EMBED, float("-inf")), "holds a value that is not finite"),
    ("a norm with nan", spoilt(NORM, float("nan")), f"tensor {NORM} holds a value that is not"),
    ("a value beyond 4 bits", spoilt(Q, 1e30), "beyond what this weight format stores"),
)  # fmt: skip
SHARDS: tuple[tuple[str, Any, str], ...] = (
    ("no map", {}, "weight_map must be an object"),
    ("a list", {"weight_map": []}, "weight_map must be an object"),
    ("empty", {"weight_map": {}}, "weight_map must be an object"),
    ("not JSON", "{", "is not valid JSON"),
    ("a file that is not there", {"weight_map": {NORM: "b.safetensors"}}, "is missing, but"),
    ("a path above", {"weight_map": {NORM: "../a.safetensors"}}, "must lie in a file of this"),
    ("an absolute path", {"weight_map": {NORM: "/etc/passwd"}}, "must lie in a file of this"),
    ("no name", {"weight_map": {NORM: None}}, "must lie in a file of this directory, got None"),
    ("a tensor that is not there", {"weight_map": {"x": "a.safetensors"}}, "tensor x is missing"),
    ("not all tensors", {"weight_map": {NORM: "a.safetensors"}}, "is missing (and"),
)
MANIFEST = "quantised/hetero.json"
SCALES = {"text_sha256": "0" * 64, "tokens": 40, "outliers": "none", "matmuls": {}}
QUANTISED: tuple[tuple[str, Change, str], ...] = (
    ("manifest not JSON", replaced(MANIFEST, "{"), "hetero.json: is not valid JSON"),
    ("another kind", json_set(MANIFEST, {"kind": "x"}), "kind must be 'hetero-quantized'"),
    ("a later version", json_set(MANIFEST, {"schema_version": 99}), "must be 1, 2, 3 or 4, got 99"),
    ("calibration of 4 bits", json_set(MANIFEST, {"schema_version": 2, "calibration": SCALES}),
     "calibration does not belong to w4a16 in a manifest of version 2"),
    ("calibration of a choice that is none",
     json_set(MANIFEST, {"schema_version": 2, "calibration": {**SCALES, "outliers": "most"}}),
     "outliers are 15% (of the matmuls), none, all or paper, got 'most'"),
    ("calibration of no text",
     json_set(MANIFEST, {"schema_version": 2, "calibration": {**SCALES, "text_sha256": ""}}),
     "calibration.text_sha256: String should match pattern"),
    ("no files", json_set(MANIFEST, {}, ["files"]), "files: Field required"),
    ("files empty", json_set(MANIFEST, {"files": {}}), "files must list weights.safetensors"),
    ("a field too many", json_set(MANIFEST, {"extra": 1}), "extra: Extra inputs are not permitted"),
    ("an unknown format", json_set(MANIFEST, {"weight_format": "w3"}), "weight_format: Input"),
    ("an unknown storage", json_set(MANIFEST, {"storage": "q3"}), "storage: Input should be"),
    ("a name of another type", json_set(MANIFEST, {"name": 5}), "name: Input should be"),
    ("another header hash", json_set(MANIFEST, {"header_sha256": "0" * 64}), "does not have the"),
    ("weights cut", cut("quantised/weights.safetensors", -4096), "bytes by hetero.json, got"),
    ("weights gone", replaced("quantised/weights.safetensors", None), "is missing, but"),
    ("config changed", json_set("quantised/config.json", {"rms_norm_eps": 1e-6}), "bytes by"),
    ("config gone", replaced("quantised/config.json", None), "has no config.json"),
    ("tokenizer changed", replaced("quantised/tokenizer.json", "{}"), "bytes by hetero.json"),
)  # fmt: skip


def damaged(name: str, place: int) -> Change:
    """One byte of a file, changed."""

    def change(work: Path) -> None:
        data = bytearray((work / name).read_bytes())
        data[place] ^= 0x20
        (work / name).write_bytes(data)

    return change


def session(**values: Any) -> Change:
    """Metadata of the session file."""
    return header(lambda raw: raw["__metadata__"].update(values), "session")


def a_model_file(work: Path) -> None:
    (work / "session").write_bytes((work / FILE).read_bytes())


def strange_token(work: Path) -> None:
    """A token that the model does not have, under the right hash."""
    data = bytearray((work / "session").read_bytes())
    start = 8 + int.from_bytes(data[:8], "little")
    old = hashlib.sha256(data[start:]).hexdigest().encode()
    data[start : start + 4] = (9999).to_bytes(4, "little")  # tokens come first
    found = bytes(data).replace(old, hashlib.sha256(data[start:]).hexdigest().encode())
    assert found != bytes(data)
    (work / "session").write_bytes(found)


SESSIONS: tuple[tuple[str, Change, str], ...] = (
    ("no bytes", replaced("session", b""), "at least 8 bytes"),
    ("a text", replaced("session", b"hello, this is no session"), "does not fit the file"),
    ("cut", cut("session", -9), "tensors end at byte"),
    ("a key changed", damaged("session", -9), "session file is damaged (its hash differs)"),
    ("another kind", session(kind="x"), "is not a session file"),
    ("no metadata", header(lambda raw: raw.pop("__metadata__") and None, "session"),
     "is not a session file"),
    ("metadata a list", header(lambda raw: raw.update({"__metadata__": []}), "session"),
     "is not a session file"),
    ("a later version", session(schema_version="9"), "written by another version of hetero"),
    ("another model", session(model="0" * 64), "belongs to another model"),
    ("other numerics", session(numerics="x"), "holds keys and values as x; start a new session"),
    ("other weights", session(weights="f16"), "was saved with --weights f16"),
    ("weights a list", session(weights=[1]), "was saved with --weights"),
    ("messages not JSON", session(messages="[{"), "session's messages are broken"),
    ("messages of numbers", session(messages="[5]"), "session's messages are broken"),
    ("a message of an unknown role", session(messages='[{"role": "x", "content": ""}]'),
     "role must be one of"),
    ("messages nested deep", session(messages="[" * 100_000), "session's messages are broken"),
    ("a number of 5000 digits", session(messages="9" * 5000), "session's messages are broken"),
    ("no tokens", header(lambda raw: raw.pop("tokens") and None, "session"), "instead of"),
    ("a cache of another shape",
     header(lambda raw: raw["k.0"].update(shape=list(reversed(raw["k.0"]["shape"]))), "session"),
     "does not hold this model's cache"),
    ("a token of another vocabulary", strange_token, "holds ids outside the vocabulary"),
    ("a model file", a_model_file, "is not a session file"),
)  # fmt: skip

CASES = [
    *(BadInput(f"safetensors: {n}", s, change=c) for n, c, s in HEADERS),
    *(BadInput(f"tensors: {n}", s, change=c) for n, c, s in TENSORS),
    *(BadInput(f"shards: {n}", s, change=shards(i)) for n, i, s in SHARDS),
    *(BadInput(f"quantised: {n}", s, OPEN_QUANTISED, c) for n, c, s in QUANTISED),
    BadInput("quantised: another format", "holds q4 weights, which serve w4a16 and w4a8, not f16",
             (*OPEN_QUANTISED, "--weights", "f16")),
    BadInput("a value beyond fp16", "beyond what this weight format stores (65504)",
             (*GENERATE, "--weights", "f16"), spoilt(Q, 1e30)),
    *(BadInput(f"session: {n}", s, LOAD_SESSION, c) for n, c, s in SESSIONS),
    BadInput("session: longer than the context", "open the model with a larger max_seq_len",
             (*LOAD_SESSION, "--max-seq-len", "2")),
]  # fmt: skip
