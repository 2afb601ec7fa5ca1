"""Write the default long prompt: chapters that we open and the bundled model continues, with a few facts among them.

    python scripts/write_document.py --model WORK/model --out gpt_fast_sd/bundled/document.txt

The headings, the opening sentences and the last sentence are ours; the rest is sampled from the model itself, each
chapter after the end of the one before. The same model, seed and machine give the same document.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a checkout runs without being installed
sys.path.insert(0, str(Path(__file__).resolve().parent))

import numpy as np
from tqdm import tqdm

from bundled_data import distinct, fact, number, person, thing
from gpt_fast_sd import Engine, EngineConfig, SamplingParams
from gpt_fast_sd.loading import BUNDLED
from gpt_fast_sd.model import Tokenizer

TITLE = "A Winter Journey to the Salt Coast"
CHAPTERS = (
    (
        "The Departure",
        "It was on the ninth of October, in weather which Captain Verrall called promising and every other person on "
        "the quay called a gale, that we left Dunmouth in the brig Constance, carrying sixteen men, two goats, and "
        "the whole of Doctor Amberley's library.",
    ),
    (
        "The Company on Board",
        "Before I relate what befell us, I ought to describe the persons among whom I was to pass the winter; and I "
        "begin with Doctor Amberley, because he would not have forgiven me for beginning with any other.",
    ),
    (
        "A Storm off Cape Harrow",
        "On the sixth night the wind went round to the north, and Captain Verrall, who had not left the deck since "
        "noon, sent the boy Pell below to tell us that we had better dress.",
    ),
    (
        "The Harbour of Sant Orlo",
        "The town of Sant Orlo is built upon three hills, of which the first belongs to the fishermen, the second to "
        "the priests, and the third, as Mrs. Thackwell observed, to the goats.",
    ),
    (
        "The Consul and His Sister",
        "We had letters to the consul, a Mr. Lindqvist, who received us in a garden where nothing grew but lemons, "
        "and asked at once whether we had brought any newspapers.",
    ),
    (
        "We Hire Mules",
        "No man who has not bargained for mules in the market of Sant Orlo can be said to know the patience of which "
        "the human heart is capable.",
    ),
    (
        "The Road over the Mountain",
        "At daybreak the guide Marco came to the door with a lantern, and told Captain Verrall that the snow upon the "
        "pass was deep, but that his grandfather had crossed it in deeper.",
    ),
    (
        "A Night with the Shepherds",
        "Toward evening we saw a light, and Doctor Amberley, who had lost one boot and all his opinions of the "
        "country, was the first to run to it.",
    ),
    (
        "The Monastery Library",
        "The abbot showed us eleven hundred volumes, and begged us to believe that he had read none of them, since "
        "he was afraid of what they might contain.",
    ),
    (
        "What Mrs. Thackwell Found",
        "It was Mrs. Thackwell, and not, as the newspapers afterwards said, Doctor Amberley, who first remarked that "
        "the old map and the new one could not both be true.",
    ),
    (
        "The Salt Coast",
        "On the second of January we came down out of the hills, and there lay before us, white as a tablecloth and "
        "quite as flat, the coast for which we had travelled nine hundred miles.",
    ),
    (
        "The Lighthouse",
        "The keeper of the light had lived for thirty years alone, and when the boy Pell wished him good morning he "
        "was so long in answering that we supposed him to be deaf.",
    ),
)
ENDING = (
    "The Return",
    "When at last the Constance lay again at her old moorings, and Captain Verrall had counted us twice, Doctor "
    "Amberley stood up among the boxes, took off his hat, and began to speak of",
)
NO_PROSE = ("The number of", "What is the number of", "The list:", "Read it once more")  # our synthetic documents
CONTEXT = 1500  # tokens of the story so far that the model sees: long contexts are slow without compiling
SENTENCE_ENDS = (". ", "! ", "? ", ".\n", "!\n", "?\n", '." ', '!" ', '?" ', '."\n', '!"\n', '?"\n')
MIN_SHARE = 48  # tokens a continuation is worth
MAX_ATTEMPTS = 12  # to fill a chapter: a continuation ends early where it leaves prose
TEMPERATURE, TOP_P = 0.8, 0.95


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", default="bundled", help="'bundled', a model folder, or a hub id (default: bundled)")
    add("--tokens", type=int, default=8000, help="about how long the document is (default: 8000)")
    add("--facts", type=int, default=6, help="facts among the chapters (default: 6)")
    add("--seed", type=int, default=0)
    add("--out", type=Path, default=BUNDLED / "document.txt", help="default: the bundled document")
    return parser.parse_args(argv)


def heading(index: int, title: str) -> str:
    return f"CHAPTER {index}. {title}\n\n"


def whole_sentences(text: str) -> str:
    """The text up to its last sentence end; nothing where it has none."""
    end = max((at + len(mark.rstrip()) for mark in SENTENCE_ENDS if (at := (text + "\n").rfind(mark)) >= 0), default=0)
    return text[:end]


def continue_story(engine: Engine, tokenizer: Tokenizer, story: str, n_tokens: int, seed: int) -> str:
    """About n_tokens of prose that follow the story, ending with a sentence."""
    grown = ""
    for attempt in range(MAX_ATTEMPTS):
        missing = n_tokens - len(tokenizer.encode(grown, bos=False))
        if missing < MIN_SHARE:
            break
        context = tokenizer.encode(story + grown)
        prompt = context[:1] + context[1:][-CONTEXT:]  # BOS stays
        params = SamplingParams(
            max_tokens=missing, temperature=TEMPERATURE, top_p=TOP_P, seed=1000 * seed + attempt, stop=NO_PROSE,
            ignore_eos=True,
        )  # fmt: skip
        text = engine.generate([prompt], params)[0].text.replace("\ufffd", "")
        grown += whole_sentences(text)
    return grown


def write_document(engine: Engine, tokenizer: Tokenizer, n_tokens: int, n_facts: int, seed: int) -> str:
    """The document: title, chapters with facts between them, and an opening sentence to go on from."""
    rng = np.random.default_rng(seed)
    names = [*distinct(person, rng, n_facts // 2), *distinct(thing, rng, n_facts - n_facts // 2)]
    facts = [fact(name, number(rng)) for name in names]
    follows = np.linspace(0, len(CHAPTERS), n_facts, endpoint=False).astype(int).tolist()  # the chapter before each

    ending = heading(len(CHAPTERS) + 1, ENDING[0]) + ENDING[1]
    ours = "".join([TITLE, *(heading(i + 1, a) + b for i, (a, b) in enumerate(CHAPTERS)), *facts, ending])
    share = (n_tokens - len(tokenizer.encode(ours))) // len(CHAPTERS)
    if share < MIN_SHARE:
        raise ValueError(f"{n_tokens:,} tokens are too few: our own sentences and {n_facts} facts fill most of them")
    story, document = f"{TITLE}\n\n", f"{TITLE}\n\n"  # the model sees the story only: a fact would teach it to go on so
    for i, (title, opening) in enumerate(tqdm(CHAPTERS, desc="chapters")):
        begun = heading(i + 1, title) + opening
        chapter = begun + continue_story(engine, tokenizer, story + begun, share, seed * len(CHAPTERS) + i) + "\n\n"
        story += chapter
        document += chapter + "".join(f"{facts[k]}\n\n" for k, after in enumerate(follows) if after == i)
    return document + ending


def run(args: argparse.Namespace) -> None:
    if not args.out.resolve().parent.is_dir():
        raise ValueError(f"cannot write {args.out}: there is no folder {args.out.resolve().parent}")
    room = args.tokens // len(CHAPTERS) + CONTEXT + 1
    engine = Engine.from_pretrained(
        args.model, EngineConfig(batch_size=1, max_seq_len=room, dtype="fp32", device="cpu", compile=False)
    )
    if engine.tokenizer is None:
        raise ValueError(f"{args.model} has no tokenizer")
    document = write_document(engine, engine.tokenizer, args.tokens, args.facts, args.seed)
    args.out.write_text(document, encoding="utf-8")
    print(f"{args.out}: {len(engine.tokenizer.encode(document)):,} tokens")


def refuse(error: Exception) -> NoReturn:
    """One sentence on stderr and exit code 2."""
    text = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) and error.filename else str(error)
    print(f"write_document.py: {text}", file=sys.stderr)
    raise SystemExit(2)


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)
    try:
        run(args)
    except (ValueError, OSError) as error:
        refuse(error)


if __name__ == "__main__":
    main()
