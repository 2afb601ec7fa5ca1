"""What one reads is what runs: an edit to a function that a body stands for takes effect, and is announced."""

from __future__ import annotations

import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gpt_fast_sd import DraftConfig, Engine, EngineConfig, SamplingParams, acceptance
from gpt_fast_sd.bodies import CORE, Bodies
from gpt_fast_sd.fast import choose, marks
from gpt_fast_sd.fast.compile import can_compile
from gpt_fast_sd.model import Transformer
from gpt_fast_sd.model.llama import Block
from tests.helpers import random_ids, tiny_config, tiny_model

ROOT = Path(__file__).resolve().parents[2]
PACKED = tiny_config(vocab_size=256, dim=64, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=64, ffn_dim=128)
CPU = torch.device("cpu")


def engine(**changes: Any) -> Engine:
    """An engine in bf16 whose layers run in one call where a compiler is there."""
    config = EngineConfig(batch_size=2, max_seq_len=300, device="cpu", dtype="bf16", **changes)
    draft = DraftConfig(policy="streaming", budget=64, gamma=3)
    return Engine(tiny_model(PACKED, dtype=torch.bfloat16), None, config, draft)


@pytest.fixture
def a_compiler() -> None:
    with warnings.catch_warnings(record=True):
        if not can_compile(CPU):
            pytest.skip("there is no C++ compiler")


def test_every_body_stands_for_the_core_as_it_is() -> None:
    """Where this fails: bring the body that is named up to date, then `python -m gpt_fast_sd.fast.marks --write`."""
    wrong = [f"{body}: {marks.edited_names(names)}" for body, names in marks.STANDS_FOR.items()]
    assert choose and [line for line in wrong if not line.endswith("[]")] == []


def test_every_field_of_the_table_has_a_body_that_says_what_it_stands_for() -> None:
    fields = {name: getattr(CORE, name) for name in Bodies.__dataclass_fields__ if name != "names"}
    stood_for = {name for names in marks.STANDS_FOR.values() for name in names}
    unserved = {name for name, function in fields.items() if marks.name_of(function) not in stood_for}
    assert unserved == set()


def test_all_that_a_function_calls_or_reads_of_the_core_counts() -> None:
    found = marks.marks_of(["gpt_fast_sd.acceptance:judge_sampled"])
    assert {name.partition(":")[2] for name in found} == {
        "judge_sampled", "verify_sampled", "_n_leading", "_each_row_at", "draw", "uniform", "_mix32", "_multiply32",
        "_MASK32",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "changed"),
    [
        ("def f(x, y=1):\n    return x + y", False),
        ('def f(x: int, y: int = 1) -> int:\n    """Add."""\n    # why\n    return (x +\n        y)', False),
        ("def f(x, y=1):\n    return y + x", True),
        ("def f(x, y=2):\n    return x + y", True),
        ("def f(x, y=1):\n    x += y\n    return x", True),
    ],
)
def test_a_mark_is_of_what_is_done_not_of_how_it_is_written(text: str, changed: bool) -> None:
    import ast

    one, other = (marks._written(ast.parse(source).body[0]) for source in ("def f(x, y=1):\n    return x + y", text))
    assert (one != other) is changed


def test_a_function_that_was_bound_anew_is_not_stood_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def keep_all(logits: Tensor, drafted: Tensor, max_accept: Tensor, vocabulary: Any) -> acceptance.AcceptResult:
        return acceptance.AcceptResult(max_accept, logits.argmax(-1).gather(1, max_accept[:, None])[:, 0])

    monkeypatch.setattr(acceptance, "verify_greedy", keep_all)
    with pytest.warns(
        UserWarning, match="^acceptance, verify_greedy was edited: acceptance runs as the core is written"
    ):
        one = engine()
    assert one.state.bodies.verify_greedy is keep_all
    one.generate([random_ids(100)], SamplingParams(max_tokens=9))
    assert one.stats.accepted == one.stats.drafted > 0


def test_a_block_that_was_bound_anew_takes_effect(a_compiler: None, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts, params = [random_ids(100)], SamplingParams(max_tokens=9)
    expected = engine().generate(prompts, params)[0].tokens

    def without_feed_forward(self: Block, x: Tensor, cos: Tensor, sin: Tensor, pos: Tensor, kv: Any) -> Tensor:
        return x + self.attention(self.attention_norm(x), cos, sin, pos, kv)

    monkeypatch.setattr(Block, "forward", without_feed_forward)
    with pytest.warns(
        UserWarning, match=r"^model\.llama, Block\.forward was edited: layers runs as the core is written"
    ):
        one = engine(cuda_graphs="off")
    assert not one.target.bodies.fused and one.target.bodies.hidden is Transformer.hidden
    one.rounds.decode = one.rounds.verify = type(one.rounds.accept_compiled)(one.rounds.decode.fn)  # not compiled
    assert one.generate(prompts, params)[0].tokens != expected


def test_the_reference_runs_the_core_as_it_is_written_in_the_same_dtype() -> None:
    one = engine(bodies="reference", compile=False)
    assert one.dtype == torch.bfloat16 and one.state.bodies == one.target.bodies
    assert all(
        getattr(one.target.bodies, name) is getattr(CORE, name)
        for name in Bodies.__dataclass_fields__
        if name != "names"
    )
    assert one.target.bodies.names == (("everything", "as the core is written"),)
    tokens = [c.tokens for c in one.generate([random_ids(90)], SamplingParams(max_tokens=9))]
    plain = engine(bodies="reference", compile=False).generate(
        [random_ids(90)], SamplingParams(max_tokens=9), speculate=False
    )
    assert len(tokens[0]) == 9 == len(plain[0].tokens)


# ---- edits of files --------------------------------------------------------------------------------------------------


RUN = """
import torch
torch.set_num_threads(1)
from gpt_fast_sd import DraftConfig, Engine, EngineConfig, SamplingParams
one = Engine.from_pretrained("bundled", EngineConfig(batch_size=1, max_seq_len=512, compile={compile}, bodies="fast"),
                             DraftConfig(policy="lookup", gamma=3))
document = "one two three four five six seven. " * 8
(c,) = one.generate([document], SamplingParams(max_tokens=24, temperature={temperature}, seed=1))
print(c.tokens, c.stats.accepted, c.stats.drafted)
"""
EDITS: dict[str, tuple[str, str, str, float]] = {  # what is edited: file, old, new, temperature
    "accept all": ("gpt_fast_sd/acceptance.py", "n_accepted = _n_leading(best[:, :-1] == drafted, max_accept)",
                   "n_accepted = max_accept", 0.0),
}  # fmt: skip


def run(root: Path, temperature: float) -> tuple[str, str]:
    code = RUN.format(compile=True, temperature=temperature)
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip(), done.stderr
