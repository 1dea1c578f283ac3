"""A calibration's walk through a model sees what a run of the whole model does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hetero.backends.formats import StorageFormat, WeightFormat
from hetero.compiling.calibration import CalibratedWeights
from hetero.compiling.walk import CalibrationPoint, walk
from hetero.models import open_model
from tests.support.checkpoints import Case, make_checkpoint

torch = pytest.importorskip("torch")
MODULES = {  # that see what a matmul sees, by its role
    "qkv": "self_attn.q_proj", "q_only": "self_attn.q_proj", "o": "self_attn.o_proj",
    "gate_up": "mlp.gate_proj", "down": "mlp.down_proj",
    "input_gate": "per_layer_input_gate", "input_out": "per_layer_projection",
    "delta_in": "linear_attn.in_proj_qkv", "delta_out": "linear_attn.out_proj",
}  # fmt: skip
STATES = {
    "layer_types": ["linear_attention", "full_attention"], "num_hidden_layers": 2,
    "linear_num_key_heads": 1, "linear_num_value_heads": 2, "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}  # fmt: skip
SHARED = {
    "num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 2, "sliding_window": 8, "head_dim": 16, "global_head_dim": 16,
    "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 263,
}  # fmt: skip
CHANGES = {"Gemma4": SHARED, "Qwen3_5": STATES}


def seen_by(model: Any, sequences: list[list[int]]) -> dict[str, float]:
    """The largest magnitude of each linear layer's input in `transformers`, by module."""
    seen: dict[str, float] = {}

    def noted(name: str) -> Any:
        def hook(_: Any, given: Any, __: Any) -> None:
            seen[name] = max(seen.get(name, 0.0), float(given[0].abs().max()))

        return hook

    modules = [(n, x) for n, x in model.named_modules() if isinstance(x, torch.nn.Linear)]
    hooks = [x.register_forward_hook(noted(name)) for name, x in modules]
    with torch.no_grad():
        for tokens in sequences:
            model(torch.tensor([tokens]))
    for hook in hooks:
        hook.remove()
    return seen


def checkpoint(family: str, folder: Path) -> tuple[Any, list[list[int]]]:
    """A model and two texts, longer than its windows."""
    changes = {**CHANGES[family], "pad_token_id": 0}
    texts = [np.random.default_rng(x).integers(3, 263, 21 + x).tolist() for x in (0, 5)]
    return make_checkpoint(Case(family, family, changes), folder), texts


@pytest.mark.parametrize("family", CHANGES)
def test_ranges_are_those_of_a_full_run(family: str, tmp_path: Path) -> None:
    """Gemma 4's last two layers read the keys and values of layers before them."""
    model, texts = checkpoint(family, tmp_path)
    ranges: dict[str, float] = {}

    def at_matmul(site: CalibrationPoint) -> Any:
        if site.role in MODULES:
            name = f"model.layers.{site.node.layer}.{MODULES[site.role]}"
            ranges[name] = max(float(np.abs(x).max()) for x in site.inputs)
        return site.values

    walk(open_model(tmp_path, weights="f32").weights, texts, at_matmul)
    seen = seen_by(model, texts)
    assert len(ranges) == sum(name.endswith(tuple(MODULES.values())) for name in seen)
    assert ranges == pytest.approx({name: seen[name] for name in ranges}, rel=1e-4)


def test_every_matmul_of_a_layer_is_quantised(tmp_path: Path) -> None:
    """Those after its feed-forward, too: Gemma 4's inputs of each layer."""
    _, texts = checkpoint("Gemma4", tmp_path)
    exact = open_model(tmp_path, weights="f32").weights
    made = CalibratedWeights(exact, WeightFormat.W4A16, texts)
    for layer in range(len(exact.config.mixers)):
        assert made.block(layer).matrices.keys() == exact.block(layer).matrices.keys()
    assert {x.storage for x in made.block(0).matrices.values()} == {StorageFormat.Q4}
