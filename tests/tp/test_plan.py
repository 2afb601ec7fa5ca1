"""The plan on paper: one process that acts as one of many ranks, with collectives that do nothing."""

from collections.abc import Callable
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.debug import CommDebugMode

from gpt_fast_sd import DraftConfig, Engine, EngineConfig
from gpt_fast_sd.fast.cpu.packing import pack_linears
from gpt_fast_sd.model import CausalSelf, ModelConfig, Transformer
from gpt_fast_sd.tp import Parallel, Vocabulary, collectives_per_step, local_config, start
from tests.helpers import tiny_config, tiny_engine, tiny_model, whole_text_logits


def counts(step: Callable[[], object]) -> dict[str, int]:
    with CommDebugMode() as seen, torch.inference_mode():
        step()
    return {str(op).rpartition(".")[2]: n for op, n in seen.get_comm_counts().items()}


@pytest.fixture
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("_alone")
def test_one_process_is_a_mesh_of_one_without_a_process_group_and_needs_no_collective() -> None:
    parallel = start(device="cpu")
    assert (parallel.dp, parallel.tp, parallel.rank, parallel.mesh) == (1, 1, 0, None)
    assert parallel.is_main and not dist.is_initialized()
    assert parallel.share(["a", "b"]) == [(0, "a"), (1, "b")]
    assert parallel.gather([(1, "b"), (0, "a")]) == ["a", "b"]
    assert parallel.same(7) == 7
    with parallel.guard():
        assert parallel.group.size == 1
    model = tiny_model()
    assert parallel.group.shard(model) is model and type(model.embedding) is torch.nn.Embedding
    alone = counts(lambda: Vocabulary().argmax(whole_text_logits(tiny_model(), [1, 2, 3])))
    assert alone == collectives_per_step(tiny_config(), 1) == {}


@pytest.mark.usefixtures("_alone")
def test_a_split_or_device_that_the_processes_do_not_have_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="one process was started, got tp 2: torchrun --nproc_per_node=2"):
        start(2, "cpu")
    with pytest.raises(ValueError, match="draft_tp must divide tp, got draft_tp 2 and tp 1"):
        tiny_engine(DraftConfig(policy="standalone", draft_model="small", draft_tp=2), tiny_model())
    with pytest.raises(ValueError, match="device 'cuda' was requested, but the processes were started for 'cpu'"):
        Engine.from_pretrained("bundled", EngineConfig(device="cuda", compile=False), parallel=start(device="cpu"))
    monkeypatch.setenv("WORLD_SIZE", "6")
    for tp, device, said in ((4, "cpu", "tp must divide .* 6 processes were started, got tp 4"), (0, "cpu", "got tp 0"),
                             (1, "tpu", "device must be one of auto, cpu, cuda, got 'tpu'")):  # fmt: skip
        with pytest.raises(ValueError, match=said):
            start(tp, device)


@pytest.mark.parametrize(
    ("changes", "tp", "wrong"),
    [
        ({"n_heads": 12, "n_kv_heads": 4}, 8, "n_heads 12"), ({"n_heads": 12, "n_kv_heads": 4}, 3, "n_kv_heads 4"),
        ({"ffn_dim": 50, "vocab_size": 260}, 4, "ffn_dim 50"),
    ],
)  # fmt: skip
def test_what_cannot_be_split_evenly_is_refused_with_its_numbers(changes: dict[str, int], tp: int, wrong: str) -> None:
    with pytest.raises(ValueError, match=f"tp {tp} does not fit the model: it must divide .*({wrong})"):
        local_config(tiny_config(**changes), tp)


@pytest.mark.parametrize("as_one_of", [8], indirect=True)
def test_a_vocabulary_is_padded_where_the_ranks_do_not_divide_it(as_one_of: Parallel) -> None:
    """32,001 ids: a fine-tune with one for padding."""
    config = tiny_config(vocab_size=32001, n_heads=8, ffn_dim=48)
    whole = tiny_model(config)
    rows = whole.output.weight.clone()
    assert local_config(config, 8).vocab_size == 32001
    model = as_one_of.group.shard(whole)
    as_one_of.group.check_part(model)
    assert model.embedding.weight.shape == model.output.weight.shape == (4001, 32)
    assert model.embedding.first_row == 4001 and torch.equal(model.output.weight, rows[4001:8002])
    with mock.patch.object(DeviceMesh, "get_local_rank", lambda mesh: 7):
        last = as_one_of.group.shard(tiny_model(config))
    assert last.output.out_features == 4001 and 7 * 4001 == 32001 - 3994
    assert torch.equal(last.output.weight[:3994], rows[-3994:]) and not last.output.weight[3994:].any()
    with pytest.raises(ValueError, match="the model holds 32,001 of 32,001 embedding rows, but 8 processes"):
        tiny_engine(model=tiny_model(config), parallel=as_one_of)


@pytest.mark.parametrize("as_one_of", [2], indirect=True)
def test_a_model_whose_weights_are_packed_is_not_split(as_one_of: Parallel) -> None:
    model = tiny_model(tiny_config(dim=64, n_heads=4, n_kv_heads=2, head_dim=16, ffn_dim=64)).to(torch.bfloat16)
    if not pack_linears(model):
        pytest.skip("this CPU or its compiler lacks AVX-512 bf16")
    with pytest.raises(ValueError, match=r"packed this model's weights .* load it again"):
        as_one_of.group.shard(model)


