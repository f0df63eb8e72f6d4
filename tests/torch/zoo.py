"""A tiny model with random weights of each decoder family of transformers, made from the defaults of its
configuration: sizes by the names of the fields, 2 to 4 layers with one of each kind, windows of 8."""

import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

VOCABULARY = 120
WINDOW = 8
# They need another package, the K/V of another model, or tokens of several books.
LEFT_OUT = {"dots3_note", "gemma3n", "gemma4_assistant", "gemma4_unified_assistant", "musicgen",
            "musicgen_melody"}
FAMILIES = sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) - LEFT_OUT)
# By field, of every configuration that has it.
SIZES = {
    128: "hidden_size n_embd d_model dim_model word_embed_proj_dim embedding_size input_embedding_size "
         "emb_dim hidden_dim embedding_dim output_embedding_size lru_width hidden_size_global",
    4: "num_attention_heads n_head n_heads num_heads decoder_attention_heads encoder_attention_heads "
       "attention_heads swa_num_attention_heads num_encoder_attention_heads num_decoder_attention_heads",
    # Each token goes to all experts: rounding then changes no choice.
    2: "num_key_value_heads num_kv_heads swa_num_key_value_heads num_hidden_layers n_layer n_layers "
       "num_layers decoder_layers encoder_layers num_encoder_layers num_decoder_layers n_routed_experts "
       "num_experts num_local_experts moe_num_experts num_experts_per_tok num_experts_per_token moe_topk "
       "moe_top_k moe_k",
    32: "head_dim global_head_dim dim_head d_head swa_head_dim kv_channels attention_head_size v_head_dim "
        "qk_head_dim kv_lora_rank q_lora_rank rotary_dim index_head_dim linear_key_head_dim "
        "linear_value_head_dim linear_head_dim",
    16: "qk_rope_head_dim qk_nope_head_dim",
    64: "intermediate_size moe_intermediate_size decoder_ffn_dim encoder_ffn_dim ffn_dim dff n_inner "
        "ffn_hidden_size expert_ffn_hidden_size shared_expert_intermediate_size dense_intermediate_size "
        "intermediate_size_mlp shared_intermediate_size dim_ff d_inner feed_forward_size "
        "shared_experts_intermediate_size moe_shared_expert_intermediate_size",
    1: "n_group topk_group num_expert_group num_shared_experts n_shared_experts",
    256: "max_position_embeddings n_positions n_ctx max_seq_len max_target_positions max_source_positions",
    VOCABULARY: "vocab_size decoder_vocab_size vocab_size_per_layer_input",
    WINDOW: "sliding_window window_size attention_window_size local_attention sliding_window_size "
            "attention_chunk_size",
    0: "pad_token_id",
    3: "bos_token_id decoder_start_token_id",
}
FIELDS = {name: size for size, names in SIZES.items() for name in names.split()}
NONE = ("eos_token_id", "forced_eos_token_id", "mtp_layer_types")
# These are set where the default is None, too.
WANTED = ("num_key_value_heads", "num_experts_per_tok", "n_routed_experts", "n_shared_experts")
# Further needs of a family's defaults.
ROPE = {"rope_type": "default", "rope_theta": 1e4}
CHANGES = {
    "bamba": {"attn_layer_indices": [1]},
    "cohere_compass_text": {"rope_parameters": {"full_attention": ROPE}},
    "dbrx": {"attn_config": {"rope_theta": 1e4, "kv_n_heads": 2, "clip_qkv": 8.0}},
    "dory": {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
             "num_hidden_layers": 3, "n_input_layers": 1, "n_recurrent_layers": 1, "n_output_layers": 1},
    "dots1": {"num_local_experts": 2},
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 8, "n_groups": 1},
    "minimax_m3_vl_text": {"layer_types": ["full_attention", "minimax_m3_sparse"], "index_n_heads": 2,
                           "index_block_size": 4, "index_topk_blocks": 2},
    "nemotron_h": {"layers_block_type": ["linear_attention", "full_attention"]},
    "qwen4_exp_text": {"indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 32,
                       "indexer_budget": 16, "indexer_compress_ratio": 4},
    "recurrent_gemma": {"num_hidden_layers": 3},
    "reformer": {"axial_pos_embds": False},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"layers_block_type": ["linear_attention", "hybrid"]},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"]},
    "zaya": {"num_experts_per_tok": 1},
}


def _shrink(kind):
    """A configuration of class `kind`."""
    whole = kind()
    given = whole.to_dict()
    fields = {name: size for name, size in FIELDS.items()
              if isinstance(given.get(name), int) and not isinstance(given[name], bool)}
    fields.update({name: FIELDS[name] for name in WANTED if name in given})
    fields.update({name: None for name in NONE if name in given})
    kinds = given.get("layer_types")
    if kinds:
        fields["layer_types"] = sorted(set(kinds), key=kinds.index)
        while len(fields["layer_types"]) < 2:
            fields["layer_types"] *= 2
        fields["num_hidden_layers"] = len(fields["layer_types"])
    layers = fields.get("num_hidden_layers", 2)
    for name, value in given.items():
        if name != "layer_types" and isinstance(value, list) and len(value) == getattr(
                whole, "num_hidden_layers", -1):
            fields[name] = value[:layers]
    if "is_decoder" in given:
        fields["is_decoder"] = True
    if given.get("kv_lora_rank"):  # latent attention: a head of Q and K is 16 that rotate and 16 that do not
        fields.update({"num_key_value_heads": 4, "head_dim": 16})
    elif "head_dim" in given:
        fields["head_dim"] = 32
    for name in kind.sub_configs or {}:
        if given.get(name) is not None:
            fields[name] = _shrink(type(getattr(whole, name)))
    changes = CHANGES.get(kind.model_type, {})
    return kind(**{**fields, **changes})


def tiny_model(family, attention):
    """In float32 and eval mode, loaded with this attn_implementation; its weights are always the same."""
    config = _shrink(CONFIG_MAPPING[family])
    kind = getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family])
    if not isinstance(config, kind.config_class):
        config = config.get_text_config(decoder=True)
    torch.manual_seed(1)
    model = kind._from_config(config, attn_implementation=attention)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim > 1:
                weight.copy_(torch.randn(weight.shape) * 0.08)
    return model.eval()
