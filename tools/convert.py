"""
Published Parcae weights in; folders in Hugging Face's style in and out.

    python -m tools.convert import FOLDER RUN [--tokenizer FILE]    # then: python core_eval.py RUN
    python -m tools.convert export RUN FOLDER                  # model.safetensors and two .json

import takes config.json with pytorch_model.bin or model.safetensors: those of the reference
implementation (looped, or its "gpt" baseline), or what export wrote. The function stays the same to
float32 rounding; four conventions differ: the reference's ReLU² has a factor ½, its rotary pairs
are interleaved (ours: split halves), the eps of its QK-norm is 2^-23 (ours 1e-5: q and k are scaled
up, which the norm undoes), and its tokenizer may have its specials first.
"""

import json
import math
import re
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors.torch import load_file, save

from core_eval import open_run
from looped.checkpoint import write_checkpoint
from looped.console import DAMAGE, Parser, fail, outside, run_cli
from looped.files import file_hash, write_atomic, write_checked
from looped.layers import EPS
from model import Model, ModelConfig, config_of
from tools.hf_tokenizer import read_tokenizer, tokenizer_to_hf

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
WEIGHT_FILES = ("model.safetensors", "pytorch_model.bin")
# fmt: on


def reference_config(given: dict) -> ModelConfig:
    """The reference's config.json -> ours. What would change the function and is not implemented
    here is refused.
    """
    given = {"rope_base": 50_000} | given | (given.get("rope_settings") or {})
    names = LOOPED if "n_layers_in_recurrent_block" in given else FLAT
    settings = {"n_core": 0, "n_coda": 0}
    for key, name in names.items():
        if given.get(key) is None:
            fail(f"config.json lacks {key}")
        settings[name] = VALUES.get(given[key], given[key])
    fixed = FIXED | {key: given[like] for key, like in EQUAL.items()}
    for key, value in given.items():
        if key in names or key in INERT or not (value or key in fixed):
            continue
        if value not in (None, fixed.get(key)):
            only = f"config.json: {key} {value} is not implemented, only {fixed.get(key)}"
            fail(f"{only}; take it out if it does not change the function")
    return ModelConfig(**settings)


def our_name(name: str, cfg: ModelConfig) -> str:
    """Our name of the reference's parameter."""
    name = re.sub(r"^(module\.|_orig_mod\.|model\.)+", "", name)  # wrappers
    layer = re.match(r"transformer\.(h|prelude|core_block|coda)\.(\d+)", name)
    if layer:
        part, number = layer.groups()
        firsts = {"core_block": cfg.n_prelude, "coda": cfg.n_prelude + cfg.n_core}
        name = f"blocks.{firsts.get(part, 0) + int(number)}{name[layer.end() :]}"
    for theirs, ours in NAMES.items():
        name = name.replace(theirs, ours)
    return name


def from_reference(state: dict, cfg: ModelConfig) -> dict:
    """The reference's weights -> ours, float32."""
    weights = {our_name(name, cfg): w for name, w in state.items()}
    head = weights.pop("lm_head.weight", None)
    weights.pop("freqs_cis", None)
    ours = checked(weights, cfg)
    if head is not None and not torch.equal(head.float(), ours["wte.weight"]):
        fail("lm_head.weight is not the token embedding; only tied heads are implemented")
    K = cfg.d_model // cfg.n_head
    halves = [*range(0, K, 2), *range(1, K, 2)]  # of interleaved pairs
    scale = math.sqrt(EPS / 2**-23) if cfg.qk_norm else 1.0
    for name, w in ours.items():
        if name.endswith((".q.weight", ".k.weight")):
            heads = w.view(cfg.n_head, K, -1)[:, halves]
            ours[name] = (heads.reshape(w.shape).double() * scale).float()
        elif name.endswith(".proj.weight"):
            ours[name] = w / 2
    return ours


def checked(weights: dict, cfg: ModelConfig) -> dict:
    """The same in float32; RuntimeError names what is missing, left over or misshapen."""
    weights = {name: w.float() for name, w in weights.items()}
    with torch.device("meta"):
        Model(cfg).load_state_dict(weights, assign=True)
    return weights


