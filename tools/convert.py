"""Published Parcae weights in; our own runs out, as a folder that transformers loads, and in again.

    python -m tools.convert import FOLDER RUN [--tokenizer FILE]    # then: python core_eval.py RUN
    python -m tools.convert export RUN FOLDER

    model = AutoModelForCausalLM.from_pretrained("FOLDER", trust_remote_code=True, depth=8)
    tokenizer = AutoTokenizer.from_pretrained("FOLDER", trust_remote_code=True)
    lm_eval --model hf --model_args pretrained=FOLDER,trust_remote_code=True,depth=8 --tasks hellaswag

export writes weights, tokenizer, a model card, and the network as the source files of this folder,
whose imports it makes relative: an edited model.py is exported as it is. To load the folder takes
transformers (pip install -e ".[share]"), and not this repository.

import takes config.json with pytorch_model.bin or model.safetensors: those of the reference
implementation (looped, or its "gpt" baseline), or what export wrote. The tokenizer is ours, or
byte-level BPE in Hugging Face's format. The function stays the same to float32 rounding; four
conventions differ: the reference's ReLU² has a factor ½, its rotary pairs are interleaved (ours:
split halves), the eps of its QK-norm is 2^-23 (ours 1e-5: q and k are scaled up, which the norm
undoes), and its tokenizer may have its specials first.
"""

import base64
import json
import math
import re
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file, save

from core_eval import open_run
from looped.common import Parser, fail, file_hash, write_atomic, write_json
from looped.machine import ROOT, code_files
from looped.ops import EPS
from looped.run import read_log, step_of
from looped.tokenizer import SPECIALS, file_content, load_tokenizer
from model import Model, ModelConfig, config_of

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
VALUES = {"linear": "concat", "per-batch": "batch", "per-sequence": "sequence"}
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
WEIGHTS = {
    "model.safetensors": load_file,
    "pytorch_model.bin": partial(torch.load, map_location="cpu", weights_only=True),
}
WRAPPER = "tools/modeling_looped.py"
CARD = """---
library_name: transformers
pipeline_tag: text-generation
---

# {name}

{kind}
It has {params:,} parameters; its network is the code in this folder. {training}

To load it, with transformers {version}:

    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained("{name}", trust_remote_code=True{depth})
    tokenizer = AutoTokenizer.from_pretrained("{name}", trust_remote_code=True)
    prompt = tokenizer("{bos}The", return_tensors="pt")
    print(tokenizer.decode(model.generate(**prompt, max_new_tokens=32)[0]))

A text begins with {bos}, as in training. `forward` and `generate` take a depth too. Weights are
float32; dtype=torch.bfloat16 sets the dtype of the activations.
"""
TRAINING = """It was trained on {tokens:,} tokens in
{dtype}, by the code of commit {commit}, with

    {command}
"""
VALIDATION = """
Validation on {eval_tokens:,} tokens, after {tokens:,} of training:

| depth | loss, nats a token | bits a byte |
|---:|---:|---:|
"""
AUTHORS_DTYPES = {"trained_dtype": "bfloat16", "residual_dtype": "float32"}


def reference_config(given: dict) -> ModelConfig:
    """The reference's config.json -> ours. Settings that would change the function and are not
    implemented here are refused.
    """
    rope = given.get("rope_settings") or {}
    given = {"rope_base": 50_000} | given | rope
    names = LOOPED if "n_layers_in_recurrent_block" in given else FLAT
    missing = (names.keys() | set(EQUAL.values())) - given.keys()
    if missing:
        fail(f"not a Parcae model: config.json lacks {', '.join(sorted(missing))}")
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
VISIBLE = {byte: chr(char) for char, byte in RAW.items()}


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


