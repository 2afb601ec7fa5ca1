"""The best token of each row of logits: what argmax finds, though a CPU does not look through a row one by one."""

import math

import pytest
import torch

from gpt_fast_sd.tp import Vocabulary, vocab
from tests.helpers import Noting

BLOCK, FEW, first_best = vocab.BLOCK, vocab.FEW, vocab.first_best
SIZES = [1, BLOCK, 2 * BLOCK - 1, 2 * BLOCK, 2 * BLOCK + 1, 4096, 32_003]


@pytest.fixture(params=[0, FEW], ids=["by blocks", "as it comes"])
def _few(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vocab, "FEW", request.param)


@pytest.mark.usefixtures("_few")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", SIZES)
def test_it_is_argmax_the_first_of_ties_and_nan_as_the_largest(size: int, dtype: torch.dtype) -> None:
    torch.manual_seed(size)
    for shape in ((size,), (1, size), (3, 2, size), (0, 2, size)):
        x = torch.randn(shape).to(dtype)  # bf16 has ties
        assert torch.equal(first_best(x), x.argmax(-1))
    last = torch.full((2, size), -1.0).to(dtype)
    last[:, -1] = 1
    assert first_best(last).tolist() == [size - 1] * 2
    for values in ([1.0], [-math.inf], [math.inf], [0.0, -0.0], [1.0, math.inf], [0.0, math.nan], [math.inf, math.nan]):
        rare = (torch.rand(8, size) < 4 / size).long() if len(values) > 1 else torch.zeros(8, size).long()
        x = torch.tensor(values, dtype=dtype)[rare]
        assert torch.equal(first_best(x), x.argmax(-1)), values


@pytest.mark.usefixtures("_few")
def test_rows_may_lie_apart() -> None:
    x = torch.randn(6, 3, 1500)
    for view in (x[::2, :, 100:1300], x.transpose(0, 1), torch.randn(1200, 5).T, torch.randn(1, 1200).expand(4, -1)):
        assert torch.equal(first_best(view), view.argmax(-1))


def test_many_logits_are_not_looked_through_one_by_one() -> None:
    with Noting(lambda op, args: op is torch.ops.aten.argmax.default and args[0].shape[-1]) as searches:
        Vocabulary().argmax(torch.zeros(8, 5, 49_152))
    assert [size for size in searches.seen if size] == [49_152 // BLOCK, BLOCK]


def test_one_graph_serves_any_number_of_tokens() -> None:
    """As judging is compiled, where it is: a size that varies must be asked nothing."""
    graphs, backend = [], lambda graph, _: graphs.append(graph) or graph
    step = torch.compile(first_best, fullgraph=True, dynamic=False, backend=backend)
    for n_tokens in (5, 16, 17, 3):
        x = torch.randn(1, n_tokens, 1000)
        torch._dynamo.mark_dynamic(x, 1, min=3, max=17)
        assert torch.equal(step(x), x.argmax(-1))
    assert len(graphs) == 1
