"""Faults that other servers have had, with the tests here that would show them in kind."""

import json
import re

import pytest

from tests.conftest import ROOT

COMPLETIONS, CHAT = "server/test_completions.py", "server/test_chat.py"
VALIDATION, LIFECYCLE = "server/test_validation.py", "server/test_lifecycle.py"
LIMITS, TOOLS = "server/test_limits.py", "tokenizer/test_tool_parsers.py"
STREAM, PROMPTS = "tokenizer/test_stream.py", "tokenizer/test_chat_prompts.py"
GRAMMAR = "grammar/test_grammar.py"
TESTS = {
    "B001": [(STREAM, "test_characters_of_several_tokens_come_out_whole"),
             (STREAM, "test_a_cut_character_shows_only_in_the_flush")],
    "B003": [(STREAM, "test_a_leading_space_stays_after_a_prompt"),
             (STREAM, "test_a_leading_space_goes_where_the_text_begins")],
    "B004": [(STREAM, "test_byte_fallback_gives_bytes_not_letters")],
    "B006": [(PROMPTS, "test_typed_control_tokens_stay_text"),
             ("tokenizer/test_real_prompts.py", "test_typed_control_tokens_stay_text")],
    "B007": [(PROMPTS, "test_exactly_one_begin_token_in_chats"),
             (PROMPTS, "test_exactly_one_begin_token_in_raw_prompts"),
             ("tokenizer/test_hf.py", "test_add_bos_token_counts_without_a_post_processor")],
    "B008": [(COMPLETIONS, "test_unusable_prompts_are_refused_and_the_next_works"),
             (COMPLETIONS, "test_an_empty_prompt_starts_from_the_begin_token"),
             (VALIDATION, "test_bad_chat_values_name_their_field")],
    "B009": [(COMPLETIONS, "test_the_context_clamps_the_output"),
             (COMPLETIONS, "test_a_prompt_without_room_is_refused_with_both_numbers")],
    "B010": [(COMPLETIONS, "test_ids_outside_the_vocabulary_never_reach_the_engine")],
    "B011": [(COMPLETIONS, "test_scores_null_zero_and_one"), (CHAT, "test_scores")],
    "B012": [(VALIDATION, "test_bad_values_name_their_field"),
             (VALIDATION, "test_bad_chat_values_name_their_field"),
             (VALIDATION, "test_numbers_that_are_not_finite"),
             (VALIDATION, "test_bias_by_digits_bans_a_token"),
             ("engine/test_sample.py", "test_bias_and_the_min_tokens_mask")],
    "B013": [(COMPLETIONS, "test_no_usage_unless_asked"),
             (COMPLETIONS, "test_usage_comes_once_in_a_chunk_without_choices"),
             (VALIDATION, "test_bad_values_name_their_field")],
    "B014": [("server/test_openai_client.py", "test_chat_stream"), (CHAT, "test_stream_envelope")],
    "B015": [(COMPLETIONS, "test_echo_alone_and_with_scores"),
             (COMPLETIONS, "test_echo_of_scores_without_output"),
             (COMPLETIONS, "test_stream_joins_to_the_whole_answer"),
             ("engine/test_engine_faults.py", "test_scoring_a_prompt_matches_generating_it")],
    "B016": [(VALIDATION, "test_bias_by_digits_bans_a_token"),
             ("engine/test_invariance.py", "test_choices_of_one_request")],
    "B017": [(TOOLS, "test_two_calls_in_pieces_of_any_size"),
             ("server/test_tools.py", "test_streamed_answer_is_numbered_and_joins_to_the_whole")],
    "B019": [(COMPLETIONS, "test_the_models_own_end_wins_at_max_tokens"),
             (COMPLETIONS, "test_a_stop_string_that_ends_at_the_limit_wins"),
             ("scheduler/test_scheduler.py", "test_b019_an_end_token_at_the_last_place_is_a_stop")],
    "B021": [(STREAM, "test_stop_strings_across_tokens"),
             (STREAM, "test_only_what_may_be_a_stop_string_is_held_back")],
    "B022": [(GRAMMAR, "test_outputs_that_match_and_outputs_that_do_not"),
             (GRAMMAR, "test_what_is_not_enforced_is_refused_by_name"),
             (GRAMMAR, "test_schemas_nothing_can_satisfy_or_that_are_wrong")],
    "B023": [(GRAMMAR, "test_schemas_nothing_can_satisfy_or_that_are_wrong"),
             (GRAMMAR, "test_outputs_that_match_and_outputs_that_do_not"),
             (VALIDATION, "test_bodies_that_are_no_json_object"),
             ("server/test_structured.py",
              "test_nesting_beyond_the_bound_is_a_400_and_the_next_request_works")],
    "B024": [(LIFECYCLE, "test_probes"),
             ("engine/test_async_engine.py", "test_health_from_start_to_end"),
             ("server/test_engine_end_to_end.py",
              "test_a_dead_engine_is_reported_and_its_clients_are_told")],
    "B025": [(COMPLETIONS, "test_text_that_cannot_fit_is_refused_before_tokenising"),
             (LIFECYCLE, "test_tokenising_leaves_the_event_loop_free")],
    "B027": [(LIMITS, "test_headers_too_large_or_too_many"),
             (LIMITS, "test_a_declared_giant_is_refused_unread"),
             (LIMITS, "test_an_endless_body_without_length_is_refused"),
             (LIMITS, "test_a_body_in_countless_chunks"),
             (LIMITS, "test_dripping_headers_do_not_move_the_deadline"),
             (LIMITS, "test_pipelined_requests_are_answered_in_order")],
    "B028": [("server/test_observability.py",
              "test_errors_tell_no_insides_and_logs_no_prompts")],
}  # fmt: skip


@pytest.mark.parametrize("fault", TESTS)
def test_named_tests_exist(fault):
    for file, name in TESTS[fault]:
        assert re.search(rf"^def {name}\(", (ROOT / "tests" / file).read_text(), re.MULTILINE)


def test_no_known_fault_of_these_rooms_is_left_out(shared):
    file = shared / "known_faults.jsonl"
    faults = map(json.loads, file.read_text().splitlines())
    rooms = {"api", "server", "tokenizer"}
    assert {fault["id"] for fault in faults if fault["area"] in rooms} == set(TESTS)
