"""Plots of the demo model's story grammar: beats, and the ways each beat may be told.

A template is English with `{slot}` (a person, place or thing of the story) and `[one|another|]`
(a free choice, may nest).  A beat is a tuple of templates of which one is told; a beat whose first
entry is "?" is told in about half of the stories.  `{hero}` and `{helper}` become a name or "the
fox"; a pronoun ending in 2 is the helper's, in 3 the relative's, in 4 a passer-by's; a slot with a
capital letter is capitalised.
"""

from __future__ import annotations

from lexicon import Beat
from plots_friends import (
    BROKEN,
    FEAR,
    GRUMPY,
    NEW_FRIEND,
    RACE,
    SHARE,
    STUCK,
)
from plots_quests import (
    GIFT,
    LOST,
    RESCUE,
    SEED,
    STORM,
    TREASURE,
    WAY_HOME,
    WISH,
)

ONCE_OPENINGS: Beat = (
    "Once upon a time, there was a {trait} {kind} named {name}. {He} lived {where}.",
    "Once upon a time, there was a {trait} {kind} [named|called] {name} who lived {where}.",
    "Once upon a time, a {trait} {kind} [named|called] {name} lived {where}.",
    "Once upon a time, {where}, there lived a {trait} {kind} [named|called] {name}.",
    "Once upon a time there was a {kind}. {His} name was {name}, and {he} lived {where}.",
    "Once upon a time, there was a {trait} {kind} {where}. {His} name was {name}.",
)

OPENINGS: Beat = (
    "Once there was a {trait} {kind} named {name}, and {he} lived {where}.",
    "There was once a {trait} {kind} called {name}. {He} lived {where} [with {his} {rel}|].",
    "There once was a {kind} named {name} who lived {where} [with {his} {rel}|].",
    "Long ago, a {trait} {kind} lived {where}. {His} name was {name}.",
    "Long, long ago, there lived a {kind} called {name} {where}. {He} was very {trait}.",
    "{name} was a {trait} {kind} who lived {where}.",
    "{name} the {kind} lived {where}. {He} was a {trait} {kind}.",
    "[In a little house|In a cosy home] {where} lived a {trait} {kind} named {name}.",
    "{Where}, there lived a {trait} {kind} [named|called] {name}.",
    "The {trait} {kind} was called {name}. {He} lived {where}.",
    "A {trait} {kind} named {name} lived {where}.",
)

# Openings that begin in the middle of the day; the hero is introduced on the way.
DAY_OPENINGS: Beat = (
    "One day, a {trait} {kind} named {name} woke up early {where}.",
    "One [sunny|bright|warm|cold|windy] [morning|day], a {kind} named {name} [was walking|went "
    "for a walk] {where}.",
    "It was a [sunny|quiet|cold|windy] [morning|day] {where}. A {trait} {kind} called {name} "
    "looked out of the window.",
    "Every [morning|day], a {trait} {kind} named {name} [sang a song|took a walk] {where}.",
    "The sun was [shining|rising] {where}, and a {trait} {kind} named {name} was awake.",
    "One day {where}, a {kind} called {name} [woke up|got up] with a smile.",
)

VIEWS: Beat = (
    "{view}.",
    "{view}, and {hero} loved it there.",
    "It was a lovely place. {view}.",
    "{name} liked the {place} very much. {view}.",
)

HABITS: Beat = (
    "{He} liked [singing|dancing|drawing|reading|swimming|climbing|cooking] and "
    "[long walks|telling jokes|looking at the clouds|counting stars|collecting stones].",
    "Every [morning|evening], {he} [drank a cup of tea|sang a little song|swept the floor|fed the "
    "birds|watered the flowers].",
    "{He} had a [warm|loud|funny|soft] [laugh|voice], and everyone liked {him}.",
    "{He} lived with {his} {rel}, and they were happy together.",
    "{He} was known for {his} [funny songs|good heart|big smile|long scarf|many questions].",
)

ENDINGS: Beat = (
    "The end.",
    "And they lived happily ever after.",
    "That night, {hero} slept very well.",
    "And that is the story of {name} the {kind}.",
    "{Hero} smiled all the way home.",
    "Everyone {where} was happy that evening.",
    "{name} and {name2} watched the [stars|moon] until it was time for bed.",
)

PLOTS: dict[str, tuple[Beat, ...]] = {
    "losing something": LOST,
    "sharing": SHARE,
    "a storm": STORM,
    "finding the way home": WAY_HOME,
    "a race": RACE,
    "being brave": FEAR,
    "a present": GIFT,
    "telling the truth": BROKEN,
    "making a friend": NEW_FRIEND,
    "working together": STUCK,
    "being patient": SEED,
    "three wishes": WISH,
    "helping someone": RESCUE,
    "a treasure": TREASURE,
    "being kind": GRUMPY,
}
