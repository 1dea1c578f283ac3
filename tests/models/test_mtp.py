"""Heads for multi-token prediction: read with the model, and computed as a graph of their own.

The judge is the formula with the decoder layer of `transformers`, which itself drops such heads.
"""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from hetero.backends.reference.compute import program
from hetero.compiling.walk import fresh_slots, run_node
from hetero.models import LoadedModel, model_spec, open_model
from hetero.models.config import mtp_head
from hetero.models.graph import model_graph
from hetero.profiler.model_graph import HIDDEN, ModelGraph
from hetero.runtime.kernels import node_weights
from tests.models.gguf_files import metadata, named_tensors, tokenizer, write
from tests.models.test_delta_net import TINY
from tests.models.test_gguf import check_same_weights
from tests.support.checkpoints import Case, make_checkpoint, torch
from tests.support.helpers import Command

LAYERS = 3
KEPT = r"has a head for multi-token prediction \(0\.\d MiB\), which guesses tokens ahead with --d"
MOE = {
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 40,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "intermediate_size": None,
}


def random_head(model: Any) -> dict[str, Any]:
    """Tensors of a head with a block of a model's attention layer."""
    torch.manual_seed(11)
    d = model.config.hidden_size
    layer = next(x for x in model.model.layers if hasattr(x, "self_attn"))
    head = {
        f"mtp.layers.0.{name}": torch.randn_like(x) * (0.2 if x.ndim == 1 else 0.1)
        for name, x in layer.state_dict().items()
    }
    norms = ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")
    head |= {f"mtp.{x}.weight": torch.randn(d) * 0.2 for x in norms}
    return head | {"mtp.fc.weight": torch.randn(d, 2 * d) * 0.1}


@pytest.fixture(scope="module", params=["qwen3.5", "qwen3.5-moe"])
def checkpoint(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Any, dict[str, Any]]:
    """A directory with a head, its model in `transformers`, and the head's tensors."""
    from safetensors.torch import load_file, save_file

    folder = tmp_path_factory.mktemp("mtp")
    moe = request.param.endswith("moe")
    kind, more = ("Qwen3_5Moe", MOE) if moe else ("Qwen3_5", {})
    model = make_checkpoint(Case(request.param, kind, TINY | more), folder)
    head = random_head(model)
    tensors = load_file(folder / "model.safetensors") | head
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder, model, head


def head_of(model: LoadedModel) -> LoadedModel:
    assert model.weights.mtp is not None
    return replace(model, config=model.weights.mtp.config, weights=model.weights.mtp)


def norm(x: Any, weight: Any, eps: float) -> Any:
    """RMSNorm with a weight of 1 + w."""
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * (1 + weight)


def expected(model: Any, head: dict[str, Any], tokens: Any, hidden: Any) -> tuple[Any, Any]:
    """The logits and the next hidden state, by the formula with the layer of `transformers`.

    They are computed in the numbers of `hidden`, which are the model's.
    """
    decoder, eps = model.model, model.config.rms_norm_eps
    head = {x: y.to(hidden.dtype) for x, y in head.items()}
    number = next(i for i, x in enumerate(decoder.layers) if hasattr(x, "self_attn"))
    layer = type(decoder.layers[number])(model.config, number).eval().to(hidden.dtype)
    prefix = "mtp.layers.0."
    layer.load_state_dict({x.removeprefix(prefix): y for x, y in head.items() if prefix in x})
    e = norm(decoder.embed_tokens(tokens), head["mtp.pre_fc_norm_embedding.weight"], eps)
    h = norm(hidden, head["mtp.pre_fc_norm_hidden.weight"], eps)
    x = torch.cat([e, h], dim=-1) @ head["mtp.fc.weight"].T
    positions = torch.arange(len(tokens))[None]
    mask = torch.full((len(tokens),) * 2, float("-inf"), dtype=hidden.dtype).triu(1)[None, None]
    ropes = decoder.rotary_emb(x[None], positions)
    y = layer(x[None], position_embeddings=ropes, attention_mask=mask, position_ids=positions)
    y = norm(y[0] if y.ndim == 3 else y, head["mtp.norm.weight"], eps)
    return model.lm_head(y), y


