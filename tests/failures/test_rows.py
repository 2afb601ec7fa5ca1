"""Every failure that was once found by trying, by its number: what was tried, and the tests that keep it right.

A test that is renamed or removed is missed here. "open" says what of a row has no test yet.
"""

from __future__ import annotations

import ast
import functools
from dataclasses import dataclass
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Row:
    """What was tried, the tests (file::name, file below tests/) that it has, and what of it has none."""

    tried: str
    tests: tuple[str, ...]
    open: str = ""


ENGINE, BATCH, GENERATE = "gpt_fast_sd/test_engine.py::", "scripts/test_batch.py::", "scripts/test_generate.py::"
FILES, TOKENIZER, WEIGHTS = "scripts/test_files.py::", "model/test_tokenizer.py::", "model/test_checkpoint.py::"
CONFIG, REFUSALS = "model/test_config.py::", "gpt_fast_sd/test_config_refusals.py::"
WRONG_LINE = f"{GENERATE}test_a_wrong_line_of_a_prompts_file_is_named"
BAD_LINES = f"{BATCH}test_lines_that_make_no_sense_are_rejected_by_number_and_the_others_go_on"
NEVER_REPLACED = f"{FILES}test_what_is_read_is_never_replaced"
BOUNDED = f"{TOKENIZER}test_a_template_and_its_text_are_bounded"
BY_NAME = f"{REFUSALS}test_nonsense_is_refused_by_name"

