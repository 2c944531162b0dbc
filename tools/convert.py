"""Published Parcae weights in; our own weights out, and in again.

    python -m tools.convert import FOLDER RUN [--tokenizer FILE]    # then: python core_eval.py RUN
    python -m tools.convert export RUN FOLDER      # model.safetensors, config.json, tokenizer.json

import takes config.json with pytorch_model.bin or model.safetensors: those of the reference
implementation (looped, or its "gpt" baseline), or what export wrote. The tokenizer is ours, or
byte-level BPE in Hugging Face's format. The function stays the same to float32 rounding; four
conventions differ: the reference's ReLU² has a factor ½, its rotary pairs are interleaved (ours:
split halves), the eps of its QK-norm is 2^-23 (ours 1e-5: q and k are scaled up, which the norm
undoes), and its tokenizer may have its specials first.
"""

import json
import math
import re
import shutil
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file, save

from core_eval import open_run
from looped.common import Parser, fail, file_hash, write_atomic, write_json
from looped.ops import EPS
from looped.tokenizer import SPECIALS, file_content, load_tokenizer
from model import Model, ModelConfig

# fmt: off
# The reference's settings that we have, {theirs: ours}
EVERY_MODEL = {
    "padded_vocab_size": "vocab_size", "block_size": "seq_len", "n_embd": "d_model",
    "num_attention_heads": "n_head", "intermediate_size": "d_mlp", "qk_norm": "qk_norm",
    "init_strategy": "init", "rope_base": "rope_theta",
}
LOOPED = EVERY_MODEL | {
    "n_layers_in_prelude": "n_prelude", "n_layers_in_recurrent_block": "n_core",
    "n_layers_in_coda": "n_coda", "mean_recurrence": "mu_rec", "mean_backprop_depth": "mu_bwd",
    "prelude_norm": "prelude_norm", "state_init": "state_init", "sampling_scheme": "sampling",
    "injection_type": "injection", "recurrent_iteration_method": "granularity",
}
FLAT = EVERY_MODEL | {"n_layer": "n_prelude"}
VALUES = {"linear": "concat", "per-batch": "batch", "per-sequence": "sequence", "per-token": "token"}
# those that must equal another of its settings
EQUAL = {
    "num_key_value_heads": "num_attention_heads",
    "recurrent_num_attention_heads": "num_attention_heads",
    "recurrent_embedding_dimension": "n_embd",
    "recurrent_intermediation_embedding_dimension": "intermediate_size",
}
# those that have one value here; others must be false, none or inert
FIXED = {
    "block_class_name": "TransformerPreNormBlock", "norm_class_name": "RMSNorm", "norm_eps": 1e-5,
    "mlp_class_name": "BaseMLP", "nonlin_name": "ReLU2", "tie_embeddings": True, "use_rope": True,
    "rope_condense_ratio": 1, "mup_model_scaling_factor": 1,
}
# those that change no function
INERT = {
    "name", "hf_config", "vocab_size", "padding_multiple", "attn_impl", "init_orthogonal",
    "skip_initialization", "use_fused_head", "activation_checkpoint_impl", "simple_ops", "strategy",
    "lockstep_n", "lockstep_k", "curriculum_target", "model_class_name", "init", "n_layer",
    "_class_name", "architecture_class_name", "_is_recurrent_block_config",
    "_recurrent_block_config", "model_type", "architectures", "dtype", "torch_dtype",
    "transformers_version", "auto_map", "head_size", "n_head", "n_query_groups", "rope_settings",
}
# What to replace in the names of its weights, in this order
NAMES = {
    "value_embeds.": "ve.", "ve_gate": "gate", "norm_1": "norm1", "norm_2": "norm2", "c_q": "q",
    "c_k": "k", "c_v": "v", "c_proj": "o", "transformer.adapter.adapter.weight": "injection.W",
    "transformer.adapter.": "injection.", "transformer.ln_f.": "norm_f.",
    "transformer.ln_prelude.": "norm_e.", "transformer.": "",
}
# fmt: on
AUTHORS_DTYPES = {"dtype": "bfloat16", "residual_dtype": "float32"}


def reference_config(given: dict) -> ModelConfig:
    """The reference's config.json -> ours. Settings that would change the function and are not
    implemented here are refused.
    """
    rope = given.get("rope_settings") or {}
    given = {"rope_base": 50_000} | given | rope
    names = LOOPED if "n_layers_in_recurrent_block" in given else FLAT
    settings = {"n_core": 0, "n_coda": 0}
    for key, name in names.items():
        value = given[key]
        settings[name] = VALUES.get(value, value)
    fixed = FIXED.copy()
    for key, like in EQUAL.items():
        fixed[key] = given[like]
    for key in given.keys() - names.keys() - INERT:
        value = given[key]
        ours = fixed.get(key)
        if (value or key in fixed) and value not in (None, ours):
            fail(f"config.json: {key} {value} is not implemented, only {ours}")
    return ModelConfig(**settings)


def our_name(name: str, cfg: ModelConfig) -> str:
    """Our name of the reference's parameter."""
    name = re.sub(r"^(module\.|_orig_mod\.|model\.)+", "", name)  # wrappers
    layer = re.match(r"transformer\.(h|prelude|core_block|coda)\.(\d+)", name)
    if layer:
        part, number = layer.groups()
        firsts = {"core_block": cfg.n_prelude, "coda": cfg.n_prelude + cfg.n_core}
        index = firsts.get(part, 0) + int(number)
        name = f"blocks.{index}{name[layer.end() :]}"
    for theirs, ours in NAMES.items():
        name = name.replace(theirs, ours)
    return name


