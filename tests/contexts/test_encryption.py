"""What lies on the disk tells nothing without the key, and opens nowhere but in its place."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hetero import LLM, Service, UserError
from hetero.contexts.budget import ByteBudget
from hetero.contexts.chunk_files import ChunkFiles
from hetero.contexts.chunk_format import ChunkError
from hetero.contexts.chunks import Chunk
from hetero.contexts.codec import CHUNK_TOKENS, RAW, ChunkCodec
from hetero.contexts.encryption import SealError, Vault, vault_of
from hetero.contexts.text_log import Text, TextLog
from hetero.serving.database import Records, StoredResponse
from hetero.serving.errors import ApiError
from tests.contexts.fake_service import LAYOUT
from tests.support import tiny_files

pytest.importorskip("cryptography")
KEY, OTHER = bytes(range(32)), bytes(32)
SECRET = "hi hi hi hi hi hi hi hi hi"


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = tiny_files.write_directory(tmp_path_factory.mktemp("model") / "model")
    with LLM(str(folder), device="npu") as opened:
        yield opened


def service(llm: LLM, folder: Path, key: bytes | None = KEY) -> Service:
    given: dict[str, Any] = {"context_memory": "2MiB", "context_disk": "1MiB", "kv_bits": "raw"}
    return Service(llm, directory=folder, recompute=False, encryption_key=key, **given)


def everything(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file())


def test_a_box_opens_what_it_sealed_for_that_place_alone() -> None:
    data, salt = os.urandom(300), os.urandom(32)
    box, others = (
        Vault(KEY).box("text", salt),
        [
            Vault(OTHER).box("text", salt),
            Vault(KEY).box("chunks", salt),
            Vault(KEY).box("text", os.urandom(32)),
        ],
    )
    sealed, nth = box.seal(data, b"here"), box.seal_nth(7, data, b"here")
    assert box.open(sealed, b"here") == box.open_nth(7, nth, b"here") == data
    assert box.seal(data, b"here") != sealed
    wrong = [(other.open, (sealed, b"here")) for other in others] + [(box.open, (sealed, b"there"))]
    wrong += [(box.open_nth, (7, nth, b"there")), (box.open_nth, (8, nth, b"here"))]  # type: ignore[list-item]
    for at in (0, 11, 12, 200, len(sealed) - 1):
        changed = bytearray(sealed)
        changed[at] ^= 1
        wrong.append((box.open, (bytes(changed), b"here")))
    wrong += [(box.open, (sealed[:n], b"here")) for n in (0, 5, 12, 20, 300)]
    for call, arguments in wrong:
        with pytest.raises(SealError):
            call(*arguments)  # type: ignore[arg-type]


def test_a_context_comes_back_by_its_key_and_nothing_is_told_without(
    llm: LLM, tmp_path: Path
) -> None:
    with service(llm, tmp_path / "plain", None) as opened:
        app = opened.bind("a")
        wanted = [app.new_context(chat=False).call(SECRET, max_tokens=4).tokens]
        (context,) = app.contexts()
        wanted.append(context.call(SECRET, max_tokens=4).tokens)
        text = context.tokens
    tokens = json.dumps(list(text)[:8], separators=(",", ":"))[1:-1].encode()
    assert tokens in everything(tmp_path / "plain"), "what is looked for would be found"
    with service(llm, tmp_path / "c") as opened:
        app = opened.bind("a")
        assert app.new_context(chat=False).call(SECRET, max_tokens=4).tokens == wanted[0]
        other = app.new_context(chat=False)
        other.call("hi", max_tokens=4)
        root, secret = app.root, opened._directory._secret
        opened.swap.drain()
        assert list(tmp_path.glob("c/apps/*/*.kv"))
    with service(llm, tmp_path / "c") as opened:
        first, second = opened.bind("a").contexts()
        second.delete()  # what is left of its file is sealed again
        assert first.call(SECRET, max_tokens=4).tokens == wanted[1]
        assert first.last_switch is not None
        assert first.last_switch.loaded_bytes > 0
        assert first.tokens == text
    kept = everything(tmp_path / "c")
    for told in (tokens, SECRET.encode(), b'"keep"', b'"density"', root.hex().encode(), secret):
        assert told not in kept
    assert secret.hex().encode() not in kept


def test_chunks_are_sealed_each_in_its_place(tmp_path: Path) -> None:
    """Blocks that changed places, and changed ones, do not open."""
    vault, codec = Vault(KEY), ChunkCodec(LAYOUT)
    files = ChunkFiles(tmp_path, codec, ByteBudget(1 << 30), vault)
    shape = LAYOUT.layers, 2, LAYOUT.kv_heads, CHUNK_TOKENS, LAYOUT.head_dim
    values = np.random.default_rng().standard_normal(shape).astype(np.float32)
    codes = codec.encode(values, RAW)
    chunks = [Chunk("a", bytes([i]) * 32, 16 * i, (1,) * 16, RAW) for i in range(2)]
    for chunk, place in zip(chunks, files.write([(c, codes) for c in chunks]), strict=True):
        chunk.place = place
    (path,) = tmp_path.glob("*.kv")
    sound = path.read_bytes()
    size = codec.plane_bytes(CHUNK_TOKENS, RAW, 0)[0]
    assert codes.planes[0][0].tobytes() not in sound

    def read(vault: Vault | None = vault) -> bool:
        again = ChunkFiles(tmp_path, codec, ByteBudget(1 << 30), vault)
        found = again.scan()
        if not found:
            return False
        empty = [codec.empty(CHUNK_TOKENS, RAW) for _ in chunks]
        for each in empty:
            for plane in each.planes:
                plane[:] = 255
        try:
            reader = again.reader(chunks)
            for layer in range(codec.layers):
                reader.layer(layer, empty)
            reader.close()
        except ChunkError:
            return False
        pairs = [(a, b) for x in empty for a, b in zip(x.planes, codes.planes, strict=True)]
        return all(np.array_equal(a, b) for a, b in pairs)

    assert read()
    piece = size + 16
    data = len(sound) - 2 * codec.layers * len(codes.planes) * piece
    swapped = bytearray(sound)
    one, two = slice(data, data + piece), slice(data + piece, data + 2 * piece)
    swapped[one], swapped[two] = sound[two], sound[one]
    changed = bytearray(sound)
    changed[np.random.default_rng().integers(len(sound))] ^= 1
    for wrong in (swapped, changed, sound[:-1]):
        path.write_bytes(wrong)
        assert not read()
        path.write_bytes(sound)
    assert not read(Vault(OTHER)), "and a file of another key goes"
    assert not path.exists()


def test_a_log_with_a_torn_end_goes_on_and_records_do_not_change_places(tmp_path: Path) -> None:
    vault, budget, path = Vault(KEY), ByteBudget(1 << 20), tmp_path / "ctx-0.log"
    log = TextLog.create(path, budget, Text(system="Be short."), vault=vault)
    sizes = [path.stat().st_size]
    for count in (3, 6, 9):
        log.append(range(count))
        sizes.append(path.stat().st_size)
    sound = path.read_bytes()
    assert TextLog.open(path, budget, vault=vault).text.tokens == list(range(9))
    path.write_bytes(sound[:-5])
    again = TextLog.open(path, budget, vault=vault)
    assert again.text.tokens == list(range(6))
    again.append([7, 7])
    again.append([7, 7, 8])
    assert TextLog.open(path, budget, vault=vault).text.tokens == [7, 7, 8]
    second, third, last = (sound[a:b] for a, b in pairwise(sizes))
    for wrong in (sound[: sizes[0]] + third + second + last, sound[: sizes[1]] + last):
        path.write_bytes(wrong)
        with pytest.raises(UserError, match="is damaged at byte"):
            TextLog.open(path, budget, vault=vault)
    path.rename(tmp_path / "ctx-1.log")
    with pytest.raises(UserError, match="is damaged at byte"):
        TextLog.open(tmp_path / "ctx-1.log", budget, vault=vault)


def test_responses_are_sealed_for_their_app(tmp_path: Path) -> None:
    path, vault = tmp_path / "responses.sqlite", Vault(KEY)
    records = Records(path, vault=vault)
    stored = StoredResponse({"id": "r1", "text": SECRET}, [{"role": "user", "content": SECRET}])
    records.keep_response("a", stored)
    records.new_conversation("a", "c1", {"topic": SECRET}, [{"id": "i1", "x": SECRET}], 9)
    records.keep_slot("a", SECRET, "9" * 32)
    records.close()
    assert SECRET.encode() not in path.read_bytes()
    records = Records(path, vault=vault)
    assert records.response("a", "r1") == stored
    assert records.items("a", "c1") == [{"id": "i1", "x": SECRET}]
    found = records.conversation("a", "c1")
    assert found is not None
    assert found[1:] == ({"topic": SECRET}, [])
    assert records.slot("a", SECRET) == "9" * 32
    assert records.slot("b", SECRET) is None
    records._db.execute("update responses set app='b'")
    with pytest.raises(ApiError, match="is damaged"):
        records.response("b", "r1")
    records.close()
    for wrong, sentence in ((None, "is encrypted: give the key"), (Vault(OTHER), "another key")):
        with pytest.raises(UserError, match=sentence):
            Records(path, vault=wrong)
    Records(tmp_path / "plain").close()
    with pytest.raises(UserError, match="is not encrypted"):
        Records(tmp_path / "plain", vault=vault)


def test_keys_of_files_and_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "key"
    for data in (KEY, KEY.hex().encode(), b" " + KEY.hex().upper().encode() + b"\r\n"):
        path.write_bytes(data)
        path.chmod(0o600)
        found = vault_of(path)
        assert found is not None
        assert found.key_id == Vault(KEY).key_id != Vault(OTHER).key_id
    assert KEY.hex()[:8] not in found.key_id
    path.chmod(0o440)
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(tmp_path))
    assert vault_of(path) is not None, "as systemd hands it over"
    monkeypatch.delenv("HETERO_ENCRYPTION_KEY", raising=False)
    assert vault_of(None) is None
    monkeypatch.setenv("HETERO_ENCRYPTION_KEY", OTHER.hex())
    found = vault_of(None)
    assert found is not None
    assert found.key_id == Vault(OTHER).key_id
    assert vault_of(path) is not None