def run(graph: ModelGraph, model: LoadedModel, tokens: Any, hidden: Any) -> dict[str, Any]:
    """The slots behind a graph of a head, in the arithmetic of the reference."""
    state = fresh_slots(tokens) | {HIDDEN: hidden}
    for node in graph.nodes:
        block = None if node.layer is None else model.weights.block(node.layer)
        operation, _ = program(node.op, node_weights(node, block, model.weights))
        run_node(node, operation, state)
    return state


def computed(model: LoadedModel, tokens: Any, hidden: npt.NDArray[np.float32]) -> dict[str, Any]:
    head = head_of(model)
    return run(model_graph(head.config, "f32", capacity=32), head, tokens, hidden)


def test_the_head_computes_its_formula(
    checkpoint: tuple[Path, Any, dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    folder, model, head = checkpoint
    ours = open_model(folder, weights="f32")
    tokens = np.array([5, 17, 250, 3, 99, 41], np.int32)
    hidden = torch.randn(len(tokens), model.config.hidden_size)
    with torch.no_grad():
        logits, after = expected(model, head, torch.tensor(tokens), hidden)
    state = computed(ours, tokens, hidden.numpy())
    np.testing.assert_allclose(state["logits"], logits.numpy(), rtol=2e-4, atol=2e-4)
    np.testing.assert_allclose(state["h"], after.numpy(), rtol=2e-4, atol=2e-4)


def test_the_model_is_the_same_with_a_head(
    checkpoint: tuple[Path, Any, dict[str, Any]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    plain, own = tmp_path / "plain", shutil.copytree(checkpoint[0], tmp_path / "own")
    checkpoint[1].save_pretrained(plain)  # without a head
    ours, theirs = (open_model(x, weights="f32") for x in (own, plain))
    assert theirs.weights.mtp is None
    assert ours.config == theirs.config
    assert ours.weights.nbytes == theirs.weights.nbytes
    assert ours.spec().nodes == theirs.spec().nodes
    check_same_weights(ours, theirs)
    assert head_of(ours).weights.embed() is ours.weights.embed()
    assert_said(capsys, KEPT)


def test_quantising_says_that_a_head_is_left_out(
    command: Command, checkpoint: tuple[Path, Any, dict[str, Any]], tmp_path: Path
) -> None:
    done = command("quantize", str(checkpoint[0]), "--out", str(tmp_path / "out"))
    assert "head for multi-token prediction is left out" in done.stdout
    assert open_model(tmp_path / "out").weights.mtp is None


def each_expert(tensors: dict[str, Any]) -> dict[str, Any]:
    """The tensors with those of all experts as one of each."""
    found = {}
    for name, value in tensors.items():
        module, _, part = name.rpartition(".")
        if not module.endswith("experts"):
            found[name] = value
            continue
        names = ("gate_proj", "up_proj") if part == "gate_up_proj" else ("down_proj",)
        for e, own in enumerate(value):
            for each, matrix in zip(names, own.chunk(len(names)), strict=True):
                found[f"{module}.{e}.{each}.weight"] = matrix
    return found


def write_gguf(
    checkpoint: tuple[Path, Any, dict[str, Any]], target: Path, *, drop: str = "", copies: int = 1
) -> None:
    """The directory as llama.cpp writes it: the head is the block behind the others."""
    from safetensors.torch import load_file

    folder, _, head = checkpoint
    raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    name = "qwen35moe" if "moe" in raw["model_type"] else "qwen35"
    tensors = load_file(folder / "model.safetensors")
    own = named_tensors(raw, name, {x: y for x, y in tensors.items() if "mtp" not in x})
    head = each_expert(head)
    block = {
        x.replace("mtp.layers.0", f"model.layers.{LAYERS}").replace("mtp.norm", "model.norm"): y
        for x, y in head.items()
        if "fc" not in x
    }
    for name_in_file, value in named_tensors(raw, name, block).items():
        own[f"blk.{LAYERS}.nextn.shared_head_norm.weight" if "output_norm" in name_in_file
            else name_in_file] = value  # fmt: skip
    ends = {"eh_proj": "fc", "enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden"}
    for name_in_file, source in ends.items():
        value = head[f"mtp.{source}.weight"].numpy()
        own[f"blk.{LAYERS}.nextn.{name_in_file}.weight"] = value + (source != "fc")
    lacking = [drop] if drop else [] if copies else [f"blk.{LAYERS}."]
    own = {x: y for x, y in own.items() if not any(part in x for part in lacking)}
    for number in range(1, copies):
        own |= {
            x.replace(f"blk.{LAYERS}.", f"blk.{LAYERS + number}."): y
            for x, y in own.items()
            if x.startswith(f"blk.{LAYERS}.")
        }
    types = [x == "linear_attention" for x in raw["layer_types"]] + [False] * copies
    entries = metadata(raw, name) | tokenizer(folder)
    entries |= {f"{name}.block_count": LAYERS + copies, f"{name}.nextn_predict_layers": copies}
    entries |= {f"{name}.attention.recurrent_layers": types}
    write(target, name, {x: y for x, y in entries.items() if y is not None}, own)


def assert_said(capsys: pytest.CaptureFixture[str], pattern: str) -> None:
    assert re.search(pattern, " ".join(capsys.readouterr().err.split()))


def test_a_file_has_the_head_of_its_directory(
    checkpoint: tuple[Path, Any, dict[str, Any]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "model.gguf"
    write_gguf(checkpoint, file)
    ours, theirs = (open_model(x, weights="f32") for x in (file, checkpoint[0]))
    check_same_weights(ours, theirs)
    check_same_weights(head_of(ours), head_of(theirs))
    assert mtp_head(ours.config) == ours.weights.mtp.config  # type: ignore[union-attr]
    for name in ("mtp_embed", "mtp_hidden"):
        one, other = (head_of(x).weights.outer_matrix(name).dequantize() for x in (ours, theirs))
        np.testing.assert_array_equal(one, other)
    assert_said(capsys, rf"{file}: {KEPT}")
    # In the file's own formats its bytes are no part of the model's.
    plain = tmp_path / "plain.gguf"
    write_gguf(checkpoint, plain, copies=0)
    with_head, without = (open_model(x, weights="gguf-a16").weights for x in (file, plain))
    assert (with_head.nbytes, without.mtp) == (without.nbytes, None)


def test_a_head_that_lacks_a_tensor_is_left_out_with_a_sentence(
    checkpoint: tuple[Path, Any, dict[str, Any]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "model.gguf"
    write_gguf(checkpoint, file, drop="hnorm")
    opened = open_model(file, weights="f32")
    assert opened.weights.mtp is None
    check_same_weights(opened, open_model(checkpoint[0], weights="f32"))
    assert_said(
        capsys, r"hnorm\.weight is missing; .*; the head for multi-token prediction is left out"
    )


def test_a_file_with_several_heads_keeps_the_first(
    checkpoint: tuple[Path, Any, dict[str, Any]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "model.gguf"
    write_gguf(checkpoint, file, copies=2)
    ours, theirs = (open_model(x, weights="f32") for x in (file, checkpoint[0]))
    check_same_weights(head_of(ours), head_of(theirs))
    assert_said(capsys, rf"{file}: blocks behind its first head for multi-token prediction are lef")


def test_a_plan_of_the_model_says_that_a_head_is_there(
    checkpoint: tuple[Path, Any, dict[str, Any]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "model.gguf"
    write_gguf(checkpoint, file)
    own = shutil.copytree(checkpoint[0], tmp_path / "own")  # a notice is given once for each path
    for path in (file, own):
        model_spec(path)
        assert_said(capsys, rf"{path}: {KEPT}")


def test_a_graph_of_a_head_is_a_document_as_others() -> None:
    from hetero.models.random_models import known_config

    config = replace(known_config("qwen3-0.6b"), output_gate=True)
    graph = model_graph(mtp_head(config), "w4a16", capacity=64)
    assert ModelGraph.model_validate_json(graph.model_dump_json()) == graph
    begin = [node.name for node in graph.nodes[:7]]
    assert begin == [
        "embed", "mtp_embed_norm", "mtp_embed", "mtp_hidden_norm", "mtp_hidden",
        "join", "layer0.input_norm",
    ]  # fmt: skip
    assert graph.layers == 1