def parts(token: bytes, ranks: dict) -> list[bytes]:
    """The two tokens from which a token of several bytes is merged."""
    pieces = [token[i : i + 1] for i in range(len(token))]
    while len(pieces) > 2:
        pairs = [ranks.get(a + b, math.inf) for a, b in zip(pieces, pieces[1:])]
        i = pairs.index(min(pairs))
        pieces[i : i + 2] = [pieces[i] + pieces[i + 1]]
    return pieces


def tokenizer_to_hf(ours: dict) -> dict:
    """Our tokenizer file -> Hugging Face's tokenizer.json, from which tokenizer_from_hf makes ours."""
    ranks = {base64.b64decode(token): i for i, token in enumerate(ours["ranks"])}
    merges = [list(map(visible, parts(token, ranks))) for token in ranks if len(token) > 1]
    vocab = {visible(token): i for token, i in ranks.items()}
    inert = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    specials = ours["specials"].items()
    split = {"type": "Split", "pattern": {"Regex": ours["pattern"]}}
    level = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
    level["trim_offsets"] = True
    steps = [split | {"behavior": "Isolated", "invert": False}, level]
    return {
        "version": "1.0",
        "added_tokens": [{"id": i, "content": x, "special": True} | inert for x, i in specials],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
        "post_processor": None,
        "decoder": level,
        "model": {"type": "BPE", "vocab": vocab, "merges": merges},
    }


def visible(token: bytes) -> str:
    return token.decode("latin-1").translate(VISIBLE)


# -------------------------------------------------------------------------------------------------
# Import


def read_weights(folder: Path) -> dict:
    names = [name for name in WEIGHTS if (folder / name).exists()]
    if not names:
        fail(f"not a Parcae model: {folder} has no {' or '.join(WEIGHTS)}, whole in one file")
    return WEIGHTS[names[0]](folder / names[0])


