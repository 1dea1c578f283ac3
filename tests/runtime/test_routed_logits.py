"""Models of routed experts: logits are those of `transformers`, from a directory and from GGUF.

Configurations are drawn with every field that changes arithmetic. Where two experts are equally
good but for the last bits of a float, both choices are right: prompts are drawn at which none are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hetero import LLM
from hetero.backends.ops import Experts
from hetero.compiling.calibration import calibrated
from hetero.errors import ModelError, UserError
from hetero.models import open_model
from hetero.models.gguf import GgufFile
from hetero.models.layout import EXPERTS
from hetero.models.quantized import save
from hetero.solver.errors import PlanError
from hetero.solver.handmade import single_device
from tests.models.gguf_files import convert, write
from tests.support.checkpoints import Case, make_checkpoint, relative_error
from tests.support.selection import examples

torch = pytest.importorskip("torch")
DEVICES = ("gpu", "npu", "hetero")
DRAWN = settings(
    max_examples=examples(2, 8),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=True,
)
TOLERANCE = {"f32": 2e-5, "w8a16": 3e-3}
MARGIN = {"f32": 1e-5, "w8a16": 1e-3}  # of the probabilities of experts
DECODED = 4
SIZES = {"head_dim": 16, "hidden_size": 64, "num_key_value_heads": 2, "num_hidden_layers": 2}
QWEN3 = st.fixed_dictionaries(
    {
        "num_experts": st.sampled_from([8, 5]),
        "num_experts_per_tok": st.integers(1, 5),
        "moe_intermediate_size": st.sampled_from([32, 48]),
        "norm_topk_prob": st.booleans(),
        "hidden_act": st.sampled_from(["silu", "gelu_pytorch_tanh"]),
        "attention_bias": st.booleans(),
        "tie_word_embeddings": st.booleans(),
        "decoder_sparse_step": st.sampled_from([1, 1, 2]),
        "mlp_only_layers": st.sampled_from([(), (), (0,)]),
    }
)
LFM2 = st.fixed_dictionaries(
    {
        "num_experts": st.sampled_from([8, 5]),
        "num_experts_per_tok": st.integers(1, 5),
        "moe_intermediate_size": st.sampled_from([32, 48]),
        "num_dense_layers": st.integers(0, 2),
        "layer_types": st.sampled_from(
            [("conv", "full_attention", "conv"), ("full_attention", "full_attention", "conv")]
        ),
        "num_hidden_layers": st.just(3),
        "use_expert_bias": st.booleans(),
        "norm_topk_prob": st.booleans(),
        "routed_scaling_factor": st.sampled_from([1.0, 2.5]),
        "conv_L_cache": st.sampled_from([3, 4]),
        "conv_bias": st.booleans(),
    }
)
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 24}
GPT_OSS = st.fixed_dictionaries(
    {
        "num_local_experts": st.sampled_from([8, 5]),
        "num_experts_per_tok": st.integers(1, 5),
        "intermediate_size": st.sampled_from([32, 48]),
        "attention_bias": st.booleans(),
        "tie_word_embeddings": st.booleans(),
        "sliding_window": st.sampled_from([5, 24]),
        "layer_types": st.sampled_from(
            [None, ("full_attention", "sliding_attention"), ("sliding_attention",) * 2]
        ),
        "rope_parameters": st.sampled_from(
            [
                None,
                tuple({"rope_type": "default", "rope_theta": 1e4}.items()),
                tuple({**YARN, "truncate": False, "rope_theta": 150000.0}.items()),
                tuple({**YARN, "truncate": True, "rope_theta": 100.0}.items()),
            ]
        ),
    }
)
QWEN3_GGUF = {
    "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 64, "norm_topk_prob": True
}  # fmt: skip
LFM2_GGUF = {
    **QWEN3_GGUF, "num_dense_layers": 1, "num_hidden_layers": 3,
    "layer_types": ("conv", "full_attention", "conv"),
}  # fmt: skip
GPT_OSS_GGUF = {
    "num_local_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 64, "sliding_window": 24,
    "rope_parameters": tuple({**YARN, "truncate": False, "rope_theta": 150000.0}.items()),
}  # fmt: skip
QWEN3_5 = st.fixed_dictionaries(
    {
        "num_experts": st.sampled_from([8, 5]),
        "num_experts_per_tok": st.integers(1, 5),
        "moe_intermediate_size": st.sampled_from([32, 48]),
        "shared_expert_intermediate_size": st.sampled_from([32, 172]),
        "hidden_act": st.sampled_from(["silu", "gelu_pytorch_tanh"]),
        "attention_bias": st.booleans(),
        "tie_word_embeddings": st.booleans(),
        "layer_types": st.sampled_from(
            [("linear_attention", "full_attention"), ("full_attention",) * 2]
        ),
        "linear_num_key_heads": st.just(2),
        "linear_num_value_heads": st.sampled_from([2, 4]),
        "linear_key_head_dim": st.just(16),
        "linear_value_head_dim": st.just(32),
        "pad_token_id": st.just(0),
    }
)
QWEN3_5_GGUF = {
    "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 96, "layer_types": ("linear_attention", "full_attention"),
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
    "linear_value_head_dim": 32, "pad_token_id": 0,
}  # fmt: skip
GEMMA4 = st.fixed_dictionaries(
    {
        "enable_moe_block": st.just(True),
        "num_experts": st.sampled_from([8, 5]),
        "top_k_experts": st.integers(1, 5),
        "moe_intermediate_size": st.sampled_from([32, 48]),
        "global_head_dim": st.sampled_from([16, 32]),
        "layer_types": st.just(("sliding_attention", "full_attention")),
        "sliding_window": st.sampled_from([5, 24]),
        "attention_k_eq_v": st.booleans(),
        "num_global_key_value_heads": st.sampled_from([None, 1]),
        "hidden_size_per_layer_input": st.sampled_from([0, 16]),
        "vocab_size_per_layer_input": st.just(263),
        "final_logit_softcapping": st.sampled_from([None, 3.0]),
        "tie_word_embeddings": st.booleans(),
        "pad_token_id": st.just(0),
    }
)
GEMMA4_GGUF = {
    "enable_moe_block": True, "num_experts": 8, "top_k_experts": 3, "moe_intermediate_size": 64,
    "layer_types": ("sliding_attention", "full_attention"), "sliding_window": 24,
    "global_head_dim": 32, "attention_k_eq_v": True, "num_global_key_value_heads": 1,
    "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 263, "pad_token_id": 0,
}  # fmt: skip
IN_FILES = {
    "Qwen3_5Moe": QWEN3_5_GGUF,
    "Qwen3Moe": QWEN3_GGUF,
    "Lfm2Moe": LFM2_GGUF,
    "GptOss": GPT_OSS_GGUF,
    "Gemma4": GEMMA4_GGUF,
}


def drawn(kind: str, changes: Mapping[str, Any]) -> tuple[Path, Any]:
    """A random checkpoint; the same for the same changes."""
    return _drawn(kind, tuple(sorted(changes.items())))


@cache
def _drawn(kind: str, changes: tuple[tuple[str, Any], ...]) -> tuple[Path, Any]:
    folder = Path(mkdtemp(prefix=kind))
    model = make_checkpoint(Case(kind, kind, SIZES | lists(changes)), folder)
    biases = [x for name, x in model.named_buffers() if name.endswith("expert_bias")]
    for bias in biases:
        bias.copy_(torch.randn_like(bias) * 0.1)
    sinks = [x for name, x in model.named_parameters() if name.endswith("sinks")]
    with torch.no_grad():
        for values in sinks:
            values.normal_(0.0, 2.0)  # below and above the scores
    scales = [x for name, x in model.named_parameters() if name.endswith(("r.scale", "t_scale"))]
    scales += [x for name, x in model.named_parameters() if name.endswith("norm_2.weight")]
    with torch.no_grad():
        for values in scales:
            values.uniform_(0.5, 2.0)  # they are 1 in a new model
    if biases or sinks or scales:
        model.save_pretrained(folder)
    return folder, model


def lists(changes: tuple[tuple[str, Any], ...]) -> dict[str, Any]:
    """The changes, with lists where they were made hashable."""
    made = {name: list(x) if isinstance(x, tuple) else x for name, x in changes}
    if made.get("rope_parameters"):
        made["rope_parameters"] = dict(made["rope_parameters"])
    return made


def decided_prompt(model: Any, length: int, margin: float) -> tuple[list[int], Any]:
    """`length` tokens that no router has a doubtful choice for, and their logits."""
    random, vocab = np.random.default_rng(length), model.config.vocab_size
    chosen = getattr(model.config, "top_k_experts", None) or model.config.num_experts_per_tok
    routers = [
        x for x in model.modules() if type(x).__name__.endswith(("TopKRouter", "TextRouter"))
    ]
    for _ in range(200):
        tokens = random.integers(3, vocab, length).tolist()
        seen: list[torch.Tensor] = []
        hooks = [x.register_forward_hook(partial(_preferred, seen)) for x in routers]
        with torch.no_grad():
            logits = model(torch.tensor([tokens])).logits[0].numpy()
        for hook in hooks:
            hook.remove()
        ranked = torch.cat(seen).sort(descending=True).values
        gaps = ranked[:, chosen - 1 : chosen] - ranked[:, chosen : chosen + 1]
        if not gaps.numel() or float(gaps.min()) > margin:
            return tokens, logits
    raise AssertionError(f"no prompt of {length} tokens has gaps of {margin} between experts")


def _preferred(seen: list[torch.Tensor], router: Any, given: Any, output: Any) -> None:
    """Append what a router chooses by."""
    logits = output[0]
    if type(router).__name__.startswith("Gemma4"):
        seen.append(logits)  # probabilities
        return
    if not type(router).__name__.startswith("Lfm2"):
        seen.append(logits.softmax(-1))
        return
    bias = given[1] if len(given) > 1 and given[1] is not None else 0.0
    seen.append(logits.sigmoid() + bias)


def check(
    path: Path, model: Any, device: Any, weights: str, lengths: Sequence[int], **options: Any
) -> None:
    """Prefill, then token by token, then all logits of the prompt."""
    with LLM(str(path), device=device, weights=weights, kv="f32", **options) as llm:
        for length in lengths:
            tokens, expected = decided_prompt(model, length + DECODED, MARGIN[weights])
            llm.context.truncate(0)
            got = [llm.engine.prefill(llm.context, tokens[:length]).copy()]
            got += [llm.engine.decode(llm.context, x).copy() for x in tokens[length:]]
            assert relative_error(np.stack(got), expected[length - 1 :]) <= TOLERANCE[weights]
            scored = llm.logits(tokens)
            assert relative_error(scored, expected) <= TOLERANCE[weights]


@pytest.mark.parametrize("device", DEVICES)
@DRAWN
@given(changes=QWEN3)
def test_qwen3_moe(device: str, changes: dict[str, Any]) -> None:
    folder, model = drawn("Qwen3Moe", changes)
    check(folder, model, device, "f32", (1, 33))


@pytest.mark.full
@pytest.mark.parametrize("device", DEVICES)
@DRAWN
@given(changes=LFM2)
def test_lfm2_moe(device: str, changes: dict[str, Any]) -> None:
    folder, model = drawn("Lfm2Moe", changes)
    check(folder, model, device, "f32", (1, 33))


@pytest.mark.full
@pytest.mark.parametrize("device", DEVICES)
@DRAWN
@given(changes=QWEN3_5)
def test_qwen3_5_moe(device: str, changes: dict[str, Any]) -> None:
    folder, model = drawn("Qwen3_5Moe", changes)
    check(folder, model, device, "f32", (1, 33))


@pytest.mark.full
@pytest.mark.parametrize("device", DEVICES)
@DRAWN
@given(changes=GPT_OSS)
def test_gpt_oss(device: str, changes: dict[str, Any]) -> None:
    folder, model = drawn("GptOss", changes)
    check(folder, model, device, "f32", (1, 33))


@pytest.mark.full
@pytest.mark.parametrize("device", DEVICES)
@DRAWN
@given(changes=GEMMA4)
def test_gemma_4(device: str, changes: dict[str, Any]) -> None:
    folder, model = drawn("Gemma4", changes)
    check(folder, model, device, "f32", (1, 33))


@pytest.mark.full
def test_a_plan_has_the_experts_on_the_npu() -> None:
    """Everything else is the GPU's; experts take any number of tokens."""
    weights = "f32"
    folder, model = drawn("Qwen3Moe", QWEN3_GGUF)
    graph = open_model(folder, weights=weights).spec()
    plan = single_device(graph, "gpu").model_copy(update={"experts": "npu"})
    check(folder, model, "hetero", weights, (1, 33), plan=plan)
    with LLM(str(folder), plan=plan, weights=weights) as llm:
        placement = llm.engine.placement
        routed = [x for x in graph.nodes if isinstance(x.op, Experts)]
        assert {kind for x in routed for kind in placement.devices(x)} == {"npu"}
        held = placement.kernels.weight_bytes
        assert held["npu"] >= graph.expert_weight_bytes > held["gpu"]
    with pytest.raises(PlanError, match="experts on the npu, which has no kernels of them: make a"):
        LLM(str(folder), plan=plan, weights=weights, npu="null")


