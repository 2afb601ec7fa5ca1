"""The bundled model at its full length: a row's output does not depend on what shares its batch."""

import pytest
import torch

from gpt_fast_sd import Engine, EngineConfig, SamplingParams
from gpt_fast_sd.loading import BUNDLED


@pytest.mark.slow
def test_twenty_prompts_through_four_slots_give_the_tokens_each_gives_alone() -> None:
    capacity, new = 12_288, 24
    several = Engine.from_pretrained("bundled", EngineConfig(batch_size=4, max_seq_len=capacity, dtype="fp32"))
    alone = Engine.from_pretrained("bundled", EngineConfig(batch_size=1, max_seq_len=capacity, dtype="fp32"))
    assert several.tokenizer is not None
    text = several.tokenizer.encode((BUNDLED / "document.txt").read_text(encoding="utf-8"), bos=False) * 2
    lengths = [round(3 * 4000 ** (i / 19)) for i in range(20)]
    assert (min(lengths), max(lengths)) == (3, 12_000)
    order = torch.randperm(20, generator=torch.Generator().manual_seed(0)).tolist()
    prompts = [[1, *text[37 * i : 37 * i + lengths[i] - 1]] for i in order]
    params = [SamplingParams(max_tokens=new + i % 5, ignore_eos=True) for i in range(20)]
    together = several.generate(prompts, params)
    assert several.stats.recompiles == 0
    for prompt, param, row in zip(prompts, params, together, strict=True):
        (by_itself,) = alone.generate([prompt], param)
        assert row.tokens == by_itself.tokens, f"a prompt of {len(prompt)} tokens"
    assert len({tuple(row.tokens) for row in together}) > 10
