"""The demo model's corpus: reproducible, whole, varied, and with honest held-out combinations."""

from __future__ import annotations

import importlib
import itertools
import random
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

DEMO_DIR = Path(__file__).parents[2] / "docs" / "demo-model"
SAMPLE = 400
WORD = re.compile(r"[A-Za-z]+")


@pytest.fixture(scope="module")
def corpus() -> Iterator[ModuleType]:
    """The script's module; its folder is on the path only while this file runs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(DEMO_DIR))
        yield importlib.import_module("corpus")
    for name in ("corpus", "grammar"):
        sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def stories(corpus: ModuleType) -> list[str]:
    """A few hundred training stories."""
    rng = random.Random(7)
    return [corpus.generate_story(rng) for _ in range(SAMPLE)]


def casts(corpus: ModuleType, split: str) -> list[object]:
    """The casts of one split's first stories."""
    rng = random.Random(11)
    return [corpus.make_cast(rng, split) for _ in range(SAMPLE)]


def test_same_seed_same_documents(corpus: ModuleType) -> None:
    first, second = (list(itertools.islice(corpus.documents(3), 50)) for _ in range(2))
    assert first == second


def test_seeds_and_splits_differ(corpus: ModuleType) -> None:
    sources = (corpus.documents(3), corpus.documents(4), corpus.documents(3, "held_out"))
    assert len({next(source) for source in sources}) == 3


def test_no_held_out_combination_in_training(corpus: ModuleType) -> None:
    combinations = {
        split: {cast.combination for cast in casts(corpus, split)}  # type: ignore[attr-defined]
        for split in ("train", "held_out")
    }
    assert not combinations["train"] & combinations["held_out"]
    assert all(corpus.split_of(name) == "held_out" for name in combinations["held_out"])


def test_every_part_of_a_held_out_combination_occurs_in_training(corpus: ModuleType) -> None:
    rng = random.Random(5)
    seen = [corpus.make_cast(rng).combination.split("|") for _ in range(4000)]
    for position, cast in itertools.product(range(3), casts(corpus, "held_out")):
        part = cast.combination.split("|")[position]  # type: ignore[attr-defined]
        assert part in {combination[position] for combination in seen}


def test_about_one_combination_in_sixteen_is_held_out(corpus: ModuleType) -> None:
    splits = [corpus.split_of(f"{a}|{b}|{c}") for a, b, c in itertools.product(range(20), repeat=3)]
    assert 0.04 < splits.count("held_out") / len(splits) < 0.09


def test_no_placeholder_is_left(stories: list[str]) -> None:
    assert not [story for story in stories if re.search(r"[{}\[\]|]", story)]


def test_length_bounds(corpus: ModuleType, stories: list[str]) -> None:
    lengths = [len(story.split()) for story in stories]
    assert corpus.MIN_WORDS <= min(lengths) < 120
    assert 170 < max(lengths) <= corpus.MAX_WORDS


def test_vocabulary_and_openings_vary(stories: list[str]) -> None:
    words = set(WORD.findall(" ".join(stories)))
    openings = {" ".join(story.split()[:3]) for story in stories}
    assert len(words) > 1000
    assert len(openings) > 40
    assert len(set(stories)) == len(stories)


def test_a_quarter_begins_with_the_classic_words(stories: list[str]) -> None:
    share = sum(story.startswith("Once upon a time") for story in stories) / len(stories)
    assert 0.3 < share < 0.5


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        (r"[.!?] [a-z]", "a sentence starts without a capital"),
        (r"\b[Aa] [aeiou]", "'a' before a vowel"),
        (r"  | [.,!?]", "stray space"),
        (r"\b(\w+) \1\b(?<!that that)", "a word twice"),
    ],
)
def test_text_is_tidy(stories: list[str], pattern: str, reason: str) -> None:
    hits = [match[0] for story in stories for match in re.finditer(pattern, story)]
    assert not hits, f"{reason}: {hits[:3]}"


def test_every_plot_keeps_its_cast(corpus: ModuleType) -> None:
    rng = random.Random(2)
    themes = set()
    for _ in range(300):
        cast = corpus.make_cast(rng)
        story = corpus.tell_story(rng, cast)
        themes.add(cast.theme)
        assert cast.hero.kind != cast.helper.kind
        assert cast.hero.name in story
        assert cast.helper.name in story
        assert cast.place.name in story
    assert themes == set(corpus.beats.plots)


def test_every_template_of_every_plot_can_be_told(corpus: ModuleType) -> None:
    rng = random.Random(1)
    for theme, beats in corpus.beats.plots.items():
        cast = corpus.make_cast(rng)
        for beat, _ in itertools.product(beats, range(20)):
            teller = corpus.Teller(rng, cast)
            teller.tell(("{intro2}",))
            assert "{" not in teller.tell(beat), theme


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{helper} came.", r"\{helper\} before \{intro2\}"),
        ("{dragon} came.", r"no slot named \{dragon\}"),
    ],
)
def test_a_bad_template_is_refused(corpus: ModuleType, template: str, message: str) -> None:
    rng = random.Random(0)
    with pytest.raises(ValueError, match=message):
        corpus.Teller(rng, corpus.make_cast(rng)).tell((template,))


def test_choices_nest(corpus: ModuleType) -> None:
    told = {corpus.choose(random.Random(seed), "a[b|c[d|e]]f") for seed in range(60)}
    assert told == {"abf", "acdf", "acef"}


@pytest.mark.parametrize(
    ("raw", "tidied"),
    [
        ("a owl came .  it sat", "An owl came. It sat"),
        ('"Where?" asked Tom. then he left', '"Where?" asked Tom. Then he left'),
        ('Tom said, "no." the fox left', 'Tom said, "no." The fox left'),
    ],
)
def test_tidy(corpus: ModuleType, raw: str, tidied: str) -> None:
    assert corpus.tidy(raw) == tidied


def test_chat_documents_have_both_turns(corpus: ModuleType) -> None:
    documents = list(itertools.islice(corpus.documents(9), SAMPLE))
    chats = [text for text in documents if text.startswith("User: ")]
    assert 0.15 < len(chats) / len(documents) < 0.3
    assert all(text.count("\nAssistant: ") == 1 for text in chats)
