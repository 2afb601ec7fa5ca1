"""What one reads is what runs: an edit to a function that a body stands for takes effect, and is announced."""

import ast
import functools
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import _functional_collectives as functional

from gpt_fast_sd import DraftConfig, Engine, SamplingParams, acceptance, attention
from gpt_fast_sd.bodies import CORE, Bodies
from gpt_fast_sd.fast import choose, marks
from gpt_fast_sd.model.llama import Block, FeedForward
from gpt_fast_sd.tp import collectives
from tests.gpt_fast_sd.fast.references import as_on_cuda
from tests.helpers import random_ids, tiny_config, tiny_engine, tiny_model

ROOT = Path(__file__).resolve().parents[2]
PACKED = tiny_config(vocab_size=256, dim=64, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=64, ffn_dim=128)
CPU = torch.device("cpu")


def engine(**changes: Any) -> Engine:
    """An engine in bf16 whose layers run in one call where a compiler is there."""
    draft, model = DraftConfig(policy="streaming", budget=64, gamma=3), tiny_model(PACKED, dtype=torch.bfloat16)
    return tiny_engine(draft, model=model, **{"max_seq_len": 300, "compile": True} | changes)


def test_every_body_stands_for_the_core_as_it_is() -> None:
    """Where this fails: bring the body that is named up to date, then `python -m gpt_fast_sd.fast --write`."""
    assert choose, "it imports every body"
    assert [(body, found) for body, names in marks.STANDS_FOR.items() if (found := marks.edited_of(names))] == []


def test_every_field_of_the_table_has_a_body_that_says_what_it_stands_for() -> None:
    stood_for = {name for names in marks.STANDS_FOR.values() for name in names}
    fields = set(Bodies.__dataclass_fields__) - {"names", "others"}
    assert {name for name in fields if marks.name_of(getattr(CORE, name)) not in stood_for} == set()


