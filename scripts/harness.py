"""Evaluate a model with lm-evaluation-harness: its own command line, where this engine is the model gpt_fast_sd.

    python scripts/harness.py --model gpt_fast_sd --model_args pretrained=bundled,draft=lookup --tasks gsm8k

"harness.py run --help" has lm_eval's flags. model_args are flags of our programs by name: pretrained is --model,
no_compile=True --no-compile. --batch_size is the number of slots (default: 1), max_seq_len what lm_eval calls
max_length (default: the model's positions). Texts are encoded, cut and scored as by lm_eval's model hf, but a context
of several continuations is computed once. cuda:0, which lm_eval names by default, is our auto: a CPU where there is no
GPU. Exit code 2: the request makes no sense, a sentence says why.
"""

from __future__ import annotations

import gpt_fast_sd  # noqa: F401  before torch is loaded, see there

# isort: split
import argparse
import importlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from common import ProgressLine, parser_of, refuse, refusing, started
from flags import config_of, draft_of, flag_of, public
from gpt_fast_sd import DraftConfig, Engine, EngineConfig, SamplingParams
from gpt_fast_sd.loading import locate, sensible_threads
from gpt_fast_sd.model import read_config

PROGRAM = "harness.py"
SAMPLING = "temperature, top_k, top_p, min_p"


def configs(pretrained: str, args: Mapping[str, Any]) -> tuple[EngineConfig, DraftConfig]:
    """What model_args ask for, by the names of flags; ValueError where they make no sense."""
    every = [*public(EngineConfig), *public(DraftConfig)]
    known = {flag_of(one)[2:].replace("-", "_"): one.default is not True and one.default for one in every}
    if unknown := [name for name in args if name not in known]:
        raise ValueError(f"--model_args has the unknown {unknown[0]!r}; there are pretrained, {', '.join(known)}")
    given = argparse.Namespace(**{**known, "batch_size": 1, "max_seq_len": None, **args})
    given.device = "auto" if given.device == "cuda:0" else given.device  # lm_eval's default, on a CPU too
    given.reference = "reference" if given.reference is True else given.reference
    given.batch_size = int(given.batch_size) if str(given.batch_size).isdecimal() else given.batch_size
    room = read_config(locate(pretrained)).max_seq_len if given.max_seq_len is None else given.max_seq_len
    return config_of(EngineConfig, given, max_seq_len=room), draft_of(given)


def window(context: Sequence[int], continuation: Sequence[int], most: int) -> tuple[list[int], int]:
    """The end of a text of which the model is fed at most so many tokens -> its ids, and how many are scored."""
    if not 1 <= len(continuation) <= most:
        n = len(continuation)
        raise ValueError(f"a continuation must have 1 to {most:,} tokens, as max_seq_len says, got {n:,}")
    return [*context, *continuation][-(most + 1) :], len(continuation)


def sampling(asked: Mapping[str, Any], seed: int) -> SamplingParams:
    """How generation_kwargs, as lm_eval normalizes them, have a text continued; ValueError for what cannot be done."""
    rest = dict(asked)
    n, until, sampled = rest.pop("max_gen_toks"), rest.pop("until"), rest.pop("do_sample")
    how = {name: rest.pop(name) for name in SAMPLING.split(", ") if name in rest}
    if rest:
        raise ValueError(f"unknown generation_kwargs {[*rest]}; known: until, max_gen_toks, do_sample, {SAMPLING}")
    how = {"top_k": 50, **how} if sampled and how.get("temperature") else {}  # as in transformers
    return SamplingParams(max_tokens=n, stop=[stop for stop in until if stop], seed=seed, **how)


