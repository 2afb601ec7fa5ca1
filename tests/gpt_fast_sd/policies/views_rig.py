"""A view and a model that drafts through it, over rows of given lengths that grow as a test wants.

Rows are beginnings of one long prompt each, prefilled once; behind a row's length the cache holds noise, as drafts that
were rejected leave it.

Shapes: B slots, T tokens, S cache capacity, L layers, K kv heads, V vocabulary.
"""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gpt_fast_sd import DraftConfig, SamplingParams
from gpt_fast_sd.model import FORMATS, SPLIT, CacheLayer, KVCache, ModelConfig, Transformer
from gpt_fast_sd.policies import ModelDraft, build_view
from gpt_fast_sd.prefill import Prefill
from gpt_fast_sd.round import decode_step
from gpt_fast_sd.state import BatchState, RoundPlan
from gpt_fast_sd.steps import Runner
from tests.drafts import VIEWS
from tests.helpers import random_ids, tiny_config, tiny_model

N_ROWS, MAX_LEN = 4, 1000
SPARSE = [name for name in VIEWS if name != "full"]


def new_cache(config: ModelConfig) -> KVCache:
    return KVCache(config, N_ROWS, MAX_LEN, format=FORMATS["fp32"], device=torch.device("cpu"))


@functools.cache
def prefilled(config: ModelConfig) -> tuple[Transformer, list[list[int]], KVCache]:
    """A tiny model, a prompt of MAX_LEN for each row, and the keys and values of all of it."""
    model, cache = tiny_model(config), new_cache(config)
    prompts = [random_ids(MAX_LEN, seed=100 + row) for row in range(N_ROWS)]
    prefill = Prefill(Runner(model, cache))
    for slot, prompt in enumerate(prompts):
        prefill.fill(slot, prompt)
    return model, prompts, cache


class Rig:
    """Rows of these committed lengths, each admitted with one token more; begin() is due before anything is read."""

    def __init__(self, name: str, lengths: Sequence[int], config: ModelConfig | None = None, **draft: Any) -> None:
        self.model, self.prompts, self.source = prefilled(config or tiny_config())
        self.cache = new_cache(self.model.config)
        for buffer in self.cache.buffers:
            buffer.normal_(generator=torch.Generator().manual_seed(1))
        self.state = BatchState.idle(self.cache.seq_len, self.cache.capacity + SPLIT, self.model.config.vocab_size, ())
        self.draft = DraftConfig(**({"policy": name, "gamma": 4} | draft))
        self.runner = Runner(self.model, self.cache)
        self.view: Any = build_view(self.draft, name, self.runner)
        self.policy = ModelDraft(self.runner, self.view, name)
        self.lengths, self.drafted_at = dict(enumerate(lengths)), dict[int, int]()
        for slot, length in self.lengths.items():
            self.admit(slot, length)

    def admit(self, slot: int, length: int) -> None:
        """Put the first `length` tokens of the slot's prompt into it, and the next one is pending."""
        self.lengths[slot] = self.drafted_at[slot] = length
        self._reveal(slot, 0, length)
        self.state.assign(slot, self.prompts[slot][: length + 1], SamplingParams(), 0)
        self.policy.host_admit(slot, self.prompts[slot][: length + 1])

    def begin(self) -> None:
        self.plan = RoundPlan.of(self.lengths, drafted_at=self.drafted_at, gamma=self.draft.max_gamma)
        self.policy.host_before_round(self.state, self.plan)
        for n_keys in self.policy.host_refreshes(self.plan):
            self.policy.device_refresh(self.state, n_keys)
        self.policy.device_before_draft(self.state, self.plan)
        self.drafted_at = dict(self.lengths)

    def grow(self, by: Sequence[int], *, observed: bool = True) -> None:
        """Commit `by` more tokens per row, in a round that drafted, or in several that did not."""
        mass = self.verify()[1] if observed and self.view.wants_mass else None
        for slot, n in zip(list(self.lengths), by, strict=False):
            before, after = self.lengths[slot], min(self.lengths[slot] + n, MAX_LEN - 20)
            self._reveal(slot, before, after)
            self.state.assign(slot, self.prompts[slot][: after + 1], SamplingParams(), 0)
            self.lengths[slot] = after
        if observed:
            self.policy.device_after_verify(self.state, mass)

    def rounds(self, *grown: Sequence[int]) -> None:
        """Rounds that draft, after each of which the rows have grown by so much."""
        for by in grown:
            self.grow(by)
            self.begin()
            self.step()

    def verify(self) -> tuple[Tensor, Tensor | None]:
        """Logits [B, T, V] and mass of the next T = gamma + 1 tokens of every row; the cache stays as it is."""
        tokens = torch.tensor([[*p[n : n + 5]] for p, n in zip(self.prompts, self.cache.seq_len.tolist(), strict=True)])
        pos = self.cache.seq_len[:, None] + torch.arange(5)  # [B, T]
        layers = [CacheLayer(layer.format, *(x.clone() for x in layer.buffers)) for layer in self.cache.layers]
        n_splits_carrier = torch.empty(self.cache.splits(int(pos.max()) + 1), 0)
        page = self.draft.page if self.view.wants_mass else 0
        return decode_step(self.model, tokens, pos, layers, n_splits_carrier, page)

    def step(self) -> Tensor:
        """The first draft step of a round: logits [B, V]."""
        return self.policy.first(self.state, self.plan)

    def reads(self) -> Tensor:
        """What that step reads: bool [L, B, K, S]."""
        return self.policy.positions_read(self.cache.seq_len)

    @property
    def committed(self) -> Tensor:
        """bool [B, 1, S]"""
        return (torch.arange(self.cache.layers[0].k.shape[2]) < self.cache.seq_len[:, None])[:, None]

    def _reveal(self, slot: int, start: int, end: int) -> None:
        for buffer, source in zip(self.cache.buffers, self.source.buffers, strict=True):
            buffer[slot, :, start:end] = source[slot, :, start:end]
