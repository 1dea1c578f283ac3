"""Every known architecture runs at tensor level: matmuls are cut, the numbers stay."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from hetero import LLM
from hetero.backends.registry import open_device
from hetero.models import open_model, random_models
from hetero.models.config import ModelConfig
from hetero.models.random_models import KNOWN_MODELS
from hetero.placement.choice import PlacementRequest
from hetero.placement.choosing import choose
from hetero.profiler.profile_files import shipped_names
from hetero.profiler.records import DeviceProfile
from hetero.runtime.engine import Engine
from hetero.solver.handmade import single_device
from tests.runtime.plans import random_plan
from tests.support.helpers import assert_close

pytestmark = pytest.mark.usefixtures("no_chains")

NAMES = {config.architecture: name for name, config in KNOWN_MODELS.items()}
GRAPHS = (1, 8, 32, 64)
TOKENS = (np.arange(48) * 37 % 300).tolist()
LENGTH = 128


def small(config: ModelConfig) -> ModelConfig:
    """The same kind of model with three layers of hidden size 64."""
    half, scaling = 4 if config.rotary_dim else 8, config.rope_scaling
    factors = {x: getattr(scaling, x)[:half] for x in ("short_factor", "long_factor")}
    return replace(
        config,
        hidden_size=64,
        intermediate_size=96,
        num_layers=3,
        heads=4,
        kv_heads=2 if config.kv_heads < config.heads else 4,
        head_dim=16,
        vocab_size=300,
        max_position=LENGTH,
        positions=config.positions and LENGTH + config.position_offset,
        windows=tuple(min(window, 24) for window in config.windows[:3]),
        rope_scaling=replace(scaling, **factors),
        layer_ropes=config.layer_ropes[:3],
        mixers=config.mixers[1:4],  # with attention, whatever the others are
        rotary_dim=config.rotary_dim and 8,
        embed_scale=min(config.embed_scale, 8.0),
        layer_sizes=(),
        kv_source=config.kv_source[:3],
        layer_inputs=min(config.layer_inputs, 16),
    )


@pytest.fixture(params=NAMES)
def name(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A small `random:` model of an architecture."""
    known = {f"small-{key}": small(KNOWN_MODELS[name]) for key, name in NAMES.items()}
    monkeypatch.setattr(random_models, "KNOWN_MODELS", known)
    return f"random:small-{request.param}"


def run(engine: Engine) -> list[Any]:
    """Logits of a prompt and of three more tokens."""
    context = engine.new_context()
    found = [engine.prefill(context, TOKENS[:-3]).copy()]
    return found + [engine.decode(context, token).copy() for token in TOKENS[-3:]]


@pytest.mark.few(2)
@pytest.mark.parametrize(("strategy", "non_matmul"), [("hybrid-cut", "gpu"), ("row-cut", "npu")])
def test_a_cut_model_gives_the_same_logits(name: str, strategy: str, non_matmul: str) -> None:
    """And launches every node of its graph in order."""
    loaded = open_model(name, weights="f32")
    alone = {"gpu": open_device("reference", kind="gpu")}
    plan = single_device(loaded.spec(), "gpu")
    with Engine(loaded.weights, plan, alone, max_seq_len=LENGTH) as engine:
        expected = run(engine)
    both = {"gpu": open_device("opencl"), "npu": open_device("ort-cpu", graph_sizes=GRAPHS)}
    prompt, drawn = len(TOKENS) - 3, random.Random(3)
    plan = random_plan(
        loaded.spec(),
        prompt,
        GRAPHS,
        drawn,
        strategies=[strategy],
        non_matmul=non_matmul,
        shares=True,
    )
    cut = {op.op.partition(".")[0] for op in plan.ops if len(op.tiles) > 1}
    assert cut >= {"qkv", "o", "gate_up", "down"} & {x.name for x in loaded.spec().matmuls}
    assert {"qkv", "o"} <= cut
    with Engine(loaded.weights, plan, both, max_seq_len=LENGTH) as engine:
        for got, want in zip(run(engine), expected, strict=True):
            assert_close(got, want, tolerance=5e-5)
        nodes = [node.name for node in engine.placement.graph.nodes]
        launched = dict.fromkeys(
            x.node for x in engine.steps.step(engine.new_context(), "prefill", prompt).launches
        )
        assert [x for x in launched if not x.endswith(" flag")] == nodes


@pytest.mark.full
def test_the_command_lines_way_needs_nothing_else(name: str) -> None:
    """`hetero generate random:NAME --device hetero`, on the profile that there is."""
    with LLM(name, device="hetero", max_seq_len=LENGTH) as llm:
        assert llm.generate("Once upon a time", max_tokens=4).stats.completion_tokens == 4
        assert llm.devices.fallback == ""
        assert llm.choice.plan is not None, llm.choice.reason


@pytest.mark.full
@pytest.mark.sampled(12)  # tests/solver/test_known_models.py plans every model on every profile
@pytest.mark.parametrize("profile", shipped_names())
def test_a_plan_is_found_on_every_shipped_profile(name: str, profile: str) -> None:
    """Both devices work in every prompt, were it in attention's heads alone."""
    spec = open_model(name, weights="w4a16").spec()
    found = choose(spec, PlacementRequest(profile=DeviceProfile.load(profile), context=LENGTH))
    assert found.plan is not None, found.reason