class Harness:
    """What lm_eval asks of a model, of an engine; `register` joins it with lm_eval's class, which encodes pairs."""

    backend, max_gen_toks = "causal", 256
    cache_hook: Any
    eot_token_id: int | None = None  # this and the next three are properties of lm_eval's class
    prefix_token_id: int | None = None
    tokenizer_name, max_length = "", 0

    def __init__(self, pretrained: str = "bundled", **args: Any) -> None:
        super().__init__()
        torch.set_num_threads(sensible_threads())
        with refusing(PROGRAM):
            self.engine = Engine.from_pretrained(pretrained, *configs(pretrained, args))
            if self.engine.tokenizer is None:
                raise ValueError(f"{pretrained} has no tokenizer, and tasks are texts")
        self.engine.on_progress, self.tokens = ProgressLine(), self.engine.tokenizer
        self.tokenizer_name, self.max_length = str(pretrained).replace("/", "__"), self.engine.config.max_seq_len
        self.tokenizer = argparse.Namespace(chat_template=self.tokens.template)  # all that lm_eval's class asks of one
        bos, eos = self.tokens.named("bos_token"), self.tokens.named("eos_token")
        self.eot_token_id = next(iter(self.tokens.eos_ids), None) if eos is None else eos
        self.prefix_token_id = self.eot_token_id if bos is None else bos

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, last: int = 0, **_: Any) -> list[int]:
        """Token ids, the last so many; BOS is put first if the tokenizer does that and the text has none of its own."""
        ids = self.tokens.encode(string, bos=False)
        written = add_special_tokens is None and ids[:1] == [self.prefix_token_id]
        if self.tokens.bos_id is not None and add_special_tokens is not False and not written:
            ids = [self.tokens.bos_id, *ids]
        return ids[-last:]

    def _loglikelihood_tokens(self, requests: Sequence[Any], **_: Any) -> list[tuple[float, bool]]:
        """(the logarithm of its probability, whether it is the greedy one) of each continuation."""
        with refusing(PROGRAM):
            windows = [window(context, continuation, self.max_length) for _, context, continuation in requests]
            order = sorted(range(len(windows)), key=lambda i: windows[i][0])  # those that begin alike follow each other
            scores = self.engine.score([windows[i][0] for i in order], [windows[i][1] for i in order])
        found = {i: (each.total, bool(each.greedy.all())) for i, each in zip(order, scores, strict=True)}
        for i, (asked, _, _) in enumerate(requests):
            if asked is not None:  # a window of a text is no request
                self.cache_hook.add_partial("loglikelihood", asked, found[i])
        return [found[i] for i in range(len(windows))]

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """The logarithm of the probability of each text, window by window."""
        cut, found = importlib.import_module("lm_eval.utils"), []
        for (text,) in (request.args for request in requests):
            pairs = cut.get_rolling_token_windows(self.tok_encode(text), self.prefix_token_id, self.max_length, 1)
            windows = [(None, *cut.make_disjoint_window(pair)) for pair in pairs]
            found.append(sum(logprob for logprob, _ in self._loglikelihood_tokens(windows)))
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), found[-1])
        return found

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """What the model writes after each context, up to a stop string or the end of text."""
        theirs, prompts, params, found = importlib.import_module("lm_eval.models.utils"), [], [], []
        with refusing(PROGRAM):
            for i, (text, how) in enumerate(request.args for request in requests):
                params.append(sampling(theirs.normalize_gen_kwargs(how, self.max_gen_toks), i))
                prompts.append(self.tok_encode(text, None, max(1, self.max_length - params[-1].max_tokens)))
            completions = self.engine.generate(prompts, params)
        for request, each, ids in zip(requests, params, (completion.tokens for completion in completions), strict=True):
            text = self.tokens.decode(ids[: ids.index(self.eot_token_id)] if self.eot_token_id in ids else ids)
            found.append(theirs.postprocess_generated_text(text, list(each.stop_strings), None))
            self.cache_hook.add_partial("generate_until", request.args, found[-1])
        return found

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """A conversation as text, up to where the assistant answers, or goes on with the last message."""
        shown, rest = (chat_history, "") if add_generation_prompt else (chat_history[:-1], chat_history[-1]["content"])
        try:
            return self.tokens.written(shown) + rest
        except ValueError:  # a template may know no system message
            with refusing(PROGRAM):
                return self.tokens.written([message for message in shown if message["role"] != "system"]) + rest


def register() -> None:
    """Let lm_eval know the model."""
    _, api, registry = (importlib.import_module(f"lm_eval.{name}") for name in ("models", "api.model", "api.registry"))
    registry.register_model("gpt_fast_sd")(type("Ours", (Harness, api.TemplateLM), {}))  # beside its own models


def main(argv: Sequence[str] | None = None) -> None:
    """Register the model, and run lm_eval's command line."""
    sys.argv[1:] = sys.argv[1:] if argv is None else argv
    if sys.argv[1:] in ([], ["-h"], ["--help"]):
        parser_of(PROGRAM, __doc__).parse_args(["--help"])
    try:
        register()
    except ImportError as error:
        refuse(ValueError(f'lm_eval cannot be imported ({error}): pip install -e ".[eval]"'), PROGRAM)
    importlib.import_module("lm_eval.__main__").cli_evaluate()


if __name__ == "__main__":
    started(main)