def test_all_that_a_function_calls_or_reads_of_the_core_counts() -> None:
    assert {name.partition(":")[2] for name in marks.marks_of(["gpt_fast_sd.acceptance:judge_sampled"])} == {
        "judge_sampled", "verify_sampled", "_n_leading", "_each_row_at", "draw", "uniform", "_mix32", "_multiply32",
        "_MASK32", "AcceptResult",
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
    one, other = (marks._written(ast.parse(source).body[0]) for source in ("def f(x, y=1):\n    return x + y", text))
    assert (one != other) is changed


@pytest.mark.usefixtures("traced")
def test_a_function_that_was_bound_anew_is_not_stood_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def keep_all(logits: Tensor, drafted: Tensor, max_accept: Tensor, vocabulary: Any) -> acceptance.AcceptResult:
        return acceptance.AcceptResult(max_accept, logits.argmax(-1).gather(1, max_accept[:, None])[:, 0])

    monkeypatch.setattr(acceptance, "verify_greedy", keep_all)
    with pytest.warns(UserWarning, match=r"^acceptance\.verify_greedy was edited: acceptance as the core"):
        one = engine()
    assert one.state.bodies.verify_greedy is keep_all and one.state.bodies.commit is CORE.commit
    assert "acceptance" not in one.state.bodies.about
    one.generate([random_ids(100)], SamplingParams(max_tokens=9))
    assert one.stats.accepted == one.stats.drafted > 0


@pytest.mark.usefixtures("a_compiler", "traced")
def test_a_block_that_was_bound_anew_takes_effect(monkeypatch: pytest.MonkeyPatch) -> None:
    prompts, params = [random_ids(100)], SamplingParams(max_tokens=9)
    expected = engine().generate(prompts, params)[0].tokens

    def without_feed_forward(self: Block, x: Tensor, cos: Tensor, sin: Tensor, pos: Tensor, kv: Any) -> Tensor:
        return x + self.attention(self.attention_norm(x), cos, sin, pos, kv)

    monkeypatch.setattr(Block, "forward", without_feed_forward)
    with pytest.warns(UserWarning, match=r"^model\.llama\.Block\.forward was edited: layers as the core"):
        one = engine(cuda_graphs="off")
    assert not one.target.bodies.fused and one.target.bodies.hidden is CORE.hidden
    assert one.generate(prompts, params)[0].tokens != expected


def test_the_reference_runs_the_core_as_it_is_written_in_the_same_dtype() -> None:
    one = engine(bodies="reference", compile=False)
    assert one.dtype == torch.bfloat16 and one.state.bodies == one.target.bodies
    fields = [name for name in Bodies.__dataclass_fields__ if name != "names"]
    assert all(getattr(one.target.bodies, name) == getattr(CORE, name) for name in fields)
    assert one.target.bodies.about == "the core as it is written"
    prompts, params = [random_ids(90)], SamplingParams(max_tokens=9)
    spoken, plain = (one.generate(prompts, params, speculate=drafts)[0].tokens for drafts in (True, False))
    assert len(spoken) == 9 and spoken == plain


def test_wrappers_objects_and_other_functions_in_a_place_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["gpt_fast_sd.acceptance:judge_sampled"]
    assert marks.edited_of(names) == []
    true = acceptance.draw
    wrapped = functools.wraps(true)(lambda *args: true(*args))
    for other in (wrapped, functools.partial(true), acceptance.uniform, torch.add, None):
        with monkeypatch.context() as patch:
            patch.setattr(acceptance, "draw", other)
            assert marks.edited_of(names) == ["gpt_fast_sd.acceptance:draw"], other
    assert marks.edited_of(["gpt_fast_sd.acceptance:gone"]) == ["gpt_fast_sd.acceptance:gone"]


def test_an_edit_reaches_a_model_that_an_engine_has_laid_out(a_compiler: None, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model(PACKED, dtype=torch.bfloat16)
    tiny_engine(model=model, compile=True)
    monkeypatch.setattr(FeedForward, "forward", lambda self, x: x)
    with pytest.warns(UserWarning, match=r"^model\.llama\.FeedForward\.forward was edited: feed-forward layers as"):
        tiny_engine(model=model, compile=True)
    assert {type(m) for m in model.modules() if isinstance(m, FeedForward)} == {FeedForward}
    with pytest.raises(ValueError, match="bodies 'reference' needs plain weights"):
        tiny_engine(model=model, compile=True, bodies="reference")
    one, packed = engine(bodies="reference", compile=False), DraftConfig(policy="standalone", draft_model="given")
    with pytest.raises(ValueError, match="bodies 'reference' needs plain weights"):
        one.redraft(packed, model)


def test_a_library_that_reads_otherwise_is_no_edit(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["gpt_fast_sd.acceptance:verify_greedy", "gpt_fast_sd.tp.vocab:Vocabulary.argmax"]
    monkeypatch.setattr(collectives, "_all_gather", functional.all_gather_tensor)
    assert marks.edited_of(names) == []
    monkeypatch.setattr(collectives, "_all_gather", lambda *_: None)
    assert marks.edited_of(names) == ["gpt_fast_sd.tp.collectives:_all_gather"]


# ---- edits of files --------------------------------------------------------------------------------------------------

# what an engine runs that decodes with a streaming view, greedily and by sampling
USED = {
    "gpt_fast_sd.bodies:hidden", "gpt_fast_sd.bodies:logits",
    "gpt_fast_sd.attention:dense", "gpt_fast_sd.attention:listed", "gpt_fast_sd.acceptance:verify_greedy",
    "gpt_fast_sd.acceptance:judge_sampled", "gpt_fast_sd.acceptance:commit", "gpt_fast_sd.sampling:draw",
    "gpt_fast_sd.sampling:uniform", "gpt_fast_sd.sampling:probabilities", "gpt_fast_sd.sampling:likeliest",
    "gpt_fast_sd.model.llama:Transformer.forward", "gpt_fast_sd.model.llama:Transformer.hidden",
    "gpt_fast_sd.model.llama:Block.forward", "gpt_fast_sd.model.llama:Attention.forward",
    "gpt_fast_sd.model.llama:FeedForward.forward",
    "gpt_fast_sd.model.llama:RMSNorm.forward", "gpt_fast_sd.model.cache:CacheLayer.store",
    "gpt_fast_sd.kv:DenseKV.attend", "gpt_fast_sd.kv:ListedKV.attend",
}  # fmt: skip


RUN = """
import sys, warnings, torch
torch.set_num_threads(1)
from gpt_fast_sd import DraftConfig, Engine, EngineConfig, SamplingParams
from gpt_fast_sd.model import ModelConfig, Transformer
from gpt_fast_sd.steps import Step
from gpt_fast_sd.tp import collectives
torch.manual_seed(0)
config = ModelConfig(vocab_size=256, dim=64, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=64, ffn_dim=128,
                     max_seq_len=512)
model = Transformer(config).to(torch.bfloat16).requires_grad_(False).eval()
prompt = [i % 7 for i in range(100)]
try:
    one = Engine(model, None, EngineConfig(batch_size=1, max_seq_len=256, device="cpu", dtype="bf16"),
                 DraftConfig(policy="streaming", budget=64, gamma=2))
    rounds = one.schedule.rounds
    rounds.decode = rounds.verify = Step(rounds.decode.fn)  # not compiled, to save time
    one._prefill._step, one.policy._step = Step(one._prefill._step.fn), Step(one.policy._step.fn)
    for temperature, top_k in ((0.0, None), (1.0, 5)):
        one.generate([prompt], SamplingParams(max_tokens=5, temperature=temperature, top_k=top_k, seed=1))
    print("the edit does not run")
except RuntimeError as error:
    print(error)
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(USED))
def test_an_edit_in_a_copy_takes_effect_and_is_announced(name: str, tmp_path: Path, a_compiler: None) -> None:
    """As somebody would try it: a line in a function of the core, with everything on its default."""
    for room in ("gpt_fast_sd", "model", "tp"):  # links and all
        shutil.copytree(ROOT / room, tmp_path / room, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    module, _, place = name.partition(":")
    path = tmp_path.joinpath(*module.split(".")).with_suffix(".py")
    node: Any = ast.parse(text := path.read_text(encoding="utf-8"))
    for part in place.split("."):
        node = next(n for n in node.body if isinstance(n, (ast.ClassDef, ast.FunctionDef)) and n.name == part)
    first, lines = node.body[1] if ast.get_docstring(node) else node.body[0], text.split("\n")
    lines.insert(first.lineno - 1, " " * first.col_offset + "raise RuntimeError('the edit runs')")
    path.write_text("\n".join(lines), encoding="utf-8")
    done = subprocess.run([sys.executable, "-c", RUN], cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.stdout.strip() == "the edit runs", done.stderr[-2000:]
    where = name.replace(":", ".").removeprefix("gpt_fast_sd.")
    # of a small vocabulary no body stands in for the whole of probabilities
    assert (f"{where} was edited" in done.stderr) == (where != "sampling.probabilities")


def test_what_a_body_stands_for_is_edited_in_some_test() -> None:
    on_a_cpu = {name for body, names in marks.STANDS_FOR.items() if ".triton." not in body for name in names}
    helpers = {name for name in on_a_cpu if ".cache:Cache" in name or name in (
        "gpt_fast_sd.sampling:SamplingTable.repeated", "gpt_fast_sd.tp.vocab:Vocabulary.argmax")}  # fmt: skip
    assert on_a_cpu - helpers <= USED


def test_a_cache_that_triton_alone_reads_is_not_cleared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Zeroing the rest of a long slot takes as long as a short prompt; what an edit brings back reads and masks it."""
    assert tiny_engine().cache.clears
    as_on_cuda(monkeypatch)
    attend = attention.dense
    one = tiny_engine(max_seq_len=600)
    one.cache.layers[0].k[:, :, 40:] = 7.0
    one.generate([[1, 2, 3]], SamplingParams(max_tokens=2))
    assert not one.cache.clears and one.cache.layers[0].k[0, :, -1].eq(7.0).all()
    monkeypatch.setattr(attention, "dense", lambda *args: attend(*args))
    with pytest.warns(UserWarning, match="was edited: attention as the core is written"):
        one = tiny_engine()
    monkeypatch.setattr(attention, "dense", attend)
    assert one.target.backend.bodies(one.target).names and one.cache.clears  # whoever reads it, too
