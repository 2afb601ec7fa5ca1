"""What a model knows: perplexity, facts found again far back, samples; and logits beside those of a reference.

Shapes: T tokens, D hidden size, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from gpt_fast_sd.config import SamplingParams
from gpt_fast_sd.engine import Engine
from gpt_fast_sd.model import CausalSelf, Tokenizer, Transformer
from measuring import plots
from measuring.needles import DIGITS, Case
from measuring.tables import Column, Table

END = 512  # tokens at the end of a stretch that are averaged on their own
NEW_TOKENS = 80  # of a sample
LOGITS_BLOCK = 1024  # positions whose logits are in memory at once
OPENINGS = (  # our own
    "The road to the harbour was steep, and before we had gone half a mile",
    '"You have kept me waiting," said the old clockmaker, "and I should like to know',
    "Of all the islands which we visited that summer, the smallest was",
)
Record = dict[str, Any]


# ---- perplexity ------------------------------------------------------------------------------------------------------


@torch.inference_mode()
def token_losses(model: Transformer, tokens: Tensor) -> Tensor:
    """Next-token losses in nats of one text: tokens [T + 1] -> fp32 [T]."""
    tokens = tokens.to(model.embedding.weight.device)
    pos = torch.arange(len(tokens) - 1, device=tokens.device)[None]  # [1, T]
    hidden = model.hidden(tokens[None, :-1], pos, CausalSelf())[0]  # [T, D]
    blocks = zip(hidden.split(LOGITS_BLOCK), tokens[1:].split(LOGITS_BLOCK), strict=True)
    return torch.cat([F.cross_entropy(model.output(h).float(), t, reduction="none") for h, t in blocks]).cpu()


def measure_perplexity(
    engine: Engine, tokenizer: Tokenizer, cuts: Mapping[str, Sequence[Tensor]], contexts: Sequence[int]
) -> list[Record]:
    """One record a text and context; cuts: stretches of each text, int64 [longest context] each."""
    records = []
    n_tokens = sum(len(cut) for one in cuts.values() for cut in one) * len(contexts)
    bar = tqdm(total=n_tokens, desc="perplexity", unit="tok", unit_scale=True, disable=not n_tokens)
    for name, own in cuts.items():
        n_bytes = sum(len(tokenizer.token_bytes(token)) for cut in own for token in cut.tolist())
        for context in contexts:
            losses = []
            for window in (window for cut in own for window in cut.split(context)):
                losses.append(token_losses(engine.model, torch.cat([bos_of(tokenizer), window])))
                bar.update(len(window))
            per_stretch = torch.cat(losses).view(len(own), -1)  # [stretches, longest]
            mean = per_stretch.mean().item()
            records.append({
                "book": name, "context": context, "tokens": per_stretch.numel(), "loss": mean,
                "perplexity": math.exp(mean),
                "bits_per_byte": per_stretch.double().sum().item() / math.log(2) / n_bytes,
                "loss_window_end": torch.cat([window[-END:] for window in losses]).mean().item(),
                "loss_stretch_end": per_stretch[:, -END:].mean().item(),
            })  # fmt: skip
    bar.close()
    return records


def stretches(ids: Tensor, length: int, n: int, name: str) -> list[Tensor]:
    """n runs of length tokens, spread evenly over the text, that do not overlap."""
    if len(ids) < n * length:
        raise ValueError(f"{name} has {len(ids):,} tokens, too few for {n} stretches of {length:,}")
    return [ids[start : start + length] for start in np.linspace(0, len(ids) - length, n + 2)[1:-1].astype(int)]


def bos_of(tokenizer: Tokenizer) -> Tensor:
    """What a text begins with, [1]; [0] where that is nothing."""
    return torch.tensor([] if tokenizer.bos_id is None else [tokenizer.bos_id], dtype=torch.int64)


# ---- needles and look-ups --------------------------------------------------------------------------------------------


def measure_probes(engine: Engine, probes: Sequence[Case], what: str, names: Sequence[str]) -> list[Record]:
    """Accuracy of greedy answers, a record for each cell: exact matches and single digits at their place."""
    answered: dict[tuple[float, ...], list[float]] = {}
    digits = SamplingParams(max_tokens=DIGITS, ignore_eos=True)
    with tqdm(total=len(probes), desc=what, unit="prompt", disable=not probes) as bar:
        for event in engine.stream([probe.prompt for probe in probes], digits):
            if event.completion:
                probe, text = probes[event.index], event.completion.text
                right = sum(a == b for a, b in zip(text, probe.answer or "", strict=False)) / DIGITS
                answered.setdefault(probe.cell, []).append(right)
                bar.update()
    return [
        dict(zip(names, cell, strict=True))
        | {"n": len(right), "exact": float(np.mean([r == 1.0 for r in right])), "digits": float(np.mean(right))}
        for cell, right in sorted(answered.items())
    ]


def write_samples(engine: Engine, seed: int) -> list[Record]:
    """What the model writes after our own openings, greedy and at temperature 0.8."""
    samples = []
    for temperature in (0.0, 0.8):
        params = SamplingParams(max_tokens=NEW_TOKENS, temperature=temperature, seed=seed, ignore_eos=True)
        for prompt, completion in zip(OPENINGS, engine.generate(OPENINGS, params), strict=True):
            samples.append({"prompt": prompt, "temperature": temperature, "text": completion.text})
    return samples


# ---- beside a reference ----------------------------------------------------------------------------------------------


def last_logits(engine: Engine, tokenizer: Tokenizer, cuts: Mapping[str, Sequence[Tensor]], n: int) -> list[Tensor]:
    """The logits for each of the last n tokens of each text's first stretch: fp32 [n, V] on the CPU."""
    first = tqdm([own[0] for own in cuts.values()], desc="logits", unit="text", disable=not cuts)
    return [engine.logits(torch.cat([bos_of(tokenizer), cut])[:-1].tolist(), last=min(n, len(cut))) for cut in first]


