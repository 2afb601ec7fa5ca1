"""Made-up facts that no model can know: names of people and things, a number for each, and how they are stated."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

DIGITS = 5  # of a number

FIRST = (
    "Agnes Albert Alice Ambrose Anna Arthur Beatrice Benjamin Bertha Caleb Caroline Charles Clara Cyril Daniel Dora "
    "Edith Edmund Eleanor Ernest Esther Felix Florence Francis George Grace Hannah Harold Helen Henry Hester Hugh Ida "
    "Isaac Jane Jasper Joseph Julia Laura Leonard Lucy Lydia Mabel Martin Matilda Miriam Nathan Nora Oliver Owen "
    "Philip Rachel Ralph Robert Rose Rupert Sarah Silas Simon Sophia Stephen Susan Thomas Violet Walter William"
).split()
LAST = (
    "Abbott Ainsley Archer Barlow Beckett Blackwood Bramley Bright Calder Carver Chambers Clifton Coombe Crane Dalton "
    "Drake Dunstan Ellery Fairfax Fenwick Fletcher Forrest Garland Gibbon Gray Hale Hargrave Harper Hartley Holloway "
    "Ingram Keating Kirby Lambert Langley Lockwood Marsden Merrick Milford Norris Oakley Palmer Pembroke Perkins "
    "Quince Radcliffe Ransom Redfern Rowley Savage Selwyn Shelby Stanton Sutton Thorne Turner Underhill Vernon "
    "Wainwright Ward Weston Whitlock Winter Yardley York"
).split()
ADJECTIVE = (
    "amber ancient blue brass broken bronze copper crimson crooked crystal dark distant empty faded gilded golden "
    "gray green hidden hollow iron ivory little lonely marble narrow northern old painted pale purple quiet red rusty "
    "sacred secret silent silver small southern square stone stolen sunken tall velvet violet white winding wooden "
    "yellow"
).split()
NOUN = (
    "anchor arch barrel basket bell boat bottle box bridge button cabinet candle castle chain chest clock coat "
    "compass cottage crown cup door drum feather fiddle flag flute fountain garden gate glove hammer harbour key "
    "kettle knife ladder lamp lantern letter lock mill mirror needle oar pearl pipe plough ring saddle ship spoon "
    "statue sword tower trumpet vase violin wagon watch wheel whistle window"
).split()


def person(rng: np.random.Generator) -> str:
    """A name such as "Clara Lockwood"; about 4,200 are possible."""
    return f"{rng.choice(FIRST)} {rng.choice(LAST)}"


def thing(rng: np.random.Generator) -> str:
    """A thing such as "the silver lantern"; about 3,300 are possible."""
    return f"the {rng.choice(ADJECTIVE)} {rng.choice(NOUN)}"


def made_up(rng: np.random.Generator, n: int) -> tuple[list[str], list[str]]:
    """n different names of one sort, and a number for each; ValueError for more than there are."""
    if n > (most := min(len(FIRST) * len(LAST), len(ADJECTIVE) * len(NOUN))):
        raise ValueError(f"there are {most:,} names for facts, too few for {n:,}")
    make, names = (person if rng.random() < 0.5 else thing), dict[str, None]()
    while len(names) < n:
        names[make(rng)] = None
    return [*names], ["".join(map(str, rng.integers(0, 10, DIGITS))) for _ in names]


def fact(name: str, value: str) -> str:
    """The sentence that states a needle: the value follows the name at once, the easiest order for a small model."""
    return f"Remember {name} {value}."


def question(name: str) -> str:
    return f"Recall {name} "


def register(names: Sequence[str], values: Sequence[str]) -> list[str]:
    return [fact(name, value) for name, value in zip(names, values, strict=True)]
