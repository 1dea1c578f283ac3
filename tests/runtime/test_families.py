"""Every family in random tiny configurations: the logits of `transformers`, also as GGUF."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from hetero import LLM
from hetero.models import open_model
from hetero.models.gguf import GgufFile, read_config
from hetero.models.quantized import save
from tests.models.gguf_files import convert, write_tiny
from tests.models.test_gguf import check_same_weights
from tests.models.test_gguf_lfm2 import LLAMA_CPP
from tests.runtime.test_routed_logits import decided_prompt
from tests.support.checkpoints import Case, make_checkpoint, reference_logits, relative_error
from tests.support.families import FAMILIES, in_files
from tests.support.selection import examples

TOLERANCE = 2e-5
DECODED = 4
LENGTHS = st.sampled_from([1, 2, 31, 33, 70])
QUICK: Any = {  # shrinking would write hundreds of checkpoints
    "deadline": None,
    "phases": [Phase.explicit, Phase.reuse, Phase.generate],
    "suppress_health_check": [HealthCheck.too_slow],
}
NO_GGUF = ("Phi3",)  # tests/runtime/test_longrope.py has it


LARGER = {  # llama.cpp's caches need heads of 32 or more
    "hidden_size": 256, "intermediate_size": 384, "num_attention_heads": 4, "head_dim": 64,
    "num_key_value_heads": 2, "pad_token_id": 0,
}  # fmt: skip
ALTERNATING = {
    "num_hidden_layers": 4, "sliding_window": 8,
    "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
}  # fmt: skip
PLAIN = {"rope_type": "default", "rope_theta": 1e4}
YARN = PLAIN | {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 24}
ROUTED = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 96}
FILED: dict[str, dict[str, Any]] = {
    "Qwen3Moe": {**ROUTED, "norm_topk_prob": True},
    "Lfm2Moe": {
        **ROUTED, "num_dense_layers": 1, "layer_types": ["conv", "full_attention", "conv"],
    },
    "Qwen3_5Moe": {
        **ROUTED, "shared_expert_intermediate_size": 160, "linear_num_key_heads": 2,
        "linear_num_value_heads": 4, "linear_key_head_dim": 32, "linear_value_head_dim": 32,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    },
    "GptOss": {
        "num_local_experts": 8, "num_experts_per_tok": 3, "sliding_window": 8,
        "rope_parameters": PLAIN,  # llama.cpp rounds the ramp of YaRN
    },
    "Gemma3": {**ALTERNATING, "query_pre_attn_scalar": 64},
    "Gemma4": {
        "num_hidden_layers": 6, "sliding_window": 8, "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 3,
        "global_head_dim": 128, "use_double_wide_mlp": True, "hidden_size_per_layer_input": 64,
        "vocab_size_per_layer_input": 263, "final_logit_softcapping": 30.0,
    },
    "Gemma4 with experts": {
        "num_hidden_layers": 2, "sliding_window": 8, "global_head_dim": 128,
        "layer_types": ["sliding_attention", "full_attention"], "hidden_size_per_layer_input": 0,
        "attention_k_eq_v": True, "num_global_key_value_heads": 1, "enable_moe_block": True,
        "final_logit_softcapping": 30.0, "num_experts": 8, "top_k_experts": 8,
        "moe_intermediate_size": 96,
    },
    "Granite": {
        "residual_multiplier": 0.22,
        "embedding_multiplier": 12.0,
        "logits_scaling": 8.0,
        "attention_multiplier": 0.35,
    },
    "SmolLM3": {"num_hidden_layers": 4},
    "Ministral3": {
        "rope_parameters": {
            **YARN, "llama_4_scaling_beta": 0.5, "mscale": 1.0, "mscale_all_dim": 1.0
        }
    },
    "Olmo2": {"num_key_value_heads": 4},
    "Olmo3": {
        **ALTERNATING, "rope_parameters": {"full_attention": YARN, "sliding_attention": PLAIN}
    },
    "Exaone4": {"sliding_window": None, "layer_types": ["full_attention"] * 3},
    "Glm4": {},
    "Ernie4_5": {},
    "HunYuanDenseV1": {},
    "Cohere2": {**ALTERNATING, "logit_scale": 0.25},
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=examples(2, 8), **QUICK)
@given(data=st.data())
def test_logits_are_those_of_transformers(
    family: str, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Prefill and token by token, on each device and on both."""
    changes = data.draw(FAMILIES[family])
    length = data.draw(LENGTHS)
    folder = tmp_path_factory.mktemp(family)
    model = make_checkpoint(Case(family, family, changes), folder)
    tokens = np.random.default_rng(length).integers(3, 263, length + DECODED).tolist()
    expected = reference_logits(model, tokens)
    for device in ("gpu", "npu", "hetero"):
        with LLM(str(folder), device=device, weights="f32", kv="f32") as llm:
            context = llm.context
            got = [llm.engine.prefill(context, tokens[:length]).copy()]
            got += [llm.engine.decode(context, token).copy() for token in tokens[length:]]
        error = relative_error(np.stack(got), expected[length - 1 :])
        assert error <= TOLERANCE, f"{device}: off by {error:.2g}"


