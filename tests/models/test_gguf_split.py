"""GGUF models that are split into several files, and files of another byte order or no UTF-8."""

from __future__ import annotations

import shutil
from pathlib import Path

import gguf
import numpy as np
import pytest

from hetero import LLM
from hetero.errors import ModelError
from hetero.models import default_weights, hub, model_spec, open_model
from hetero.models.gguf import GgufFile, packed_store, read_tokenizer
from hetero.models.gguf.file import NO_UTF8
from hetero.models.hub import models_here
from hetero.models.split_files import model_name, split_names
from tests.models.gguf_files import PIECES, write_tiny
from tests.models.test_gguf import check_same_weights

FILES = [f"m-0000{i}-of-00003.gguf" for i in (1, 2, 3)]  # eleven tensors, four to a file


@pytest.fixture
def split(tmp_path: Path) -> Path:
    """The directory of a model in three files."""
    write_tiny(tmp_path / "m.gguf", split=4)
    assert sorted(x.name for x in tmp_path.glob("*.gguf")) == FILES
    return tmp_path


@pytest.mark.parametrize("name", FILES)
def test_any_file_of_a_split_model_opens_it(name: str, split: Path) -> None:
    whole = open_model(write_tiny(split / "whole.gguf"), weights="f32")
    model = open_model(split / name, weights="f32")
    assert (model.name, model.source) == ("m", split / FILES[0])
    check_same_weights(model, whole)
    assert model.encode("abc") == whole.encode("abc")
    assert default_weights(split / name) == default_weights(split / "whole.gguf")
    assert model_spec(split / name).nodes == model_spec(split / "whole.gguf").nodes


def test_a_split_model_gives_the_same_answer(split: Path) -> None:
    answers = []
    for path in (split / FILES[1], write_tiny(split / "whole.gguf")):
        with LLM(str(path), device="npu") as llm:
            answers.append(llm.generate([3, 4, 5], max_tokens=5, chat=False).tokens)
    assert answers[0] == answers[1]


def test_a_missing_file_is_named(split: Path) -> None:
    (split / FILES[1]).unlink()
    with pytest.raises(ModelError) as caught:
        open_model(split / FILES[2])
    assert str(caught.value) == (
        f"{split / FILES[2]}: the model has 3 files, of which {FILES[1]} is not there; download it "
        "into the same directory"
    )
    (split / FILES[0]).unlink()
    with pytest.raises(ModelError, match=r"m-00001-of-00003.gguf is not there \(and 1 more\)"):
        open_model(split / FILES[2])


def test_a_file_of_another_name_is_refused(split: Path) -> None:
    (split / FILES[0]).rename(split / "model.gguf")
    with pytest.raises(ModelError, match=r"one of 3 files of a model \(split.count\), which are"):
        open_model(split / "model.gguf")
    (split / "model.gguf").rename(split / "m-00001-of-00004.gguf")
    with pytest.raises(ModelError, match="llama-gguf-split --merge"):
        open_model(split / "m-00001-of-00004.gguf")


def test_files_that_do_not_belong_together_are_refused(split: Path) -> None:
    third = (split / FILES[2]).read_bytes()
    shutil.copy(split / FILES[1], split / FILES[2])
    with pytest.raises(ModelError, match=r"must be file 2 of 3 by its name .*, got 1 of 3; down"):
        open_model(split / FILES[0])
    (split / FILES[2]).write_bytes(third)
    other = split / "other"
    other.mkdir()
    write_tiny(other / "m.gguf", split=5)
    shutil.copy(other / FILES[1], split / FILES[1])
    with pytest.raises(ModelError, match=r"tensor .* is in another of the 3 files as well"):
        open_model(split / FILES[0])


def test_a_tensor_too_few_is_noticed(split: Path) -> None:
    """The last file with a tensor less, which the count of the first one gives away."""
    write_tiny(split / "n.gguf", split=4, tensors={"output_norm.weight": None})
    shutil.copy(split / FILES[2].replace("m-", "n-"), split / FILES[2])
    with pytest.raises(ModelError, match=r"the 3 files must have 11 tensors .*, got 10"):
        open_model(split / FILES[0])


def test_every_file_is_part_of_the_models_identity(split: Path) -> None:
    first = open_model(split / FILES[0])
    opened = GgufFile.opened(split / FILES[0])
    assert GgufFile.opened(split / FILES[0]) is opened
    identity = opened.identity()
    copy = (split / FILES[2]).read_bytes()
    (split / FILES[2]).unlink()
    (split / FILES[2]).write_bytes(copy)
    again = GgufFile.opened(split / FILES[0])
    assert again is not opened
    assert (again.identity() != identity, again.nbytes) == (True, opened.nbytes)
    assert open_model(split / FILES[0]).fingerprint != first.fingerprint