@pytest.mark.full
@pytest.mark.parametrize("device", DEVICES)
def test_a_long_prompt(device: str) -> None:
    folder, model = drawn("Qwen3Moe", QWEN3_GGUF)
    check(folder, model, device, "f32", (300,))


@pytest.mark.full
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", IN_FILES)
def test_gguf_has_the_numbers_of_the_directory(device: Any, kind: str, tmp_path: Path) -> None:
    folder, _ = drawn(kind, IN_FILES[kind])
    convert(folder, tmp_path / "m.gguf")
    tokens = np.random.default_rng(0).integers(3, 263, 40).tolist()
    logits = []
    for path in (folder, tmp_path / "m.gguf"):
        with LLM(str(path), device=device, weights="f32", kv="f32") as llm:
            logits.append(llm.logits(tokens))
    np.testing.assert_array_equal(*logits)


@pytest.mark.full
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0])
def test_quantised_gguf_has_the_numbers_of_its_floats(
    device: Any, kind: Kind, tmp_path: Path
) -> None:
    """Stored as the file has them: the same as the dequantised file in float32."""
    folder, _ = drawn("Qwen3Moe", QWEN3_GGUF | {"hidden_size": 128})
    convert(folder, tmp_path / "m.gguf", kind)
    tokens = np.random.default_rng(0).integers(3, 263, 3).tolist()
    logits = []
    for weights in (None, "f32"):
        with LLM(str(tmp_path / "m.gguf"), device=device, weights=weights, kv="f32") as llm:
            logits.append(llm.logits(tokens))
    assert relative_error(*logits) <= 3e-3


