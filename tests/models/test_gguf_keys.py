"""Every metadata entry and tensor that llama.cpp knows is used, harmless, or refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from hetero.errors import ModelError
from hetero.models import open_model
from hetero.models.gguf import GgufFile, metadata_rules, read_config
from hetero.models.gguf.families import FAMILIES
from tests.models.gguf_files import PIECES, write_tiny

KNOWN = {
    *metadata_rules.USED,
    *metadata_rules.HARMLESS,
    *metadata_rules.UNREAD,
    *metadata_rules.FIXED,
    *metadata_rules.FOREIGN,
}
KNOWN_TOKENIZER = {
    *metadata_rules.TOKENIZER_USED,
    *metadata_rules.TOKENIZER_HARMLESS,
    *metadata_rules.TOKENIZER_FOREIGN,
    *metadata_rules.TOKENIZER_UNREAD,
}


def names(group: type = gguf.constants.Keys) -> Iterator[str]:
    """All entries that the gguf package knows."""
    for name, value in vars(group).items():
        if isinstance(value, type):
            yield from names(value)
        elif isinstance(value, str) and not name.startswith("_"):
            yield value


@pytest.mark.parametrize("name", [x for x in names() if x.startswith("{arch}.")])
def test_every_entry_of_the_library_has_a_rule(name: str) -> None:
    assert name.removeprefix("{arch}.").replace("{dense}", "dense_2") in KNOWN


@pytest.mark.parametrize("name", [x for x in names() if x.startswith("tokenizer.")])
def test_every_entry_of_tokenizers_has_a_rule(name: str) -> None:
    assert name.removeprefix("tokenizer.").replace(".{name}", "") in KNOWN_TOKENIZER


@pytest.mark.parametrize("name", sorted(metadata_rules.FOREIGN))
def test_entries_of_other_architectures_are_refused(name: str, tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "m.gguf", **{name: 3})
    with pytest.raises(ModelError) as caught:
        open_model(path)
    assert str(caught.value) == (
        f"{path}: llama.{name} must be 0 for the architecture 'llama', got 3; choose another model"
    )


@pytest.mark.parametrize(
    ("entries", "sentence"),
    [
        ({"attention__value_length": 16}, "attention.value_length must be 8 for"),
        ({"rope__dimension_count": 4}, "rope.dimension_count must be 8 for"),
        ({"rope__freq_base": 5e5, "rope__freq_base_swa": 1e4}, "rope.freq_base_swa must be 500000"),
        ({"attention__causal": False}, "attention.causal must be True for"),
        ({"logit_scale": 0.0625}, "logit_scale must be 1 for"),
        ({"residual_scale": 0.25}, "residual_scale must be 1 for"),
        ({"hidden_activation": "gelu"}, "hidden_activation must be 'silu' for"),
        ({"expert_count": 8, "expert_used_count": 2}, "expert_count must be 0 for"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping must be 0 for"),
        ({"embedding_length_out": 64}, "embedding_length_out must be 32 for"),
        ({"rope__dimension_sections": [2, 2, 0, 0]}, "rope.dimension_sections must be 0 for"),
        ({"context_length": None}, "context_length must be given, but it is missing"),
        ({"attention__layer_norm_rms_epsilon": None}, "rms_epsilon must be given, but it is miss"),
        ({"general__type": "adapter"}, "general.type is 'adapter', which is no language model"),
        ({"tokenizer__ggml__add_sep_token": True}, "add_sep_token must be false for tokenizers"),
        ({"tokenizer__ggml__normalizer__lowercase": True}, "lowercase must be false for tokeniz"),
    ],
)  # fmt: skip
def test_values_that_change_numbers_are_refused(
    entries: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    path = write_tiny(tmp_path / "m.gguf", **entries)
    with pytest.raises(ModelError, match=sentence.replace(".", r"\.")):
        open_model(path)


def test_values_that_change_nothing_are_taken(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    entries = {
        "attention__value_length": 8, "rope__dimension_count": 8, "attention__causal": True,
        "logit_scale": 1.0, "residual_scale": 0.0, "hidden_activation": "silu", "expert_count": 0,
        "expert_used_count": 0, "attn_logit_softcapping": 0.0, "rope__scaling__finetuned": True,
        "rope__dimension_sections": [0, 0], "tensor_data_layout": "Meta AI original pth",
        "rope__scaling__yarn_beta_fast": 32.0, "attention__sliding_window": 4096,
        "general__type": "model", "tokenizer__ggml__add_sep_token": False,
        "tokenizer__ggml__remove_extra_whitespaces": True, "general__anything": "x",
    }  # fmt: skip
    model = open_model(write_tiny(tmp_path / "m.gguf", **entries))
    assert model.encode("a")
    assert capsys.readouterr().err == ""


def test_one_notice_names_what_is_not_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    entries = {
        "rope__scaling__yarn_beta_fast": 16.0, "attention__sliding_window": 16, "new_thing": 1,
        "tokenizer__ggml__suppress_tokens": [5], "tokenizer__ggml__new": "x", "another__key": 2,
    }  # fmt: skip
    path = write_tiny(tmp_path / "m.gguf", **entries)
    open_model(path)
    open_model(path)
    assert capsys.readouterr().err == (
        f"hetero: {path}: metadata that is not read: llama.rope.scaling.yarn_beta_fast, "
        "llama.attention.sliding_window, llama.new_thing, tokenizer.ggml.suppress_tokens, "
        "tokenizer.ggml.new and 1 more; if the answers are wrong, use the model's Hugging Face "
        "directory\n"
    )


def architecture_tensors() -> Iterator[tuple[str, str]]:
    """The tensors that the gguf package knows of each supported architecture."""
    enums = {name: value for value, name in gguf.MODEL_ARCH_NAMES.items()}
    for architecture in FAMILIES:
        for tensor in gguf.MODEL_TENSORS[enums[architecture]]:
            yield architecture, gguf.TENSOR_NAMES[tensor].format(bid=0)


@pytest.mark.parametrize("name", sorted({name for _, name in architecture_tensors()}))
def test_a_tensor_is_read_or_refused(name: str, tmp_path: Path) -> None:
    """A weight that would be ignored changes the numbers."""
    whole = write_tiny(tmp_path / "whole.gguf")
    if f"{name}.weight" in gguf_names(whole) or name in ("output", "rope_freqs"):
        return
    path = write_tiny(tmp_path / "m.gguf", tensors={f"{name}.weight": np.full(4, 2.0, "f4")})
    with pytest.raises(ModelError, match=name.removesuffix("kv").replace(".", r"\.")):
        open_model(path)


def gguf_names(path: Path) -> set[str]:
    return {x.name for x in gguf.GGUFReader(path).tensors}


@pytest.mark.parametrize("suffix", ["scale", "input_scale"])
def test_scales_beside_weights_are_refused(suffix: str, tmp_path: Path) -> None:
    one = np.ones(1, np.float32)
    path = write_tiny(tmp_path / "m.gguf", tensors={f"blk.0.ffn_up.{suffix}": one})
    with pytest.raises(ModelError, match=f"tensor blk.0.ffn_up.{suffix} does not belong"):
        open_model(path)


def test_sizes_that_a_file_leaves_out_are_llama_cpps(tmp_path: Path) -> None:
    """Not those of `transformers`, which differ from one architecture to the other."""
    names = [f"blk.0.attn_{x}_norm.weight" for x in "qk"]
    path = write_tiny(
        tmp_path / "m.gguf", arch="qwen3", attention__head_count_kv=None,
        tensors={name: np.ones(8, np.float32) for name in names}
        | {f"blk.0.attn_{x}.weight": np.ones((32, 32), np.float32) for x in "kv"},
    )  # fmt: skip
    config = open_model(path).config
    assert (config.kv_heads, config.head_dim) == (4, 8)


def test_the_end_of_text_is_added_where_the_file_asks_for_it(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "m.gguf", tokenizer__ggml__add_eos_token=True)
    ids = open_model(path).encode("ab")
    assert [ids[0], ids[-1]] == [1, 2]
    assert open_model(path).tokenizer.encode("ab", add_special_tokens=False) == ids[1:-1]
    assert PIECES[ids[-2]] == "b"


SAME = {"attention__head_count": [4] * 3, "attention__head_count_kv": [2] * 3,
        "feed_forward_length": [64] * 3}  # fmt: skip


def three_layers(path: Path, **entries: Any) -> Path:
    first = {x.name: x.data for x in gguf.GGUFReader(write_tiny(path)).tensors}
    more = {
        name.replace("blk.0", f"blk.{i}"): value
        for name, value in first.items()
        for i in range(3)
        if name.startswith("blk.0")
    }
    return write_tiny(path, tensors=more, block_count=3, **entries)


@pytest.mark.parametrize("name", SAME)
def test_a_list_of_one_number_is_that_number(name: str, tmp_path: Path) -> None:
    plain = open_model(three_layers(tmp_path / "a.gguf")).config
    assert open_model(three_layers(tmp_path / "b.gguf", **{name: SAME[name]})).config == plain


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ([2, 2, 4], "llama.attention.head_count_kv differs from layer to layer, which is not"),
        ([2, 2], "head_count_kv must be one number or a list of 3, one for each layer, got 2"),
        (["2", "2", "2"], "llama.attention.head_count_kv differs from layer to layer"),
    ],
)
def test_other_lists_are_refused(values: list[Any], sentence: str, tmp_path: Path) -> None:
    path = three_layers(tmp_path / "m.gguf", attention__head_count_kv=values)
    with pytest.raises(ModelError, match=sentence.replace(".", r"\.")):
        open_model(path)


@pytest.mark.parametrize("value", [[1, 2], [0.5], "text", 1.5, True, 2**31, 0])
@pytest.mark.parametrize("arch", [x for x in FAMILIES if x != "llama"])
def test_any_value_of_a_familys_own_entries_gives_a_configuration_or_a_model_error(
    arch: str, value: Any, tmp_path: Path
) -> None:
    names = [*FAMILIES[arch].used, "block_count", "rope.freq_base", "embedding_length"]
    for name in names:
        entries = {"attention__sliding_window": 16, "attention__layer_norm_epsilon": 1e-5}
        entries |= {"logit_scale": 2.0, name.replace(".", "__"): value}
        path = write_tiny(tmp_path / "m.gguf", arch=arch, **entries)
        try:
            read_config(GgufFile(path))
        except ModelError as error:
            assert str(path) in str(error)  # noqa: PT017


@pytest.mark.full
@pytest.mark.few(2)
@pytest.mark.parametrize("value", [[1, 2], [0.5], ["a", "b"], "text", 1.5, True, 2**31])
def test_a_value_of_any_type_gives_a_model_or_a_model_error(value: Any, tmp_path: Path) -> None:
    names = [f"llama__{name.replace('.', '__')}" for name in KNOWN]
    names += [f"tokenizer__{name.replace('.', '__')}" for name in KNOWN_TOKENIZER]
    names += ["general__type", "general__name", "general__architecture", "general__alignment"]
    names += ["split__count", "split__no", "split__tensors__count"]
    for name in names:
        path = write_tiny(tmp_path / "m.gguf", **{name.removeprefix("llama__"): value})
        try:
            model = open_model(path)
            assert model.tokenizer.eos_ids is not None
        except ModelError as error:
            assert str(path) in str(error)  # noqa: PT017
