"""A Gemma 4 assistant guesses tokens ahead; the judge of its numbers is `transformers`."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hetero import LLM, ModelError, UserError
from hetero.generation.assistant import Assistant
from tests.support.checkpoints import GEMMA4, make_checkpoint, torch

transformers = pytest.importorskip("transformers")
EVEN = replace(
    GEMMA4, changes=GEMMA4.changes | {"vocab_size": 264, "vocab_size_per_layer_input": 264}
)
CLUSTERS = {
    "use_ordered_embeddings": True, "num_centroids": 33, "centroid_intermediate_top_k": 5
}  # fmt: skip
OPTIONS: dict[str, Any] = {"device": "gpu", "weights": "f32", "kv": "f32", "max_seq_len": 256}
PROMPT = [9, 40, 7, 200, 31, 5, 88, 12, 250, 3, 99, 41, 17, 64, 77, 21, 130, 6, 45, 222, 18, 92] * 2


def make_assistant(folder: Path, target: Any, **changes: Any) -> Any:
    """A random assistant of a model, in float32, written to a folder."""
    of = target.config
    sliding, full = of.per_layer_config[0], of.per_layer_config[1]
    torch.manual_seed(3)
    text = transformers.Gemma4TextConfig(
        vocab_size=of.vocab_size, hidden_size=32, intermediate_size=64, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=sliding.num_key_value_heads,
        head_dim=sliding.head_dim,
        global_head_dim=full.head_dim, sliding_window=of.sliding_window,
        layer_types=["sliding_attention", "full_attention", "full_attention"],
        hidden_size_per_layer_input=0, vocab_size_per_layer_input=0, num_kv_shared_layers=3,
        max_position_embeddings=512, rope_parameters=of.rope_parameters,
    )  # fmt: skip
    config = transformers.Gemma4AssistantConfig(
        text_config=text, backbone_hidden_size=of.hidden_size, **changes
    )
    model = transformers.Gemma4AssistantForCausalLM(config).eval()
    with torch.no_grad():
        for name, value in model.named_parameters():
            value.normal_(1.0 if "norm" in name else 0.0, 0.1)
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.fill_(0.7)
            elif name.endswith("token_ordering"):
                buffer.copy_(torch.randperm(of.vocab_size))
    model.save_pretrained(folder)
    return model


@pytest.fixture(scope="module", params=[False, True], ids=["whole head", "clusters"])
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Any, Path, Any]:
    """A model and its assistant, each a directory and as `transformers` has it."""
    return make_pair(tmp_path_factory.mktemp("pair"), **CLUSTERS if request.param else {})


def make_pair(folder: Path, **changes: Any) -> tuple[Path, Any, Path, Any]:
    model = make_checkpoint(EVEN, folder / "model")
    return folder / "model", model, folder / "own", make_assistant(folder / "own", model, **changes)


@pytest.fixture(scope="module")
def clustered(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, Path, Any]:
    return make_pair(tmp_path_factory.mktemp("clustered"), **CLUSTERS)


def expected(model: Any, assistant: Any, text: list[int], steps: int) -> list[Any]:
    """The assistant's logits of guesses behind a text, its own last guess before each."""
    with torch.no_grad():
        out = model(
            torch.tensor([text[:-1]]), output_hidden_states=True, return_shared_kv_states=True
        )
        hidden, kv = out.hidden_states[-1][:, -1:], dict(out.shared_kv_states)
        window = model.config.sliding_window  # what the last computed token saw
        kv["sliding_attention"] = tuple(x[:, :, -window:] for x in kv["sliding_attention"])
        token, logits = text[-1], []
        for _ in range(steps):
            embedded = model.get_input_embeddings()(torch.tensor([[token]]))
            guess = assistant(
                inputs_embeds=torch.cat([embedded, hidden], dim=-1),
                position_ids=torch.tensor([[len(text) - 1]]),
                shared_kv_states=kv,
            )
            hidden = guess.last_hidden_state
            logits.append(guess.logits[0, -1].numpy())
            token = int(logits[-1].argmax())
    return logits


@pytest.mark.full
@pytest.mark.parametrize("tokens", [2, 7, 44])
def test_guesses_are_those_of_transformers(
    pair: tuple[Path, Any, Path, Any], monkeypatch: pytest.MonkeyPatch, tokens: int
) -> None:
    """Also beyond the window, which is shorter than the longest text."""
    folder, model, own, assistant = pair
    text, steps = PROMPT[:tokens], []
    step = Assistant.step

    def kept(self: Assistant, *args: Any) -> Any:
        steps.append(step(self, *args))
        return steps[-1]

    monkeypatch.setattr(Assistant, "step", kept)
    monkeypatch.setattr("hetero.generation.assistant.LEAST_PROBABILITY", 0.0)
    with LLM(str(folder), draft_model=str(own), **OPTIONS) as llm, llm.new_context() as context:
        assert isinstance(llm.draft, Assistant)
        with llm.draft.drafter(context, text) as drafter:
            llm.engine.prefill(context, text[:-1])
            guess = drafter.guess(text, 3)
    wanted = expected(model, assistant, text, 3)
    for (ids, logits, _), want in zip(steps, wanted, strict=True):
        np.testing.assert_allclose(logits, want[ids], rtol=2e-3, atol=2e-4)
    assert list(guess.tokens) == [int(x.argmax()) for x in wanted]


