# SPDX-License-Identifier: Apache-2.0
"""What gguf_to_hf.py knows about Gemma 3 text models: configuration, names, and the tokenizer."""

# Every sixth layer attends to everything, with its own rotary base; the file does not say either.
PATTERN = 6
LOCAL_ROPE_BASE = 10000.0

NORMS = {
    "attn_norm": "input_layernorm", "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm", "post_ffw_norm": "post_feedforward_layernorm",
    "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
}  # fmt: skip
MATRICES = {
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}  # fmt: skip


def model_config(gguf):
    layers = gguf.get("gemma3.block_count")
    types = ["full_attention" if (i + 1) % PATTERN == 0 else "sliding_attention" for i in range(layers)]
    head_dim = gguf.get("gemma3.attention.key_length")
    theta = gguf.get("gemma3.rope.freq_base", 1000000.0)
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "bos_token_id": gguf.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": gguf.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": gguf.get("tokenizer.ggml.padding_token_id"),
        "head_dim": head_dim,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": gguf.get("gemma3.embedding_length"),
        "initializer_range": 0.02,
        "intermediate_size": gguf.get("gemma3.feed_forward_length"),
        "layer_types": types,
        "max_position_embeddings": gguf.get("gemma3.context_length"),
        "num_attention_heads": gguf.get("gemma3.attention.head_count"),
        "num_hidden_layers": layers,
        "num_key_value_heads": gguf.get("gemma3.attention.head_count_kv"),
        "query_pre_attn_scalar": head_dim,
        "rms_norm_eps": float(f"{gguf.get('gemma3.attention.layer_norm_rms_epsilon'):.6g}"),
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": theta},
            "sliding_attention": {"rope_type": "default", "rope_theta": LOCAL_ROPE_BASE},
        },
        "sliding_window": gguf.get("gemma3.attention.sliding_window"),
        "tie_word_embeddings": "output.weight" not in gguf.tensors,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": len(gguf.get("tokenizer.ggml.tokens")),
    }


def weights(gguf, config):
    """Hugging Face's names -> float32 arrays. A norm's weight is stored with the 1 that Gemma adds."""
    out = {
        "model.embed_tokens.weight": gguf.tensor("token_embd.weight"),
        "model.norm.weight": gguf.tensor("output_norm.weight") - 1.0,
    }
    if not config["tie_word_embeddings"]:
        out["lm_head.weight"] = gguf.tensor("output.weight")
    for layer in range(config["num_hidden_layers"]):
        for theirs, ours in NORMS.items():
            out[f"model.layers.{layer}.{ours}.weight"] = gguf.tensor(f"blk.{layer}.{theirs}.weight") - 1.0
        for theirs, ours in MATRICES.items():
            out[f"model.layers.{layer}.{ours}.weight"] = gguf.tensor(f"blk.{layer}.{theirs}.weight")
    return out


def merges(tokens, ids, normal):
    """Pairs that make a token, best token first: SentencePiece merges the pair whose result has the
    best score, and a token's id is its rank."""
    out = []
    for token in normal:
        pairs = [(token[:i], token[i:]) for i in range(1, len(token))]
        pairs = [(ids[a], ids[b], a, b) for a, b in pairs if a in ids and b in ids]
        out += [(a, b) for _, _, a, b in sorted(pairs)]
    return out


def tokenizer(gguf):
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

    tokens, types = gguf.get("tokenizer.ggml.tokens"), gguf.get("tokenizer.ggml.token_type")
    scores = gguf.get("tokenizer.ggml.scores")
    ids = {token: i for i, token in enumerate(tokens)}
    normal_type, control, user_defined = 1, 3, 4  # gguf.TokenType
    ranked = sorted((-scores[i], i) for i, type in enumerate(types) if type == normal_type)
    normal = [tokens[i] for _, i in ranked]
    model = models.BPE(ids, merges(tokens, ids, normal), unk_token=tokens[gguf.get("tokenizer.ggml.unknown_token_id")],
                       fuse_unk=True, byte_fallback=True)
    result = Tokenizer(model)
    result.normalizer = normalizers.Replace(" ", "\u2581")
    result.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    result.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    for type, special in ((control, True), (user_defined, False)):
        added = [AddedToken(token, special=special, normalized=False) for token, t in zip(tokens, types) if t == type]
        (result.add_special_tokens if special else result.add_tokens)(added)
    bos = tokens[gguf.get("tokenizer.ggml.bos_token_id")]
    result.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, ids[bos])])
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": bos,
        "eos_token": tokens[gguf.get("tokenizer.ggml.eos_token_id")],
        "pad_token": tokens[gguf.get("tokenizer.ggml.padding_token_id")],
        "unk_token": tokens[gguf.get("tokenizer.ggml.unknown_token_id")],
        "clean_up_tokenization_spaces": False,
        "model_max_length": gguf.get("gemma3.context_length"),
    }
    return result, settings