def test_gate_and_up_of_experts_in_one_tensor_or_in_two(tmp_path: Path) -> None:
    folder, _ = drawn("Gemma4", GEMMA4_GGUF)
    tensors = convert(folder, tmp_path / "fused.gguf")
    for i in range(2):
        both = tensors.pop(f"blk.{i}.ffn_gate_up_exps.weight")
        for name, rows in zip(("gate", "up"), np.split(both, 2, axis=1), strict=True):
            tensors[f"blk.{i}.ffn_{name}_exps.weight"] = rows
    write(tmp_path / "apart.gguf", "gemma4", entries_of(tmp_path / "fused.gguf"), tensors)
    fused, apart = (open_model(tmp_path / f"{x}.gguf").weights for x in ("fused", "apart"))
    for ours, theirs in ((fused.block(i), apart.block(i)) for i in range(2)):
        for name in EXPERTS:
            np.testing.assert_array_equal(ours.matrix(name).data, theirs.matrix(name).data)


def entries_of(path: Path) -> dict[str, Any]:
    """The metadata of a file as `write` takes it."""
    return {
        key: value.tolist() if isinstance(value, np.ndarray) else value
        for key, value in GgufFile(path).metadata.items()
        if key.partition(".")[0] not in ("general", "GGUF")
    }


