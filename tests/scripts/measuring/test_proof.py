"""The proof kit passes the engine as it is, and finds each bug that is planted in it.

Shapes: B slots, T tokens, V vocabulary, gamma tokens drafted.
"""

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gpt_fast_sd import DraftConfig, Engine, EngineConfig, SamplingParams, acceptance
from gpt_fast_sd.bodies import Bodies
from gpt_fast_sd.fast import choose
from gpt_fast_sd.fast.cpu import layers, linear
from gpt_fast_sd.fast.cpu import round as rounds
from gpt_fast_sd.model import CacheLayer, KVCache, llama
from gpt_fast_sd.policies import ModelDraft
from gpt_fast_sd.round import Round
from gpt_fast_sd.sampling import TARGET_STREAM, Kind, SamplingTable, draw, probabilities, uniform
from measuring import lossless
from measuring.lossless import Difference
from tests.drafts import POLICIES, draft_of
from tests.helpers import Patch, ahead, few, random_ids, thinned, tiny_config, tiny_model

N_TOKENS = 8
PROMPTS = [random_ids(n, seed=n, vocab_size=23) for n in (40, 45, 21, 3, 30)]  # more than slots
CONFIG = EngineConfig(batch_size=4, max_seq_len=64, device="cpu", compile=False, cuda_graphs="off")


def built(config: EngineConfig = CONFIG, policy: str = "streaming", **draft: Any) -> Engine:
    """A tiny engine whose drafts are often refused."""
    model = tiny_model(tiny_config(vocab_size=23, dim=16, n_heads=2, n_kv_heads=1, ffn_dim=24))
    return Engine(model, None, config, DraftConfig(policy=policy, gamma=3, **draft))


def narrow(**changes: Any) -> Engine:
    """A streaming draft that sees 10 entries, in an engine of its own."""
    return built(replace(CONFIG, **changes), budget=10, n_sink=2)


@pytest.fixture(scope="module")
def engine() -> Engine:
    return narrow()


@pytest.fixture(scope="module")
def wide() -> Engine:
    """Slots for samples, in which nothing is wrong as they are, and which have been looked at."""
    one = narrow(batch_size=32)
    assert drawn(one).passed
    return one


def assert_found(finding: lossless.Finding) -> None:
    assert not finding.passed, finding.line


def drawn(engine: Engine, n: int = 2000) -> lossless.Finding:
    return lossless.samples(engine, PROMPTS, 2 * N_TOKENS, n)


def test_the_engine_as_it_is_passes_every_check() -> None:
    findings = list(lossless.prove(lambda config: narrow(exact=config.exact), CONFIG, PROMPTS, N_TOKENS, 400))
    assert [one.check for one in findings] == ["greedy", "cache", "samples", "seeds", "refill", "exact"]
    assert all(one.passed for one in findings), [one.line for one in findings]
    assert 0.05 < findings[0].figures["acceptance"] < 0.95
    assert findings[3].figures["moved"] > 0


def test_what_refuses_no_draft_is_not_called_tested() -> None:
    good, none = built(budget=64), built(policy="lookup", ngram=8)
    for one, prompts, said in (good, PROMPTS[:1], "all drafts were accepted"), (none, [[1]], "nothing was drafted"):
        for check in lossless.greedy, lossless.cache:
            finding = lossless.tested(check(one, prompts, 2), one)
            assert not finding.passed and said in finding.text


def test_samples_find_drafts_judged_by_a_filtered_q_and_drawn_from_another(wide: Engine, monkeypatch: Patch) -> None:
    def choose(self: Any, logits: Tensor, pos: Tensor, kind: Kind, by: int, *_: Any) -> tuple[Tensor, Tensor | None]:
        unfiltered = probabilities(logits, self.table, filtered=False)
        return draw(unfiltered, uniform(self.table.seed, pos, by)), self.probabilities(logits, kind)

    assert isinstance(wide.policy, ModelDraft)
    monkeypatch.setattr(wide.policy._choose, "fn", choose)
    monkeypatch.setattr(lossless, "FILTERED", {"temperature": 1.0, "top_k": 4})
    assert_found(drawn(wide, 4000))