def import_folder(folder: Path, run: Path, tokenizer: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    if config.get("model_type") == "looped":
        cfg = config_of(config["model"])
        weights = read_weights(folder)
        weights = {name.removeprefix("model."): w for name, w in weights.items()}
    else:
        cfg = reference_config(config)
        weights = from_reference(read_weights(folder), cfg)
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
    about = {"model": asdict(cfg), "params": params, "dtype": config["trained_dtype"]}
    about["args"] = {"residual_dtype": config["residual_dtype"]}
    sha256 = file_hash(run / "tokenizer.json")
    about["tokenizer"] = {"path": str(tokenizer), "sha256": sha256}
    about["data"] = {"path": str(run / "rows"), "sha256": None}  # rows may be packed there later
    write_json(run / "config.json", about)
    print(f"{run}: {params:,} parameters; python core_eval.py {run}")


# -------------------------------------------------------------------------------------------------
# Export


def flat_sources() -> dict[str, str]:
    """The wrapper and every file of ours that it imports, as files of one folder: {name: text}.

    In one folder, since transformers reads `from .a.b import` as a file named a.b.py.
    """
    texts = {}  # by module
    for path in code_files(script=WRAPPER):
        if path.name != "__init__.py":
            module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            texts[module] = path.read_text()
    packages = "|".join({module.split(".")[0] for module in texts})
    files = {}
    for module, text in texts.items():
        for other in texts:
            text = text.replace(f"from {other} import ", f"from .{flat(other)} import ")
        left = re.search(rf"^ *(import|from) ({packages})\b.*", text, re.M)
        if left:
            fail(f"{module}: for the export write `{left[0].strip()}` as `from MODULE import NAME`")
        files[f"{flat(module)}.py"] = text
    return files


def flat(module: str) -> str:
    return module.removeprefix("tools.").replace(".", "_")


def hf_config(cfg: ModelConfig, config: dict) -> dict:
    """config.json of the folder, from a run's."""
    return {
        "model_type": "looped",
        "architectures": ["LoopedForCausalLM"],
        "auto_map": {
            "AutoConfig": "modeling_looped.LoopedConfig",
            "AutoModelForCausalLM": "modeling_looped.LoopedForCausalLM",
        },
        "model": asdict(cfg),
        "dtype": "float32",
        "trained_dtype": config["dtype"],
        "residual_dtype": config["args"]["residual_dtype"],
        # under the names that other programs look for
        "vocab_size": cfg.vocab_size,
        "max_position_embeddings": cfg.seq_len,
    }


def model_card(name: str, run: Path, cfg: ModelConfig, config: dict) -> str:
    kind = f"A Transformer of {cfg.n_layer()} layers, without a loop."
    depth = ""
    if cfg.n_core:
        kind = (
            f"A looped Transformer of {cfg.n_layer()} layers, {cfg.n_core} of them in the loop, which "
            f"runs {cfg.mu_rec} times on average (injection {cfg.injection}, gain {cfg.gain}, "
            f"mechanism {cfg.mechanism})."
        )
        depth = f", depth={cfg.mu_rec}"
    training = "Its weights were imported."
    if (run / "log.jsonl").exists():
        training = training_record(run, config)
    needed = re.search(r"transformers==([\d.]+)", (ROOT / "pyproject.toml").read_text())
    return CARD.format(
        name=name,
        kind=kind,
        params=config["params"],
        training=training,
        version=needed[1],
        depth=depth,
        bos=SPECIALS[0],
    )


def training_record(run: Path, config: dict) -> str:
    step = step_of(Path(config["checkpoint"]))
    tokens = step * config["args"]["batch_size"] * config["model"]["seq_len"]
    commit = config["git"]["commit"]
    text = TRAINING.format(
        tokens=tokens, dtype=config["dtype"], commit=commit, command=config["command"]
    )
    for result in read_log(run).evals[-1:]:
        text += VALIDATION.format(**result)
        for depth, loss in result["loss"].items():
            text += f"| {depth} | {loss:.4f} | {result['bpb'][depth]:.4f} |\n"
    return text.strip()


def export_run(run: Path, folder: Path) -> None:
    model, _, config = open_run(run, torch.device("cpu"))
    cfg = model.cfg
    ours = json.loads((run / "tokenizer.json").read_text())
    bos, eos, pad = SPECIALS
    ids = ours["specials"]
    ends = {"bos_token_id": ids[bos], "eos_token_id": [*ids.values()], "pad_token_id": ids[pad]}
    about = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": cfg.seq_len,
        "model_input_names": ["input_ids", "attention_mask"],
        "padding_side": "left",
        "bos_token": bos,
        "eos_token": eos,
        "pad_token": pad,
    }
    weights = {f"model.{name}": w for name, w in model.state_dict().items()}
    files = flat_sources()
    files["README.md"] = model_card(folder.name, run, cfg, config)
    folder.mkdir(parents=True)
    for name, text in files.items():
        write_atomic(folder / name, text)
    write_atomic(folder / "model.safetensors", save(weights, {"format": "pt"}))
    write_json(folder / "config.json", hf_config(cfg, config))
    write_json(folder / "generation_config.json", ends)
    write_json(folder / "tokenizer.json", tokenizer_to_hf(ours))
    write_json(folder / "tokenizer_config.json", about)
    print(
        f"{folder}: {config['params']:,} parameters, for transformers; README.md says how to load it"
    )


def main(argv=None):
    parser = Parser(description=__doc__, prog="python -m tools.convert")
    add = parser.add_argument
    add("command", choices=["import", "export"], help="what to do")
    add("source", type=Path, help="import: the folder; export: the run directory")
    add("target", type=Path, help="what to make of it, a new directory")
    about = "of the import, ours or Hugging Face's (default: the folder's)"
    add("--tokenizer", type=Path, help=about)
    args = parser.parse_args(argv)
    if args.target.exists():
        fail(f"{args.target} exists; name a new directory")
    if args.command == "export":
        export_run(args.source, args.target)
    else:
        tokenizer = args.tokenizer or args.source / "tokenizer.json"
        import_folder(args.source, args.target, tokenizer)


if __name__ == "__main__":
    main()