def test_experts_that_a_gguf_file_lacks(tmp_path: Path) -> None:
    folder, _ = drawn("Qwen3Moe", QWEN3_GGUF)
    tensors = convert(folder, tmp_path / "m.gguf")
    entries = entries_of(tmp_path / "m.gguf")
    name = "blk.1.ffn_up_exps.weight"
    others = {key: x for key, x in tensors.items() if key != name}
    few = others | {name: tensors[name][:7]}
    chosen = "qwen3moe.expert_used_count"
    for present, changes, rule in (
        (others, {}, f"tensor {name} is missing; download the file again"),
        (few, {}, rf"tensor {name} must have the shape \[8, 64, 64\] .*got \[7, 64, 64\]"),
        (tensors, {chosen: 9}, "num_experts_per_tok must be at most the 8 of num_experts, got 9"),
    ):
        write(tmp_path / "bad.gguf", "qwen3moe", entries | changes, present)
        with pytest.raises(ModelError, match=rule):
            open_model(tmp_path / "bad.gguf")


@pytest.mark.parametrize("weights", ["w4a16", "w8a8"])
def test_experts_are_not_calibrated(weights: str, tmp_path: Path) -> None:
    folder, _ = drawn("Qwen3Moe", QWEN3_GGUF)
    (tmp_path / "text.txt").write_text("words of a text " * 40, encoding="utf-8")
    with pytest.raises(UserError, match="has routed experts, whose weights are not calibrated"):
        calibrated(str(folder), weights, tmp_path / "text.txt", 200)


