"""Words of the demo model's story grammar: who, where and with what."""

from __future__ import annotations

from dataclasses import dataclass

# The ways one step of a plot may be told; plots.py describes the templates.
Beat = tuple[str, ...]


@dataclass(frozen=True)
class Place:
    """Somewhere a story happens: its name, the phrase for being there, spots in it, a view."""

    name: str
    where: str
    spots: tuple[str, ...]
    view: str


PLACES: tuple[Place, ...] = (
    Place(
        "forest",
        "in the forest",
        ("under a mossy log", "behind a tall oak tree", "beside the little stream"),
        "The trees were tall and the leaves whispered in the wind",
    ),
    Place(
        "village",
        "in the village",
        ("behind the old well", "under the bakery window", "next to the stone bridge"),
        "The houses had red roofs and smoke curled from every chimney",
    ),
    Place(
        "meadow",
        "in the meadow",
        ("in the long grass", "under a wild rose bush", "beside the wooden fence"),
        "Yellow flowers grew everywhere and bees hummed all day",
    ),
    Place(
        "farm",
        "on the farm",
        ("behind the red barn", "under a pile of hay", "next to the water trough"),
        "The barn was warm and the fields were golden",
    ),
    Place(
        "castle",
        "in the castle",
        ("under the stairs", "behind a heavy curtain", "in the top of the tower"),
        "Flags waved on the towers and the halls were wide and quiet",
    ),
    Place(
        "garden",
        "in the garden",
        ("under the apple tree", "behind the rose bushes", "beside the stone wall"),
        "The apple trees were in bloom and butterflies danced in the air",
    ),
    Place(
        "beach",
        "on the beach",
        ("behind a sand dune", "under an old boat", "between two grey rocks"),
        "The waves rolled softly and the sand was warm",
    ),
    Place(
        "mountain",
        "on the mountain",
        ("behind a big boulder", "in a small cave", "under a crooked pine tree"),
        "The air was cool and the snow on the top shone like silver",
    ),
    Place(
        "river",
        "by the river",
        ("under the old bridge", "in the tall reeds", "behind a flat stone"),
        "The water sparkled and little fish jumped in the sun",
    ),
    Place(
        "town",
        "in the town",
        ("under a park bench", "behind the clock tower", "next to the fountain"),
        "The streets were busy and the clock tower rang every hour",
    ),
    Place(
        "island",
        "on the island",
        ("under a palm tree", "behind the lighthouse", "in a sandy cave"),
        "The sea was blue on every side and gulls cried above the shore",
    ),
    Place(
        "valley",
        "in the valley",
        ("under a willow tree", "behind the mill", "beside the winding path"),
        "Green hills stood all around and a soft wind blew through the grass",
    ),
    Place(
        "harbour",
        "in the harbour",
        ("behind a stack of crates", "under a fishing net", "beside the wooden pier"),
        "The boats rocked gently and the air smelled of salt",
    ),
    Place(
        "jungle",
        "in the jungle",
        ("under a giant leaf", "behind a waterfall", "between the roots of a fig tree"),
        "Bright birds sang and long vines hung from every branch",
    ),
)

ANIMALS: tuple[str, ...] = (
    "fox", "rabbit", "bear", "mouse", "hedgehog", "squirrel", "duck", "cat", "dog", "turtle",
    "otter", "badger", "deer", "lamb", "goat", "pony", "beaver", "mole", "frog", "owl",
    "penguin", "elephant", "lion", "monkey", "pig", "dragon", "robot", "sparrow", "wolf", "tiger",
)  # fmt: skip
SHE_PEOPLE: tuple[str, ...] = ("girl", "princess", "girl")
HE_PEOPLE: tuple[str, ...] = ("boy", "prince", "boy")
GROWN_PEOPLE: tuple[str, ...] = ("farmer", "baker", "knight", "wizard", "sailor", "painter")