CORRECTNESS = {
    "C1": Row("a seed under guided, beside rows that end earlier or later", (
        "gpt_fast_sd/test_speculation.py::test_a_seed_fixes_a_rows_tokens_beside_rows_that_go_on_for_longer",)),
    "C2": Row("the same prompts twice over a guided hierarchy", (
        "gpt_fast_sd/policies/test_hierarchy.py::test_a_guided_middle_level_selects_by_no_token_of_a_slots_former_occupant",
        "gpt_fast_sd/policies/test_hierarchy.py::test_a_seed_gives_the_same_tokens_again")),
    "C3": Row("a chat template with {% generation %}", (
        f"{TOKENIZER}test_what_templates_may_use_in_transformers_gives_the_same_here",)),
    "C4": Row("tojson with transformers' arguments", (
        f"{TOKENIZER}test_what_templates_may_use_in_transformers_gives_the_same_here",)),
    "C5": Row("an empty shared object in Inductor's cache", (
        "gpt_fast_sd/fast/test_cpu_build.py::test_torn_libraries_are_removed_and_built_again",
        "gpt_fast_sd/fast/test_cpu_build.py::test_a_run_goes_on_although_a_library_in_the_cache_is_torn")),
}  # fmt: skip
OUTPUTS = {
    "1": Row("outputs of generate.py that are an input or a file of the model", (
        NEVER_REPLACED, f"{FILES}test_a_file_of_the_model_is_never_replaced",
        f"{GENERATE}test_a_report_never_replaces_a_file_of_the_model")),
    "2": Row("a disk that is full while an output is written", (
        f"{BATCH}test_what_one_rank_cannot_do_is_one_sentence_of_each",
        f"{FILES}test_a_disk_that_is_full_costs_nothing_that_was_made",
        f"{GENERATE}test_a_file_that_cannot_be_moved_into_place_leaves_nothing_behind")),
    "3": Row("benchmark.py --json that is its --text", (NEVER_REPLACED,)),
    "4": Row("batch.py: a hard link to the input, an input named as the state file", (
        NEVER_REPLACED, f"{FILES}test_what_batch_keeps_beside_its_output_is_no_input_either")),
    "7": Row("batch.py goes on with another model of the same sizes", (
        f"{BATCH}test_a_job_does_not_go_on_with_other_weights_of_the_same_size",)),
    "8": Row("batch.py: damaged, doubled and foreign lines in its output", (
        f"{BATCH}test_damaged_doubled_and_foreign_lines_are_never_counted_as_done",)),
    "15": Row("an output without write permission", (f"{FILES}test_a_folder_or_file_without_permission_is_refused",)),
    "16": Row("/dev/full as output or stdout", (
        f"{FILES}test_a_full_stdout_is_one_sentence", f"{FILES}test_a_disk_that_is_full_costs_nothing_that_was_made")),
    "23": Row("two batch.py with one --rejects", (f"{BATCH}test_two_processes_do_not_share_a_file_of_rejects",)),
}  # fmt: skip
NUMBERS = {
    "5": Row("top_p that fp32 rounds to 0", (
        "failures/test_numbers.py::test_a_top_p_that_rounds_to_0_leaves_the_best_token",)),
    "6": Row("the caller's autocast", (
        f"{ENGINE}test_what_the_caller_sets_for_other_work_changes_no_token_and_stays_the_callers",)),
    "9": Row("a temperature that fp32 cannot hold", (BY_NAME,)),
    "17": Row("JSON nested 100,000 deep", (WRONG_LINE, BAD_LINES)),
    "18": Row("hidden_size and rope_theta of 10**400", (
        "failures/test_numbers.py::test_a_config_of_400_digits_is_refused",)),
    "25": Row("--threads 1000000000", ("failures/test_numbers.py::test_threads_without_end_are_refused",)),
    "26": Row("None, numbers and dicts where the API takes configurations", (
        "failures/test_numbers.py::test_what_is_no_model_is_a_value_error",
        "gpt_fast_sd/policies/test_standalone.py::test_redrafting_takes_a_configuration",
        f"{ENGINE}test_how_many_logits_is_a_whole_number_of_them")),
    "28": Row("ignore_eos \"false\", booleans as numbers, bytes and sets as token ids", (
        BY_NAME, WRONG_LINE, f"{ENGINE}test_what_is_no_list_of_ids_is_refused_in_one_line")),
    "29": Row("lines that end at U+2028", (
        f"{GENERATE}test_a_line_of_prompts_ends_at_a_line_feed_alone_and_a_mark_of_byte_order_is_none_of_it",)),
    "30": Row("a wrong line by its number in the file", (
        WRONG_LINE, f"{GENERATE}test_a_file_that_is_not_utf8_is_named_with_the_byte")),
    "33": Row("a mark of byte order", (
        f"{GENERATE}test_a_line_of_prompts_ends_at_a_line_feed_alone_and_a_mark_of_byte_order_is_none_of_it",)),
}  # fmt: skip
CHECKPOINTS = {
    "12": Row("templates without end in time or memory", (
        BOUNDED, f"{TOKENIZER}test_a_template_that_takes_all_time_or_memory_is_ended_with_one_sentence")),
    "19": Row("half a surrogate pair in a prompt", (
        f"{TOKENIZER}test_half_a_character_is_refused_with_its_place", WRONG_LINE)),
    "20": Row("added tokens past the vocabulary", (
        f"{TOKENIZER}test_an_added_token_without_a_row_is_refused_before_a_table_is_made",
        f"{TOKENIZER}test_more_token_ids_than_the_model_has_are_refused_with_both_numbers",
        f"{TOKENIZER}test_ids_of_a_tokenizer_json_that_are_absurd_are_refused_or_no_matter")),
    "21": Row("templates that divide by zero or recur", (
        BOUNDED, f"{TOKENIZER}test_a_template_that_fails_or_reaches_outside_is_one_sentence")),
    "22": Row("a pickle with a meta tensor", (
        f"{WEIGHTS}test_a_tensor_that_was_saved_without_its_numbers_is_named",
        f"{WEIGHTS}test_a_pickle_that_lies_is_refused")),
    "27": Row("what is no conversation", (f"{TOKENIZER}test_what_is_no_conversation_is_refused_by_its_place",)),
    "31": Row("NaN and infinity in weights and configs", (
        f"{WEIGHTS}test_a_weight_that_is_no_finite_number_is_refused_by_its_name",
        f"{CONFIG}test_what_cannot_be_read_exactly_is_refused_by_name")),
    "32": Row("an index that names files outside", (
        f"{WEIGHTS}test_a_file_outside_the_folder_is_not_read_whoever_names_it",)),
}  # fmt: skip
PROGRAMS = {
    "10": Row("a budget of a billion", (
        "failures/test_numbers.py::test_a_budget_beyond_the_cache_holds_what_all_of_it_needs",)),
    "11": Row("a batch of a billion", (
        "scripts/test_benchmark.py::test_a_batch_that_no_memory_holds_is_refused_before_its_prompts_are_made",
        "gpt_fast_sd/test_memory.py::test_a_batch_that_no_machine_holds_ends_a_program_with_code_2")),
    "13": Row("a reader that leaves: | head -1", (f"{FILES}test_a_reader_that_leaves_is_no_traceback",)),
    "14": Row("a stdout that cannot say the text", (f"{FILES}test_text_that_an_encoding_lacks_ends_nothing",)),
    "24": Row("a compiler that cannot compile", (
        "gpt_fast_sd/test_compile.py::test_a_compiler_that_cannot_build_is_one_warning_and_the_engine_runs_eagerly",)),
    "34": Row("twice the same key or file; ids past the vocabulary; no weights", (
        BAD_LINES, f"{FILES}test_two_outputs_are_two_files",
        f"{CONFIG}test_token_ids_past_the_vocabulary_are_left_out_and_named",
        "failures/test_numbers.py::test_a_tensor_for_prompts_and_a_number_for_a_model_are_one_sentence",
        f"{FILES}test_a_process_that_may_open_few_files_works_or_says_which_it_could_not_open",
        f"{BATCH}test_what_is_refused_changes_and_leaves_no_file")),
}  # fmt: skip
ROWS = CORRECTNESS | OUTPUTS | NUMBERS | CHECKPOINTS | PROGRAMS


@functools.cache
def names(file: str) -> set[str]:
    """The tests of a file below tests/."""
    tree = ast.parse((TESTS / file).read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}


def test_no_failure_is_missing_and_none_stands_twice() -> None:
    assert ROWS.keys() == {f"C{i}" for i in range(1, 6)} | {str(i) for i in range(1, 35)}
    assert len(ROWS) == sum(map(len, (CORRECTNESS, OUTPUTS, NUMBERS, CHECKPOINTS, PROGRAMS)))


@pytest.mark.parametrize("row", ROWS)
def test_a_failure_has_its_tests(row: str) -> None:
    assert ROWS[row].tests
    for test in ROWS[row].tests:
        file, _, name = test.partition("::")
        assert (TESTS / file).is_file(), f"{row}: there is no file {file}"
        assert name in names(file), f"{row}: {file} has no {name}"
