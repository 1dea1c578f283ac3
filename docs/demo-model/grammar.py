"""The demo model's story grammar, from `grammar.json`: words, plots, prompts.

A template is English with `{slot}` (a person, place or thing of the story) and `[one|another|]`
(a free choice, may nest).  A beat is a list of templates of which one is told; a beat whose first
entry is "?" is told in about half of the stories.  `{hero}` and `{helper}` become a name or "the
fox"; a pronoun ending in 2 is the helper's, in 3 the relative's, in 4 a passer-by's; a slot with a
capital letter is capitalised.  A plot is a list of beats.  A place has a name, the phrase for being
there, spots in it and a view.  `plot_objects` has the plots that need a certain sort of thing,
`plot_traits` those whose helper has a certain temper.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

_GRAMMAR = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))

Beat = list[str]
words = SimpleNamespace(**_GRAMMAR["words"])
words.places = [SimpleNamespace(**place) for place in words.places]
beats = SimpleNamespace(**_GRAMMAR["beats"])
PROMPTS: list[str] = _GRAMMAR["prompts"]
SMALL_TALK: list[tuple[str, str]] = _GRAMMAR["small_talk"]
