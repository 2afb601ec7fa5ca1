"""Flags generated from the configurations: every public field has one in every program and describes itself.

    parser = argparse.ArgumentParser()
    add_flags(parser.add_argument_group("who drafts"), DraftConfig, policy={"default": "streaming"})
    add_engine_flags(parser)
    args = parser.parse_args()
    draft, engine = draft_of(args), config_of(EngineConfig, args, max_seq_len=4096)

Help, allowed values and the flag's name are the field's metadata (gpt_fast_sd/config.py and policies/config.py); which
policies heed a field of DraftConfig is said by their classes. A value that makes no sense is refused by the
configuration, in its own words.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import Field, fields
from pathlib import Path
from types import NoneType
from typing import Any, TypeVar, get_args, get_type_hints

import torch

from gpt_fast_sd import DraftConfig, EngineConfig, SamplingParams
from gpt_fast_sd.config import allowed_values
from gpt_fast_sd.loading import sensible_threads
from gpt_fast_sd.model import ModelConfig
from gpt_fast_sd.policies.registry import fields_used, policies
from gpt_fast_sd.tp import Parallel, start
from measuring.grid import known_drafters

Config = TypeVar("Config", EngineConfig, DraftConfig, SamplingParams)
Parser = argparse.ArgumentParser | argparse._ArgumentGroup
Change = Mapping[str, Any] | None  # arguments of argparse's add_argument that are a program's own, see add_flags
MODELS = "'smollm2', 'bundled', a model folder, a GGUF file or a hub id (of GGUF files: owner/name:Q4_K_M)"
CHAT = "wrap each text in the model's chat template as a user message"
FIELDS = "fields of a row that make its prompt (default: those of its form, see scripts/inputs/sources.py)"
PROMPTS = "a JSON object per line, or a file of a published form (json, jsonl, parquet), or hf:NAME[:CONFIG][:SPLIT]"
PARSE_SPECIAL = "read special tokens that are written out in messages as such (default: they are text)"

MOST_THREADS = 1024

# ---- parsers of values -----------------------------------------------------------------------------------------------


def positive(text: str) -> int:
    """A whole number of at least 1."""
    if not text.strip().isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {text!r}")
    return int(text)


def count(text: str) -> int:
    """A whole number, or 0."""
    return 0 if text.strip() == "0" else positive(text)


def seed(text: str) -> int:
    """A seed of random numbers."""
    if not text.strip().isdecimal() or int(text) >= 2**63:
        raise argparse.ArgumentTypeError(f"expected a whole number from 0 to 2**63 - 1, got {text!r}")
    return int(text)


def threads(text: str) -> int:
    """A number of threads, of which libraries take any and then run out of memory."""
    if (found := positive(text)) > MOST_THREADS:
        raise argparse.ArgumentTypeError(f"expected at most {MOST_THREADS:,} threads, got {text!r}")
    return found


def number_or(word: str) -> Callable[[str], int | str]:
    """A parser of a whole number or one word, such as "auto"."""

    def parse(text: str) -> int | str:
        try:
            return text if text == word else int(text)
        except ValueError:
            said = f"must be {word!r} or a whole number of at least 1, got {text!r}"
            raise argparse.ArgumentTypeError(said) from None

    return parse


def sizes(text: str) -> list[int]:
    """Rising whole numbers, k for thousands: "1k,16k,500"."""
    found = set()
    for part in text.lower().split(","):
        number, is_thousands = part.strip().removesuffix("k"), part.strip().endswith("k")
        if not number.isdecimal() or int(number) < 1:
            raise argparse.ArgumentTypeError(f"expected whole numbers of at least 1, as in 1k,4k,500; got {text!r}")
        found.add(int(number) * (1000 if is_thousands else 1))
    return sorted(found)


def real(what: str, fits: Callable[[float], bool]) -> Callable[[str], float]:
    """A parser of numbers that fit; what: they are expected to be."""

    def parse(text: str) -> float:
        with contextlib.suppress(ValueError):
            if fits(found := float(text)):
                return found
        raise argparse.ArgumentTypeError(f"expected {what}, got {text!r}")

    return parse


def gammas(text: str) -> list[int | str]:
    """Whole numbers and auto: "4,6,auto"."""
    parts = [part.strip() for part in text.split(",")]
    return list(dict.fromkeys(part if part == "auto" else positive(part) for part in parts))


def names_of(what: str, known: Iterable[str]) -> Callable[[str], list[str]]:
    """A parser of names among those that are known: "streaming,guided"."""

    def parse(text: str) -> list[str]:
        names = [name.strip() for name in text.split(",")]
        if unknown := [name for name in names if name not in known]:
            raise argparse.ArgumentTypeError(f"there is no {what} {unknown[0]!r}; there are {', '.join(known)}")
        return list(dict.fromkeys(names))

    return parse


def drafters(text: str) -> list[str]:
    """Names of policies that may draft."""
    return names_of("policy", known_drafters())(text)


# ---- flags and configurations ----------------------------------------------------------------------------------------


def given_beside(parser: argparse.ArgumentParser, args: argparse.Namespace, *names: str) -> list[str]:
    """The flags that were given another value than their default, but for these."""
    others = [name for name in vars(args) if name not in names and getattr(args, name) != parser.get_default(name)]
    return [f"--{name.replace('_', '-')}" for name in others]


def add_flags(parser: Parser, config: type[Config], **changes: Change) -> None:
    """A flag for every public field.

    changes: by the field's name, what this program says otherwise: default, help, type, metavar, flag (its name),
    allowed (named by help), and unset (what the default None means). None: it has no flag here, another one says it.
    """
    hints = get_type_hints(config)
    for field in public(config):
        given = changes.pop(field.name, {})
        if given is None:
            continue
        change = dict(given)
        flag, unset = change.pop("flag", flag_of(field)), change.pop("unset", field.metadata["unset"])
        allowed = change.pop("allowed", () if field.metadata["switch"] else allowed_values(field))
        default = False if hints[field.name] is bool else field.default
        keywords = kind_of(field, hints[field.name]) | {"default": default, "help": field.metadata["help"]} | change
        text = keywords["help"]
        keywords["help"] = described(config, field, text, allowed, keywords["default"], unset)
        parser.add_argument(flag, **keywords)
    assert not changes, f"{config.__name__} has no field {next(iter(changes))}"


def public(config: type[Config]) -> list[Field[Any]]:
    """The fields that a user may set."""
    return [field for field in fields(config) if "help" in field.metadata]


def flag_of(field: Field[Any]) -> str:
    """--its-name; --no-its-name of one that is on unless it is switched off."""
    name = (field.metadata["flag"] or field.name).replace("_", "-")
    return f"--no-{name}" if field.default is True else f"--{name}"


def kind_of(field: Field[Any], hint: Any) -> dict[str, Any]:
    """How argparse parses a value of this type."""
    if field.metadata["switch"]:
        return {"action": "store_const", "const": allowed_values(field)[-1]}
    kinds = {*(get_args(hint) or (hint,))} - {NoneType, Path}
    if kinds == {bool}:
        return {"action": "store_true"}
    if len(kinds) == 2 and str in kinds:  # a number or a word, or a text or several of them
        word = field.metadata["metavar"].partition("|")[2]
        how: dict[str, Any] = {"type": number_or(word)} if int in kinds else {"action": "append"}
    elif kinds == {Sequence[int]}:
        how = {"type": int, "action": "append"}
    else:
        (kind,) = kinds
        how = {"type": kind}
    return how | {"metavar": field.metadata["metavar"] or ("NAME" if kinds == {str} else "N")}


def described(
    config: type[Config], field: Field[Any], text: str, allowed: Sequence[object], default: object, unset: str
) -> str:
    """The help text with the allowed values, the policies that it is for, where they are few, and the default."""
    if allowed:
        text += f"; {'one of ' if len(allowed) > 1 else ''}{', '.join(map(str, allowed))}"
    notes = []
    if config is DraftConfig:
        who = [policy for policy in policies() if field.name in fields_used(policy)]
        notes += [f"for {', '.join(who)}"] if 0 < len(who) <= len(policies()) // 3 else []
    if default is None:
        notes += [f"default: {unset}"] if unset else []
    elif not isinstance(default, bool) and not field.metadata["switch"]:
        values = default if isinstance(default, list) else [default]
        notes.append(f"default: {','.join(f'{v:g}' if isinstance(v, float) else str(v) for v in values)}")
    return (f"{text} ({'; '.join(notes)})" if notes else text).replace("%", "%%")


def names(text: str) -> list[str]:
    """Names of fields, as in context,question."""
    return [name.strip() for name in text.split(",") if name.strip()]


def config_of(config: type[Config], args: argparse.Namespace, **values: Any) -> Config:
    """The configuration that the flags ask for; ValueError where they make no sense.

    values: fields that are not asked of the flags.
    """
    for field in public(config):
        if field.name not in values:
            given = getattr(args, flag_of(field).removeprefix("--").replace("-", "_"))
            values[field.name] = not given if field.default is True else given
    return config(**values)


def draft_of(args: argparse.Namespace) -> DraftConfig:
    """Who drafts; ValueError where the flags make no sense, or where one does nothing for this policy.

    "off" may stand beside all of them: so a command is repeated without drafts.
    """
    made = config_of(DraftConfig, args)
    used = {"policy", "gamma"} | fields_used(made.policy) | (fields_used(made.view_name) if made.view_name else set())
    for field in public(DraftConfig):
        if made.policy != "off" and field.name not in used and getattr(made, field.name) != field.default:
            raise ValueError(f"{flag_of(field)} does nothing for --draft {made.policy}: leave it out")
    return made


# ---- the model and its processes -------------------------------------------------------------------------------------


def add_engine_flags(
    parser: argparse.ArgumentParser, model: Change | None = None, *, alone: bool = False, **changes: Change
) -> None:
    """Flags that say which model runs, on what, and how; model: changes of --model, the others: of EngineConfig's.

    alone: the program runs in one process, so that there is no --tp.
    """
    group, n = parser.add_argument_group("the model, and how it runs"), sensible_threads()
    model = {"default": "bundled", "unset": "bundled", **(model or {})}
    text = f"{MODELS} (default: {model.pop('unset')})"
    group.add_argument("--model", **{"metavar": "M", "help": text, **model})
    add_flags(group, EngineConfig, **changes)
    parser.set_defaults(tp=None)
    if not alone:
        text = "under torchrun: processes that hold one model together (default: all)"
        group.add_argument("--tp", metavar="N", type=positive, help=text)
    group.add_argument(
        "--threads", metavar="N", type=threads, default=n, help=f"on a CPU (default: {n}, see OMP_NUM_THREADS)"
    )


def join(args: argparse.Namespace, alone: str = "") -> Parallel:
    """The place of this process among those that torchrun started; alone where there is only one.

    alone: a program for which there may be no others; ValueError where there are.
    """
    if args.threads != torch.get_num_threads():
        torch.set_num_threads(args.threads)
    parallel = start(tp=args.tp, device=args.device)
    if alone and parallel.dp * parallel.tp > 1:
        raise ValueError(f"{alone} runs in one process")
    return parallel


def room_of(args: argparse.Namespace, config: ModelConfig, default: int) -> int:
    """Tokens that a slot holds: --max-seq-len, or the default where the model can; ValueError where it cannot."""
    if args.max_seq_len is None:
        return min(default, config.max_seq_len)
    if args.max_seq_len > config.max_seq_len:
        raise ValueError(f"--max-seq-len {args.max_seq_len:,} is over the model's {config.max_seq_len:,} positions")
    room: int = args.max_seq_len
    return room
