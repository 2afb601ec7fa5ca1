"""Ranks hold one model together: two and four of them, on gloo, against one (workers/checks.py has the checks)."""

from __future__ import annotations

import pytest

from tests.tp.spawn import run_checks

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


# name of a start: ranks, of which so many hold a model, and what they check; one start serves all its checks
STARTS: dict[str, tuple[int, int, list[str]]] = {
    "two ranks": (2, 2, [*MODEL, *ENGINE]),
    "no less than four ranks": (4, 4, FOUR),
    "two ranks, more": (2, 2, [*SELDOM, *MORE]),
    "two ranks, compiled": (2, 2, COMPILED),
    "four ranks": (4, 4, [*MODEL, *ENGINE, *SELDOM, *MORE]),
    "two replicas of two ranks": (4, 2, [*MODEL, *ENGINE, *SELDOM]),
}


@pytest.fixture(scope="module")
def complaints(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """What the ranks of a start complain of, by check."""
    n, tp, names = STARTS[request.param]
    return run_checks(n, tp, names, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize(
    ("complaints", "name"),
    [
        pytest.param(start, name, marks=() if start == "two ranks" else pytest.mark.slow)
        for start, (_, _, names) in STARTS.items()
        for name in names
    ],
    indirect=["complaints"],
    scope="module",  # of the start, which serves all its checks
)
def test_ranks_together_are_one(name: str, complaints: dict[str, list[str]]) -> None:
    assert not complaints[name], "\n".join(complaints[name])


def test_every_check_is_run_somewhere() -> None:
    from tests.tp.workers.checks import CHECKS

    assert {name for _, _, names in STARTS.values() for name in names} == {*CHECKS}
