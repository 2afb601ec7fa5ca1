"""Evaluate a model with lm-evaluation-harness: its own command line, where this engine is the model gpt_fast_sd.

    python scripts/harness.py --model gpt_fast_sd --model_args pretrained=smollm2,dtype=fp32 --tasks arc_easy
    python scripts/harness.py --model gpt_fast_sd --model_args pretrained=bundled,draft=streaming,budget=256 \\
        --batch_size 8 --tasks gsm8k --apply_chat_template

All of lm_eval's own flags, and its other models, are as ever. model_args are the flags of our other programs by name:
pretrained is --model, no_compile=True is --no-compile. --batch_size is the number of slots (default: 1), max_seq_len
what lm_eval calls max_length (default: all positions that the model has). Texts are encoded, cut and scored as
lm_eval's own model hf does; continuations of one context are scored without computing the context again.

Needs lm_eval 0.4.13 or later: pip install -e ".[eval]". Exit code 2: the request makes no sense, a sentence says why.
"""

from __future__ import annotations

import gpt_fast_sd  # noqa: F401  before torch is loaded, see there

# isort: split
import argparse
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from common import ProgressLine, refuse, refusing, started
from flags import config_of, draft_of, flag_of, public
from gpt_fast_sd import DraftConfig, Engine, EngineConfig, SamplingParams
from gpt_fast_sd.loading import locate, sensible_threads
from gpt_fast_sd.model import read_config

PROGRAM = "harness.py"
TOGETHER = 256  # requests between two lines of progress; a context that they share is computed again
SAMPLING = ("temperature", "top_k", "top_p", "min_p")
LIKELIEST = 50  # tokens that transformers samples from, unless a task says otherwise


def configs(pretrained: str, args: Mapping[str, Any]) -> tuple[EngineConfig, DraftConfig]:
    """What model_args ask for, by the names of flags; ValueError where they make no sense."""
    fields = {
        flag_of(field)[2:].replace("-", "_"): False if field.default is True else field.default
        for config in (EngineConfig, DraftConfig)
        for field in public(config)
    } | {"batch_size": 1, "max_seq_len": None}
    if unknown := [name for name in args if name not in fields]:
        raise ValueError(f"--model_args has the unknown {unknown[0]!r}; there are pretrained, {', '.join(fields)}")
    given = argparse.Namespace(**{**fields, **args})
    if given.reference is True:
        given.reference = "reference"
    if isinstance(given.batch_size, str) and given.batch_size.isdecimal():  # as lm_eval's flag hands it on
        given.batch_size = int(given.batch_size)
    room = read_config(locate(pretrained)).n_positions if given.max_seq_len is None else given.max_seq_len
    return config_of(EngineConfig, given, max_seq_len=room), draft_of(given)


def window(context: Sequence[int], continuation: Sequence[int], most: int) -> tuple[list[int], int]:
    """The end of a text of which the model is fed at most so many tokens -> its ids, and how many are scored."""
    if not 0 < len(continuation) <= most:
        raise ValueError(f"a continuation of {len(continuation):,} tokens is not scored: 1 to max_seq_len, {most:,}, are")
    return [*context, *continuation][-(most + 1) :], len(continuation)


def sampling(asked: Mapping[str, Any], seed: int) -> SamplingParams:
    """How lm_eval's generation_kwargs, normalized, have a text continued; ValueError for what the engine cannot do."""
    rest = dict(asked)
    n, until, sampled = rest.pop("max_gen_toks"), rest.pop("until"), rest.pop("do_sample")
    chosen = {name: rest.pop(name) for name in SAMPLING if name in rest}
    if rest:
        raise ValueError(f"generation_kwargs has {next(iter(rest))!r}; there are until, max_gen_toks, do_sample, "
                         f"{', '.join(SAMPLING)}")  # fmt: skip
    how = {"top_k": LIKELIEST} | chosen if sampled and chosen.get("temperature") else {}
    return SamplingParams(max_tokens=n, stop=[stop for stop in until if stop], seed=seed, **how)


