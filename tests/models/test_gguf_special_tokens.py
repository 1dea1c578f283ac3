"""Special tokens of GGUF files and Hugging Face directories: which ids end a generation."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken

from hetero import LLM
from hetero.models import LoadedModel, open_model
from hetero.models.end_tokens import ENDS, FIM, FIM_ENDS
from tests.models.gguf_files import PIECES, write_tiny
from tests.models.model_helpers import byte_level_tokenizer, small_config

NEW = len(PIECES)  # the id of a token that is added to the vocabulary
NORMAL, CONTROL, USER_DEFINED = 1, 3, 4
NAMES = [*ENDS, *(name for kind in FIM_ENDS for name in FIM[kind])]


def types(count: int, *more: int) -> list[int]:
    return [2, 3, 3, *[6] * 256, *[1] * (count - 259), *more]


def with_tokens(path: Path, names: list[str], kind: int = CONTROL, **changes: Any) -> Path:
    tokens = [*(x for x in PIECES if x != "</s>" or "</s>" not in names), *names]
    changes = {"tokenizer__ggml__token_type": types(NEW, *[kind] * (len(tokens) - NEW))} | changes
    return write_tiny(path, tokens=tokens, **changes)


@pytest.mark.parametrize("kind", [NORMAL, CONTROL, USER_DEFINED])
@pytest.mark.parametrize("name", [x for x in NAMES if x != "</s>"])
def test_a_generation_ends_at_a_token_of_a_known_name(name: str, kind: int, tmp_path: Path) -> None:
    model = open_model(with_tokens(tmp_path / "m.gguf", [name], kind))
    assert NEW in model.eos_ids
    assert model.encode(f"a{name}")[-1] == NEW
    assert model.tokenizer.decode([NEW]) == ""  # a special token, whatever type the file gives


def test_other_names_do_not_end_a_generation(tmp_path: Path) -> None:
    names = ["<|user|>", "<|im_start|>", "<|fim_prefix|>"]
    assert open_model(with_tokens(tmp_path / "m.gguf", names)).eos_ids == (2,)


def test_an_answer_ends_at_the_named_token(tmp_path: Path) -> None:
    """The likeliest token is renamed to one that ends a turn."""
    with LLM(str(write_tiny(tmp_path / "a.gguf")), device="npu") as llm:
        first = llm.generate([5, 6], max_tokens=4, chat=False)
    tokens = list(PIECES)
    tokens[first.tokens[1]] = "<|end|>"
    path = write_tiny(tmp_path / "b.gguf", tokens=tokens)
    with LLM(str(path), device="npu") as llm:
        result = llm.generate([5, 6], max_tokens=4, chat=False)
    assert (result.finish_reason, first.finish_reason) == ("stop", "length")


@pytest.mark.parametrize(
    ("names", "plain"),
    [
        (["<|end|>", "<|return|>", "<|call|>"], "<|end|>"),
        (["<|end|>", "<|calls|>", "<|flush|>"], "<|end|>"),
        (["<|tool_response>"], "</s>"),
    ],
)
def test_the_end_of_a_message_of_some_vocabularies_does_not_end_the_turn(
    names: list[str], plain: str, tmp_path: Path
) -> None:
    path = with_tokens(tmp_path / "m.gguf", names)
    model = open_model(path)
    tokens = [*PIECES, *names]
    assert tokens.index(plain) not in model.eos_ids
    assert {NEW + i for i, name in enumerate(names) if name != plain} <= set(model.eos_ids)
    assert model.tokenizer.decode([tokens.index(plain)]) == plain  # and is shown


@pytest.mark.parametrize("key", ["eos", "eot", "eom", *FIM_ENDS])
def test_given_ids_end_a_generation(key: str, tmp_path: Path) -> None:
    changes = {f"tokenizer__ggml__{key}_token_id": 260}
    assert 260 in open_model(write_tiny(tmp_path / "m.gguf", **changes)).eos_ids


def test_a_fill_in_token_is_not_looked_for_by_name_where_its_id_is_given(tmp_path: Path) -> None:
    names = ["<|fim_pad|>", "<|file_sep|>"]
    path = with_tokens(tmp_path / "m.gguf", names, tokenizer__ggml__fim_pad_token_id=260)
    assert set(open_model(path).eos_ids) == {2, 260, NEW + 1}


@pytest.mark.parametrize("given", [{}, {"tokenizer__ggml__eos_token_id": 4294967295}])
def test_a_sentencepiece_file_without_ids_has_llama_cpps(
    given: dict[str, Any], tmp_path: Path
) -> None:
    model = open_model(write_tiny(tmp_path / "m.gguf", **given))
    assert (model.config.bos_id, model.config.eos_ids) == (1, (2,))
    assert model.encode("ab")[0] == 1
    small = write_tiny(tmp_path / "small.gguf", tokens=["a", "b"],
                       tokenizer__ggml__token_type=[1, 1])  # fmt: skip
    assert open_model(small).config.eos_ids == ()


@pytest.mark.parametrize(("kind", "ids"), [(CONTROL, (11, (11,))), (NORMAL, (None, ()))])
def test_a_byte_level_file_without_ids_ends_at_token_11_if_that_is_no_text(
    kind: int, ids: tuple[int | None, tuple[int, ...]], tmp_path: Path
) -> None:
    tokens = [*"abcdefghijklmnop"]
    types = [kind if i == 11 else NORMAL for i in range(len(tokens))]
    path = write_tiny(
        tmp_path / "m.gguf", tokens=tokens, tokenizer__ggml__model="gpt2",
        tokenizer__ggml__merges=["a b"], tokenizer__ggml__pre="gpt-2",
        tokenizer__ggml__token_type=types,
    )  # fmt: skip
    config = open_model(path).config
    assert (config.bos_id, config.eos_ids) == ids


@pytest.mark.parametrize(
    ("name", "strips"), [("Phi-3 mini", True), ("phi3", True), ("Llama", False)]
)
def test_special_tokens_of_phi3_take_the_space_behind_them(
    name: str, strips: bool, tmp_path: Path
) -> None:
    path = with_tokens(tmp_path / "m.gguf", ["<|user|>"], general__name=name)
    model = open_model(path)
    newline = PIECES.index("<0x0A>")
    assert (newline in model.encode("<|user|>\na")) is not strips
    assert newline in model.encode("<s>\na")


def directory(
    make_checkpoint: Callable[..., Path], *, eos: int, special: Sequence[str] = (), **files: Any
) -> LoadedModel:
    """A Hugging Face directory with a byte-level vocabulary and its end token `<|end|>`, id 1."""
    tokenizer = byte_level_tokenizer()
    tokenizer.add_special_tokens([AddedToken(x) for x in special])
    tokenizer.add_tokens(["<|im_end|>"] if "<|im_end|>" not in special else ["a plain one"])
    config = small_config(vocab_size=402, eos_ids=(eos,))
    path = make_checkpoint(config, tokenizer=tokenizer)
    for name, content in files.items():
        (path / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return open_model(path)


def test_a_directory_ends_at_its_special_tokens_of_known_names(
    make_checkpoint: Callable[..., Path],
) -> None:
    model = directory(make_checkpoint, eos=2, special=["<|im_end|>"])
    ends = [model.tokenizer.encode(text)[0] for text in ("<|end|>", "<|im_end|>")]
    assert sorted(model.eos_ids) == sorted([2, *ends])


def test_a_plain_token_of_a_directory_is_text_whatever_its_name(
    make_checkpoint: Callable[..., Path],
) -> None:
    assert directory(make_checkpoint, eos=2, special=["<|user|>"]).eos_ids == (2, 1)


def test_a_directory_ends_at_all_that_its_files_name(
    make_checkpoint: Callable[..., Path],
) -> None:
    """generation_config.json as in transformers; the tokenizer's end token as in vLLM."""
    model = directory(
        make_checkpoint,
        eos=2,
        generation_config={"eos_token_id": [5, 6]},
        tokenizer_config={"eos_token": "<|begin|>"},
    )
    assert model.eos_ids == (5, 6, 0, 1)


def test_token_ids_need_no_tokenizer(make_checkpoint: Callable[..., Path]) -> None:
    path = make_checkpoint(small_config(eos_ids=(3,)))
    assert open_model(path).eos_ids == (3,)