SHE_NAMES: tuple[str, ...] = (
    "Lily", "Mia", "Anna", "Rosa", "Ella", "Nora", "Clara", "Ivy", "Daisy", "Hazel", "Ruby",
    "Luna", "Molly", "Poppy", "Sara", "Tessa", "Willa", "Zoe", "Emma", "Greta", "Hanna", "June",
    "Kira", "Lucy", "Maya", "Nina", "Olive", "Penny", "Stella", "Wendy", "Sophie", "Alice",
)  # fmt: skip
HE_NAMES: tuple[str, ...] = (
    "Tom", "Max", "Ben", "Leo", "Sam", "Finn", "Oscar", "Hugo", "Jack", "Theo", "Felix", "Milo",
    "Otto", "Henry", "Noah", "Toby", "Rufus", "Simon", "Bruno", "Casper", "Emil", "Fred", "Gus",
    "Ivan", "Jonas", "Karl", "Louis", "Nico", "Paul", "Robin", "Walter", "Peter",
)  # fmt: skip
# Made-up names teach the model to copy a name from the text instead of knowing it by heart.
NAME_STARTS: tuple[str, ...] = (
    "Ba", "Bri", "Do", "Fa", "Gi", "Ha", "Ka", "Lo", "Mar", "Ne", "Pi", "Ro", "Ta", "Vi", "Wo",
    "Zi", "Pim", "Tal", "Quin", "El", "Or", "Um", "Jas", "Sel",
)  # fmt: skip
SHE_ENDS: tuple[str, ...] = ("la", "na", "bby", "rina", "tta", "lie", "mi", "sha", "wyn", "della")
HE_ENDS: tuple[str, ...] = ("bo", "ko", "rick", "dor", "lo", "mund", "to", "per", "gus", "zo")

COLOURS: tuple[str, ...] = (
    "red", "blue", "green", "yellow", "silver", "golden", "purple", "white", "orange", "pink",
    "shiny", "small", "old", "new", "wooden", "tiny",
)  # fmt: skip
OBJECTS: tuple[str, ...] = (
    "ball", "kite", "key", "hat", "drum", "lantern", "music box", "boat", "bell", "scarf", "book",
    "shell", "crown", "umbrella", "flute", "cup", "button", "basket", "whistle", "ring", "toy car",
    "teapot", "feather", "spoon", "mirror", "blanket",
)  # fmt: skip
FOODS: tuple[str, ...] = (
    "apple pie", "honey cake", "loaf of bread", "bowl of soup", "basket of berries", "pumpkin pie",
    "plate of cookies", "pot of stew", "bag of nuts", "cheese sandwich", "jar of jam",
)  # fmt: skip
SEEDS: tuple[str, ...] = (
    "sunflower", "pumpkin", "rose", "apple tree", "bean", "cherry tree", "tulip", "strawberry",
)  # fmt: skip
FEARS: tuple[str, ...] = (
    "the dark", "deep water", "high places", "loud thunder", "the old cave", "the tall slide",
    "the long bridge", "singing on a stage",
)  # fmt: skip
RELATIVES: tuple[tuple[str, str], ...] = (
    ("mother", "she"), ("father", "he"), ("grandmother", "she"), ("grandfather", "he"),
    ("aunt", "she"), ("uncle", "he"), ("sister", "she"), ("brother", "he"),
)  # fmt: skip
TRAITS: tuple[str, ...] = (
    "little", "young", "brave", "kind", "shy", "cheerful", "curious", "clever", "quiet", "small",
    "friendly", "gentle", "busy", "playful", "proud", "sleepy",
)  # fmt: skip
PRONOUNS: dict[str, tuple[str, str, str, str]] = {
    "she": ("she", "her", "her", "herself"),
    "he": ("he", "him", "his", "himself"),
}

# Plots that need a certain sort of thing; every other plot takes any of OBJECTS.
PLOT_OBJECTS: dict[str, tuple[str, ...]] = {
    "a treasure": (
        "lantern", "hat", "drum", "music box", "boat", "book", "umbrella", "basket", "teapot",
        "cup", "blanket",
    ),
    "working together": ("ball", "kite", "hat", "scarf", "feather", "umbrella", "blanket", "crown"),
    "telling the truth": (
        "lantern", "drum", "music box", "boat", "bell", "flute", "cup", "whistle", "toy car",
        "teapot", "mirror", "crown",
    ),
    "a present": (
        "kite", "hat", "drum", "lantern", "music box", "boat", "scarf", "book", "crown", "flute",
        "basket", "whistle", "ring", "spoon", "blanket", "toy car",
    ),
    "finding the way home": (
        "lantern", "bell", "scarf", "shell", "mirror", "drum", "feather", "crown", "umbrella",
        "basket", "kite", "hat",
    ),
}  # fmt: skip

# Plots whose helper has a certain temper.
PLOT_TRAITS: dict[str, tuple[str, ...]] = {
    "being kind": ("big", "old", "grumpy", "wild", "angry"),
    "sharing": ("little", "tired", "old", "hungry", "small", "poor"),
}