def from_reference(state: dict, cfg: ModelConfig) -> dict:
    """The reference's weights -> ours, float32."""
    K = cfg.d_model // cfg.n_head
    halves = [*range(0, K, 2), *range(1, K, 2)]  # of interleaved pairs
    scale = math.sqrt(EPS / 2**-23) if cfg.qk_norm else 1.0
    ours = {}
    for theirs, w in state.items():
        name = our_name(theirs, cfg)
        w = w.float()
        if name.endswith((".q.weight", ".k.weight")):
            heads = w.view(cfg.n_head, K, -1)
            w = (heads[:, halves].reshape(w.shape).double() * scale).float()
        elif name.endswith(".proj.weight"):
            w = w / 2
        ours[name] = w
    ours.pop("lm_head.weight", None)  # the token embedding
    ours.pop("freqs_cis", None)
    return ours


# -------------------------------------------------------------------------------------------------
# Tokenizers

# Hugging Face writes a byte as the character of that number, or one from 256 on where that is not
# visible
HIDDEN = [*range(33), *range(127, 161), 173]
RAW = {256 + i: byte for i, byte in enumerate(HIDDEN)}


def tokenizer_from_hf(data: dict) -> tuple[dict, list[int]]:
    """Hugging Face's tokenizer.json (byte-level BPE) -> ours, and their id for each of ours: our
    specials have the last ids, theirs often the first.
    """
    steps = data["pre_tokenizer"].get("pretokenizers")
    split, level = steps or ({}, {})
    plain = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
    if data["normalizer"] or not plain.items() <= level.items():
        raise ValueError("the tokenizer is not plain byte-level BPE")
    specials = {token["content"]: token["id"] for token in data["added_tokens"]}
    vocab = data["model"]["vocab"]
    tokens = sorted(vocab.keys() - specials.keys(), key=vocab.get)
    # theirs lists the pairs to merge, ours the tokens in the order in which they arise
    merges = data["model"]["merges"]
    made = ["".join(pair).replace(" ", "") for pair in merges]  # a pair may be a text with a blank
    if made != tokens[256:]:
        raise ValueError("the tokenizer's merges are not in the order of its ids")
    raw = [token.translate(RAW).encode("latin-1") for token in tokens]
    ours = file_content(raw, split["pattern"]["Regex"])
    order = [vocab[token] for token in tokens]
    order += [specials[name] for name in SPECIALS]
    return ours, order


def read_tokenizer(path: Path) -> tuple[dict, list[int]]:
    """A tokenizer file, ours or theirs -> ours, and for each of our ids the file's."""
    data = json.loads(path.read_text())
    if "model" in data:
        return tokenizer_from_hf(data)
    return data, list(range(load_tokenizer(path).n_vocab))


# -------------------------------------------------------------------------------------------------
# Folders


def read_weights(folder: Path) -> dict:
    file = folder / "model.safetensors"
    if file.exists():
        return load_file(file)
    return torch.load(folder / "pytorch_model.bin", map_location="cpu")


def import_folder(folder: Path, run: Path, tokenizer: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    weights = read_weights(folder)
    if config.get("model_type") == "looped":
        cfg = ModelConfig(**config["model"])
    else:
        cfg = reference_config(config)
        weights = from_reference(weights, cfg)
        config = AUTHORS_DTYPES
    ours, order = read_tokenizer(tokenizer)
    for name in weights:
        if name.startswith(("wte.", "ve.")):
            weights[name] = weights[name][order]
    with torch.device("meta"):
        Model(cfg).load_state_dict(weights, assign=True)  # names what is missing or misshapen
    run.mkdir(parents=True)
    write_json(run / "tokenizer.json", ours)
    checkpoint = {"step": 0, "model": weights}
    write_atomic(run / "step_0000000.pt", partial(torch.save, checkpoint))
    params = sum(w.numel() for w in weights.values())
    about = {"model": asdict(cfg), "params": params, "dtype": config["dtype"]}
    about["args"] = {"residual_dtype": config["residual_dtype"]}
    sha256 = file_hash(run / "tokenizer.json")
    about["tokenizer"] = {"path": str(tokenizer), "sha256": sha256}
    about["data"] = {"path": str(run / "rows"), "sha256": None}  # rows may be packed there later
    write_json(run / "config.json", about)
    print(f"{run}: {params:,} parameters; python core_eval.py {run}")


def export_run(run: Path, folder: Path) -> None:
    model, _, config = open_run(run, torch.device("cpu"))
    folder.mkdir(parents=True)
    write_atomic(folder / "model.safetensors", save(model.state_dict(), {"format": "pt"}))
    about = {"model_type": "looped", "model": asdict(model.cfg), "dtype": config["dtype"]}
    about["residual_dtype"] = config["args"]["residual_dtype"]
    write_json(folder / "config.json", about)
    shutil.copy(run / "tokenizer.json", folder)
    print(f"{folder}: model.safetensors, config.json, tokenizer.json")


def main(argv=None):
    parser = Parser(description=__doc__, prog="python -m tools.convert")
    add = parser.add_argument
    add("command", choices=["import", "export"], help="what to do")
    add("source", type=Path, help="import: the folder; export: the run directory")
    add("target", type=Path, help="what to make of it, a new directory")
    about = "of the import, ours or Hugging Face's (default: the folder's)"
    add("--tokenizer", type=Path, help=about)
    args = parser.parse_args(argv)
    if args.command == "export":
        export_run(args.source, args.target)
    else:
        tokenizer = args.tokenizer or args.source / "tokenizer.json"
        import_folder(args.source, args.target, tokenizer)


if __name__ == "__main__":
    main()