@pytest.mark.parametrize("as_one_of", [2, 4, 8], indirect=True)
@pytest.mark.parametrize("n_layers", [1, 3])
def test_a_step_has_two_sums_per_layer_one_for_the_embedding_and_one_gather(as_one_of: Parallel, n_layers: int) -> None:
    config = tiny_config(n_layers=n_layers, n_heads=8, n_kv_heads=4, vocab_size=264)
    model, vocabulary = as_one_of.group.shard(tiny_model(config)), Vocabulary(as_one_of.group.mesh)
    expected = collectives_per_step(config, as_one_of.tp)
    assert expected == {"all_reduce": 2 * n_layers + 1, "all_gather": 1}
    exact = collectives_per_step(config, as_one_of.tp, exact=True)
    assert exact == (expected if as_one_of.tp == 2 else {"all_reduce": 1, "all_gather": 2 * n_layers + 1})
    tokens, own = torch.zeros(2, 1, dtype=torch.int64), torch.zeros(2, 264 // as_one_of.tp)
    assert counts(lambda: model(tokens, tokens, CausalSelf())) == {"all_reduce": 2 * n_layers + 1}
    assert counts(lambda: vocabulary.argmax(own)) == counts(lambda: vocabulary.whole(own))
    assert counts(lambda: vocabulary.whole(own)) == {"all_gather_into_tensor": 1}
    assert counts(lambda: vocabulary.decided(torch.zeros(2), torch.ones(2))) == {"broadcast": 1}
    as_one_of.group.sum_in_order(model)
    gathers = exact["all_gather"] - 1  # the last one is argmax's
    found = counts(lambda: model(tokens, tokens, CausalSelf()))
    assert found.pop("all_gather_into_tensor", 0) == gathers and found == {"all_reduce": exact["all_reduce"]}


@pytest.mark.parametrize("as_one_of", [4], indirect=True)
@pytest.mark.parametrize("exact", [False, True])
def test_an_exact_engine_lets_its_ranks_sum_in_order(as_one_of: Parallel, exact: bool) -> None:
    model = as_one_of.group.shard(tiny_model(tiny_config(vocab_size=260)))
    draft = DraftConfig(policy="lookup", gamma=2)
    engine = tiny_engine(draft, model=model, parallel=as_one_of, batch_size=1, exact=exact)
    feed, tokens = engine.schedule.rounds.feed, torch.zeros(1, 1, dtype=torch.int64)
    expected = collectives_per_step(model.config, 4, exact=exact)
    expected["all_gather_into_tensor"] = expected.pop("all_gather")
    assert counts(lambda: engine.vocabulary.argmax(feed(tokens, 1)[0])) == expected


@pytest.mark.parametrize("as_one_of", [8], indirect=True)
@pytest.mark.parametrize("n_kv_heads", [8, 4, 1])
def test_eight_ranks_of_a_70b_shape_hold_an_eighth_each(as_one_of: Parallel, n_kv_heads: int) -> None:
    config = ModelConfig(
        vocab_size=128256, dim=8192, n_layers=2, n_heads=64, n_kv_heads=n_kv_heads, head_dim=128, ffn_dim=28672,
        max_seq_len=131072,
    )  # fmt: skip
    with torch.device("meta"):
        model = as_one_of.group.shard(Transformer(config))
    own = local_config(config, 8)
    assert (own.n_heads, own.n_kv_heads) == (8, 1)
    attention, feed_forward = model.layers[0].attention, model.layers[0].feed_forward
    assert attention.wqkv.weight.shape == ((8 + 2) * 128, 8192)
    assert attention.wo.weight.shape == (8192, 8 * 128)
    assert feed_forward.w_in.weight.shape == (2 * 28672 // 8, 8192)
    assert feed_forward.w_out.weight.shape == (8192, 28672 // 8)
    assert model.embedding.weight.shape == model.output.weight.shape == (128256 // 8, 8192)
    assert model.embedding.first_row == 128256 // 8
    for linear in (attention.wqkv, attention.wo, feed_forward.w_in, feed_forward.w_out, model.output):
        assert (linear.out_features, linear.in_features) == linear.weight.shape
    assert model.embedding.num_embeddings == 128256 // 8
    held, copied = sum(p.numel() for p in model.parameters()), 2 * (8 - n_kv_heads) * 128 * 8192 * config.n_layers
    norms = (2 * config.n_layers + 1) * 8192
    assert held == (config.n_params - norms + copied) // 8 + norms
    tokens = torch.zeros(2, 3, dtype=torch.int64, device="meta")
    assert model(tokens, tokens, CausalSelf()).shape == (2, 3, 128256 // 8)


@pytest.mark.parametrize("as_one_of", [8], indirect=True)
def test_a_draft_group_is_a_part_of_the_targets_ranks(as_one_of: Parallel) -> None:
    sizes = {size: as_one_of.smaller_group(size) for size in (1, 2, 4, 8)}
    assert [(group.size, group.rank) for group in sizes.values()] == [(1, 0), (2, 1), (4, 1), (8, 1)]
    assert sizes[1].mesh is None
    assert sizes[2].mesh is not None and sizes[2].mesh.mesh.tolist() == [0, 1]
    assert as_one_of.smaller_group(2) is sizes[2]
    assert (as_one_of.tp, as_one_of.group.size) == (8, 8)  # as they were
    for wrong in (0, 3, 16):
        with pytest.raises(ValueError, match=f"draft_tp must divide tp, got draft_tp {wrong} and tp 8"):
            as_one_of.smaller_group(wrong)