@pytest.mark.parametrize("kind", IN_FILES)
def test_a_quantised_directory_has_the_experts(kind: str, tmp_path: Path) -> None:
    folder, _ = drawn(kind, IN_FILES[kind])
    source = open_model(folder, weights="w4a16")
    save(source.weights, tmp_path / "out", name="routed")
    copy = open_model(tmp_path / "out", verify=True)
    for ours, theirs in ((copy.weights.block(i), source.weights.block(i)) for i in range(2)):
        assert set(ours.matrices) == set(theirs.matrices)
        assert set(ours.vectors) == set(theirs.vectors)
        for name in theirs.matrices:
            np.testing.assert_array_equal(ours.matrix(name).data, theirs.matrix(name).data)
        for name, vector in theirs.vectors.items():
            np.testing.assert_array_equal(ours.vectors[name], vector)
    assert copy.config == source.config


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"num_experts_per_tok": 9}, "num_experts_per_tok must be at most the 8 of num_experts"),
        ({"moe_intermediate_size": 20}, "moe_intermediate_size must be a multiple of 16"),
        ({"decoder_sparse_step": 9}, "decoder_sparse_step leaves no layer with experts, got 9"),
        ({"mlp_only_layers": [0, 1]}, "mlp_only_layers leaves no layer with experts, got .0, 1."),
        ({"mlp_only_layers": [2]}, "mlp_only_layers must list layers of the 2, from 0 on, got .2."),
        ({"num_experts": 0}, "num_experts must be"),
    ],
)
def test_what_is_wrong_is_said(changes: dict[str, Any], rule: str, tmp_path: Path) -> None:
    import json

    folder, _ = drawn("Qwen3Moe", QWEN3_GGUF)
    raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    raw["num_experts"] = raw.pop("num_local_experts")
    (tmp_path / "config.json").write_text(json.dumps(raw | changes), encoding="utf-8")
    with pytest.raises(ModelError, match=rule):
        open_model(tmp_path)
