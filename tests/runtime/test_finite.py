"""Values that are not finite: an error that names the operation and the device, never a text."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from hetero import LLM
from hetero.backends.errors import DeviceError
from hetero.compiling.static_scales import static_weights
from hetero.models import open_model
from hetero.placement.device_set import open_devices
from hetero.runtime.engine import Engine
from hetero.runtime.finite import all_finite, norms_finite
from hetero.solver.handmade import layer_level, single_device
from tests.runtime.models import tiny_model
from tests.runtime.plans import random_plan
from tests.support.helpers import Command

PROMPT = list(range(5, 45))
HUGE = 3e38  # what a sum of products cannot hold


@pytest.fixture(scope="module")
def sound(tmp_path_factory: Any) -> Path:
    return tiny_model(tmp_path_factory.mktemp("sound"))


@pytest.fixture(scope="module")
def broken(sound: Path, tmp_path_factory: Any) -> Path:
    """A model whose second layer overflows in its feed-forward output."""
    folder = tmp_path_factory.mktemp("broken") / "model"
    shutil.copytree(sound, folder)
    tensors = load_file(folder / "model.safetensors")
    weight = tensors["model.layers.1.mlp.down_proj.weight"]
    tensors["model.layers.1.mlp.down_proj.weight"] = np.full_like(weight, HUGE)
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.full
@pytest.mark.parametrize(
    ("device", "backend", "kind"),
    [("gpu", "opencl", "gpu"), ("npu", "ort-cpu", "npu"), ("hetero", "ort-cpu", "npu")],
)
def test_the_layer_and_the_device_are_named(
    broken: Path, device: Any, backend: str, kind: str
) -> None:
    with LLM(str(broken), device=device, weights="f32") as llm:
        for call in (
            lambda: llm.generate(PROMPT, max_tokens=3),
            lambda: llm.generate(PROMPT[:1], max_tokens=3),
            lambda: llm.logits(PROMPT),
            lambda: list(llm.stream(PROMPT, max_tokens=3, speculative=3)),
        ):
            with pytest.raises(DeviceError, match=rf"layer1\.down .* on the {kind}") as found:
                call()
            assert (found.value.device, found.value.code) == (backend, "NOT_FINITE")
            assert len(llm.context) == 0


@pytest.mark.full
@pytest.mark.few(2)
@pytest.mark.parametrize("device", ["gpu", "npu", "hetero"])
@pytest.mark.parametrize("tokens", [1, 7])
def test_codes_hide_nothing(sound: Path, device: Any, tokens: int) -> None:
    """A code of what is not finite is finite, and so are logits; the stream before them is not."""
    loaded = open_model(sound, weights="f32")
    weights = static_weights(loaded.weights, [PROMPT], outliers="none")
    scales = weights.block(1).matrix("down").scales
    assert scales is not None
    scales[...] = HUGE
    spec = loaded.spec()
    plan = layer_level(spec) if device == "hetero" else single_device(spec, device)
    devices = open_devices(device).devices
    with Engine(weights, plan, devices, max_seq_len=64) as engine:
        context = engine.new_context()
        with pytest.raises(DeviceError, match=r"layer1\.down") as found:
            engine.prefill(context, PROMPT[:tokens])
        assert found.value.code == "NOT_FINITE"
        assert len(context) == 0


@pytest.mark.full
def test_a_piece_without_logits_is_looked_at(broken: Path) -> None:
    spec = open_model(broken, weights="f32").spec()
    plan = random_plan(spec, len(PROMPT), (1, 8, 32), random.Random(2), strategies=["gpu-only"])
    with LLM(str(broken), plan=plan, weights="f32") as llm:
        with pytest.raises(DeviceError, match=r"layer1\.down"):
            llm.generate([*PROMPT, *PROMPT], max_tokens=1)
        assert llm.engine.runner.last_step.logits is None
        assert len(llm.context) == 0


def test_cut_matmuls_in_panels(broken: Path) -> None:
    spec = open_model(broken, weights="f32").spec()
    plan = random_plan(spec, len(PROMPT), (1, 8, 32), random.Random(1), strategies=["hybrid-cut"])
    with (
        LLM(str(broken), plan=plan, weights="f32") as llm,
        pytest.raises(DeviceError, match=r"layer1\.down .* on the [gn]pu failed: NOT_FINITE"),
    ):
        llm.generate(PROMPT, max_tokens=3)


@pytest.mark.full
def test_the_command_line_says_one_sentence(broken: Path, command: Command) -> None:
    done = command("generate", str(broken), "Hi", "--device", "gpu", "--weights", "f32", "--raw")
    assert done.returncode == 2
    assert done.stderr.startswith("hetero: opencl: computing layer1.down (")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_one_value_is_found(bad: float) -> None:
    values = np.random.default_rng(1).standard_normal((3, 1000)).astype(np.float32)
    assert all_finite(values)
    values[1, 500] = bad
    assert not all_finite(values)
    assert not all_finite(np.full((2, 2), bad, np.float32))


def test_sums_beyond_the_largest_number_are_no_fault() -> None:
    assert all_finite(np.full(100, HUGE, np.float32))


@pytest.mark.parametrize("weight_is_zero", [False, True])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 2e38])
def test_two_columns_of_a_norm_tell_whether_a_row_is_finite(
    bad: float, weight_is_zero: bool
) -> None:
    random_values = np.random.default_rng()
    weight = random_values.normal(size=64).astype(np.float32)
    if weight_is_zero:
        weight[:2] = 0
    for _ in range(20):
        stream = random_values.normal(size=(7, 64)).astype(np.float32)
        assert norms_finite(normed(stream, weight))
        stream[random_values.integers(7), random_values.integers(64)] = bad
        found = normed(stream, weight)
        assert norms_finite(found) == bool(np.isfinite(found).all())


def normed(stream: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """RMS norm in float32."""
    with np.errstate(all="ignore"):
        square = np.mean(stream * stream, axis=1, keepdims=True, dtype=np.float32)
        return np.asarray(stream * (np.float32(1) / np.sqrt(square)) * weight)
