"""What Inductor makes of a sharded step for a GPU that is not there: the collectives of the plan, in one graph."""

from collections import Counter

import pytest
import torch

from gpt_fast_sd.model import FORMATS, KVCache
from gpt_fast_sd.policies import Draft
from gpt_fast_sd.round import accept_step, decode_step
from gpt_fast_sd.sampling import Kind
from gpt_fast_sd.state import BatchState
from gpt_fast_sd.steps import size_carrier
from gpt_fast_sd.tp import Parallel, Vocabulary, local_config
from tests.gpt_fast_sd.cuda.rig import CAPACITY, CUDA, EOS, LAYERS, SLOTS, fake_rig
from tests.gpt_fast_sd.cuda.test_codegen import HEAD, LAYER
from tests.gpuless.fakecuda import cuda_code, fake_cuda_tensors, needs_cuda_code

pytestmark = needs_cuda_code


@pytest.mark.parametrize("as_one_of", [2], indirect=True)
def test_a_sharded_step_is_one_graph_with_two_sums_per_layer(as_one_of: Parallel) -> None:
    with fake_cuda_tensors(), torch.inference_mode():
        rig = fake_rig()
        model = as_one_of.group.shard(rig.model)
        cache = KVCache(local_config(model.config, 2), SLOTS, CAPACITY, format=FORMATS["bf16"], device=CUDA)
        tokens = rig.tokens(1)
        step = cuda_code(
            decode_step, model, tokens, tokens.clone(), cache.layers, size_carrier(cache, CAPACITY), 0, rig.state.bodies
        )
    sums = 2 * LAYERS + 1
    assert Counter(step.others) == {"_c10d_functional.all_reduce_": sums, "_c10d_functional.wait_tensor": sums}
    # as on one rank, and one more: the embedding is summed before the first norm reads it
    assert step.launches - len(step.others) <= LAYERS * LAYER + HEAD + 1, step
    assert step.graphs == 1 and step.no_cudagraph is None
    assert len(step.mutated) == 2 * LAYERS  # keys and values alone


@pytest.mark.slow
@pytest.mark.parametrize("as_one_of", [2], indirect=True)
@pytest.mark.parametrize("sampled", [False, True])
def test_judging_gathers_the_vocabulary_once_within_its_graph(sampled: bool, as_one_of: Parallel) -> None:
    with fake_cuda_tensors(), torch.inference_mode():
        rig = fake_rig()
        vocabulary, tokens = Vocabulary(as_one_of.group.mesh), rig.tokens(5)
        state = BatchState.idle(rig.cache.seq_len, CAPACITY + 256, rig.state.vocab_size, EOS, vocabulary)
        logits = torch.zeros(SLOTS, 6, state.vocab_size // 2, device=CUDA)
        q = torch.zeros(SLOTS, 5, state.vocab_size, device=CUDA) if sampled else None
        step = cuda_code(accept_step, state, Kind(sampled), logits, Draft(tokens, q, state.remaining.clone()), None)
    ops = Counter(op.removeprefix("_c10d_functional.").removesuffix("_out").removesuffix("_") for op in step.others)
    # what the first rank drew counts
    drawn = {"broadcast": 1} if sampled else {}
    assert ops == {"all_gather_into_tensor": 1, **drawn, "wait_tensor": 1 + len(drawn)}, step.others
    assert step.graphs == 1 and step.no_cudagraph is None