@pytest.mark.full
@pytest.mark.parametrize("options", [{}, {"temperature": 0.9, "seed": 5}], ids=["greedy", "hot"])
@pytest.mark.parametrize("more", [{}, {"device": "hetero"}, {"kv": "q8"}], ids=str)
def test_an_assistant_changes_no_token(
    pair: tuple[Path, Any, Path, Any],
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, Any],
    more: dict[str, Any],
) -> None:
    """On all devices and with caches of codes; forks and conversations go on with it."""
    folder, _, own, _ = pair
    monkeypatch.setattr("hetero.generation.assistant.LEAST_PROBABILITY", 0.0)
    texts = [PROMPT, [*PROMPT[:7], 30, 31], PROMPT[:20]]
    answers = []
    for draft in (None, str(own)):
        with LLM(str(folder), draft_model=draft, **OPTIONS | more) as llm:
            runs = [llm.generate(x, max_tokens=40, reuse=True, **options) for x in texts]
            answers.append([x.tokens for x in runs])
            drafts = [x.stats.speculation for x in runs]
    assert answers[0] == answers[1]
    assert all(x is not None and x.drafted for x in drafts)


@pytest.mark.full
def test_an_assistant_that_is_right_is_accepted(
    pair: tuple[Path, Any, Path, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guesses behind what was verified are those of a text that is read at once."""
    folder, _, own, _ = pair
    monkeypatch.setattr("hetero.generation.assistant.LEAST_PROBABILITY", 0.0)
    with LLM(str(folder), draft_model=str(own), **OPTIONS) as llm:
        assert isinstance(llm.draft, Assistant)
        answer = llm.generate(PROMPT, max_tokens=30, logprobs=0).tokens
        for count in (3, 11, 29):
            text = [*PROMPT, *answer[:count]]
            guesses = []
            for first in (len(PROMPT), len(text) - 1):  # read in one or two calls
                with llm.new_context() as context, llm.draft.drafter(context, text) as drafter:
                    llm.engine.prefill(context, text[:first])
                    if rest := text[first:-1]:
                        llm.engine.verify(context, rest[:7])
                        for token in rest[7:]:
                            llm.engine.decode(context, token)
                    guesses.append(list(drafter.guess(text, 4).tokens))
            assert guesses[0] == guesses[1]
            assert len(guesses[0]) == 4


def spoil(folder: Path, to: Path, changes: dict[str, Any], tensors: dict[str, Any]) -> Path:
    """Copy an assistant with other values in config.json, and other tensors (None: without)."""
    from safetensors.torch import load_file, save_file

    to.mkdir()
    raw = json.loads((folder / "config.json").read_text()) | changes
    (to / "config.json").write_text(json.dumps(raw))
    stored = load_file(folder / "model.safetensors") | tensors
    kept = {name: x for name, x in stored.items() if x is not None}
    save_file(kept, to / "model.safetensors", metadata={"format": "pt"})
    return to


@pytest.mark.parametrize(
    ("changes", "tensors", "said"),
    [
        ({"backbone_hidden_size": 32}, {}, "pre_projection.weight must be floats of the shape"),
        ({"num_centroids": 7}, {}, "num_centroids must divide the vocabulary of 264, got 7"),
        ({"centroid_intermediate_top_k": 99}, {}, "must be at most 33"),
        ({"text_config": None}, {}, "text_config must be given, got None"),
        ({}, {"post_projection.weight": None}, "tensor post_projection.weight is missing"),
        ({}, {"model.norm.weight": torch.full((32,), torch.nan)}, "is not finite"),
        (
            {},
            {"masked_embedding.token_ordering": torch.zeros(264, dtype=torch.int64)},
            "must have every token of the vocabulary of 264 once",
        ),
        ({}, {"pre_projection.weight": torch.zeros(3, 3)}, "got F32 of [3, 3]"),
    ],
)
def test_a_broken_assistant_is_refused(
    clustered: tuple[Path, Any, Path, Any],
    tmp_path: Path,
    changes: dict[str, Any],
    tensors: dict[str, Any],
    said: str,
) -> None:
    broken = spoil(clustered[2], tmp_path / "broken", changes, tensors)
    with pytest.raises(ModelError) as caught:
        LLM(str(clustered[0]), draft_model=str(broken), **OPTIONS)
    assert said in str(caught.value)


def test_an_assistant_of_another_model_is_refused(
    clustered: tuple[Path, Any, Path, Any],
) -> None:
    folder, own = str(clustered[0]), str(clustered[2])
    with pytest.raises(ModelError, match="a width of 64, which demo is not: name its own"):
        LLM("demo", draft_model=own, device="gpu")
    with pytest.raises(UserError, match="leave --draft-device out"):
        LLM(folder, draft_model=own, draft_device="gpu", **OPTIONS)
    with pytest.raises(UserError, match="--sync copy keeps hidden states"):
        LLM(folder, draft_model=own, sync="copy", **OPTIONS)
