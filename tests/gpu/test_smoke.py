"""Whatever a user types first: the bundled model with generate.py's own defaults, and what may happen to an engine.

Engines are made by generate.py's own functions from its own flags, so the configuration is the default one to the
letter: gamma by the clock, rounds captured, a cache as long as the prompts ask for. Tests run in their order.
"""

import gc
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

import generate
from gpt_fast_sd import Completion, DraftConfig, Engine, SamplingParams
from gpt_fast_sd.loading import BUNDLED
from gpt_fast_sd.policies import build_policy
from gpt_fast_sd.tp import Parallel
from measuring.lossless import differences, logits_after
from tests.gpu.place import Place

pytestmark = pytest.mark.seconds(240)  # mostly of compiling

FEW = 128  # entries of a draft's budget: fewer than the prompts have, small ones too
SHORT = "Once upon a time"
FILTERS = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.02, "seed": 2}
Seen = Callable[[str, object], None]


@dataclass
class Made:
    """An engine as generate.py makes it, and the requests it was made for."""

    engine: Engine
    prompts: list[list[int]]
    params: list[SamplingParams]

    @property
    def greedy(self) -> list[SamplingParams]:
        return [SamplingParams(max_tokens=p.max_tokens, ignore_eos=True) for p in self.params]

    def plainly(self) -> list[list[int]]:
        return [one.tokens for one in self.engine.generate(self.prompts, self.greedy, speculate=False)]

    def both_ways(self, *, drafts: bool = False) -> str:
        """Both ways of decoding say the same, up to what rounding may decide -> in a phrase what was drafted.

        drafts: some round has to draft.
        """
        engine, new = self.engine, self.params[0].max_tokens
        plain = self.plainly()
        assert engine.stats.rounds == new
        drafted = engine.generate(self.prompts, self.greedy)
        said = self.counted(drafted)
        assert engine.stats.drafted > 0 or not drafts
        rows = zip(range(len(plain)), self.prompts, plain, (one.tokens for one in drafted), strict=True)
        parted = differences(rows, lambda ids: logits_after(engine.model, ids)[0])
        assert [one for one in parted if not one.is_near_tie(engine.dtype_name)] == []
        return f"{said}; {len(parted)} of {len(plain)} rows part at a near tie"

    def drawn(self, params: list[SamplingParams], *, drafts: bool = False) -> str:
        """Generate twice: all tokens are there, and nothing is compiled in the second run -> what was drafted."""
        self.engine.generate(self.prompts, params)
        said = self.counted(self.engine.generate(self.prompts, params))
        assert self.engine.stats.drafted > 0 or not drafts
        assert self.engine.stats.recompiles == 0
        return said

    def counted(self, completions: list[Completion]) -> str:
        """Every row has its tokens -> rounds by gamma and acceptance in a phrase."""
        stats, vocabulary = self.engine.stats, self.engine.model.config.vocab_size
        assert [len(one.tokens) for one in completions] == [p.max_tokens for p in self.params]
        assert all(0 <= token < vocabulary for one in completions for token in one.tokens)
        gammas = ", ".join(f"{n} of gamma {gamma}" for gamma, n in sorted(stats.rounds_by_gamma.items()))
        return f"{stats.rounds} rounds ({gammas}), {stats.acceptance_rate:.0%} of {stats.drafted} drafts kept"


def made(place: Place, *flags: str) -> Made:
    """What generate.py makes of these flags; off the chip it does not compile."""
    new = ["--max-new-tokens", "96" if place.on_cuda else "6", "--ignore-eos"]
    eagerly = [] if place.on_cuda else ["--no-compile"]
    args = generate.parse(
        ["--model", "bundled", "--draft", "streaming", *flags, *new, "--device", place.device.type, *eagerly]
    )
    return Made(*generate.prepare(args, Parallel(place.device)))


@pytest.fixture(scope="module")
def short(place: Place) -> Made:
    return made(place, "--prompt", SHORT)


@pytest.fixture(scope="module")
def said_first(short: Made) -> list[list[int]]:
    """What the first engine says before there is another one."""
    return short.plainly()


@pytest.fixture(scope="module")
def engines(
    place: Place, said_first: list[list[int]], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Made]]:
    """Beside it one for the bundled document in a large cache: greedy, sampled and filtered in one batch."""
    text = (BUNDLED / "document.txt").read_text(encoding="utf-8")[: None if place.on_cuda else 700]
    lines: list[dict[str, Any]] = [
        {"prompt": text}, {"prompt": SHORT, "temperature": 0.7, "seed": 0}, {"prompt": text, **FILTERS}
    ]  # fmt: skip
    path = Path(tmp_path_factory.mktemp("smoke"), "prompts.jsonl")
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    yield {"document": made(place, "--prompts", str(path))}


@pytest.fixture
def document(engines: dict[str, Made]) -> Made:
    return engines["document"]


def test_the_configuration_is_generates_own_to_the_letter(place: Place, short: Made) -> None:
    config, draft = short.engine.config, short.engine.draft
    assert (draft.policy, draft.gamma, draft.budget) == ("streaming", "auto", 256)
    assert (config.cuda_graphs, config.exact, config.dtype, config.compile) == ("round", False, "auto", place.on_cuda)
    assert config.max_seq_len == len(short.prompts[0]) + short.params[0].max_tokens


def test_a_short_prompt_is_decoded_greedily(short: Made, said_first: list[list[int]], record_property: Seen) -> None:
    record_property("seen", short.both_ways())


@pytest.mark.parametrize("how", [{"temperature": 0.7, "seed": 1}, FILTERS], ids=["sampled", "filtered"])
def test_a_short_prompt_is_sampled(short: Made, how: dict[str, Any], record_property: Seen) -> None:
    record_property("seen", short.drawn([replace(p, **how) for p in short.greedy]))


@pytest.mark.slow
def test_a_second_engine_decodes_a_document(document: Made, record_property: Seen) -> None:
    record_property("seen", document.both_ways())


@pytest.mark.slow
def test_greedy_sampled_and_filtered_rows_share_a_batch(document: Made, record_property: Seen) -> None:
    record_property("seen", document.drawn(document.params))


@pytest.mark.slow
def test_an_engine_may_be_redrafted(document: Made, record_property: Seen) -> None:
    document.engine.redraft(DraftConfig(policy="guided", budget=FEW, gamma=4))
    mixed = document.drawn(document.params, drafts=True)
    record_property("seen", f"{mixed}; all greedy: {document.both_ways(drafts=True)}")


@pytest.mark.slow
def test_another_policy_may_be_set(document: Made, record_property: Seen) -> None:
    engine = document.engine
    engine.policy = build_policy(DraftConfig(policy="snapkv", budget=FEW, gamma=4), engine.target, None)
    mixed = document.drawn(document.params, drafts=True)
    who = {source for event in engine.stream(document.prompts, document.params) for source in event.sources}
    assert who == {"snapkv", "target"}
    record_property("seen", f"{mixed}; all greedy: {document.both_ways(drafts=True)}")


@pytest.mark.slow
def test_an_engine_that_goes_changes_nothing_for_another(
    short: Made, said_first: list[list[int]], engines: dict[str, Made], record_property: Seen
) -> None:
    engines.clear()
    gc.collect()
    assert short.plainly() == said_first
    record_property("seen", short.both_ways())