def test_every_file_is_part_of_the_packed_copy(
    split: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(packed_store, "SMALLEST_BYTES", 0)
    monkeypatch.setattr(packed_store, "AFTER_S", 0.0)

    def answer() -> tuple[int, ...]:
        with LLM(str(split / FILES[0]), device="npu", weights="f32") as llm:
            return tuple(llm.generate([3, 4, 5], max_tokens=5, chat=False).tokens)

    first = answer()
    (packed,) = packed_store.folder().glob("*.safetensors")
    assert packed_store.origin_of(packed).file == split / FILES[0]
    assert answer() == first
    file = split / FILES[2]  # another weight at the end of the last file
    changed = bytearray(file.read_bytes())
    changed[-4:] = np.float32(5).tobytes()
    file.write_bytes(changed)
    answer()
    assert len(list(packed_store.folder().glob("*.safetensors"))) == 2


def test_a_split_model_is_listed_once(split: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "is_here", lambda _package: False)  # the hub's cache is not asked
    models = [x for x in models_here(split, split) if x.format == "GGUF"]
    assert [(x.name, x.nbytes) for x in models] == [
        (f"./{FILES[0]}", sum((split / name).stat().st_size for name in FILES))
    ]
    (split / FILES[2]).unlink()
    assert [x for x in models_here(split, split) if x.format == "GGUF"] == []


@pytest.mark.parametrize(
    ("name", "names", "model"),
    [
        ("a.gguf", ["a.gguf"], "a.gguf"),
        ("q/a-00002-of-00002.gguf",
         ["q/a-00001-of-00002.gguf", "q/a-00002-of-00002.gguf"], "q/a.gguf"),
        ("a-00003-of-00002.gguf", ["a-00003-of-00002.gguf"], "a.gguf"),
        ("a-0001-of-0002.gguf", ["a-0001-of-0002.gguf"], "a-0001-of-0002.gguf"),
    ],
)  # fmt: skip
def test_names_of_split_files(name: str, names: list[str], model: str) -> None:
    assert split_names(name) == names
    assert model_name(name) == model


def test_a_file_that_another_thread_opens_meanwhile_is_not_returned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = (write_tiny(tmp_path / f"{name}.gguf") for name in "ab")

    class Interrupted(dict[str, GgufFile]):
        """The other thread comes as soon as the first one has kept its file."""

        def __setitem__(self, key: str, file: GgufFile) -> None:
            super().__setitem__(key, file)
            if file.path == one:
                GgufFile.opened(other)

    monkeypatch.setattr("hetero.models.gguf.file._LAST", Interrupted())
    assert GgufFile.opened(one).path == one
    assert GgufFile.opened(one).path == one


def test_a_big_endian_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama", endianess=gguf.GGUFEndian.BIG)
    writer.add_uint32("llama.block_count", 1)
    writer.add_tensor("x", np.ones(32, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelError) as caught:
        open_model(path)
    assert str(caught.value) == (
        f"{path}: GGUF file is big-endian, only little-endian ones are supported; convert it with "
        f"gguf-convert-endian {path} little"
    )


def patched(path: Path, **pieces: bytes) -> Path:
    """A file in which texts are replaced by bytes of the same length."""
    data = path.read_bytes()
    for old, new in pieces.items():
        assert data.count(old.encode()) == 1
        assert len(old) == len(new)
        data = data.replace(old.encode(), new)
    path.write_bytes(data)
    return path


def test_texts_that_are_no_utf8_are_read(tmp_path: Path) -> None:
    """A name, and two tokens that differ in such bytes only."""
    path = write_tiny(
        tmp_path / "m.gguf", tokens=[*PIECES, "TOKENa", "TOKENb"], general__name="some_name",
        tokenizer__ggml__token_type=[2, 3, 3, *[6] * 256, *[1] * (len(PIECES) - 257)],
    )  # fmt: skip
    patched(path, some_name=b"some\xffname", TOKENa=b"TOKE\xe2\xff", TOKENb=b"TOKE\xe2\xfe")
    file = GgufFile(path)
    assert file.metadata["general.name"] == "some\ufffd<FF>name"
    tokenizer = read_tokenizer(file)
    assert tokenizer.decode([len(PIECES)]) == tokenizer.decode([len(PIECES) + 1])
    assert tokenizer.decode([PIECES.index("a"), len(PIECES)]) == "aTOKE\ufffd\ufffd"
    stream = tokenizer.decoder()
    assert stream.push(len(PIECES)) + stream.finish() == "TOKE\ufffd\ufffd"
    assert NO_UTF8 not in tokenizer.decode([len(PIECES)])
    assert open_model(path, weights="f32").encode("a")


def test_tokens_without_a_text_are_named_by_their_ids(tmp_path: Path) -> None:
    tokens = [*PIECES, "", ""]
    types = [2, 3, 3, *[6] * 256, *[1] * (len(tokens) - 259)]
    path = write_tiny(tmp_path / "m.gguf", tokens=tokens, tokenizer__ggml__token_type=types)
    assert read_tokenizer(GgufFile(path)).decode([len(PIECES) + 1]) == f"[EMPTY_{len(PIECES) + 1}]"
