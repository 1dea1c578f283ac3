"""`config.json`: both spellings, every field, and the sentences for what is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero.backends.frequency_scaling import RopeScaling
from hetero.backends.rope_tables import attention_factor, inverse_frequencies
from hetero.errors import ModelError
from hetero.models.architectures import ARCHITECTURES
from hetero.models.config import ModelConfig
from hetero.models.graph import model_graph
from hetero.models.random_models import KNOWN_MODELS
from tests.models.model_helpers import first_rope
from tests.support.selection import examples

BASE: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 172,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 512,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
}
LONGROPE = {"type": "su", "short_factor": [1, 2, 3, 4], "long_factor": [1, 4, 9, 16]}
LLAMA3_ROPE = {
    "factor": 32.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 1024,
    "rope_type": "llama3",
}


SCALES = {"embedding_multiplier": 12.0, "residual_multiplier": 0.25, "logits_scaling": 8.0,
          "attention_multiplier": 0.015625}  # fmt: skip
ATTENTION = {"layer_types": ["attention"] * 4, "shared_intermediate_size": 172}
MINISTRAL = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32,
             "llama_4_scaling_beta": 0.1}  # fmt: skip


def of(architecture: str, **changes: Any) -> dict[str, Any]:
    """A config.json of an architecture."""
    head = ARCHITECTURES[architecture].class_name
    return BASE | {"model_type": architecture, "architectures": [head]} | changes


def without(name: str) -> dict[str, Any]:
    return {key: value for key, value in BASE.items() if key != name}


def test_sizes_are_read() -> None:
    config = ModelConfig.from_dict(BASE)
    assert (config.hidden_size, config.intermediate_size, config.num_layers) == (64, 172, 4)
    assert (config.heads, config.kv_heads, config.head_dim) == (8, 4, 8)
    assert (config.vocab_size, config.max_position, config.rms_norm_eps) == (512, 4096, 1e-5)
    assert (config.bos_id, config.eos_ids, config.windows) == (1, (2,), (0, 0, 0, 0))
    assert config.qkv_width == 128


@pytest.mark.parametrize("theta", [10000.0, 500000])
@pytest.mark.parametrize("scaling", [None, LLAMA3_ROPE, {"type": "linear", "factor": 2.0}])
def test_both_spellings_of_the_rotary_embedding(theta: float, scaling: dict[str, Any]) -> None:
    old = BASE | {"rope_theta": theta, "rope_scaling": scaling, "torch_dtype": "bfloat16"}
    kind = {"rope_type": "default"} if scaling is None else scaling
    new = BASE | {"rope_parameters": {**kind, "rope_theta": theta}, "dtype": "bfloat16"}
    assert ModelConfig.from_dict(old) == ModelConfig.from_dict(new)
    assert ModelConfig.from_dict(old).rope_theta == theta
    assert ModelConfig.from_dict(old).dtype == "bfloat16"


@pytest.mark.parametrize(
    "scaling",
    [
        None,
        LLAMA3_ROPE,
        {"type": "linear", "factor": 4.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024},
        {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64,
         "beta_fast": 16, "beta_slow": 2, "mscale": 0.7, "mscale_all_dim": 0.9},
        {"rope_type": "yarn", "factor": 8.0, "attention_factor": 1.3, "truncate": False},
    ],
    ids=["none", "llama3", "linear", "yarn", "yarn-mscale", "yarn-attention"],
)  # fmt: skip
def test_frequencies_are_those_of_transformers(scaling: dict[str, Any] | None) -> None:
    modeling = pytest.importorskip("transformers.models.llama.modeling_llama")
    raw = BASE | {"rope_theta": 5e4, "rope_scaling": scaling, "head_dim": 16}
    theirs = modeling.LlamaRotaryEmbedding(
        modeling.LlamaConfig.from_dict(json.loads(json.dumps(raw)))
    )
    rope = first_rope(ModelConfig.from_dict(raw))
    np.testing.assert_allclose(inverse_frequencies(rope), theirs.inv_freq.numpy(), rtol=1e-5)
    assert attention_factor(rope.scaling) == pytest.approx(theirs.attention_scaling)


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 2},
        {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 0},
        {"use_sliding_window": True, "max_window_layers": 1},
        {"use_sliding_window": True, "sliding_window": None, "max_window_layers": 1},
        {"use_sliding_window": False, "sliding_window": 16, "max_window_layers": 0},
        {"use_sliding_window": True, "sliding_window": 8,
         "layer_types": ["full_attention", "sliding_attention"] * 2},
    ],
)  # fmt: skip
def test_windows_of_qwen_are_those_of_transformers(
    architecture: str, changes: dict[str, Any]
) -> None:
    transformers = pytest.importorskip("transformers")
    raw = of(architecture, **changes)
    theirs = getattr(transformers, f"{architecture.capitalize()}Config").from_dict(dict(raw))
    expected = tuple(
        (theirs.sliding_window or 0) if kind == "sliding_attention" else 0
        for kind in theirs.layer_types
    )
    assert ModelConfig.from_dict(raw).windows == expected


@pytest.mark.parametrize(
    ("changes", "window"), [({}, 4096), ({"sliding_window": None}, 0), ({"sliding_window": 7}, 7)]
)
def test_windows_of_mistral(changes: dict[str, Any], window: int) -> None:
    assert ModelConfig.from_dict(of("mistral", **changes)).windows == (window,) * 4


@pytest.mark.parametrize("architecture", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize(
    "left_out",
    ["num_key_value_heads", "max_position_embeddings", "rms_norm_eps", "head_dim", "hidden_act"],
)
def test_fields_left_out_are_those_of_transformers(architecture: str, left_out: str) -> None:
    transformers = pytest.importorskip("transformers")
    raw = of(architecture, num_attention_heads=32, hidden_size=256)
    raw.pop(left_out, None)
    theirs = getattr(transformers, f"{architecture.capitalize()}Config").from_dict(dict(raw))
    ours = ModelConfig.from_dict(raw)
    head_dim = getattr(theirs, "head_dim", None) or 256 // 32
    assert (ours.kv_heads, ours.head_dim) == (theirs.num_key_value_heads, head_dim)
    assert (ours.max_position, ours.activation) == (theirs.max_position_embeddings, "silu")
    assert ours.rms_norm_eps == theirs.rms_norm_eps
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings


@pytest.mark.parametrize(
    ("raw", "biases"),
    [
        (of("llama"), (False, False, False)),
        (of("llama", attention_bias=True), (True, True, False)),
        (of("llama", mlp_bias=True), (False, False, True)),
        (of("mistral", attention_bias=True), (False, False, False)),
        (of("qwen2"), (True, False, False)),
        (of("qwen3"), (False, False, False)),
        (of("qwen3", attention_bias=True), (True, True, False)),
    ],
)
def test_biases_by_architecture(raw: dict[str, Any], biases: tuple[bool, bool, bool]) -> None:
    config = ModelConfig.from_dict(raw)
    assert (config.qkv_bias, config.o_bias, config.mlp_bias) == biases
    assert config.qk_norm == (config.architecture == "qwen3")


def test_dynamic_scaling_means_nothing_within_the_context() -> None:
    scaled = BASE | {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}
    assert ModelConfig.from_dict(scaled) == ModelConfig.from_dict(BASE)


@pytest.mark.parametrize(
    ("given", "activation"),
    [({}, "gelu_tanh"), ({"hidden_act": "gelu"}, "gelu_tanh"),
     ({"hidden_act": "gelu", "hidden_activation": "gelu"}, "gelu"),
     ({"hidden_activation": "gelu_pytorch_tanh"}, "gelu_tanh")],
)  # fmt: skip
def test_activation_of_gemma(given: dict[str, str], activation: str) -> None:
    assert ModelConfig.from_dict(of("gemma", **given)).activation == activation


@pytest.mark.parametrize(
    ("name", "activation"),
    [("silu", "silu"), ("gelu", "gelu"), ("gelu_pytorch_tanh", "gelu_tanh")],
)
def test_activations(name: str, activation: str) -> None:
    assert ModelConfig.from_dict(BASE | {"hidden_act": name}).activation == activation


@pytest.mark.parametrize(
    ("raw", "generation", "bos", "eos"),
    [
        ({}, None, 1, (2,)),
        ({"eos_token_id": None, "bos_token_id": None}, None, None, ()),
        ({"eos_token_id": [7, 8, 7], "bos_token_id": 5}, None, 5, (7, 8)),
        ({"eos_token_id": 7}, {"eos_token_id": [9, 10], "bos_token_id": 3}, 3, (9, 10)),
        ({"eos_token_id": 7}, {"temperature": 1.0}, 1, (7,)),
        ({"eos_token_id": [-1, 511, 512]}, None, 1, (511,)),
    ],
)
def test_token_ids(
    raw: dict[str, Any], generation: dict[str, Any] | None, bos: int | None, eos: tuple[int, ...]
) -> None:
    config = ModelConfig.from_dict(BASE | raw, generation=generation)
    assert (config.bos_id, config.eos_ids) == (bos, eos)


CLASS_NAMES = [x.class_name for x in ARCHITECTURES.values()]

WRONG: list[tuple[dict[str, Any], str]] = [
    (without("hidden_size") | {"head_dim": 8},
     "hidden_size must be a positive integer, but it is missing; correct the file"),
    (BASE | {"vocab_size": -1}, "vocab_size must be a positive integer, got -1; correct the file"),
    (BASE | {"vocab_size": True},
     "vocab_size must be a positive integer, got True; correct the file"),
    (BASE | {"num_hidden_layers": "4"},
     "num_hidden_layers must be a positive integer, got '4'; correct the file"),
    (BASE | {"num_hidden_layers": 10**9},
     "num_hidden_layers must be at most 4096, got 1000000000; correct the file"),
    (BASE | {"intermediate_size": 2**31},
     "intermediate_size must be at most 2147483647, got 2147483648; correct the file"),
    (BASE | {"num_key_value_heads": 3},
     "num_attention_heads must be a multiple of num_key_value_heads, got 8 and 3; correct the "
     "file"),
    (BASE | {"hidden_size": 65},
     "hidden_size must be a multiple of num_attention_heads where head_dim is not given, got 65 "
     "and 8; correct the file"),
    (BASE | {"head_dim": 7},
     "head_dim must be even for rotary embeddings, got 7; correct the file"),
    (BASE | {"rms_norm_eps": 0},
     "rms_norm_eps must be a positive number, got 0; correct the file"),
    (BASE | {"rms_norm_eps": 10**400},
     f"rms_norm_eps must be a positive number, got {10**400}; correct the file"),
    (BASE | {"rope_theta": "big"},
     "rope_theta must be a positive number, got 'big'; correct the file"),
    (BASE | {"tie_word_embeddings": "no"},
     "tie_word_embeddings must be true or false, got 'no'; correct the file"),
    (BASE | {"hidden_act": "relu6"},
     "hidden_act must be one of silu, swish, gelu, gelu_pytorch_tanh, gelu_new, relu, got 'relu6'; "
     "choose a model with one of these"),
    (BASE | {"eos_token_id": "2"},
     "eos_token_id must be a token id or a list of token ids, got '2'; correct the file"),
    (BASE | {"rope_scaling": {"type": "mrope"}},
     "rope_scaling: type must be one of default, dynamic, linear, llama3, yarn, longrope, "
     "proportional, got "
     "'mrope'; choose a model without this scaling"),
    (BASE | {"rope_scaling": {"type": "longrope", "long_factor": [1, 2, 3, 4]}},
     "rope_scaling: short_factor must be a list of positive numbers, but it is missing; correct "
     "the file"),
    (BASE | {"rope_scaling": {"type": "su", "long_factor": [1, 0], "short_factor": [1, 2]}},
     "rope_scaling: long_factor must be a list of positive numbers, got [1, 0]; correct the file"),
    (BASE | {"rope_scaling": {"type": "longrope", "long_factor": [1] * 3, "short_factor": [1] * 4}},
     "long_factor must have 4 numbers, one for two dimensions that are rotated, got 3; correct "
     "the file"),
    (BASE | {"rope_scaling": {"type": "linear", "factor": 2.0, "short_factor": [1] * 4}},
     "rope_scaling: short_factor is of longrope alone, got [1, 1, 1, 1]; correct the file's type"),
    (BASE | {"rope_parameters": {"rope_type": "linear"}},
     "rope_parameters: factor must be a positive number, but it is missing; correct the file"),
    (BASE | {"rope_scaling": LLAMA3_ROPE | {"low_freq_factor": 4.0}},
     "rope_scaling: high_freq_factor must be greater than low_freq_factor (4.0), got 4.0; correct "
     "the file"),
    (BASE | {"rope_scaling": [1]},
     "rope_scaling must be a JSON object, got [1]; correct the file"),
    (BASE | {"rope_parameters": {"full_attention": {}, "sliding_attention": {}}},
     "rope_parameters per layer type is not supported, got full_attention, sliding_attention; "
     "choose a model with one rotary embedding for all layers"),
    (BASE | {"partial_rotary_factor": 0.5},
     "partial_rotary_factor other than 1 is not supported, got 0.5; choose another model"),
    (BASE | {"model_type": "lama"},
     "architecture 'lama' is not supported; the nearest supported one is 'llama', choose a model "
     f"of one of: {', '.join(ARCHITECTURES)}"),
    (BASE | {"architectures": ["Qwen2MoeForCausalLM"]},
     "architecture 'Qwen2MoeForCausalLM' is not supported; the nearest supported one is "
     f"'Qwen3MoeForCausalLM', choose a model of one of: {', '.join(CLASS_NAMES)}"),
    (BASE | {"architectures": ["XYZ"]},
     f"architecture 'XYZ' is not supported; choose a model of one of: {', '.join(CLASS_NAMES)}"),
    (BASE | {"architectures": "LlamaForCausalLM"},
     "architectures must be a list of names, got 'LlamaForCausalLM'; correct the file"),
    ({}, "model_type must be a string, but it is missing; correct the file"),
    (BASE | {"quantization_config": {"quant_method": "gptq", "bits": 4}},
     "weights quantised with 'gptq' are not supported; use the model's original fp32, fp16 or "
     "bf16 files"),
    (of("mistral", attention_sink_size=4),
     "attention_sink_size asks for attention sinks, which no supported architecture has, got 4; "
     "choose another model"),
    (BASE | {"model_type": "xverse", "sliding_window": 128},
     "architecture 'xverse' is not supported; choose a model of one of: "
     f"{', '.join(ARCHITECTURES)}"),
    (of("qwen2", use_sliding_window=True, layer_types=["full_attention"]),
     "layer_types must list full_attention or sliding_attention for each of the 4 layers, got "
     "['full_attention']; correct the file"),
    (of("mistral", sliding_window=0),
     "sliding_window must be a positive integer, got 0; correct the file"),
    (of("qwen3", use_sliding_window=True, max_window_layers="2"),
     "max_window_layers must be a layer number, got '2'; correct the file"),
    (of("phi", partial_rotary_factor=0.01),
     "partial_rotary_factor must leave an even number of dimensions to rotate, got 0.01 of 8; "
     "correct the file"),
    (of("phi", partial_rotary_factor=1.5),
     "partial_rotary_factor must be at most 1, got 1.5; correct the file"),
    (of("phi", qk_layernorm=True), "qk_layernorm must be false, got True; choose another model"),
    (of("opt", ffn_dim=16, do_layer_norm_before=False),
     "do_layer_norm_before must be true, got False; choose another OPT model"),
    (of("opt", ffn_dim=16, word_embed_proj_dim=32),
     "word_embed_proj_dim must be hidden_size, got 32; choose another OPT model"),
    (of("opt"), "ffn_dim must be a positive integer, but it is missing; correct the file"),
    (of("gemma", attention_bias=True),
     "attention_bias must be false for Gemma, got True; choose another model"),
    (of("gemma2", final_logit_softcapping=-1),
     "final_logit_softcapping must be a positive number, got -1; correct the file"),
    (of("lfm2", layer_types=["conv"] * 3),
     "layer_types must list conv or full_attention for each of the 4 layers, got "
     "['conv', 'conv', 'conv']; correct the file"),
    (of("lfm2", layer_types=["conv", "full_attention", "mamba", "conv"]),
     "layer_types must list conv or full_attention for each of the 4 layers, got "
     "['conv', 'full_attention', 'mamba', 'conv']; correct the file"),
    (of("lfm2", layer_types=[["conv"]] * 4),
     "layer_types must list conv or full_attention for each of the 4 layers, got "
     "[['conv'], ['conv'], ['conv'], ['conv']]; correct the file"),
    (of("lfm2", layer_types=["conv"] * 4),
     "layer_types must have a layer of full_attention, got ['conv', 'conv', 'conv', 'conv']; "
     "choose a model with attention"),
    (of("lfm2", full_attn_idxs=[1, 4]),
     "full_attn_idxs must list layers from 0 to 3, got [1, 4]; correct the file"),
    (of("lfm2", full_attn_idxs=[True]),
     "full_attn_idxs must list layers from 0 to 3, got [True]; correct the file"),
    (of("lfm2", conv_L_cache=1), "conv_L_cache must be at least 2, got 1; correct the file"),
    (of("lfm2", intermediate_size=1, block_ffn_dim_multiplier=0),
     "intermediate_size must leave a width of at least 1, got 1; correct the file"),
]  # fmt: skip


@pytest.mark.parametrize(("raw", "sentence"), WRONG)
def test_what_is_wrong_is_said_in_one_sentence(raw: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ModelError) as caught:
        ModelConfig.from_dict(raw)
    assert str(caught.value) == f"config.json: {sentence}"


@settings(deadline=None, max_examples=examples(200))
@given(
    name=st.sampled_from([*BASE, "head_dim", "rope_scaling", "rope_parameters", "eos_token_id"]),
    value=st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
        lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(), inner, max_size=2),
    ),
)
def test_any_value_gives_a_configuration_or_a_model_error(name: str, value: Any) -> None:
    try:
        config = ModelConfig.from_dict(BASE | {name: value})
    except ModelError as error:
        assert str(error).startswith("config.json: ")  # noqa: PT017
    else:
        assert config.heads % config.kv_heads == 0


OWN_KEYS = sorted({
    *SCALES, *MINISTRAL, "rope_parameters", "rope_scaling", "rope_local_base_freq", "alpha", "type",
    "sliding_window", "sliding_window_pattern", "layer_types", "no_rope_layers", "logit_scale",
    "no_rope_layer_interval", "position_embedding_type", "scale_emb", "scale_depth", "use_bias",
    "dim_model_base", "head_dim", "partial_rotary_factor", "query_pre_attn_scalar", "text_config",
})  # fmt: skip
ODD = st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(
    ["", "rope", "LLG", [1, 0, 1, 1], ["attention"] * 4, ["sliding_attention"] * 4, 1e308, 1e-308,
     {"rope_type": "dynamic", "alpha": 1e300}, {"type": "yarn", "factor": 1e-300, "mscale": 2},
     {"full_attention": {}, "sliding_attention": None}, {"full_attention": 5},
     {"rope_type": "linear", "factor": 2.0, "llama_4_scaling_beta": 0.1}]
)  # fmt: skip


@pytest.mark.full
@settings(deadline=None, max_examples=examples(300))
@given(family=st.sampled_from([*ARCHITECTURES, "gemma3", "mistral3"]), data=st.data())
def test_odd_values_of_a_family_give_a_configuration_or_a_model_error(
    family: str, data: st.DataObject
) -> None:
    changes = data.draw(st.dictionaries(st.sampled_from(OWN_KEYS), ODD, max_size=4))
    raw = BASE | {"model_type": family, "architectures": None, "layer_norm_eps": 1e-5}
    raw |= {"shared_intermediate_size": 172, "ffn_dim": 172} | changes
    try:
        config = ModelConfig.from_dict(raw)
    except ModelError as error:
        assert str(error).startswith("config.json: ")  # noqa: PT017
    else:
        model_graph(config, "f32")
        assert ModelConfig.from_dict(config.to_dict()).layer_ropes == config.layer_ropes


@pytest.mark.parametrize(
    "raw",
    [
        of("llama", attention_bias=True, mlp_bias=True, hidden_act="gelu_new", dtype="float32"),
        of("llama", rope_scaling=LLAMA3_ROPE, tie_word_embeddings=True, eos_token_id=[3, 4]),
        of("llama", rope_scaling={"type": "linear", "factor": 3.0}, bos_token_id=None),
        of("llama", rope_scaling={"type": "yarn", "factor": 3.0, "beta_fast": 8, "mscale": 2.0}),
        of("mistral", sliding_window=9),
        of("mistral", sliding_window=None),
        of("qwen2", use_sliding_window=True, sliding_window=5, max_window_layers=2),
        of("qwen3", head_dim=32, attention_bias=True),
        of("internlm2", bias=False, rope_scaling={"type": "dynamic", "factor": 2.0}),
        of("lfm2", layer_types=["conv", "full_attention"] * 2, conv_bias=True, conv_L_cache=4),
        of("lfm2", full_attn_idxs=[1], block_ff_dim=90, block_multiple_of=8, norm_eps=1e-3),
        of("lfm2", block_ffn_dim_multiplier=None, tie_embedding=False),
        of("gemma"),
        of("gemma", hidden_activation="gelu", tie_word_embeddings=False),
        of("gemma2", query_pre_attn_scalar=144, sliding_window=9),
        of(
            "gemma2",
            attn_logit_softcapping=None,
            final_logit_softcapping=12.5,
            layer_types=["full_attention", "sliding_attention"] * 2,
        ),
        of("gemma3_text", sliding_window=9, rope_scaling={"type": "linear", "factor": 8.0}),
        of("gemma3_text", sliding_window=9, rope_local_base_freq=1e6, sliding_window_pattern=2),
        of("gemma3_text", sliding_window=None, layer_types=["full_attention"] * 4),
        of(
            "gemma3_text",
            rope_parameters={
                "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 3e5},
                "sliding_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25},
            },
        ),
        of("qwen3_5_text", head_dim=16, attention_bias=True, full_attention_interval=2),
        of(
            "qwen3_5_text",
            layer_types=["full_attention", *["linear_attention"] * 3],
            linear_num_key_heads=3,
            linear_num_value_heads=6,
            linear_key_head_dim=24,
            linear_value_head_dim=40,
            linear_conv_kernel_dim=2,
            rope_parameters={"rope_theta": 1e7, "partial_rotary_factor": 0.5},
        ),
        of("granite", **SCALES, attention_bias=True),
        of("granitemoehybrid", **SCALES, **ATTENTION, position_embedding_type="rope"),
        of("granitemoehybrid", **SCALES, **ATTENTION),
        of("minicpm", scale_emb=12, scale_depth=1.4, dim_model_base=16),
        of("smollm3"),
        of("smollm3", no_rope_layers=[0, 1, 1, 0], use_sliding_window=True, sliding_window=7),
        of("ministral3", rope_parameters=MINISTRAL, sliding_window=5),
        of("ministral3", rope_scaling={"rope_type": "default"}),
        of(
            "ministral3",
            rope_parameters={"llama_4_scaling_beta": 1, "original_max_position_embeddings": 5},
        ),
        of("olmo2", attention_bias=True),
        of("olmo3", rope_theta=3e5, rope_scaling={"type": "yarn", "factor": 3.0}),
        of("exaone4", sliding_window=None),
        of("exaone4", sliding_window_pattern="LLG", sliding_window=8),
        of("exaone4", layer_types=["full_attention"] * 4),
        of("glm4", attention_bias=False, partial_rotary_factor=0.25),
        of("ernie4_5", use_bias=True),
        of("hunyuan_v1_dense", rope_scaling={"type": "dynamic", "alpha": 100.0}),
        of("cohere2", logit_scale=0.3, sliding_window_pattern=2),
        of("phi", hidden_size=640, partial_rotary_factor=0.4, layer_norm_eps=1e-3),
        of("phi3", sliding_window=5, partial_rotary_factor=0.75),
        of("phi3"),
        of("phi3", original_max_position_embeddings=64, rope_scaling=LONGROPE),
        of("opt", ffn_dim=100, enable_bias=False),
    ],
)
def test_what_is_written_reads_back_the_same(raw: dict[str, Any]) -> None:
    config = ModelConfig.from_dict(raw)
    written = json.loads(json.dumps(config.to_dict()))
    assert ModelConfig.from_dict(written) == config


@pytest.mark.parametrize("name", KNOWN_MODELS)
def test_known_models_read_back_the_same(name: str) -> None:
    assert ModelConfig.from_dict(KNOWN_MODELS[name].to_dict()) == KNOWN_MODELS[name]


def test_a_directory_takes_its_generation_config_into_account(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(BASE))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 6]}))
    assert ModelConfig.from_directory(tmp_path).eos_ids == (5, 6)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("[1]", "must hold a JSON object, got list; download the file again"),
        ('{"a": ', "is not valid JSON (Expecting value: line 1 column 7 (char 6)); download the "
         "file again"),
    ],
)  # fmt: skip
def test_a_file_that_is_not_json(tmp_path: Path, text: str, sentence: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelError) as caught:
        ModelConfig.from_directory(tmp_path)
    assert str(caught.value) == f"{tmp_path / 'config.json'}: {sentence}"


def test_the_default_scaling_is_none() -> None:
    assert ModelConfig.from_dict(BASE).rope_scaling == RopeScaling()
