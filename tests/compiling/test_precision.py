"""A type for each tensor under a budget: what is predicted is measured, and bytes are few."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero import LLM
from hetero.cli import app as cli
from hetero.compiling.divergence import UNSCORED, divergences, kl
from hetero.compiling.precision import SplitText, Tensors, Together, choose
from hetero.errors import UserError
from hetero.models import default_weights, open_model
from hetero.models.gguf import GgufFile
from hetero.models.gguf.float_rows import GgufRows
from hetero.models.gguf.kinds import Kind
from hetero.models.gguf.requantising import WRITTEN, write_copy
from tests.models.gguf_files import convert, write_tiny

WITHIN = 0.25  # of what was measured
FACTORS = st.lists(st.tuples(st.floats(0.01, 3), st.floats(0.5, 2)), min_size=1, max_size=5)


def run(*words: str) -> int:
    with pytest.raises(SystemExit) as ended:
        cli.main(["quantize", *words, "--profile", "host"])
    return ended.value.code  # type: ignore[return-value]


def tokens(seed: int, count: int = 48) -> list[int]:
    return np.random.default_rng(seed).integers(3, 260, count).tolist()


@settings(deadline=None)
@given(points=FACTORS, budget=st.floats(1e-4, 10))
def test_the_largest_sum_within_a_budget(points: list[tuple[float, float]], budget: float) -> None:
    rising = sorted({round(s, 2): factor for s, factor in points}.items())
    relation = Together([0.0, *(s for s, _ in rising)], [0.0, *(s * x for s, x in rising)])
    for s, factor in rising:
        assert relation.predicted(s) == pytest.approx(s * factor)
    allowed = relation.allowed(budget)
    assert relation.predicted(allowed) <= budget
    assert relation.predicted(allowed) == pytest.approx(budget, rel=0.01)


def test_parts_of_a_text_do_not_overlap(tmp_path: Path) -> None:
    model = open_model(write_tiny(tmp_path / "m.gguf"), weights="f32")
    (tmp_path / "text").write_text("abcdefgh" * 100)
    for limit in (256, 700):
        text = SplitText.of(model, tmp_path / "text", limit, 2)
        everything = model.encode("abcdefgh" * 100)[:limit]
        assert sum(map(len, text.unseen)) <= limit // 4
        chosen_by = everything[: limit - limit // 4]
        for part in (*text.alone, *text.together):
            assert 1 < len(part) <= 64  # the model's context
            assert any(chosen_by[i : i + len(part)] == part for i in range(len(chosen_by)))
    with pytest.raises(UserError, match="has 100 tokens, --quality needs at least 256"):
        SplitText.of(model, tmp_path / "text", 100, 2)


def test_losses_that_were_not_measured_are_near(tmp_path: Path) -> None:
    tensors = Tensors.of(GgufRows(GgufFile(write_tiny(tmp_path / "m.gguf"))))
    texts = [tokens(1), tokens(2)]
    losses = tensors.losses(texts).floats
    assert losses.keys() == tensors.smaller.keys()
    for name, by_kind in losses.items():
        assert tuple(sorted(by_kind, key=WRITTEN.index)) == tensors.smaller[name] == WRITTEN
        variants = [{name: kind} for kind in WRITTEN[:-1]]
        measured = divergences(tensors.weights, texts, variants).mean(axis=1)
        guessed = [by_kind[kind] for kind in WRITTEN[:-1]]
        assert guessed == pytest.approx(measured, rel=0.5)


def test_losses_of_rounded_inputs_are_near(tmp_path: Path) -> None:
    """Each tensor alone in a type, its input in int8: the head by measuring, others by scaling."""
    source = GgufRows(GgufFile(write_tiny(tmp_path / "f.gguf")))
    kinds = dict.fromkeys(Tensors.of(source).smaller, Kind.Q5_1)
    write_copy(source.file, tmp_path / "m.gguf", kinds)
    tensors = Tensors.of(GgufRows(GgufFile(tmp_path / "m.gguf")))
    texts = [tokens(1), tokens(2)]
    losses = tensors.losses(texts, int8=True)
    for name, types in tensors.options.items():
        assert types[0] is Kind.Q5_1
        assert losses.of(name, Kind.Q5_1, int8=False) == 0.0
        variants = [{name: kind} for kind in types]
        inputs = [frozenset({name})] * len(types)
        measured = divergences(tensors.weights, texts, variants, int8=inputs).mean(axis=1)
        guessed = [losses.of(name, kind, int8=True) for kind in types]
        assert guessed == pytest.approx(measured, rel=0.6)
        assert all(x > 0 for x in guessed)


def test_more_budget_is_fewer_bytes(tmp_path: Path) -> None:
    tensors = Tensors.of(GgufRows(GgufFile(write_tiny(tmp_path / "m.gguf"))))
    texts = [tokens(1), tokens(2)]
    losses = tensors.losses(texts)
    choices = [choose(tensors, losses, texts, x).choice for x in (0.001, 0.005, 0.02, 0.04, 9.0)]
    sizes = [x.nbytes for x in choices]
    assert sizes == sorted(sizes, reverse=True)
    assert len(set(sizes)) == 5
    assert set(choices[-1].kinds.values()) == {Kind.Q4_0}
    for choice, budget in zip(choices, (0.001, 0.005, 0.02, 0.04, 9.0), strict=True):
        assert choice.kl <= budget
        measured = divergences(tensors.weights, texts, [choice.kinds]).mean()
        assert choice.kl == pytest.approx(measured, rel=WITHIN)
    with pytest.raises(UserError, match=r"of .*m.gguf costs more; give [0-9.e-]+ or more"):
        choose(tensors, losses, texts, 1e-12)


@pytest.mark.full
def test_what_has_no_smaller_type(tmp_path: Path) -> None:
    path, out, text = (tmp_path / x for x in ("m.gguf", "out.gguf", "text"))
    write_tiny(path)
    text.write_text("abcd efgh " * 60)
    common = ("--out", str(out), "--calibrate", str(text))
    assert run(str(path), *common, "--quality", "9") == 0
    with pytest.raises(UserError, match="is the smallest type that is written"):
        Tensors.of(GgufRows(GgufFile(out)))


def printed_kl(text: str) -> tuple[float, float]:
    pattern = r"predicted KL (\S+), measured (\S+) nats a token over \d+ tokens"
    predicted, measured = re.findall(pattern, text)[0]
    return float(predicted), float(measured)


@pytest.mark.full
def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, out, text = (tmp_path / x for x in ("m.gguf", "out.gguf", "text"))
    write_tiny(path)
    text.write_text("".join(np.random.default_rng(0).choice(list("abcdefgh "), 1200)))
    words = (str(path), "--out", str(out), "--calibrate", str(text), "--quality", "0.02")
    assert run(*words) == 0
    shown = capsys.readouterr()
    predicted, measured = printed_kl(shown.out)
    assert predicted <= 0.02
    assert predicted == pytest.approx(measured, rel=WITHIN)
    assert "| Q4_0 |" in shown.out
    assert "predicted time: a prompt of 256 tokens in" in shown.out
    assert "is quantised" not in shown.err
    assert out.stat().st_size < path.stat().st_size / 3
    with LLM(str(out), device="npu") as llm:
        assert llm.generate("abc", max_tokens=2, temperature=0).tokens
    assert run(*words) == 2
    assert "exists already" in capsys.readouterr().err
    assert run(*words, "--overwrite") == 0
    again = (str(out), "--out", str(tmp_path / "x.gguf"), "--calibrate", str(text))
    assert run(*again, "--quality", "0.2") == 0
    assert "is quantised (" in capsys.readouterr().err


@pytest.mark.full
def test_the_command_for_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The file says that its inputs are int8, and the engine's answers diverge as measured."""
    path, out, text = (tmp_path / x for x in ("m.gguf", "out.gguf", "text"))
    write_tiny(path)
    text.write_text("".join(np.random.default_rng(0).choice(list("abcdefgh "), 1200)))
    words = (str(path), "--out", str(out), "--calibrate", str(text), "--quality", "0.05")
    assert run(*words, "--objective", "prompt") == 0
    shown = capsys.readouterr().out
    predicted, measured = printed_kl(shown)
    assert predicted <= 0.05
    assert predicted == pytest.approx(measured, rel=WITHIN)
    assert "| fastest prompt, int8 inputs |" in shown
    assert default_weights(out) in ("gguf-a8", "w4a8")
    times = [float(row.split("|")[4]) for row in re.findall(r"^\| [fmaQF].*$", shown, re.MULTILINE)]
    assert times == sorted(times)
    sequence = open_model(path, weights="f32").encode(text.read_text())[-64:]
    with LLM(str(path), device="npu", weights="f32", kv="f32") as exact:
        wanted = exact.logits(sequence)
    with LLM(str(out), device="npu", kv="f32") as chosen:
        lost = kl(wanted, chosen.logits(sequence))
    assert lost[len(lost) // UNSCORED :].mean() == pytest.approx(measured, rel=0.5)


@pytest.mark.full
def test_a_trained_model_is_as_good_as_predicted(
    stories: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with LLM(str(stories), device="npu", weights="f32") as exact:
        options: dict[str, Any] = {"max_tokens": 320, "temperature": 1.0}
        texts = [exact.generate([1], seed=seed, **options).text for seed in range(12)]
    path, out, text = (tmp_path / x for x in ("m.gguf", "out.gguf", "text"))
    text.write_text("\n".join(texts))
    convert(stories, path, GGMLQuantizationType.F16)
    words = (str(path), "--out", str(out), "--calibrate", str(text), "--quality", "0.02")
    assert run(*words) == 0
    predicted, measured = printed_kl(capsys.readouterr().out)
    assert predicted == pytest.approx(measured, rel=WITHIN)