def read(path: Path) -> dict:
    """A file of JSON, safetensors or torch."""
    # Exception: whatever a damaged file makes of its reader
    with outside(f"{path} cannot be read", "fetch or export it again", Exception):
        if path.suffix == ".json":
            return dict(json.loads(path.read_text()))
        if path.suffix == ".safetensors":
            return load_file(path)
        return torch.load(path, map_location="cpu", weights_only=True)


def import_folder(folder: Path, run: Path, tokenizer: Path) -> None:
    files = [folder / name for name in WEIGHT_FILES if (folder / name).is_file()]
    if not files:
        advice = "name the folder that was downloaded, or that export wrote"
        fail(f"{folder} has no {' or '.join(WEIGHT_FILES)}; {advice}")
    config = read(folder / "config.json")
    state = read(files[0])
    ours, order = read_tokenizer(tokenizer)
    advice = "only what the reference implementation or export wrote can be"
    with outside(f"{folder} cannot be imported", advice, (RuntimeError, *DAMAGE)):
        if config.get("model_type") == "looped":
            cfg = config_of(config)
            weights = checked(state, cfg)
        else:
            cfg = reference_config(config)
            weights = from_reference(state, cfg)
            config = {"dtype": "bfloat16", "residual_dtype": "float32"}
    if len(order) != cfg.vocab_size:
        entries = f"{len(order)} entries, the model {cfg.vocab_size}"
        fail(f"{tokenizer} has {entries}; give its own tokenizer")
    for name in weights:
        if name.startswith(("wte.", "ve.")):
            weights[name] = weights[name][order]
    run.mkdir(parents=True)
    write_checked(run / "tokenizer.json", ours)
    write_checkpoint(run / "step_0000000.pt", {"step": 0, "model": weights})
    params = sum(w.numel() for w in weights.values())
    about = {
        "args": {"residual_dtype": config.get("residual_dtype", "auto")},
        "model": asdict(cfg),
        "params": params,
        "dtype": config.get("dtype", "float32"),
        "tokenizer": path_and_hash(run / "tokenizer.json"),
        "data": {"path": str(run / "rows"), "sha256": None},  # for rows that are packed there later
        "imported": path_and_hash(files[0]),
    }
    write_json(run / "config.json", about)
    print(f"{run}: {params:,} parameters; python core_eval.py {run}")


def path_and_hash(path: Path) -> dict:
    """Where a file is, and what it holds."""
    return {"path": str(path), "sha256": file_hash(path)}


def export_run(run: Path, folder: Path) -> None:
    model, _, config = open_run(run, torch.device("cpu"))
    tokenizer = tokenizer_to_hf(run / "tokenizer.json")
    folder.mkdir(parents=True)
    write_atomic(folder / "model.safetensors", save(model.state_dict(), {"format": "pt"}))
    about = {"model_type": "looped", "dtype": config.get("dtype", "float32")}
    about["residual_dtype"] = config["args"].get("residual_dtype", "auto")
    write_json(folder / "config.json", about | asdict(model.cfg))
    write_json(folder / "tokenizer.json", tokenizer)
    print(f"{folder}: model.safetensors, config.json, tokenizer.json")


def write_json(path: Path, content: dict) -> None:
    write_atomic(path, json.dumps(content, indent=1, ensure_ascii=False).encode())


def main(argv=None):
    parser = Parser(description=__doc__, prog="python -m tools.convert")
    add = parser.add_argument
    add("command", choices=["import", "export"])
    add("source", type=Path, help="import: the folder; export: the run directory")
    add("target", type=Path, help="what to make of it, a new directory")
    add("--tokenizer", type=Path,
        help="of the import, ours or Hugging Face's (default: the folder's)")  # fmt: skip
    args = parser.parse_args(argv)
    if args.target.exists():
        fail(f"{args.target} exists; name another")
    if args.command == "export" and args.tokenizer:
        fail("--tokenizer has no effect on export, which takes the run's; leave it out")
    if args.command == "export":
        export_run(args.source, args.target)
    else:
        import_folder(args.source, args.target, args.tokenizer or args.source / "tokenizer.json")


if __name__ == "__main__":
    run_cli(main)
