"""A draft model reads texts longer than it has positions, as an independent StreamingLLM over transformers does."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gpt_fast_sd import DraftConfig, Engine, EngineConfig, SamplingParams
from gpt_fast_sd.model import Transformer, save_hugging_face
from gpt_fast_sd.policies.standalone import StandaloneDraft
from gpt_fast_sd.policies.turned_sinks import TurnedSinksView
from tests.gpt_fast_sd.policies.drafting import drafting, drafting_now_and_then, entries, tokens_of
from tests.helpers import few, random_ids, tiny_config, tiny_model

POSITIONS, BUDGET, SINKS, MOST = 320, 40, 4, 1000  # of the draft model; tokens that a row may have
WINDOW = BUDGET - SINKS
Block = tuple[int, int, int]  # tokens from, to, and where the window that they see begins


def short(n_layers: int = 2, **changes: Any) -> Transformer:
    return tiny_model(tiny_config(max_seq_len=POSITIONS, n_layers=n_layers, **changes), seed=3)


def drafting_past(model: Transformer, engine: dict[str, Any] | None = None, **draft: Any) -> tuple[Engine, Any]:
    settings = {"max_seq_len": MOST} | (engine or {})
    one = drafting("standalone", draft_model=model, engine=settings, **{"budget": BUDGET, "gamma": 3} | draft)
    assert isinstance(one.policy, StandaloneDraft) and isinstance(one.policy.view, TurnedSinksView)
    return one, one.policy


def window_start(length: int) -> int:
    return max(SINKS, length - WINDOW)


def in_transformers(folder: Path, model: Transformer) -> Any:
    transformers = pytest.importorskip("transformers")
    save_hugging_face(model, folder, dtype=torch.float32)
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)


@torch.no_grad()
def streamed(theirs: Any, ids: list[int], blocks: list[Block]) -> Tensor:
    """Logits after the last token of blocks that are fed one after another, with positions in the cache.

    Keys are kept as they are before rotation, and rotated anew for each block: the sinks are at 0, 1, ..., the window
    follows them.
    """
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    body, config = theirs.model, theirs.config
    size, n = config.head_dim, max(len(ids), SINKS)
    held = [torch.zeros(2, config.num_key_value_heads, n, size, dtype=torch.float64) for _ in body.layers]
    for start, stop, begin in blocks:
        seen = torch.cat([torch.arange(SINKS), torch.arange(min(begin, stop), stop)])  # in the cache's order
        asked = torch.arange(start, stop)
        inside = torch.where(asked < SINKS, asked, asked - begin + SINKS)
        mask = seen[None] <= asked[:, None]  # [T, M]
        x = body.embed_tokens(torch.tensor(ids[start:stop]))[None]
        keys_at = body.rotary_emb(x, torch.arange(len(seen))[None])
        queries_at = body.rotary_emb(x, inside[None])
        for layer, kept in zip(body.layers, held, strict=True):
            attention, normed = layer.self_attn, layer.input_layernorm(x)
            q, k, v = (
                part(normed)[0].unflatten(-1, (-1, size)).transpose(0, 1)
                for part in (attention.q_proj, attention.k_proj, attention.v_proj)
            )
            kept[0, :, start:stop], kept[1, :, start:stop] = k, v
            q, _ = apply_rotary_pos_emb(q[None], q[None], *queries_at)
            k, _ = apply_rotary_pos_emb(kept[0, :, seen][None], kept[0, :, seen][None], *keys_at)
            group = q.shape[1] // k.shape[1]
            scores = q @ k.repeat_interleave(group, 1).transpose(-1, -2) * size**-0.5
            weights = scores.masked_fill(~mask, -torch.inf).softmax(-1)
            out = weights @ kept[1, :, seen][None].repeat_interleave(group, 1)
            x = x + attention.o_proj(out.transpose(1, 2).flatten(2))
            x = x + layer.mlp(layer.post_attention_layernorm(x))
    return theirs.lm_head(body.norm(x))[0, -1]


@pytest.mark.parametrize("n", [3, 41, 300, 513, 900])
def test_a_prompt_is_prefilled_and_drafted_from_as_streaming_llm_does(tmp_path: Path, n: int) -> None:
    model, ids = short(), random_ids(n, seed=n)
    one, policy = drafting_past(model)
    found, feed = list[Tensor](), policy.feed
    policy.feed = lambda *args: found.append(feed(*args)) or found[-1]
    drafting_now_and_then(one, [3], timed=False)
    one.warm_up()
    found.clear()
    next(one.stream([ids], SamplingParams(max_tokens=9)))
    chunks = [(start, min(start + 256, n - 1), window_start(start)) for start in range(0, n - 1, 256)]
    blocks = [*chunks, (max(0, n - 2), n, window_start(max(0, n - 2)))]
    wanted = streamed(in_transformers(tmp_path, model), ids, blocks).float()
    torch.testing.assert_close(found[0][0], wanted, rtol=1e-4, atol=1e-4)


def test_kernels_store_a_prompt_read_through_sinks_and_window_as_the_core_does() -> None:
    shape = {"vocab_size": 256, "dim": 64, "n_heads": 4, "n_kv_heads": 2, "head_dim": 64, "ffn_dim": 96}
    body, found = random_ids(700, seed=1), list[list[Tensor]]()
    for bodies in ("fast", "reference"):
        models = [
            tiny_model(tiny_config(**shape, max_seq_len=n), seed=3, dtype=torch.bfloat16) for n in (2000, POSITIONS)
        ]
        draft = DraftConfig(policy="standalone", budget=BUDGET, gamma=2, draft_model="given")
        how: dict[str, Any] = {"dtype": "bf16", "bodies": bodies, "compile": bodies == "fast"}
        config = EngineConfig(batch_size=2, max_seq_len=MOST, device="cpu", **how)
        policy: Any = Engine(models[0], config=config, draft=draft, draft_model=models[1]).policy
        if bodies == "fast" and not policy.bodies.fused:
            pytest.skip("no C++ compiler builds the kernels here")
        with torch.inference_mode():
            policy._prefill.fill(1, body)
        found.append(entries(policy.runner.cache, 1, len(body)))
    for fast, core in zip(*found, strict=True):
        assert (fast.float() - core.float()).norm() < 0.02 * core.float().norm()


def test_sinks_of_several_chunks_are_turned_back_for_a_row_that_is_filled_between_rounds_of_others() -> None:
    model = tiny_model(tiny_config(max_seq_len=700), seed=3)
    one, _ = drafting_past(model, {"batch_size": 2}, budget=340, n_sink=300)
    prompts = [random_ids(n, seed=n) for n in (650, 5, 640)]
    params = [SamplingParams(max_tokens=n, temperature=0.8, seed=n) for n in (60, 3, 30)]
    together = one.generate(prompts, params)[2]  # it is filled while the first is decoded
    alone = one.generate([prompts[2]], params[2])[0]
    assert (together.tokens, together.stats.accepted) == (alone.tokens, alone.stats.accepted)


@pytest.mark.parametrize("kv_dtype", [None, *few(["int8", "bf16"], ["int8"])])
def test_every_step_of_rounds_with_and_without_a_draft_reads_sinks_just_before_its_window(
    tmp_path: Path, kv_dtype: str | None
) -> None:
    """Keys of a model of one layer depend on their token alone: each step's logits are known, whatever was before."""
    model = short(1)
    one, policy = drafting_past(model, {"kv_dtype": kv_dtype, "dtype": "fp32"})
    drafting_now_and_then(one, [3, 0, 2, 0, 0, 1, 3], timed=False)
    feed, seen, drafted = policy.feed, list[tuple[list[int], int, Tensor]](), list[list[int]]()

    def feeding(tokens: Tensor, pos: Tensor, *rest: Any) -> Tensor:
        logits: Tensor = feed(tokens, pos, *rest)
        drafted[:] = [*drafted, tokens[:, 0].tolist()] if tokens.shape[1] == 1 else []
        for row in one.state.active.nonzero()[:, 0].tolist():
            committed = one.state.history[row, : int(one.state.seq_len[row]) + 1].tolist()
            text = [*committed, *(each[row] for each in drafted)]
            assert len(text) == int(pos[row, -1]) + 1
            seen.append((text, int(policy.view.window_start[row]), logits[row]))
        return logits

    policy.feed = feeding
    prompts = [random_ids(n, seed=n) for n in (2, 600, 700, 330)]
    prompts[2] = [*prompts[1][:512], *prompts[2][512:]]  # a part of it is copied from another slot
    params = SamplingParams(max_tokens=40)
    done = tokens_of(one.generate(prompts, params))
    assert tokens_of(one.generate(prompts[::-1], params))[::-1] == done
    plain = drafting("off", engine={"max_seq_len": MOST, "kv_dtype": kv_dtype, "dtype": "fp32"})
    assert tokens_of(plain.generate(prompts, params)) == done
    loose = {None: 1e-4, "int8": 0.15, "bf16": 0.1}[kv_dtype]
    assert max(begin for _, begin, _ in seen) > 2 * POSITIONS > 2 * min(begin for _, begin, _ in seen)
    theirs = in_transformers(tmp_path, model)
    for text, begin, logits in seen[::7]:
        n = len(text)
        wanted = streamed(theirs, text, [(0, n, SINKS), (n - 1, n, begin)]).float()
        torch.testing.assert_close(logits, wanted, rtol=loose, atol=loose)