@pytest.mark.parametrize("family", ["Granite", "Cohere2", "Ernie4_5", "Olmo2", "Gemma3"])
@settings(max_examples=examples(2, 8), **QUICK)
@given(data=st.data())
def test_a_quantised_directory_is_the_same_model(
    family: str, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """What is folded into vectors, and the order of rows, is not applied once more."""
    folder = tmp_path_factory.mktemp(family)
    make_checkpoint(Case(family, family, data.draw(FAMILIES[family])), folder)
    theirs = open_model(folder, weights="w8a16")
    save(theirs.weights, folder / "quantised")
    ours = open_model(folder / "quantised")
    assert ours.config == theirs.config
    check_same_weights(ours, theirs)


def test_minicpm_is_granite_with_its_factors(tmp_path: Path) -> None:
    """`transformers` has no MiniCPM: the judge is Granite, whose logits are checked above."""
    factors = {
        "embedding_multiplier": 12.0,
        "residual_multiplier": 1.4 / 3**0.5,
        "attention_multiplier": 8**-0.5,
        "logits_scaling": 64 / 16,
    }
    make_checkpoint(Case("minicpm", "Granite", factors), tmp_path)
    granite = open_model(tmp_path, weights="f32")
    raw = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    raw = {key: value for key, value in raw.items() if key not in factors}
    raw |= {"model_type": "minicpm", "architectures": ["MiniCPMForCausalLM"]}
    raw |= {"scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 16}
    (tmp_path / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    ours = open_model(tmp_path, weights="f32")
    same = replace(granite.config, architecture="minicpm", attention_scale=None)
    assert ours.config == same
    check_same_weights(ours, granite)
    convert(tmp_path, tmp_path / "model.gguf")
    filed = open_model(tmp_path / "model.gguf", weights="f32")
    check_same_weights(filed, granite)
    for field in ("embed_scale", "residual_scale", "attention_scale", "logit_scale"):
        assert getattr(filed.config, field) == pytest.approx(getattr(granite.config, field))


def test_old_files_of_minicpm_have_llama_cpps_factors(tmp_path: Path) -> None:
    config = read_config(GgufFile(write_tiny(tmp_path / "m.gguf", arch="minicpm")))
    assert (config.embed_scale, config.residual_scale) == (12.0, 1.4)
    assert config.logit_scale == 256 / 32


@pytest.mark.full
@pytest.mark.parametrize("family", FILED)
def test_llama_cpp_gives_the_same_logits(family: str, tmp_path: Path) -> None:
    if find_spec("llama_cpp") is None:
        pytest.skip("llama-cpp-python is not installed")
    kind = family.partition(" ")[0]
    model = make_checkpoint(Case(family, kind, LARGER | FILED[family]), tmp_path)
    path, found = tmp_path / "model.gguf", tmp_path / "logits.npy"
    convert(tmp_path, path)
    tokens = np.random.default_rng(3).integers(3, 263, 40).tolist()
    routed = ("num_experts_per_tok", "top_k_experts")
    if any(getattr(model.config, x, None) for x in routed):  # float16 may choose another expert
        tokens, _ = decided_prompt(model, 40, 1e-3)
    arguments = [str(path), str(found), json.dumps(tokens)]
    subprocess.run([sys.executable, "-c", LLAMA_CPP, *arguments], check=True, timeout=120)
    with LLM(str(path), device="npu", weights="f32", kv="f32") as llm:
        error = relative_error(llm.logits(tokens), np.load(found))
    assert error < 2e-3


@pytest.mark.parametrize("family", [x for x in FAMILIES if x not in NO_GGUF])
@settings(max_examples=examples(3, 24), **QUICK)
@given(data=st.data())
def test_a_gguf_file_is_the_same_model(
    family: str, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    changes = data.draw(FAMILIES[family])
    changes |= in_files(family, changes)
    folder = tmp_path_factory.mktemp(family)
    make_checkpoint(Case(family, family, changes), folder)
    convert(folder, folder / "model.gguf")
    ours, theirs = (open_model(x, weights="f32") for x in (folder / "model.gguf", folder))
    config = replace(theirs.config, dtype=None, bos_id=ours.config.bos_id)
    assert repr(ours.config) == repr(replace(config, architecture=ours.config.architecture))
    check_same_weights(ours, theirs)