@pytest.mark.slow
def test_samples_find_a_number_that_is_used_twice_and_a_temperature_that_is_not(
    wide: Engine, monkeypatch: Patch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("gpt_fast_sd.round.ACCEPT_STREAM", TARGET_STREAM)
        assert_found(drawn(wide, 4000))
    repeated = SamplingTable.repeated
    warm = lambda table, n: replace(repeated(table, n), temperature=repeated(table, n).temperature.sign())  # noqa: E731
    monkeypatch.setattr(SamplingTable, "repeated", warm)
    assert_found(drawn(wide, 4000))


def early(engine: Engine, monkeypatch: Patch) -> None:
    """What is past the end, a refused draft's or the draft's own, takes the place of the last committed entry."""

    def leave(_: Any, state: Any, mass: Any) -> None:
        row = torch.arange(len(state.seq_len))
        for buffer in engine.cache.buffers:
            buffer[row, :, state.seq_len - 1] = buffer[row, :, state.seq_len]

    ahead(monkeypatch, ModelDraft, "device_after_verify", leave)


def stored(changed: Callable[..., Any]) -> Callable[[Engine, Patch], None]:
    """Makes verification store other keys and values, or elsewhere."""

    def fault(_: Engine, monkeypatch: Patch) -> None:
        store = CacheLayer.store
        other = lambda self, *new: store(self, *(changed(*new) if 1 < new[0].shape[1] < 8 else new))  # noqa: E731
        monkeypatch.setattr(CacheLayer, "store", other)

    return fault


def one_off(_: Engine, monkeypatch: Patch) -> None:
    """Positions of drafts that are verified are one too large."""
    turn = llama.rope_cos_sin

    def shifted(pos: Tensor, *rest: Any) -> Any:
        return turn(pos + (torch.arange(pos.shape[1]) > 0) * (pos.shape[1] < 8), *rest)

    monkeypatch.setattr(llama, "rope_cos_sin", shifted)


FAULTS = {
    "early": early, "one off": one_off, "stale": stored(lambda pos, k, v: (pos[:, 1:], k[:, :, 1:], v[:, :, 1:])),
    "the next row's": stored(lambda pos, k, v: (pos, k.roll(1, 0), v.roll(1, 0))),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("poisons", [False, True])
def test_the_cache_tells_what_else_stands_in_it(fault: str, poisons: bool, monkeypatch: Patch) -> None:
    """Also the draft's own keys, whose layers saw few others; with NaN in their place greedy tokens tell, too."""
    one = narrow()
    FAULTS[fault](one, monkeypatch)
    with lossless.worsened(one) if poisons else contextlib.nullcontext():
        assert_found(lossless.cache(one, PROMPTS, 2 * N_TOKENS))
        if poisons:
            assert_found(lossless.greedy(one, PROMPTS, 2 * N_TOKENS))


@thinned("form, name", [None, "bf16", "fp16", "int8"], [*POLICIES, "quantized", "guided x planes", "captured"])
def test_the_cache_of_every_policy_and_format_is_that_of_plain_steps(form: str | None, name: str) -> None:
    draft = draft_of("guided" if name == "captured" else name)
    config = replace(CONFIG, kv_dtype="int8" if draft.needs_planes else form)
    shape = tiny_config(vocab_size=23, dim=16, n_heads=2, n_kv_heads=1, ffn_dim=24)
    one = Engine(tiny_model(shape), None, config, draft, tiny_model(shape, seed=1) if draft.draft_model else None)
    with lossless.worsened(one):
        one.schedule.rounds.capture = (lambda part: part) if name == "captured" else None
        finding = lossless.tested(lossless.cache(one, PROMPTS, 2 * N_TOKENS), one)
        assert (one.schedule.rounds.captured > 0) is (name == "captured")
    assert finding.passed and finding.figures["limit"] < 0.2, finding.line


def test_seeds_find_one_that_depends_on_the_row(engine: Engine, monkeypatch: Patch) -> None:
    def by_row(seed: Tensor, pos: Tensor, stream: int) -> Tensor:
        row = torch.arange(len(seed))
        return uniform(seed + (row if seed.dim() == 1 else row[:, None]), pos, stream)

    monkeypatch.setattr(acceptance, "uniform", by_row)
    monkeypatch.setitem(vars(engine.state), "bodies", Bodies(uniform=by_row))
    assert_found(lossless.seeds(engine, PROMPTS, N_TOKENS))


def test_refill_finds_a_slot_that_is_not_cleared(monkeypatch: Patch) -> None:
    monkeypatch.setattr(KVCache, "vacate", lambda self, slot, keep=0: self.seq_len[slot].zero_())
    assert_found(lossless.refill(narrow(), PROMPTS, N_TOKENS))


def test_exact_finds_a_step_whose_width_varies(monkeypatch: Patch) -> None:
    engine, feed = narrow(exact=True), Round.feed

    def nudged(self: Round, tokens: Tensor, n_keys: int) -> tuple[Tensor, Tensor | None]:
        logits, mass = feed(self, tokens, n_keys)
        return logits * (1 + 2**-22 * (tokens.shape[1] > 1)), mass  # the last bits

    monkeypatch.setattr(Round, "feed", nudged)
    assert_found(lossless.exact(engine, PROMPTS[:4], N_TOKENS))


def test_logits_that_are_no_numbers_fail_and_raise_nothing(engine: Engine, monkeypatch: Patch) -> None:
    monkeypatch.setattr(Engine, "logits", lambda *_, **__: torch.full((1, 23), torch.nan))
    with pytest.raises(ArithmeticError, match="logits after 40 tokens are not finite"):
        drawn(engine)
    wrong, generate = iter([5, 6] * 100), Engine.generate

    def others(self: Engine, *args: Any, speculate: bool = True, **how: Any) -> Any:
        done = generate(self, *args, speculate=False, **how)
        return [replace(c, tokens=[next(wrong), *c.tokens[1:]]) if speculate else c for c in done]

    monkeypatch.setattr(Engine, "generate", others)
    assert not lossless.greedy(engine, PROMPTS, 4).passed


def test_gamma_auto_which_no_seed_fixes_is_refused() -> None:
    for policy, gamma, said in ("streaming", "auto", "gamma"), ("auto", 3, "draft"):
        auto = Engine(tiny_model(), None, CONFIG, DraftConfig(policy=policy, gamma=gamma))
        with pytest.raises(ValueError, match=f'{said} "auto" depends on measured times'):
            list(lossless.prove(lambda config, one=auto: one, CONFIG, PROMPTS, N_TOKENS, 200))  # type: ignore[misc]


def test_one_slot_is_not_said_to_have_been_changed() -> None:
    finding = lossless.seeds(narrow(batch_size=1), PROMPTS[:2], N_TOKENS)
    assert finding.passed and "no row came to another slot, which is not tested" in finding.text


def test_the_power_that_is_printed_is_the_power_that_there_is() -> None:
    generator = torch.Generator().manual_seed(0)
    n, p = 20000, torch.full((12,), 1 / 12, dtype=torch.float64)
    distance = lossless.smallest_distance(n, 11)
    moved = p + distance * torch.tensor([1.0, -1.0] * 6, dtype=torch.float64) / 6  # the hardest to find
    limit, found = lossless.next_above(11, chance=lossless.CHANCE / 6), []
    for q in (p, moved):
        counts = [torch.bincount(q.multinomial(n, True, generator=generator), minlength=12) for _ in range(200)]
        found.append(sum(lossless.g_statistic(c.double()) > limit for c in counts))
    assert found[0] == 0 and found[1] >= 194


def test_the_chance_of_a_statistic_is_that_of_tables() -> None:
    assert abs(lossless.chance_of(18.307, 10) - 0.05) < 1e-3  # chi-square of 10, its 95 % quantile
    assert abs(lossless.chance_of(124.342, 100) - 0.05) < 1e-3
    assert lossless.chance_of(lossless.next_above(10), 10) == pytest.approx(lossless.CHANCE, rel=1e-3)


PEAKED = torch.tensor([5.0, 4.9, 4.8, 4.7, 4.6, 4.5, 0.0, -0.001, -9.0, -9.0])
KEPT = SamplingParams(temperature=1.0, top_k=7)  # an id of 0.0 is kept, one of -0.001 is not


@pytest.mark.parametrize(("tie", "wrong"), [(0.0, [7, 8, 9]), (1e-2, [8, 9]), (10.0, [])])
def test_a_token_the_filter_leaves_out_is_wrong_unless_rounding_may_let_it_in(tie: float, wrong: list[int]) -> None:
    generator = torch.Generator()
    assert [i for i in range(10) if lossless.ranks_of(PEAKED[None], [i], KEPT, tie, generator)[3]] == wrong


@pytest.mark.parametrize("tie", [0.0, 0.25])
def test_rounding_may_move_the_edge_of_a_sum(tie: float) -> None:
    p = torch.tensor([0.5, 0.3999, 0.09, 0.0101])  # 0.8999 before the third, which a logit more by 0.02 leaves out
    how, moved = SamplingParams(temperature=1.0, top_p=0.9), p.log() + torch.tensor([0.02, 0.0, 0.0, 0.0])
    found = [lossless.ranks_of(moved[None], [i], how, tie, torch.Generator())[3] for i in range(4)]
    assert found == [0, 0, tie == 0, 1]


def test_tokens_that_follow_their_distribution_lie_anywhere_in_it_and_others_do_not() -> None:
    generator, n = torch.Generator().manual_seed(1), 4000
    logits = torch.randn(n, 10, generator=generator)
    for temperature in (1.0, 1.3):  # of what is drawn from
        tokens = (logits / temperature).softmax(-1).multinomial(1, generator=generator)[:, 0].tolist()
        by_p, by_q, by_id, _ = lossless.ranks_of(logits, tokens, SamplingParams(temperature=1.0), 0.0, generator)
        assert all(0 <= x <= 1 + 1e-6 for x in (*by_p, *by_id)) and by_q == by_id  # nothing comes first
        found = lossless.Ranks({0: by_p[:2000], 3: by_p[2000:], 9: by_p[:7]})
        (whole, freedom, _), (each, of_each, _) = found.statistics()
        assert (freedom, of_each) == (3, 6) and list(lossless.counts_of(found.by_p)) == [0, 3]  # too few are at 9
        assert (lossless.chance_of(whole, freedom) > 1e-3) is (temperature == 1) is (each < 30)


@pytest.mark.slow
def test_samples_find_tokens_that_depend_on_those_before(wide: Engine, monkeypatch: Patch) -> None:
    for module in (acceptance, lossless):  # the truth's own random numbers are no engine's
        monkeypatch.setattr(module, "uniform", lambda seed, pos, stream: uniform(seed, pos // 4, stream))
    monkeypatch.setitem(vars(wide.state), "bodies", Bodies())
    assert_found(drawn(wide))


@pytest.mark.slow
def test_samples_find_a_filter_that_leaks_once(wide: Engine, monkeypatch: Patch) -> None:
    stream, unlikely = Engine.stream, int(wide.logits(PROMPTS[0], last=1)[0].argmin())

    def leaking(self: Engine, *args: Any, **how: Any) -> Any:
        for event in stream(self, *args, **how):
            is_last = event.completion and event.index == 1  # of a row that filters
            yield replace(event, tokens=[*event.tokens[:-1], unlikely]) if is_last else event

    monkeypatch.setattr(lossless, "FILTERED", {"temperature": 1.0, "top_k": 4})
    assert drawn(wide).passed
    monkeypatch.setattr(Engine, "stream", leaking)
    finding = drawn(wide)
    assert not finding.passed and finding.text.endswith("; 1 tokens are ones that their filter leaves out")
    assert finding.figures["p"] > lossless.CHANCE


def test_nothing_is_proved_by_few_samples_and_too_many_are_refused(wide: Engine, monkeypatch: Patch) -> None:
    finding = drawn(wide, 1)
    assert not finding.passed and finding.text.startswith("nothing tested: 16 sampled tokens are too few")
    monkeypatch.setattr(lossless, "near_tie", lambda best, *dtypes: 1.0)
    with pytest.raises(ValueError, match=r"1,000,000 sampled tokens would tell how fp32 rounds: try \d"):
        drawn(wide, 10**6)


# ---- faults in C++ ------------------------------------------------------------------------------------------

IN_CPP = {  # the checks that find it; a source, what stands there, and what takes its place
    "one draft too many": ("samples", "round", "n_accepted[r] = n, next_token[r] = draw",
                           "n_accepted[r] = std::min(n + 1, limit), next_token[r] = draw"),
    "all drafts if the first": ("samples", "round", "n_accepted[r] = n, next_token[r] = draw",
                                "n_accepted[r] = n ? limit : 0, next_token[r] = draw"),
    "one greedy draft too many": ("greedy", "round", "n_accepted[r] = n, next_token[r] = best",
                                  "n_accepted[r] = std::min(n + 1, std::min(G, max_accept[r])), next_token[r] = best"),
    "drawn from p": ("samples", "round", "any |= x > 0;", "any |= x > 2;"),
    "drawn from q - p": ("samples", "round", "const float x = p[i] - (q ? q[i] : (float)(i == drafted));",
                         "const float x = (q ? q[i] : (float)(i == drafted)) - p[i];"),
    "a neighbour's q": ("samples", "round", "q ? q + r * G * V : nullptr", "q ? q + (r + 1) % R * G * V : nullptr"),
    "seeds by row": ("seeds", "round", "uniform_number(seeds[r], seq_len[r] + n, draw)",
                     "uniform_number(seeds[r] + r, seq_len[r] + n, draw)"),
    "a stale key": ("greedy cache", "layers", "if (g < G) continue;",
                    "if (g < G || (a.T > 1 && a.T < 8 && m % a.T == 0)) continue;"),
    "positions one off": ("greedy cache", "layers", "const float angle = (float)a.pos[m] * a.freqs[i];",
                          "const float angle = (float)(a.pos[m] + (m % a.T > 0 && a.T < 8)) * a.freqs[i];"),
    "another row's cache": ("greedy cache", "layers", "const int64_t b = m / a.T, place = a.pos[m];",
                            "const int64_t b = a.T > 1 ? (m / a.T + 1) % a.B : m / a.T, place = a.pos[m];"),
}  # fmt: skip


@pytest.fixture
def of_cpp(monkeypatch: Patch, tmp_path: Path) -> Iterator[Callable[..., Engine]]:
    """Builds an engine whose layers and rounds are in C++, a line of which may be another.

    Its drafts are good where rounds are looked at, as a budget holds the whole text: a wrong judge is found although
    none would be refused.
    """

    def forget() -> None:
        rounds.kernels.cache_clear()
        layers.library_of_layers.cache_clear()

    def build(source: str = "", line: str = "", other: str = "") -> Engine:
        if source:
            module, name = {"round": (rounds, "SOURCE"), "layers": (linear, "LAYERS")}[source]
            text = getattr(module, name).read_text("utf-8")
            assert text.count(line) == 1
            (tmp_path / f"{source}.cpp").write_text(text.replace(line, other))
            monkeypatch.setattr(module, name, tmp_path / f"{source}.cpp")
        forget()
        monkeypatch.setattr(choose, "kernels_are_built", lambda *_: True)  # as where a wheel brought them
        model = tiny_model(tiny_config(vocab_size=32, dim=64, head_dim=16, ffn_dim=64)).bfloat16()
        config, budget = replace(CONFIG, batch_size=16), 10 if source == "layers" else 64
        one = Engine(model, None, config, DraftConfig(policy="streaming", gamma=3, budget=budget, n_sink=2))
        if "acceptance" not in dict(one.target.bodies.names) or not one.target.bodies.fused:
            pytest.skip("no compiler for C++ is here")
        return one

    yield build
    monkeypatch.undo()
    forget()


@pytest.mark.parametrize("fault", few(["", *IN_CPP], ["", "drawn from p", "one greedy draft too many"]))
def test_a_fault_in_cpp_is_found_and_nothing_without_one(fault: str, of_cpp: Callable[..., Engine]) -> None:
    checks, *change = IN_CPP.get(fault, ("",))
    one = of_cpp(*change)
    with lossless.worsened(one):
        found = {
            "greedy": lambda: lossless.greedy(one, PROMPTS, 2 * N_TOKENS),
            "cache": lambda: lossless.cache(one, PROMPTS, 2 * N_TOKENS),
            "samples": lambda: drawn(one, 6000),
            "seeds": lambda: lossless.seeds(one, PROMPTS, N_TOKENS),
        }
        for name in checks.split() or found:
            assert (finding := found[name]()).passed is not bool(checks), finding.line


# ---- whether two outputs are equal, and if not, how close the logits were --------------------------------------------


def test_a_difference_is_told_with_both_tokens_and_the_gap_of_their_logits() -> None:
    asked: list[list[int]] = []

    def logits(ids: list[int]) -> Tensor:
        asked.append(ids)
        return torch.tensor([0.0, 1.0, 3.0, 2.5])

    same = [(0, [7], [1, 2], [1, 2]), (1, [7], [], [])]
    outputs = [*same, (4, [7, 8], [2, 2], [2, 3]), (5, [9], [1], [1, 0]), (6, [9], [3], [])]
    told = (4, 1, 2, 3, 0.5, 3.0), (5, 1, None, 0, 3.0, 3.0), (6, 0, 3, None, 0.5, 3.0)
    assert lossless.differences(outputs, logits) == [Difference(*one) for one in told]
    assert asked == [[7, 8, 2], [9, 1], [9]]
    assert [one.gap for one in lossless.differences(outputs, logits, seconds=0.0)] == [None] * 3


@pytest.mark.parametrize(("best", "limit"), [(-40.0, 1.0), (0.0, 0.25), (15.9, 0.25), (16.0, 0.5), (40.0, 1.0)])
def test_a_near_tie_is_one_in_the_coarser_dtype_and_grows_with_the_best_logit(best: float, limit: float) -> None:
    assert lossless.near_tie(best, "bf16") == limit  # its last place
    one = Difference(0, 0, 1, 2, gap=0.2)
    assert one.is_near_tie("fp32", "bf16") and not one.is_near_tie("fp32", "fp16")
    assert not any(replace(one, gap=gap).is_near_tie("bf16") for gap in (math.inf, math.nan, None))