def distance(name: str, tokens: Tensor, own: Tensor, theirs: Tensor) -> Record:
    """How far logits are from the reference's: own and theirs [T, V], tokens [T] those that came."""
    centred, reference = (logits - logits.mean(-1, keepdim=True) for logits in (own, theirs))
    error = (centred - reference).square().mean().sqrt() / reference.square().mean().sqrt().clamp(min=1e-30)
    return {
        "book": name, "tokens": len(tokens), "perplexity": F.cross_entropy(own, tokens).exp().item(),
        "reference_perplexity": F.cross_entropy(theirs, tokens).exp().item(),
        "same_best": (own.argmax(-1) == theirs.argmax(-1)).double().mean().item(), "logit_error": error.item(),
        "divergence": F.kl_div(own.log_softmax(-1), theirs.log_softmax(-1), log_target=True, reduction="batchmean")
        .item(),
    }  # fmt: skip


BESIDE = Table(
    Column("text", lambda r: r["book"], 26, left=True), Column("tokens", lambda r: f"{r['tokens']:,}"),
    Column("perplexity", lambda r: f"{r['perplexity']:.3f}"),
    Column("reference", lambda r: f"{r['reference_perplexity']:.3f}"),
    Column("ratio", lambda r: f"{r['perplexity'] / r['reference_perplexity']:.4f}", 7),
    Column("same best token", lambda r: f"{r['same_best']:.2%}"),
    Column("logit error", lambda r: f"{r['logit_error']:.2%}"),
    Column("divergence, nats", lambda r: f"{r['divergence']:.2e}"),
)  # fmt: skip


# ---- what is drawn ---------------------------------------------------------------------------------------------------


def draw_needles(records: Sequence[Record], path: Path) -> None:
    """A heat map of exact needle answers; the small figure is the share of single digits."""
    lengths, depths = sorted({r["length"] for r in records}), sorted({r["depth"] for r in records})

    def draw(panel: Any) -> None:
        exact = np.full((len(depths), len(lengths)), np.nan)
        for r in records:
            row, column, ink = depths.index(r["depth"]), lengths.index(r["length"]), "white"
            exact[row, column], ink = r["exact"], "white" if r["exact"] < 0.6 else "black"
            middle = {"ha": "center", "va": "center", "color": ink}
            panel.text(column, row - 0.1, f"{r['exact']:.0%}", **middle)
            panel.text(column, row + 0.24, f"digits {r['digits']:.0%}", fontsize=7, **middle)
        image = panel.imshow(exact, vmin=0, vmax=1, cmap="viridis", aspect="auto", zorder=1)  # over the grid
        panel.set_axisbelow(True)
        panel.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths])
        panel.set_yticks(range(len(depths)), [f"{depth:.0%}" for depth in depths])
        panel.figure.colorbar(image, ax=panel, format="{x:.0%}")

    plots.draw_panels(
        [[draw]], path, title=f"Needles answered exactly, {records[0]['n']} prompts per cell",
        xlabel="prompt and answer, tokens", ylabel="depth of the fact (0% is the start)",
        size=(0.8 + 0.95 * len(lengths), 0.8 + 0.6 * len(depths)),
    )  # fmt: skip
