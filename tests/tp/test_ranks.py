"""Ranks hold one model together: two and four of them, on gloo, against one (workers/checks.py has the checks)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from tests.tp.spawn import run_checks

Complaints = dict[str, list[str]]

SAME = "give_the_tokens_of_one_rank"
MODEL = [
    "a_sharded_model_says_what_the_whole_one_says",
    "of_equal_logits_the_lowest_id_wins_and_padding_never",
    "a_rank_reads_its_own_slices_and_nothing_else",
    "a_rank_dequantizes_its_own_rows_and_blocks_of_a_gguf_file",
    "ranks_read_their_parts_of_a_checkpoint_in_float8",
    "every_rank_is_given_what_the_first_rank_of_its_group_has",
    "ranks_that_differ_are_told_so",
    "replicas_share_a_list_and_its_results_come_back_in_order",
]
ENGINE = [
    "plain_decoding_gives_the_tokens_of_one_rank",
    "logits_are_whole_on_every_rank",
    f"drafts_by_guided_{SAME}",
    f"drafts_by_standalone_on_one_{SAME}",
    "an_int8_cache_on_ranks_gives_the_tokens_of_one",
    "a_model_that_is_not_split_is_refused",
    "other_prompts_on_a_rank_are_noticed",
    "other_tokens_on_a_rank_are_noticed_in_that_round",
    "the_first_ranks_draws_are_everyones",
    "a_vocabulary_that_ranks_do_not_divide_gives_the_tokens_of_one_rank",
]
SELDOM = [  # like others of the engine's
    f"drafts_by_snapkv_{SAME}",
    f"drafts_by_hierarchy_{SAME}",
    "a_draft_on_fewer_ranks_leaves_the_target_split_as_it_was",
    "draws_stay_together_where_the_last_bits_of_probabilities_differ",
]
FOUR = [  # which two ranks could not fail
    "exact_decoding_is_bit_identical_though_sums_depend_on_the_place",
    "sums_in_order_are_the_first_ranks_and_then_the_others",
    "a_rank_reads_its_own_slices_and_nothing_else",
    "a_rank_dequantizes_its_own_rows_and_blocks_of_a_gguf_file",
    "of_equal_logits_the_lowest_id_wins_and_padding_never",
]
MORE = [
    *(f"drafts_by_{name}_{SAME}" for name in ("full", "streaming", "quest", "lookup", "early_exit")),
    f"drafts_by_hierarchy_over_a_model_{SAME}",
    f"drafts_by_standalone_{SAME}",
    f"drafts_by_standalone_on_two_{SAME}",
    f"drafts_by_snapkv_where_kv_heads_are_few_{SAME}",
    f"drafts_by_streaming_where_kv_heads_are_few_{SAME}",
    "gamma_auto_and_fresh_seeds_are_the_first_ranks",
    "the_first_ranks_draws_count_for_all_whatever_drafts",
    "weights_are_quantized_after_they_are_split",
    "int4_weights_are_on_ranks_what_they_are_on_one",
    "a_folder_is_loaded_and_decoded_by_all_ranks",
]
COMPILED = [
    "a_step_with_its_collectives_is_one_graph",  # as test_codegen.py finds without ranks
    f"compiled_rounds_{SAME}",
    "compiled_judging_gives_the_tokens_of_one_rank",
    "compiled_int8_rounds_give_the_tokens_of_eager_ones",
]


def spawned(n: int, tp: int, names: Sequence[str]) -> Callable[[pytest.TempPathFactory], Complaints]:
    """A fixture: the complaints of n ranks, tp of which hold a model. One start serves all its checks."""

    @pytest.fixture(scope="module")
    def complaints(tmp_path_factory: pytest.TempPathFactory) -> Complaints:
        return run_checks(n, tp, names, tmp_path_factory.mktemp(f"{n}_ranks"))

    return complaints


two_ranks = spawned(2, 2, [*MODEL, *ENGINE])
two_ranks_more = spawned(2, 2, [*SELDOM, *MORE])
two_ranks_compiled = spawned(2, 2, COMPILED)
four_ranks_alone = spawned(4, 4, FOUR)
four_ranks = spawned(4, 4, [*MODEL, *ENGINE, *SELDOM, *MORE])
two_replicas = spawned(4, 2, [*MODEL, *ENGINE, *SELDOM])


@pytest.mark.parametrize("name", [*MODEL, *ENGINE])
def test_on_two_ranks(name: str, two_ranks: Complaints) -> None:
    assert not two_ranks[name], "\n".join(two_ranks[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", FOUR)
def test_on_no_less_than_four_ranks(name: str, four_ranks_alone: Complaints) -> None:
    assert not four_ranks_alone[name], "\n".join(four_ranks_alone[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", [*SELDOM, *MORE])
def test_more_on_two_ranks(name: str, two_ranks_more: Complaints) -> None:
    assert not two_ranks_more[name], "\n".join(two_ranks_more[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", COMPILED)
def test_on_two_ranks_compiled(name: str, two_ranks_compiled: Complaints) -> None:
    assert not two_ranks_compiled[name], "\n".join(two_ranks_compiled[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", [*MODEL, *ENGINE, *SELDOM, *MORE])
def test_on_four_ranks(name: str, four_ranks: Complaints) -> None:
    assert not four_ranks[name], "\n".join(four_ranks[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", [*MODEL, *ENGINE, *SELDOM])
def test_on_two_replicas_of_two_ranks(name: str, two_replicas: Complaints) -> None:
    assert not two_replicas[name], "\n".join(two_replicas[name])


def test_every_check_is_run_somewhere() -> None:
    from tests.tp.workers.checks import CHECKS

    assert {*MODEL, *ENGINE, *SELDOM, *FOUR, *MORE, *COMPILED} == {*CHECKS}
