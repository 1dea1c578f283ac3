"""Perplexity, agreement and divergence, against plain sums over whole texts."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero import LLM
from hetero.cli import app as cli
from hetero.compiling.calibration import calibration_sequences
from hetero.errors import UserError
from hetero.generation.sampling import log_softmax
from hetero.measuring.evaluation import evaluate, mean_95, read_tokens, share_95, windows
from tests.runtime.models import tiny_model
from tests.support.helpers import Command
from tests.support.selection import examples

STORY = "Once upon a time, there was a young fox named Jasmund. He lived in the village. " * 6


@settings(deadline=None)
@given(count=st.integers(2, 300), window=st.integers(2, 64), data=st.data())
def test_every_token_is_scored_once_with_enough_before_it(
    count: int, window: int, data: st.DataObject
) -> None:
    stride = data.draw(st.integers(1, window - 1))
    found = list(windows(count, window, stride))
    scored = [i for part in found for i in range(part.scored, part.stop)]
    assert scored == list(range(1, count))
    for part in found:
        assert part.stop - part.start <= window
        assert part.scored > part.start or part.start == 0
        assert part.start == 0 or part.scored - part.start >= window - stride


def test_perplexity_is_that_of_the_logits() -> None:
    with LLM("demo", device="npu") as llm:
        tokens = llm.encode(STORY)[:90]
        logs = log_softmax(llm.logits(tokens))
        losses = [-logs[i, token] for i, token in enumerate(tokens[1:])]
        found = evaluate(llm, tokens, window=128)
        assert found.perplexity == pytest.approx(math.exp(np.mean(losses)), rel=1e-3)
        assert (found.tokens, found.kl_mean) == (89, None)
        whole = evaluate(llm, tokens, window=128, reference=llm)
        assert (whole.top1_agreement, whole.kl_mean) == (1.0, 0.0)
        short = evaluate(llm, tokens, window=16, stride=8)
        assert short.perplexity > found.perplexity  # with less before them tokens are harder
        for sizes in ({"window": 1}, {"window": 10**6}, {"window": 16, "stride": 16}):
            with pytest.raises(UserError):
                evaluate(llm, tokens, **sizes)


@settings(deadline=None, max_examples=examples(20))
@given(share=st.floats(0.05, 0.95), count=st.integers(40, 400), seed=st.integers(0, 2**32 - 1))
def test_intervals_hold_the_true_value_95_times_in_100(share: float, count: int, seed: int) -> None:
    """Over 400 draws, at five standard deviations of that count."""
    draws = np.random.default_rng(seed).random((400, count)) < share
    found = [share_95(int(draw.sum()), count) for draw in draws]
    held = [low <= share <= high for low, high in found]
    assert sum(held) > 400 * 0.92 - 5 * math.sqrt(400 * 0.92 * 0.08)  # steps of a count
    values = np.random.default_rng(seed).normal(3.0, 2.0, (400, count))
    means = [low <= 3.0 <= high for low, high in map(mean_95, values)]
    assert sum(means) > 400 * 0.95 - 5 * math.sqrt(400 * 0.95 * 0.05) - 4
    low, high = share_95(count, count)
    assert 0.8 < low < high == pytest.approx(1.0)


@pytest.mark.full
def test_the_reference_shows_what_rounding_costs(stories: Path) -> None:
    with (
        LLM(str(stories), device="npu", weights="f32") as exact,
        LLM(str(stories), device="npu", weights="w4a16") as four,
        LLM(str(stories), device="npu", weights="w8a16") as eight,
    ):
        tokens = exact.encode(STORY)[:300]
        found = [evaluate(x, tokens, reference=exact, window=256) for x in (exact, eight, four)]
    kl = [x.kl_mean or 0.0 for x in found]
    assert kl[0] == 0.0
    assert 0 < kl[1] < kl[2] / 10
    assert found[2].top1_agreement is not None
    assert 0.5 < found[2].top1_agreement < 1.0


@pytest.mark.full
def test_the_command_prints_a_table_and_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text.txt"
    text.write_text(STORY)
    common = ["eval", "demo", "--text", str(text), "--max-tokens", "60"]
    with pytest.raises(SystemExit):
        cli.main([*common, "--weights", "w4a16", "--weights", "w4a8"])
    lines = capsys.readouterr().out.splitlines()
    assert [x.split("|")[1].strip() for x in lines[2:] if "|" in x] == ["w4a16", "w4a8"]
    assert "95 % intervals" in lines[-1]
    with pytest.raises(SystemExit):
        cli.main([*common, "--no-reference", "--json"])
    assert json.loads(capsys.readouterr().out)["w4a16"]["kl_mean"] is None


@pytest.mark.few(2)
@pytest.mark.parametrize("stored", [["w8a8", "w4a16"], ["w8a16"], ["w4a16"], ["f16"]], ids=str)
@pytest.mark.parametrize("origin", ["beside", "gone", "other"])
def test_a_quantised_directory_without_floats(
    command: Command, tmp_path: Path, stored: list[str], origin: str
) -> None:
    """It is compared with the model that it was made from, or scored alone."""
    text, other = tmp_path / "text.txt", tmp_path / "other.txt"
    text.write_text(STORY)
    other.write_text(STORY[::-1])
    source, made = tmp_path / "model", tmp_path / "made"
    tiny_model(source)
    formats = ("--weights", ",".join(stored))
    static = ("--calibrate", str(other)) if "w8a8" in stored else ()
    assert command("quantize", str(source), "--out", str(made), *formats, *static).returncode == 0
    if origin != "beside":
        shutil.rmtree(source)
    if origin == "other":
        tiny_model(source, num_hidden_layers=2)
    found = command("eval", str(made), "--text", str(text), "--max-tokens", "60", "--json")
    assert found.returncode == 0, found.stderr
    ((name, quality),) = json.loads(found.stdout).items()
    assert name == stored[0]
    assert (quality["kl_mean"] is not None) == (origin == "beside")
    holds = f"hetero: {made} holds {' and '.join(stored)}, no f32: it is "
    then = f"compared with {source}, " if origin == "beside" else "scored alone; for agreement give"
    assert found.stderr.startswith(holds + then)


@pytest.mark.full
def test_a_quantised_directory_is_no_reference_and_is_not_calibrated_again(
    command: Command, tmp_path: Path
) -> None:
    text, made, kept = tmp_path / "text.txt", str(tmp_path / "made"), str(tmp_path / "kept")
    text.write_text(STORY)
    assert command("quantize", "demo", "--out", made, "--weights", "w8a16").returncode == 0
    common = ("--text", str(text), "--max-tokens", "60")
    found = command("eval", made, *common)
    assert f"{made} holds w8a16, no f32: it is compared with demo, which it was" in found.stderr
    found = command("eval", "demo", *common, "--reference", made)
    assert found.returncode == 2
    assert f"--reference {made} holds w8a16, no f32: give the float model" in found.stderr
    with pytest.raises(UserError, match="holds w8a16: calibration needs floats; give the model"):
        calibration_sequences(made, text, 60)
    assert (
        command(
            "quantize", str(tiny_model(tmp_path / "tiny")), "--out", kept, "--weights", "f32"
        ).returncode
        == 0
    )
    found = command("eval", kept, *common, "--json")
    assert (found.returncode, found.stderr) == (0, "")
    assert json.loads(found.stdout)["f32"]["kl_mean"] == pytest.approx(0, abs=1e-9)


def test_a_text_that_is_none(tmp_path: Path) -> None:
    with LLM("demo", device="npu") as llm:
        for content, sentence in (
            (b"\xff\xfe\x00", "cannot be read as UTF-8"),
            (b"", "has 0 tokens"),
            (b"Once upon a time", "a score needs at least 32"),
        ):
            (tmp_path / "t").write_bytes(content)
            with pytest.raises(UserError, match=sentence):
                read_tokens(llm, tmp_path / "t")
        with pytest.raises(UserError, match="cannot be read"):
            read_tokens(llm, tmp_path / "none")
