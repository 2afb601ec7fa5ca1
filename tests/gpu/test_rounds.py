"""Rounds on the device: captured ones equal the others, token for token; and no round makes the host wait."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any

import pytest
import torch
from torch import Tensor

from gpt_fast_sd import DraftConfig, Engine, SamplingParams
from gpt_fast_sd.loading import BUNDLED
from gpt_fast_sd.model import Transformer
from gpt_fast_sd.sampling import GREEDY, Kind
from gpt_fast_sd.state import RoundPlan
from inputs.prompts import tokens_of
from tests.gpu.place import SMALL, Place, random_model
from tests.gpuless.recorder import Recording

pytestmark = pytest.mark.seconds(240)  # mostly of compiling

DRAFTS = (  # of every kind that shares no code with the others
    DraftConfig(policy="streaming", budget=128, gamma=4),
    DraftConfig(policy="snapkv", budget=128, gamma=3),
    DraftConfig(policy="guided", budget=128, gamma=5),
    DraftConfig(policy="quest", budget=128, gamma=2),
    DraftConfig(policy="lookup", gamma=4),
)
KINDS = {"greedy": {}, "sampled": {"temperature": 0.8, "top_p": 0.95, "seed": 7}}

DEAR = dict.fromkeys(("snapkv", "quest", "lookup"), pytest.mark.slow)


name_of = attrgetter("policy")  # what its tests are called
each_draft = pytest.mark.parametrize("draft", DRAFTS, ids=name_of)


@dataclass
class Both:
    """Engines of one model, the one captures rounds and the other launches them kernel by kernel; and prompts."""

    engines: dict[str, Engine]
    prompts: list[list[int]]
    new: int
    differing: dict[str, int] = field(default_factory=dict)

    def decode(self, draft: DraftConfig) -> None:
        """Both say all their tokens, and a second run compiles nothing; differing counts rows that are not equal."""
        for kind, how in KINDS.items():
            params, outputs = SamplingParams(max_tokens=self.new, ignore_eos=True, **how), []
            for engine in self.engines.values():
                if engine.draft != draft:
                    engine.redraft(draft)
                outputs.append([one.tokens for one in engine.generate(self.prompts, params)])
                again = [one.tokens for one in engine.generate(self.prompts, params)]
                assert engine.stats.recompiles == 0
                assert {len(tokens) for run in (outputs[-1], again) for tokens in run} == {self.new}
            self.differing[kind] = sum(a != b for a, b in zip(*outputs, strict=True))


def both(place: Place, model: Transformer, prompts: list[list[int]], draft: DraftConfig, **changes: Any) -> Both:
    settings = {mode: place.settings(cuda_graphs=mode, **changes) for mode in ("round", "off")}
    modes = {mode: Engine(model, None, one, draft) for mode, one in settings.items()}
    return Both(modes, prompts, 48 if place.on_cuda else 4)


@pytest.fixture(scope="module")
def random(place: Place, captures: None) -> Both:
    """A random model in fp32: whatever is drafted, and however, not a token may differ."""
    config = SMALL if place.on_cuda else replace(SMALL, n_layers=1)
    model = random_model(config, place.device, torch.float32)
    return both(place, model, place.prompts(SMALL.vocab_size), DraftConfig())


@pytest.fixture(scope="module")
def bundled(place: Place, captures: None) -> Both:
    """The bundled model, in bf16 on a chip, where roundings may decide."""
    settings = place.settings(batch_size=1, dtype="bf16" if place.on_cuda else "fp32", compile=False)
    one = Engine.from_pretrained(BUNDLED, settings)
    assert one.tokenizer
    text = tokens_of(BUNDLED / "document.txt", one.tokenizer)
    prompts = [text[50 * i :][: len(prompt)] for i, prompt in enumerate(place.prompts(SMALL.vocab_size))]
    return both(place, one.model, prompts, DraftConfig())


@pytest.mark.parametrize("draft", [pytest.param(one, marks=DEAR.get(one.policy, ())) for one in DRAFTS], ids=name_of)
def test_captured_rounds_give_the_tokens_of_rounds_launched_by_kernels(random: Both, draft: DraftConfig) -> None:
    random.decode(draft)
    assert random.differing == {"greedy": 0, "sampled": 0}
    assert random.engines["round"].schedule.rounds.captured > 0 == random.engines["off"].schedule.rounds.captured


@pytest.mark.slow
@pytest.mark.usefixtures("captures")
def test_captured_rounds_read_planes_as_others_do(place: Place) -> None:
    model = random_model(replace(SMALL, n_layers=1), place.device, torch.float32)
    draft = DraftConfig(policy="quantized", gamma=4)
    in_planes = both(place, model, place.prompts(SMALL.vocab_size), draft, kv_dtype="int8")
    in_planes.decode(draft)
    engines = in_planes.engines
    assert in_planes.differing == {"greedy": 0, "sampled": 0} and engines["round"].cache.format.planes
    assert engines["round"].schedule.rounds.captured > 0 == engines["off"].schedule.rounds.captured


@pytest.mark.slow
@pytest.mark.parametrize("draft", DRAFTS[:3], ids=name_of)
def test_captured_rounds_of_a_real_model_lose_no_token(
    bundled: Both, draft: DraftConfig, place: Place, record_property: Callable[[str, object], None]
) -> None:
    bundled.decode(draft)
    counts = ", ".join(f"{n} of {len(bundled.prompts)} rows differ, {kind}" for kind, n in bundled.differing.items())
    record_property("seen", counts)
    if not place.on_cuda:  # in fp32 there is nothing to decide
        assert set(bundled.differing.values()) == {0}


@contextlib.contextmanager
def no_waiting(device: torch.device) -> Iterator[None]:
    """RuntimeError where the host waits for the device; on a CPU where it reads what a device would have to tell it."""
    if device.type != "cuda":
        with Recording():
            yield
        return
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@torch.inference_mode()
def round_without_waiting(engine: Engine, gamma: int, kind: Kind) -> Tensor:
    """What a round says of rows in the middle of decoding, int64 [B, 2 * gamma + 5]; the host may not wait in it."""
    state = engine.state
    state.seq_len.fill_(64)
    state.active.fill_(True)
    state.stop_on_eos.fill_(False)
    state.remaining.fill_(4 * (gamma + 1))  # neither round is the last of a row
    state.table.temperature.fill_(0.8 if kind.sampled else 0.0)
    plan = RoundPlan(gamma=gamma, n_keys=engine.cache.capacity - gamma, kind=kind, captured=True)
    try:
        engine.schedule.rounds.device_round(plan)
        with no_waiting(state.seq_len.device):
            return engine.schedule.rounds.device_round(plan)
    finally:
        state.active.fill_(False)
        state.table.temperature.fill_(0.0)


@pytest.mark.parametrize("kind", [GREEDY, Kind(True, True)], ids=["greedy", "sampled"])
@each_draft
def test_the_host_never_waits_in_a_round_and_every_row_decodes(random: Both, draft: DraftConfig, kind: Kind) -> None:
    engine = random.engines["off"]
    if engine.draft != draft:
        engine.redraft(draft)
    engine.generate(random.prompts, SamplingParams(max_tokens=8, ignore_eos=True))  # compiles
    emitted = round_without_waiting(engine, draft.max_gamma, kind)[:, 0]
    assert (emitted > 0).all()


def test_a_round_that_waits_is_found(random: Both, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = random.engines["off"]
    engine.redraft(DRAFTS[0])
    feed = engine.schedule.rounds.feed

    def reading(tokens: Tensor, n_keys: int) -> tuple[Tensor, Tensor | None]:
        int(tokens.max())
        return feed(tokens, n_keys)

    monkeypatch.setattr(engine.schedule.rounds, "feed", reading)
    with pytest.raises(RuntimeError):
        round_without_waiting(engine, 4, GREEDY)


def test_the_watch_asks_cuda_to_raise_and_then_to_wait_again(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: asked.append("synchronize"))
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", asked.append)
    with pytest.raises(ZeroDivisionError), no_waiting(torch.device("cuda")):
        raise ZeroDivisionError
    assert asked == ["synchronize", "error", "default"]
