"""The demo model's corpus: short stories made from a grammar, reproducible from a seed.

A story takes a cast (hero, helper, place, thing, ...) and a plot; the plot's beats are told in one
of several ways each.  Combinations (hero, thing, place) whose checksum falls in one class of 16 are
held out: they never occur in training, so held-out perplexity measures generalisation.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Literal

from grammar import PROMPTS, SMALL_TALK, Beat, beats, words

Split = Literal["train", "held_out"]

HELD_OUT_CLASSES = 16
MIN_WORDS = 80
MAX_WORDS = 250
# Kept in step with the jinja chat template that train.py writes into tokenizer_config.json.
USER_PREFIX = "User: "
ASSISTANT_PREFIX = "Assistant: "

_CHOICE = re.compile(r"\[([^\[\]]*)\]")
_SLOT = re.compile(r"\{(\w+)\}")
_SENTENCE_START = re.compile(r"(^|[.!?] |\.\" )([a-z])")
_A_BEFORE_VOWEL = re.compile(r"\b([Aa]) (?=[aeiouAEIOU])")


@dataclass(frozen=True)
class Being:
    """Someone in a story: what they are, their name and the key of their pronouns."""

    kind: str
    name: str
    gender: str


@dataclass(frozen=True)
class Cast:
    """Everything that stays the same through one story."""

    theme: str
    hero: Being
    helper: Being
    place: SimpleNamespace
    object: str
    slots: dict[str, str] = field(repr=False, default_factory=dict)

    @property
    def combination(self) -> str:
        """The key by which stories are held out."""
        return f"{self.hero.kind}|{self.object}|{self.place.name}"


def split_of(combination: str) -> Split:
    """The split of a (hero, thing, place) combination, a pure function of its text."""
    is_held_out = zlib.crc32(combination.encode()) % HELD_OUT_CLASSES == 0
    return "held_out" if is_held_out else "train"


def make_name(rng: random.Random, gender: str) -> str:
    """A first name: usually a common one, in a third of the cases made up from syllables."""
    is_she = gender == "she"
    if rng.random() < 0.34:
        return rng.choice(words.name_starts) + rng.choice(
            words.she_ends if is_she else words.he_ends
        )
    return rng.choice(words.she_names if is_she else words.he_names)


def make_being(rng: random.Random, *, but_not: tuple[Being, ...] = ()) -> Being:
    """Someone whose kind and name differ from those of everyone in `but_not`."""
    while True:
        gender = rng.choice(("she", "he"))
        people = words.she_people if gender == "she" else words.he_people
        pool = rng.choices((words.animals, people, words.grown_people), weights=(72, 18, 10))[0]
        being = Being(rng.choice(pool), make_name(rng, gender), gender)
        if all(being.kind != other.kind and being.name != other.name for other in but_not):
            return being


def make_cast(rng: random.Random, split: Split = "train") -> Cast:
    """A cast whose combination belongs to `split`."""
    while True:
        theme = rng.choice(tuple(beats.plots))
        hero = make_being(rng)
        helper = make_being(rng, but_not=(hero,))
        thing = rng.choice(words.plot_objects.get(theme, words.objects))
        cast = Cast(theme, hero, helper, rng.choice(words.places), thing)
        if split_of(cast.combination) == split:
            cast.slots.update(_slots(rng, cast))
            return cast


def _pronouns(gender: str, suffix: str) -> dict[str, str]:
    he, him, his, himself = words.pronouns[gender]
    values = {"he": he, "him": him, "his": his, "himself": himself}
    return {key + suffix: value for key, value in values.items()}


def _slots(rng: random.Random, cast: Cast) -> dict[str, str]:
    passer_by = make_being(rng, but_not=(cast.hero, cast.helper))
    relative, relative_gender = rng.choice(words.relatives)
    thing_2 = rng.choice([thing for thing in words.objects if thing != cast.object])
    return {
        "name": cast.hero.name,
        "kind": cast.hero.kind,
        "name2": cast.helper.name,
        "kind2": cast.helper.kind,
        "kind3": passer_by.kind,
        **_pronouns(cast.hero.gender, ""),
        **_pronouns(cast.helper.gender, "2"),
        **_pronouns(relative_gender, "3"),
        **_pronouns(passer_by.gender, "4"),
        "theme": cast.theme,
        "place": cast.place.name,
        "where": cast.place.where,
        "view": cast.place.view,
        "spot": rng.choice(cast.place.spots),
        "object": cast.object,
        "thing": f"{rng.choice(words.colours)} {cast.object}",
        "thing2": f"{rng.choice(words.colours)} {thing_2}",
        "trait": rng.choice(words.traits),
        "trait2": rng.choice(words.plot_traits.get(cast.theme, words.traits)),
        "rel": relative,
        "food": rng.choice(words.foods),
        "seed": rng.choice(words.seeds),
        "fear": rng.choice(words.fears),
    }


def choose(rng: random.Random, template: str) -> str:
    """`template` with every `[one|another]` replaced by one of its alternatives."""
    while match := _CHOICE.search(template):
        choice = rng.choice(match[1].split("|"))
        template = template[: match.start()] + choice + template[match.end() :]
    return template


def tidy(text: str) -> str:
    """`text` with capitals at sentence starts, "an" before vowels and single spaces."""
    text = re.sub(r" +([.,!?])", r"\1", re.sub(r" +", " ", text)).strip()
    text = _SENTENCE_START.sub(lambda match: match[1] + match[2].upper(), text)
    return _A_BEFORE_VOWEL.sub(r"\1n ", text)


class Teller:
    """Fills templates for one cast; remembers what the story has already introduced."""

    def __init__(self, rng: random.Random, cast: Cast) -> None:
        self._rng = rng
        self._cast = cast
        self._is_helper_known = False
        self._is_thing_known = False

    def tell(self, beat: Beat) -> str:
        """One telling of `beat`; empty when an optional beat is left out.

        Raises:
            ValueError: a template uses a slot that does not exist, or the helper too early.
        """
        if beat[0] == "?":
            if self._rng.random() < 0.5:
                return ""
            beat = beat[1:]
        template = choose(self._rng, self._rng.choice(beat))
        return _SLOT.sub(lambda match: self._fill(match[1]), template)

    def _fill(self, slot: str) -> str:
        value = self._value(slot.lower())
        return value[0].upper() + value[1:] if slot[0].isupper() else value

    def _value(self, slot: str) -> str:
        if slot == "hero":
            return self._mention(self._cast.hero)
        if slot == "intro2":
            return self._introduce_helper()
        if slot in {"helper", "name2"} and not self._is_helper_known:
            raise ValueError(f"{{{slot}}} before {{intro2}} in a story of {self._cast.theme!r}")
        if slot == "helper":
            return self._mention(self._cast.helper)
        if slot == "thing":
            return self._mention_thing()
        if slot not in self._cast.slots:
            raise ValueError(f"no slot named {{{slot}}}")
        return self._cast.slots[slot]

    def _mention(self, being: Being) -> str:
        return being.name if self._rng.random() < 0.7 else f"the {being.kind}"

    def _mention_thing(self) -> str:
        is_short = self._is_thing_known and self._rng.random() < 0.5
        self._is_thing_known = True
        return self._cast.slots["object" if is_short else "thing"]

    def _introduce_helper(self) -> str:
        if self._is_helper_known:
            return self._mention(self._cast.helper)
        self._is_helper_known = True
        trait = self._cast.slots["trait2"]
        kind, name = self._cast.helper.kind, self._cast.helper.name
        forms = (f"a {kind} named {name}", f"a {trait} {kind} named {name}", f"{name} the {kind}")
        return self._rng.choice((*forms, f"a {trait} {kind} called {name}"))


def _opening(rng: random.Random, teller: Teller) -> tuple[str, bool]:
    """The first sentences, and whether they already speak of one certain day."""
    kind = rng.random()
    if kind < 0.2:
        return teller.tell(beats.day_openings), True
    opening = teller.tell(beats.once_openings if kind < 0.6 else beats.openings)
    view = teller.tell(beats.views) if rng.random() < 0.3 else ""
    habit = teller.tell(beats.habits) if rng.random() < 0.25 else ""
    return f"{opening} {view} {habit}", False


def tell_story(rng: random.Random, cast: Cast) -> str:
    """One story of `cast`, in one paragraph."""
    teller = Teller(rng, cast)
    opening, is_one_day = _opening(rng, teller)
    body = " ".join(teller.tell(beat) for beat in beats.plots[cast.theme])
    if is_one_day:
        # "One day, a fox woke up. One day, ..." would start the story twice.
        body = re.sub(r"\bOne ((?:\w+ )?(?:day|morning|afternoon|evening|night))\b", r"That \1",
                      body, count=1)  # fmt: skip
    ending = teller.tell(beats.endings) if rng.random() < 0.45 else ""
    return tidy(f"{opening} {body} {ending}")


def _cast_and_story(rng: random.Random, split: Split) -> tuple[Cast, str]:
    while True:
        cast = make_cast(rng, split)
        story = tell_story(rng, cast)
        if MIN_WORDS <= len(story.split()) <= MAX_WORDS:
            return cast, story


def generate_story(rng: random.Random, split: Split = "train") -> str:
    """One story of `split`, 80 to 250 words, in one paragraph."""
    return _cast_and_story(rng, split)[1]


def _prompt(rng: random.Random, cast: Cast) -> str:
    template = choose(rng, rng.choice(PROMPTS))
    prompt = tidy(_SLOT.sub(lambda match: cast.slots[match[1]], template))
    return prompt.rstrip(".") if rng.random() < 0.2 else prompt


def generate_document(rng: random.Random, split: Split = "train") -> str:
    """One training document: a story (72 %), a prompt with its story, or a line of small talk."""
    kind = rng.random()
    if kind < 0.015:
        question, answer = rng.choice(SMALL_TALK)
        return f"{USER_PREFIX}{choose(rng, question)}\n{ASSISTANT_PREFIX}{answer}"
    cast, story = _cast_and_story(rng, split)
    if kind < 0.22:
        return f"{USER_PREFIX}{_prompt(rng, cast)}\n{ASSISTANT_PREFIX}{story}"
    if kind < 0.28:
        return f"{_prompt(rng, cast)}\n{story}"
    return story


def documents(seed: int, split: Split = "train") -> Iterator[str]:
    """Documents of `split` without end, the same for the same seed."""
    rng = random.Random(f"{split} {seed}")
    while True:
        yield generate_document(rng, split)


def main(argv: list[str] | None = None) -> int:
    """Prints documents as JSON lines."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=20261121)
    parser.add_argument("--count", type=int, default=10)
    parser.add_argument("--split", choices=("train", "held_out"), default="train")
    arguments = parser.parse_args(argv)
    source = documents(arguments.seed, arguments.split)
    for _ in range(arguments.count):
        sys.stdout.write(json.dumps({"text": next(source)}) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
