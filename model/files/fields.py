"""What becomes of the fields of the JSON files beside a model's weights: read, of no effect here, or refused.

A field that is in no list here is named in a warning: it may be one that computes something. Of the other two files
those are named, too, that are known to change texts or ids, and are not applied.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping
from typing import Any

# ---- config.json

READ = frozenset(
    "architectures model_type vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads "
    "num_key_value_heads head_dim hidden_act max_position_embeddings rms_norm_eps rope_theta rope_scaling "
    "rope_parameters original_max_position_embeddings partial_rotary_factor tie_word_embeddings bos_token_id "
    "eos_token_id sliding_window use_sliding_window max_window_layers layer_types attention_bias mlp_bias dtype "
    "torch_dtype quantization quantization_config dual_chunk_attention_config".split()
)
# training, what other programs do with the file, and how they sample where nobody says how
IDLE = frozenset(
    "_name_or_path transformers_version use_cache initializer_range pretraining_tp attention_dropout hidden_dropout "
    "resid_pdrop embd_pdrop attn_pdrop classifier_dropout pad_token_id sep_token_id cls_token_id mask_token_id "
    "unk_token_id decoder_start_token_id auto_map id2label label2id num_labels problem_type return_dict "
    "output_attentions output_hidden_states torchscript use_bfloat16 tf_legacy_loss pruned_heads architecture "
    "chunk_size_feed_forward is_encoder_decoder is_decoder add_cross_attention cross_attention_hidden_size "
    "tie_encoder_decoder finetuning_task tokenizer_class prefix task_specific_params max_length min_length do_sample "
    "early_stopping num_beams num_beam_groups temperature top_k top_p typical_p min_p repetition_penalty "
    "length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids num_return_sequences "
    "output_scores return_dict_in_generate forced_bos_token_id forced_eos_token_id remove_invalid_values "
    "exponential_decay_length_penalty suppress_tokens begin_suppress_tokens diversity_penalty max_sequence_length "
    "unsloth_version unsloth_fixed is_llama_config transformers.js_config _attn_implementation "
    "_attn_implementation_autoset attn_implementation _flash_attn_2_enabled use_flash_attn gradient_checkpointing "
    "neftune_noise_alpha use_mrope num_nextn_predict_layers activation "
    "output_router_logits num_experts_per_tok model_max_length tokenizer_model_max_length seq_length".split()
)
# what other families, or these families in other programs, compute by; the values that compute nothing
COMPUTES: dict[str, tuple[object, ...]] = {
    "attention_multiplier": (), "embedding_multiplier": (1,), "residual_multiplier": (1,), "logits_scaling": (1,),
    "logit_scale": (1,), "scale_emb": (1,), "scale_depth": (), "dim_model_base": (), "query_pre_attn_scalar": (),
    "attn_logit_softcapping": (0,), "final_logit_softcapping": (0,), "clip_qkv": (0,),
    "is_causal": (True,), "compression_config": (), "no_rope_layers": (1, []), "no_rope_layer_interval": (0,),
    "rope_interleaved": (False,), "alibi": (False,),
    "position_embedding_type": ("rope", "absolute"), "rotary_pct": (1,), "use_qk_norm": (False,), "qk_norm": (False,),
    "qk_layernorm": (False,), "parallel_attn": (False,), "use_parallel_residual": (False,), "num_experts": (0, 1),
    "num_local_experts": (0, 1), "n_routed_experts": (0, 1), "attention_chunk_size": (), "attention_sinks": (False,),
    "cross_attention_layers": ([],), "kv_lora_rank": (0,), "mup_base_width": (),
}  # fmt: skip
ROPE = frozenset(("rope_type", "type", "rope_theta", "partial_rotary_factor", "factor"))
ROPE_OF: Mapping[str, frozenset[str]] = {  # besides, of scalings of rotary frequencies that are stretched
    "llama3": frozenset(("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")),
    "yarn": frozenset(
        "original_max_position_embeddings beta_fast beta_slow truncate attention_factor attn_factor mscale "
        "mscale_all_dim finetuned extrapolation_factor apply_yarn_scaling".split()
    ),
    "longrope": frozenset(
        "original_max_position_embeddings short_factor long_factor attention_factor short_mscale long_mscale".split()
    ),
}
YARN_COMPUTES: dict[str, tuple[object, ...]] = {"extrapolation_factor": (1,), "apply_yarn_scaling": (True,)}

# ---- generation_config.json and tokenizer_config.json

# of the first only where a text ends is read; a request says how it samples, and has no such means
CHANGES_TEXTS: dict[str, tuple[object, ...]] = {
    "repetition_penalty": (1,), "encoder_repetition_penalty": (1,), "no_repeat_ngram_size": (0,),
    "encoder_no_repeat_ngram_size": (0,), "bad_words_ids": ([],), "suppress_tokens": ([],),
    "begin_suppress_tokens": ([],), "forced_bos_token_id": (), "forced_eos_token_id": (), "sequence_bias": (),
    "guidance_scale": (1,), "num_beams": (1,), "penalty_alpha": (0,), "typical_p": (1,), "epsilon_cutoff": (0,),
    "eta_cutoff": (0,), "exponential_decay_length_penalty": (), "stop_strings": (), "min_length": (0,),
    "min_new_tokens": (0,), "watermarking_config": (), "dola_layers": (), "token_healing": (False,), "constraints": (),
    "force_words_ids": (), "forced_decoder_ids": (), "presence_penalty": (0,), "frequency_penalty": (0,),
}  # fmt: skip
# where a text begins, how long it may be, how it is sampled if nobody says so, and by which means it is computed
IDLE_OF_TEXTS = frozenset(
    "eos_token_id bos_token_id max_new_tokens max_time top_h renormalize_logits output_logits use_mtp is_assistant "
    "cache_implementation cache_config max_cache_len return_legacy_cache prefill_chunk_size compile_config "
    "disable_compile low_memory num_assistant_tokens num_assistant_tokens_schedule assistant_confidence_threshold "
    "prompt_lookup_num_tokens max_matching_ngram_size assistant_early_exit assistant_lookbehind target_lookbehind "
    "assistant_ensemble_weight speculation_type continuous_batching_config generation_kwargs trust_remote_code "
    "_from_model_config _commit_hash chat_format max_window_size user_token_id assistant_token_id".split()
)
CHANGES_IDS: dict[str, tuple[object, ...]] = {
    "add_eos_token": (False,), "split_special_tokens": (False,), "do_lower_case": (False,), "sp_model_kwargs": ({},),
    "remove_space": (False,), "strip_accents": (False,), "keep_accents": (True,), "fix_mistral_regex": (False,),
}  # fmt: skip
# special tokens besides, whose names end in _token; the rest concerns batches, files, decoding in other programs, code
KNOWN_OF_IDS = frozenset(
    "add_bos_token add_prefix_space added_tokens_decoder additional_special_tokens extra_special_tokens chat_template "
    "legacy model_specific_special_tokens tokenizer_class model_max_length max_len max_length padding padding_side "
    "pad_to_multiple_of pad_token_type_id truncation truncation_side truncation_strategy stride model_input_names "
    "clean_up_tokenization_spaces clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output errors "
    "spaces_between_special_tokens use_default_system_prompt name_or_path _name_or_path processor_class auto_map "
    "use_fast from_slow is_local local_files_only device_map trust_remote_code return_tensors transformers_version "
    "special_tokens_map_file tokenizer_file vocab_file merges_file added_tokens_file fast_tokenizer_files init_inputs "
    "verbose backend files_loaded response_template response_schema chat_control_tokens _commit_hash "
    "unsloth_version vocab_size suffix_first bos_token_id eos_token_id unk_token_id pad_token_id sep_token_id "
    "cls_token_id mask_token_id".split()
)


def is_neutral(value: object, neutral: Collection[object]) -> bool:
    """Whether a field, or each of a list, has a value that changes nothing."""
    each = value if isinstance(value, list) and value else [value]
    return value is None or all(one in neutral for one in each)


def not_neutral(raw: Mapping[str, Any], rules: Mapping[str, tuple[object, ...]]) -> list[str]:
    """The fields whose values would change something."""
    return [name for name, neutral in rules.items() if not is_neutral(raw.get(name), neutral)]


def unknown(raw: Mapping[str, Any]) -> list[str]:
    """The fields of a config.json that no list has, those of its scaling of rotary frequencies as "rope_scaling.x"."""
    found = sorted(raw.keys() - READ - IDLE - COMPUTES.keys())
    for place in ("rope_scaling", "rope_parameters"):
        inner = raw.get(place)
        if isinstance(inner, dict):
            kind = inner.get("rope_type", inner.get("type"))
            known = ROPE | ROPE_OF.get(kind if isinstance(kind, str) else "", frozenset())
            found += [f"{place}.{name}" for name in sorted(inner.keys() - known)]
    return found


def unknown_of_texts(raw: Mapping[str, Any]) -> list[str]:
    """The fields of a generation_config.json that no list has."""
    return sorted(raw.keys() - IDLE - IDLE_OF_TEXTS - CHANGES_TEXTS.keys())


def unknown_of_ids(raw: Mapping[str, Any]) -> list[str]:
    """The fields of a tokenizer_config.json that no list has, and that name no special token."""
    found = sorted(raw.keys() - KNOWN_OF_IDS - CHANGES_IDS.keys())
    return [name for name in found if not (name.endswith("_token") and isinstance(raw[name], str | dict | None))]


_said = set[str]()


def say(where: object, names: Collection[str], what: str) -> None:
    """A warning that names these fields of a file, if there are any, once: files are read several times."""
    shown = ", ".join(names)
    text = f"{where}: {shown if len(shown) <= 200 else f'{shown[:200]} ...'}: {what}"
    if names and text not in _said:
        _said.add(text)
        warnings.warn(text, stacklevel=1)