class Harness:
    """What lm_eval asks of a model, of an engine; `register` joins it with lm_eval's class, which encodes pairs."""

    backend = "causal"
    max_gen_toks = 256
    eot_token_id: int | None = None
    prefix_token_id: int | None = None
    tokenizer_name = ""
    cache_hook: Any

    def __init__(self, pretrained: str = "bundled", **args: Any) -> None:
        super().__init__()
        torch.set_num_threads(sensible_threads())
        with refusing(PROGRAM):
            self.engine = Engine.from_pretrained(pretrained, *configs(pretrained, args))
            if self.engine.tokenizer is None:
                raise ValueError(f"{pretrained} has no tokenizer, and tasks are texts")
        self.tokens = self.engine.tokenizer
        self.engine.on_progress = ProgressLine()
        self.tokenizer_name, self.max_length = str(pretrained).replace("/", "__"), self.engine.config.max_seq_len
        self.eot_token_id = self.tokens.named("eos_token")
        if self.eot_token_id is None:
            self.eot_token_id = next(iter(self.tokens.eos_ids), None)
        bos = self.tokens.named("bos_token")
        self.prefix_token_id = self.eot_token_id if bos is None else bos

    @classmethod
    def create_from_arg_obj(cls, args: Mapping[str, Any], more: Mapping[str, Any] | None = None) -> Harness:
        """The model of these model_args, which count before flags of the same name."""
        return cls(**{**{name: value for name, value in (more or {}).items() if value is not None}, **args})

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, left_truncate_len: int | None = None, **_: Any
    ) -> list[int]:
        """Token ids, the last so many; BOS is put first if the tokenizer does that and the text has none of its own."""
        ids = self.tokens.encode(string, bos=False)
        if self.tokens.bos_id is not None and (add_special_tokens is None or add_special_tokens):
            written = add_special_tokens is None and ids[:1] == [self.prefix_token_id]
            ids = ids if written else [self.tokens.bos_id, *ids]
        return ids[-left_truncate_len:] if left_truncate_len else ids

    def _loglikelihood_tokens(self, requests: Sequence[Any], **_: Any) -> list[tuple[float, bool]]:
        """(the logarithm of its probability, whether it is the greedy one) of each continuation."""
        with refusing(PROGRAM):
            windows = [window(context, continuation, self.max_length) for _, context, continuation in requests]
        found = dict[int, tuple[float, bool]]()
        order = sorted(range(len(windows)), key=lambda i: windows[i][0])  # those that begin alike follow each other
        for some in (order[at : at + TOGETHER] for at in range(0, len(order), TOGETHER)):
            texts, last = zip(*(windows[i] for i in some), strict=True)
            for i, scores in zip(some, self.engine.score(texts, last), strict=True):
                found[i] = scores.total, bool(scores.greedy.all())
                if requests[i][0] is not None:  # a window of a text is no request
                    self.cache_hook.add_partial("loglikelihood", requests[i][0], found[i])
        return [found[i] for i in range(len(windows))]

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """The logarithm of the probability of each text, window by window."""
        from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

        found = []
        for (text,) in (request.args for request in requests):
            pairs = get_rolling_token_windows(self.tok_encode(text), self.prefix_token_id, self.max_length, 1)
            windows = [(None, *make_disjoint_window(pair)) for pair in pairs]
            found.append(sum(logprob for logprob, _ in self._loglikelihood_tokens(windows)))
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), found[-1])
        return found

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """What the model writes after each context, up to a stop string or the end of text."""
        from lm_eval.models.utils import normalize_gen_kwargs, postprocess_generated_text

        asked, found = [request.args for request in requests], []
        with refusing(PROGRAM):
            params = [sampling(normalize_gen_kwargs(how, self.max_gen_toks), i) for i, (_, how) in enumerate(asked)]
            rooms = [self.max_length - each.max_tokens for each in params]
            if min(rooms, default=1) < 1:
                raise ValueError(f"max_gen_toks leaves no room for a context: max_seq_len is {self.max_length:,}")
            prompts = [self.tok_encode(text, None, room) for (text, _), room in zip(asked, rooms, strict=True)]
            self.engine.check(prompts, params)
        for completion, each, args in zip(self.engine.generate(prompts, params), params, asked, strict=True):
            ids = completion.tokens
            end = ids.index(self.eot_token_id) if self.eot_token_id in ids else len(ids)
            text = self.tokens.decode(ids[:end])
            found.append(postprocess_generated_text(text, list(each.stop_strings), None))
            self.cache_hook.add_partial("generate_until", args, found[-1])
        return found

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """A conversation as text, up to where the assistant answers, or goes on with the last message."""
        *before, last = chat_history
        shown, rest = (chat_history, "") if add_generation_prompt else (before, last["content"])
        with refusing(PROGRAM):
            try:
                return self.tokens.written(shown) + rest
            except ValueError:  # a template may know no system message
                return self.tokens.written([message for message in shown if message["role"] != "system"]) + rest

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """The template, by which lm_eval knows runs apart; None: none is applied."""
        return self.tokens.template if chat_template else None


def register() -> None:
    """Let lm_eval know the model."""
    import lm_eval.models  # its own ones
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model

    register_model("gpt_fast_sd")(type("GptFastSd", (Harness, TemplateLM), {}))


def main() -> None:
    """Register the model, and run lm_eval's command line."""
    try:
        from lm_eval.__main__ import cli_evaluate

        register()
    except ImportError as error:
        refuse(ValueError(f'lm_eval cannot be imported ({error}): pip install -e ".[eval]"'), PROGRAM)
    cli_evaluate()


if __name__ == "__main__":
    started(main)
