"""
Looped language models: a Transformer whose middle block is applied a variable number of times.

    e = norm(prelude(tokens))                                      once
    x = decay * h + gain * (B e);  h = core_blocks(x)              `depth` times
    logits = head(norm(coda(C h)))                                 once

    a = exp(A_log);  dt = softplus(dt_bias);  decay = exp(-dt * a)     0 < decay < 1
    gain = dt                   `euler`  Parcae (Prairie et al. 2026, "the paper"; section 4)
    gain = (1 - decay) / a      `zoh`    Exact-ZOH (Huang 2026): the held-input integral, solved exactly

`Model.prelude`, `core_step`, `coda` and `head` are these lines. `enter_loop` computes gain * (B e) once,
`unroll` repeats line two, and the head is the embedding's transpose. The flat twin has no loop and no
coda: its prelude has all layers and ends in the final norm and the head. The RDM is the recurrent-depth model of Geiping et al. 2025, the paper's baseline:
its loop begins with W [h; e].

In shapes, such as (B, T, D), B is sequences (elsewhere the input matrix), T tokens, D width, H heads, S
the tokens of keys and values, V vocabulary.

Where to change what:
    the input gain            a function, and its line in GAINS
    decay and gain            DiagonalInjection.decay_and_write; each may be (D,) or (B, T, D)
    the linear path           a class like DiagonalInjection, and its line in INJECTIONS
    which tokens see which    sees
    one whole loop            Model.core_step; index (B,) is each sequence's own loop index
    a table by loop index     at_index (looped/mechanisms.py), with trained_loops (looped/depth.py) rows
    noise in a loop           inputs.uniform(index): a random number for each (sequence, loop)
    what all loops read       a field of LoopInputs, filled in by Model.enter_loop; the coda gets it too
    the loss                  Model.head_loss in training, Model.token_losses in validation; a further
                              term, summed over tokens: Model.loss
    a flag of the network     a field of ModelConfig; a word's choices: its line in CHOICES
    how its change enters h   a class as in looped/mechanisms.py, and its line in MECHANISMS
    the log's statistics      Model.statistics, of the last loop's h and the one before
    how deep                  a law in looped/depth.py, which is told how much of the training has passed
A new parameter is told its init and its optimiser where it is created (looped/ops.py, parameter).
"""

import copy
import functools
import json
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.fx.experimental._config
import torch.nn as nn
import torch.nn.functional as F
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.checkpoint import checkpoint

from looped.common import note
from looped.depth import DEPTH_LAWS, GRANULARITIES, MAX_DEPTH, Loop, even_plan, training_plan
from looped.machine import code_hash
from looped.mechanisms import AttnRes, HyperConnected, PlainLoop
from looped.ops import (
    EPS,
    attend,
    constant,
    hash_keys,
    hashed_normal,
    hashed_uniform,
    identity,
    ones,
    orthogonal,
    parameter,
    rope,
    shift_keys,
    shift_values,
    spectral_norm,
    standard_normal,
    uniform_by_width,
    zeros,
)
from looped.randomness import FOR_INIT, FOR_SAMPLE, hash_key
from looped.run import newest_checkpoint, read_checkpoint

# -------------------------------------------------------------------------------------------------
# The linear path of a loop


# An input gain is a function of a and dt, two tensors of the same shape.


def euler_gain(a: torch.Tensor, dt: torch.Tensor) -> torch.Tensor:
    """Parcae: the first-order term of the held-input integral."""
    return dt


def zoh_gain(a: torch.Tensor, dt: torch.Tensor) -> torch.Tensor:
    """Exact-ZOH: the integral itself, (1 - exp(-dt a)) / a, to full relative precision as dt a -> 0,
    where it tends to dt.
    """
    return -torch.expm1(-dt * a) / a


GAINS = {"euler": euler_gain, "zoh": zoh_gain}


def discretise(
    A_log: torch.Tensor, dt_bias: torch.Tensor, gain_rule: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """(A_log, dt_bias), each (D,) or (B, T, D) -> (decay, gain) of the same shape, float32.

    dh/dτ = -a h + B e with e held over a step of length dt has the exact solution
    h(dt) = exp(-dt a) h(0) + (1 - exp(-dt a)) / a · B e.

    A_log and dt_bias act as if clamped to [-40, 40], and decay is kept in [exp(-80), 1 - 2^-24], so
    that 0 < decay < 1 holds in float32 for every parameter value; beyond the ends the gradient is
    zero.
    """
    a = A_log.float().clamp(-40, 40).exp()
    dt = F.softplus(dt_bias.float().clamp(-40, 40))
    decay = torch.exp(-(dt * a).clamp(2.0**-24, 80.0))
    return decay, GAINS[gain_rule](a, dt)


class LoopInputs(NamedTuple):
    """What all loops read besides the state. A 1-D tensor is per channel; any other is per sequence,
    batch first, and `first` cuts it.
    """

    decay: torch.Tensor | None  # (D,) or (B, T, D), float32
    write: torch.Tensor  # (B, T, D), of the activations' dtype: gain ⊙ (B e), added to the state
    ve: list  # (B, T, D) or None for each core layer: the tokens' rows of its value table
    rng_keys: torch.Tensor  # (B, 1) int64, from `hash_keys`: each sequence's randomness

    def first(self, n: int) -> "LoopInputs":
        """The inputs of the first n sequences."""

        def cut(x):
            return x[:n] if torch.is_tensor(x) and x.dim() > 1 else x

        return tree_map(cut, self)

    def uniform(self, index, stream: int = 0):
        """A random number in (0, 1) for each (sequence, loop): index (B,) int64 -> (B,) float32. Another
        stream gives others. It does not depend on ranks, micro-batches or earlier calls.
        """
        counter = -1 - (stream << 32) - index  # h_0 uses the numbers from 0 on
        return hashed_uniform(self.rng_keys, counter[:, None])[:, 0]


class Injection(nn.Module):
    """What an injection does, with the simplest answers: h + e. Override what differs."""

    def __init__(self, cfg: "ModelConfig"):
        super().__init__()

    def decay_and_write(self, e):
        """e (B, T, D) -> decay, (D,) or (B, T, D) or None, and the written input (B, T, D), which all
        loops use.
        """
        return None, e

    def inject(self, h, inputs: LoopInputs):
        """The linear part of a loop: h (B, T, D) -> what the core blocks read."""
        return h + inputs.write

    def finish(self, out, x, h, inputs: LoopInputs):
        """out: what the core blocks made of x = inject(h); h: the state before the loop -> the state
        after it, (B, T, D).
        """
        return out

    def statistics(self, inputs: LoopInputs, tokens: int) -> dict:
        """What the log says of the loops' inputs: {name: sum over tokens}."""
        return {}

    def spectra(self) -> dict:
        """Spectral radius and norm of the carry (what multiplies h), and the norm of what multiplies e;
        None where that is not linear, or not known.
        """
        return dict.fromkeys(("rho", "carry_norm", "write_norm"))


class AddInjection(Injection):
    """h + e: the carry is the identity, so h may grow."""

    def spectra(self):
        return {"rho": 1.0, "carry_norm": 1.0, "write_norm": 1.0}


class DiagonalInjection(Injection):
    """Parcae: decay ⊙ h + gain ⊙ (B e), with 0 < decay < 1 by construction."""

    def __init__(self, cfg: "ModelConfig"):
        super().__init__(cfg)
        d = cfg.d_model
        dt = -math.log(cfg.ssm_decay)  # since a = 1 at first, decay = exp(-dt)
        inverse = dt + math.log(-math.expm1(-dt))  # softplus⁻¹(dt)
        self.gain_rule = cfg.gain
        self.A_log = parameter(d, zeros)
        self.dt_bias = parameter(d, constant(inverse))
        self.B = parameter((d, d), identity) if cfg.input_matrix else None

    def decay_and_write(self, e):
        decay, gain = discretise(self.A_log, self.dt_bias, self.gain_rule)
        if self.B is not None:
            e = F.linear(e, self.B.to(e.dtype))
        return decay, (gain * e).to(e.dtype)

    def inject(self, h, inputs):
        """decay stays float32, since bfloat16 would round 0.999 to 1."""
        return (h * inputs.decay + inputs.write).to(h.dtype)

    def statistics(self, inputs, tokens):
        decay = inputs.decay.detach()
        largest = decay.amax(-1).mean()
        return {"decay_max": largest * tokens, "decay_mean": decay.mean() * tokens}

    @torch.no_grad()
    def spectra(self):
        decay, gain = discretise(self.A_log, self.dt_bias, self.gain_rule)
        rho = decay.max().item()
        write = gain.max().item()
        if self.B is not None:
            write = spectral_norm(gain[:, None] * self.B)
        return {"rho": rho, "carry_norm": rho, "write_norm": write}


class ConcatInjection(Injection):
    """RDM: W [h; e], unconstrained."""

    def __init__(self, cfg: "ModelConfig"):
        super().__init__(cfg)
        d = self.width = cfg.d_model
        self.W = parameter((d, 2 * d), orthogonal(init_std(d)))  # [carry, write]

    def decay_and_write(self, e):
        write = self.W[:, self.width :].to(e.dtype)
        return None, F.linear(e, write)

    def inject(self, h, inputs):
        dtype = inputs.write.dtype
        carry = self.W[:, : self.width].to(dtype)
        kept = F.linear(h.to(dtype), carry)
        return kept.to(h.dtype) + inputs.write

    @torch.no_grad()
    def spectra(self):
        carry, write = self.W.float().split(self.width, dim=1)
        rho = math.nan
        if carry.isfinite().all():
            values = torch.linalg.eigvals(carry)
            rho = values.abs().max().item()
        return {"rho": rho, "carry_norm": spectral_norm(carry), "write_norm": spectral_norm(write)}


class RawInjection(Injection):
    """The raw loop (`--injection none`): h + core(h + e) - (h + e). The blocks read e, h does not keep it."""

    def finish(self, out, x, h, inputs):
        return h + (out - x)  # not (h + out) - x, which would round h where the blocks add nothing

    def spectra(self):
        return {"rho": 1.0, "carry_norm": 1.0, "write_norm": None}


INJECTIONS = {
    "diagonal": DiagonalInjection,
    "add": AddInjection,
    "concat": ConcatInjection,
    "none": RawInjection,
}
MECHANISMS = {"none": PlainLoop, "attnres": AttnRes, "hyper": HyperConnected}


# -------------------------------------------------------------------------------------------------
# Transformer pieces. Master weights are float32 and are cast to the activations' dtype where they are
# used. No autocast: it caches casts, and one cached under no_grad cut the core's weights out of the
# gradient on some versions of torch (measured).


class Linear(nn.Module):
    def __init__(self, n_in: int, n_out: int, init: Callable, muon: bool = False):
        super().__init__()
        self.weight = parameter((n_out, n_in), init, muon)

    def forward(self, x):
        return F.linear(x, self.weight.to(x.dtype))


class Embedding(nn.Module):
    def __init__(self, vocab_size: int, d: int, init: Callable):
        super().__init__()
        self.weight = parameter((vocab_size, d), init)

    def forward(self, ids):
        return F.embedding(ids, self.weight)


class RMSNorm(nn.Module):
    def __init__(self, d: int):
        super().__init__()
        self.weight = parameter(d, ones)

    def forward(self, x):
        weight = self.weight.to(x.dtype)
        return F.rms_norm(x, weight.shape, weight, EPS)


def init_std(d_model: int) -> float:
    """Standard deviation of the entries of most matrices, and of h_0, at the start."""
    return math.sqrt(2 / (5 * d_model))


def zero_outputs(cfg: "ModelConfig") -> Callable:
    return zeros


def outputs_scaled_by_depth(cfg: "ModelConfig") -> Callable:
    """A standard deviation that falls as 1 / sqrt(2 L), L the layers that are applied."""
    layers = cfg.n_prelude + cfg.n_core * cfg.mu_rec + cfg.n_coda
    return orthogonal(init_std(cfg.d_model) / math.sqrt(2 * layers))


# How the output matrices of attention and MLP begin.
INITS = {"scaled-zero": zero_outputs, "scaled": outputs_scaled_by_depth}


class Context(NamedTuple):
    """What all layers of a pass read besides the residual stream."""

    cos: torch.Tensor  # (T, 1, D/2H), of the rotary embedding, in the activations' dtype
    sin: torch.Tensor
    causal: bool  # whether a token sees itself and all before it, for which kernels need no mask
    # (B,): loops that each sequence has taken; None outside the loop
    index: torch.Tensor | None = None
    cache: object = None  # keys and values of earlier tokens, in sampling: tools.sample.KVCache

    def cast(self, x):
        """x in the activations' dtype, which may be narrower than the residual stream's."""
        return x.to(self.cos.dtype)


def sees(query, key):
    """Whether the token at position `query` sees the one at `key`; for a window of 128 tokens, add
    `& (key > query - 128)`. All of attention follows this line.
    """
    return key <= query


def attention_mask(queries: int, keys: int, device="cpu"):
    """Whether each query sees each key, bool (queries, keys); the queries are the last tokens."""
    key = torch.arange(keys, device=device)
    return sees(key[keys - queries :, None], key)


def is_causal(tokens: int) -> bool:
    """Whether `sees` means that a token sees itself and all before it."""
    everything = torch.ones(tokens, tokens, dtype=torch.bool, device="cpu")
    return torch.equal(attention_mask(tokens, tokens), everything.tril())


class Attention(nn.Module):
    """Attention of layer number `layer`, with rotary embedding and a table of values by token."""

    def __init__(self, cfg: "ModelConfig", layer: int):
        super().__init__()
        d, H = cfg.d_model, cfg.n_head
        self.layer = layer
        self.n_head = H
        self.qk_norm = cfg.qk_norm
        self.shift = cfg.shifts().get(layer)
        init = orthogonal(init_std(d))
        self.q = Linear(d, d, init, muon=True)
        self.k = Linear(d, d, init, muon=True)
        self.v = Linear(d, d, init, muon=True)
        output_init = INITS[cfg.init](cfg)
        self.o = Linear(d, d, output_init, muon=True)
        self.gate = None
        self.gate_width = min(32, d)
        if layer in cfg.value_layers():
            self.gate = Linear(self.gate_width, H, uniform_by_width)

    def forward(self, x, ve, context: Context):
        """x (B, T, D) -> (B, T, D); ve (B, T, D) or None: the tokens' rows of the value table."""
        B, T, D = x.shape
        x = context.cast(x)
        q = self.q(x).view(B, T, self.n_head, -1)  # (B, T, H, D/H)
        q = self.rope_and_norm(q, context)
        k, v = self.keys_and_values(x, ve, context)  # (B, H, S, D/H), S tokens so far
        mask = None  # attend's own: a token sees itself and all before it
        if context.cache is not None or not context.causal:
            mask = attention_mask(T, k.size(2), x.device)
        y = attend(q, k, v, mask)
        y = y.transpose(1, 2)
        return self.o(y.reshape(B, T, D))

    def keys_and_values(self, x, ve, context: Context):
        heads = (*x.shape[:2], self.n_head, -1)
        k = self.k(x).view(heads)
        v = self.v(x).view(heads)
        if ve is not None:  # gated per head
            gate = self.gate(x[..., : self.gate_width])  # (B, T, H)
            weight = 2 * torch.sigmoid(gate)
            v = v + weight.unsqueeze(-1) * ve.view(heads)
        k = self.rope_and_norm(k, context)
        v = v.transpose(1, 2)
        if context.cache is not None:
            k, v = context.cache.extend(self.layer, k, v)
        if self.shift is not None:
            k, v = self.shift(k, v)
        return k, v

    def rope_and_norm(self, x, context: Context):
        """Queries or keys (B, T, H, D/H), rotated by their positions and normed -> (B, H, T, D/H)."""
        x = rope(x, context.cos, context.sin)
        if self.qk_norm:
            x = F.rms_norm(x, x.shape[-1:], eps=EPS)
        return x.transpose(1, 2)


class MLP(nn.Module):
    """W' relu²(W x)"""

    def __init__(self, cfg: "ModelConfig", layer: int):
        super().__init__()
        init = orthogonal(init_std(cfg.d_model))
        output_init = INITS[cfg.init](cfg)
        self.fc = Linear(cfg.d_model, cfg.d_mlp, init, muon=True)
        self.proj = Linear(cfg.d_mlp, cfg.d_model, output_init, muon=True)

    def forward(self, x, context: Context):
        x = context.cast(x)
        hidden = F.relu(self.fc(x))
        return self.proj(hidden.square())


class SwiGLU(nn.Module):
    """W' (silu(W x) ⊙ (W'' x))"""

    def __init__(self, cfg: "ModelConfig", layer: int):
        super().__init__()
        init = orthogonal(init_std(cfg.d_model))
        output_init = INITS[cfg.init](cfg)
        self.fc = Linear(cfg.d_model, cfg.d_mlp, init, muon=True)
        self.up = Linear(cfg.d_model, cfg.d_mlp, init, muon=True)
        self.proj = Linear(cfg.d_mlp, cfg.d_model, output_init, muon=True)

    def forward(self, x, context: Context):
        x = context.cast(x)
        hidden = F.silu(self.fc(x))
        return self.proj(hidden * self.up(x))


# Each is made from (cfg, layer) and called with (x, context); context.index is the loop.
MLPS = {"relu2": MLP, "swiglu": SwiGLU}


class Block(nn.Module):
    """Layer number `layer`, which is looped if that is in cfg.core_layers()."""

    def __init__(self, cfg: "ModelConfig", layer: int):
        super().__init__()
        d = cfg.d_model
        self.attn = Attention(cfg, layer)
        self.mlp = MLPS[cfg.mlp](cfg, layer)
        self.norm1 = RMSNorm(d)
        self.norm2 = RMSNorm(d)

    def forward(self, x, ve, context: Context):
        """x (B, T, D), the residual stream -> the same shape and dtype."""
        x = x + self.attn(self.norm1(x), ve, context)
        return x + self.mlp(self.norm2(x), context)


class ResNormBlock(Block):
    """The RDM's: the residual stream is normed too."""

    def __init__(self, cfg: "ModelConfig", layer: int):
        super().__init__(cfg, layer)
        self.norm3 = RMSNorm(cfg.d_model)
        self.norm4 = RMSNorm(cfg.d_model)

    def forward(self, x, ve, context: Context):
        x = self.norm3(x + self.attn(self.norm1(x), ve, context))
        return self.norm4(x + self.mlp(self.norm2(x), context))


BLOCKS = {"prenorm": Block, "resnorm": ResNormBlock}


# -------------------------------------------------------------------------------------------------
# Configuration


# h_0 is drawn from a truncated normal: {name: (standard deviation, where it is cut, in standard
# deviations)}; None is init_std.
STATE_INITS = {"like-init": (None, 3.0), "normal": (1.0, 5.0), "zero": (0.0, 3.0)}
CHOICES = {
    "injection": INJECTIONS,
    "gain": GAINS,
    "mechanism": MECHANISMS,
    "block": BLOCKS,
    "mlp": MLPS,
    "state_init": STATE_INITS,
    "init": INITS,
    "sampling": DEPTH_LAWS,
    "granularity": GRANULARITIES,
}


def setting(default, about: str, least: float = 0, most: float = 1 << 20, needs: str = ""):
    """A field of ModelConfig: its default, the help of its flag, the bounds of a number, and the part
    without which it does nothing ("loop", "diagonal").
    """
    metadata = {"help": about, "least": least, "most": most, "needs": needs}
    return field(default=default, metadata=metadata)


@dataclass(unsafe_hash=True)
class ModelConfig:
    """The network. n_core = 0 makes it a plain Transformer. The defaults are the paper's model at
    the size of the preset `nano`, which itself leaves four parts of it out (NANO, below).

    Raises ValueError with what to type for a value out of bounds, and for numbers that do not fit
    together.
    """

    vocab_size: int = setting(1024, "entries of the tokenizer", least=1)
    seq_len: int = setting(256, "tokens a row", least=1)
    d_model: int = setting(64, "width of the residual stream", least=1)
    n_head: int = setting(1, "attention heads", least=1)
    d_mlp: int = setting(256, "width of the MLP", least=1)
    n_prelude: int = setting(1, "layers before the loop", most=4096)
    n_core: int = setting(1, "layers in the loop; 0: a plain Transformer", most=4096)
    n_coda: int = setting(1, "layers after the loop", most=4096)
    mu_rec: int = setting(
        8, "loops at evaluation; mean loops in training", most=MAX_DEPTH, needs="loop"
    )
    mu_bwd: int = setting(
        0,
        "most loops with gradient (poisson-full: all); 0: half of mu_rec, rounded up",
        needs="loop",
    )
    injection: str = setting(
        "diagonal", "how a loop takes in h and e; none: the raw loop h + R(h, e)", needs="loop"
    )
    gain: str = setting("euler", "input gain of the diagonal injection", needs="diagonal")
    mechanism: str = setting(
        "none", "how a loop's change enters the state: looped/mechanisms.py", needs="loop"
    )
    streams: int = setting(4, "copies of the state in --mechanism hyper", least=1, needs="loop")
    block: str = setting(
        "prenorm", "norms before attention and MLP; resnorm: also after each sum, the RDM's"
    )
    mlp: str = setting("relu2", "nonlinearity of the MLP; swiglu has a third matrix")
    qk_norm: bool = setting(True, "normalise queries and keys")
    token_shift: bool = setting(
        False,
        "take half the channels of the first layer's values and the last layer's keys from the "
        "preceding token",
    )
    value_embeds: bool = setting(True, "tables of values by token, on every second layer")
    prelude_norm: bool = setting(True, "normalise the prelude's output", needs="loop")
    input_matrix: bool = setting(
        True, "the diagonal injection's matrix B; without it, the identity", needs="diagonal"
    )
    readout: bool = setting(
        True, "a matrix C between loop and coda; without it, the identity", needs="loop"
    )
    state_init: str = setting(
        "like-init",
        "h_0: random, with the standard deviation of the matrices' initial values or 1, or zero",
        needs="loop",
    )
    init: str = setting(
        "scaled-zero", "initial attention and MLP outputs: zero, or scaled by depth"
    )
    ssm_decay: float = setting(
        math.sqrt(1 / 5), "decay at initialisation, between 0 and 1", 1e-6, 1 - 1e-6, "diagonal"
    )
    rope_theta: float = setting(50_000.0, "base of the rotary embedding", least=1, most=1 << 31)
    sampling: str = setting(
        "poisson-truncated-full", "depth law of training, see looped/depth.py", needs="loop"
    )
    granularity: str = setting(
        "sequence", "what draws a training depth: each sequence, or 32 together", needs="loop"
    )

    def __post_init__(self):
        for item in fields(self):
            value, bounds = getattr(self, item.name), item.metadata
            flag = "--" + item.name.replace("_", "-")
            allowed = CHOICES.get(item.name, (value,))
            if value not in allowed:
                raise ValueError(f"{flag} {value} is not one of {', '.join(allowed)}")
            if type(value) in (int, float) and not bounds["least"] <= value <= bounds["most"]:
                raise ValueError(
                    f"{flag} {value} must lie between {bounds['least']} and {bounds['most']}"
                )
        # a head's channels rotate in pairs; half of the pairs may be the preceding token's
        part = 4 if self.token_shift else 2
        unit = part * self.n_head
        if self.d_model % unit:
            fits = math.ceil(self.d_model / unit) * unit
            raise ValueError(
                f"--d-model {self.d_model} is no multiple of {part} × --n-head {self.n_head}; "
                f"try --d-model {fits}"
            )
        if self.n_core == 0:
            self.mu_rec = self.mu_bwd = 0
            if self.mechanism != "none":
                raise ValueError(f"--mechanism {self.mechanism} needs a loop; try --n-core 1")
            return
        if self.mu_rec == 0:
            raise ValueError("--mu-rec 0 is no loop; try --mu-rec 1, or --n-core 0")
        self.mu_bwd = self.mu_bwd or math.ceil(self.mu_rec / 2)
        if self.mu_bwd > self.mu_rec:
            raise ValueError(
                f"--mu-bwd {self.mu_bwd} exceeds --mu-rec {self.mu_rec}; try --mu-bwd {self.mu_rec}"
            )

    # layers are numbered once through prelude, core and coda

    def n_layer(self) -> int:
        return self.n_prelude + self.n_core + self.n_coda

    def core_layers(self) -> range:
        return range(self.n_prelude, self.n_prelude + self.n_core)

    def value_layers(self) -> list[int]:
        """Layers with a value table: every second, the last included."""
        if not self.value_embeds:
            return []
        layers = self.n_layer()
        return list(range((layers - 1) % 2, layers, 2))

    def shifts(self) -> dict[int, Callable]:
        """Layers in which attention also reads the preceding token, and how."""
        return {0: shift_values, self.n_layer() - 1: shift_keys} if self.token_shift else {}


# Presets: paper, tables "Model definitions", heads 128 wide; `nano` is for CPUs. Each is the merger of
# some of these settings; a Transformer is the flat twin of one.

# four parts that nano leaves out, and the token shift, by which it learns to copy (measured in LOG.md)
NANO = {
    "input_matrix": False,
    "readout": False,
    "prelude_norm": False,
    "state_init": "zero",
    "token_shift": True,
}
PAPER = {"vocab_size": 32768, "seq_len": 2048}
# Parcae in the setup of Geiping et al., in which it is compared with the RDM
RDM_SETUP = {
    "mlp": "swiglu",
    "init": "scaled",
    "qk_norm": False,
    "value_embeds": False,
    "prelude_norm": False,
    "readout": False,
}
RDM_PAPER = RDM_SETUP | {"vocab_size": 65536, "seq_len": 2048}
RDM_SMALL = RDM_SETUP | {"d_mlp": 176, "token_shift": True}
RDM = {"injection": "concat", "block": "resnorm"}  # Geiping et al.'s own model
SIZES = {  # prelude, core and coda of Parcae have as many layers each
    "140m": {"d_model": 768, "n_head": 6, "d_mlp": 3072, "n_prelude": 2, "n_core": 2, "n_coda": 2},
    "370m": {"d_model": 1024, "n_head": 8, "d_mlp": 4096, "n_prelude": 4, "n_core": 4, "n_coda": 4},
    "770m": {"d_model": 1280, "n_head": 10, "d_mlp": 5120, "n_prelude": 6, "n_core": 6, "n_coda": 6},
    "1.3b": {"d_model": 1536, "n_head": 12, "d_mlp": 6144, "n_prelude": 8, "n_core": 8, "n_coda": 8},
    "rdm-100m": {"d_model": 1024, "n_head": 8, "d_mlp": 3520, "n_core": 1, "mu_rec": 16},
    "rdm-350m": {"d_model": 2048, "n_head": 16, "d_mlp": 7040, "n_core": 2, "mu_rec": 8},
}  # fmt: skip


def network(*settings: dict) -> ModelConfig:
    merged = functools.reduce(dict.__or__, settings)
    return ModelConfig(**merged)


def flat_twin(*settings: dict) -> ModelConfig:
    """The Transformer with the same layers, each run once."""
    cfg = network(*settings)
    return replace(cfg, n_prelude=cfg.n_layer(), n_core=0, n_coda=0)


PRESETS = {
    "nano": network(NANO),
    "parcae-140m": network(PAPER, SIZES["140m"]),
    "parcae-370m": network(PAPER, SIZES["370m"]),
    "parcae-770m": network(PAPER, SIZES["770m"]),
    "parcae-1.3b": network(PAPER, SIZES["1.3b"]),
    "transformer-nano": flat_twin(NANO),
    "transformer-140m": flat_twin(PAPER, SIZES["140m"]),
    "transformer-370m": flat_twin(PAPER, SIZES["370m"]),
    "transformer-770m": flat_twin(PAPER, SIZES["770m"]),
    "transformer-1.3b": flat_twin(PAPER, SIZES["1.3b"]),
    "parcae-rdm-nano": network(RDM_SMALL),
    "parcae-rdm-100m": network(RDM_PAPER, SIZES["rdm-100m"]),
    "parcae-rdm-350m": network(RDM_PAPER, SIZES["rdm-350m"]),
    "rdm-nano": network(RDM_SMALL, RDM),
    "rdm-100m": network(RDM_PAPER, SIZES["rdm-100m"], RDM),
    "rdm-350m": network(RDM_PAPER, SIZES["rdm-350m"], RDM),
}


# -------------------------------------------------------------------------------------------------
# The model


class Model(nn.Module):
    """The lines at the head of this file are `prelude`, `core_step`, `coda` and `head`; `unroll` is the loop.

    dtype: of activations; residual_dtype: of the residual stream and the loop's state (None: the
    same); checkpoint_loops: recompute loops in the backward pass.
    """

    def __init__(
        self,
        cfg: ModelConfig,
        dtype: torch.dtype = torch.float32,
        residual_dtype: torch.dtype | None = None,
        checkpoint_loops: bool = False,
    ):
        super().__init__()
        self.cfg = cfg
        self.dtype = dtype
        self.residual_dtype = residual_dtype
        self.checkpoint_loops = checkpoint_loops
        d, V = cfg.d_model, cfg.vocab_size
        self.core_layers = cfg.core_layers()
        self.prelude_layers = range(self.core_layers.start)
        self.coda_layers = range(self.core_layers.stop, cfg.n_layer())
        init = orthogonal(init_std(d))
        self.injection = INJECTIONS[cfg.injection](cfg) if cfg.n_core else None
        self.wte = Embedding(V, d, init)
        layers = range(cfg.n_layer())
        self.blocks = nn.ModuleList(BLOCKS[cfg.block](cfg, layer) for layer in layers)
        tables = {str(layer): Embedding(V, d, standard_normal) for layer in cfg.value_layers()}
        self.ve = nn.ModuleDict(tables)
        self.norm_f = RMSNorm(d)
        self.norm_e = RMSNorm(d) if cfg.n_core and cfg.prelude_norm else None
        self.C = Linear(d, d, init) if cfg.n_core and cfg.readout else None
        self.mechanism = MECHANISMS[cfg.mechanism](cfg)
        self.causal = is_causal(cfg.seq_len)
        # numpy's arange: torch's loads the compiler where the device is "meta"
        width = d // cfg.n_head
        pairs = torch.from_numpy(np.arange(0, width, 2, dtype=np.float32))
        positions = torch.from_numpy(np.arange(cfg.seq_len, dtype=np.float32))
        rate = cfg.rope_theta ** (-pairs / width)
        angle = torch.outer(positions, rate).unsqueeze(1)  # (T, 1, D/2H)
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)

    # -- initialisation ---------------------------------------------------------------------------

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        """Draws each parameter from a generator keyed by (seed, its name), so a flag that adds one
        changes no other. How it is drawn stands where it is made:

        | wte, q, k, v, fc, up, C, W       | orthogonal, entries of std s = sqrt(2 / (5 D))                |
        | attention o, MLP proj            | scaled-zero: 0; scaled: std s / sqrt(2 L), L = layers applied |
        | value tables; value gates; norms | N(0, 1); U(±1/sqrt(fan in)), as torch's Linear; 1             |
        | A_log; dt_bias; B                | 0; softplus⁻¹(-ln ssm_decay); identity                        |
        """
        for name, p in self.named_parameters():
            if not hasattr(p, "init"):
                raise ValueError(
                    f"{name} has no initial value: make it with parameter(shape, init) of "
                    "looped/ops.py, or as Linear(n_in, n_out, init) of model.py"
                )
            drawn_as = name.removeprefix("injection.")  # as recorded runs drew it
            key = hash_key(seed, FOR_INIT, *drawn_as.encode())
            generator = torch.Generator().manual_seed(key & 0x7FFFFFFFFFFFFFFF)
            p.copy_(p.init(p.shape, generator))

    # -- prelude, core, coda ----------------------------------------------------------------------

    def prelude(self, ids, cache=None):
        """ids (B, T) -> e (B, T, D), the prelude's output."""
        x = self.wte(ids).to(self.residual_dtype or self.dtype)
        ve = self.lookup_ve(ids, self.prelude_layers)
        context = self.context(ids, cache=cache)
        x = self.run_blocks(x, self.prelude_layers, ve, context)
        return x if self.norm_e is None else self.norm_e(x)

    def initial_state(self, e, keys, positions=None):
        """h_0 (B, T, D), a function of (key, position, channel): see STATE_INITS."""
        B, T, D = e.shape
        std, cut = STATE_INITS[self.cfg.state_init]
        if std == 0:
            return torch.zeros_like(e)
        if std is None:
            std = init_std(D)
        # a copy: given a view, torch recompiles whenever the tensor behind the view changes shape
        h = hashed_normal(keys, T, D, std, cut, positions)
        return h.to(e.dtype, copy=True)

    def enter_loop(self, ids, keys, cache=None):
        """ids (B, T), keys (B,) int64 from `hash_keys` -> h_0 (B, T, D) and LoopInputs; without a loop:
        the prelude's output and None.
        """
        e = self.prelude(ids, cache)
        if self.cfg.n_core == 0:
            return e, None
        decay, write = self.injection.decay_and_write(e.to(self.dtype))
        positions = None if cache is None else cache.positions
        h = self.initial_state(e, keys, positions)
        ve = self.lookup_ve(ids, self.core_layers)
        # (B, 1), so that `first` cuts it; cloned, since torch.compile would compile again for a view
        return h, LoopInputs(decay, write, ve, keys[:, None].clone())

    def core_step(self, h, inputs: LoopInputs, index, cache=None):
        """One loop, line two at the head of this file, or another injection's: h (B, T, D) -> (B, T, D).
        index (B,): how many loops each sequence has already taken.
        """
        x = self.injection.inject(h, inputs)
        context = self.context(h, index, cache)
        out = self.run_blocks(x, self.core_layers, inputs.ve, context)
        return self.injection.finish(out, x, h, inputs)

    def coda(self, h, ids, inputs: LoopInputs | None, cache=None):
        """h after the last loop (B, T, D) -> the normed final hidden state (B, T, D) that the head reads.
        inputs: what the loops read; None for a model without a loop.
        """
        if self.C is not None:
            h = self.C(h.to(self.dtype)).to(h.dtype)
        ve = self.lookup_ve(ids, self.coda_layers)
        context = self.context(ids, cache=cache)
        x = self.run_blocks(h, self.coda_layers, ve, context)
        return self.norm_f(x).to(self.dtype)

    def lookup_ve(self, ids, layers: range) -> list:
        """The tokens' rows of these layers' value tables: (B, T, D), None for a layer without."""
        rows = []
        for layer in layers:
            name = str(layer)
            rows.append(self.ve[name](ids).to(self.dtype) if name in self.ve else None)
        return rows

    def context(self, x, index=None, cache=None) -> Context:
        """What the blocks need to know of x (B, T, …): whole sequences, or the cache's next tokens."""
        at = slice(x.size(1)) if cache is None else cache.positions
        cos = self.cos[at].to(self.dtype)
        sin = self.sin[at].to(self.dtype)
        return Context(cos, sin, self.causal, index, cache)

    def run_blocks(self, x, layers: range, ve: list, context: Context):
        """These layers, each with its entry of `ve`, applied to x (B, T, D)."""
        for layer, rows in zip(layers, ve, strict=True):
            x = self.blocks[layer](x, rows, context)
        return x

    # -- the head ---------------------------------------------------------------------------------

    def head(self, x):
        """x (..., D) -> logits (..., V) in x's dtype."""
        return F.linear(x, self.wte.weight.to(x.dtype))

    def head_loss(self, x, targets):
        """x (N, D), targets (N,) -> the summed cross-entropy, nats, float32."""
        return F.cross_entropy(self.head(x).float(), targets, reduction="sum")

    def coda_loss(self, h, ids, targets, inputs):
        """The last loop's h (B, T, D) -> summed cross-entropy of a micro-batch, nats, float32."""
        x = self.coda(h, ids, inputs)
        return self.head_loss(x.flatten(0, 1), targets.flatten())

    def token_losses(self, h, ids, targets, inputs):
        """The last loop's h (B, T, D) -> cross-entropy of each token (B, T), nats, float32."""
        x = self.coda(h, ids, inputs)
        logits = self.head(x.flatten(0, 1)).float()
        losses = F.cross_entropy(logits, targets.flatten(), reduction="none")
        return losses.view_as(ids)

    # -- the loop ---------------------------------------------------------------------------------

    def unroll(self, h, inputs: LoopInputs, plan: Iterable[Loop], cache=None):
        """Runs a plan's loops from h_0 (B, T, D); after each yields the mechanism's state, which
        `mechanism.read` turns into h.

        Sequences come deepest first, and all end in the last loop: those with fewer loops wait, or join
        late (the picture at `training_plan`). A loop runs the first `loop.active`; the others keep their
        state.
        """
        mechanism = self.mechanism
        state, history = mechanism.start(h)
        with_gradient = False
        for loop in plan:
            if loop.gradient and torch.is_grad_enabled() and not with_gradient:
                # backpropagation is truncated here: gradients flow from this loop to the last
                with_gradient = True
                state = requiring_grad(state)
                history = mechanism.resume(history)
            if cache is not None:
                cache.begin_loop(loop.number, loop.live)
            with torch.set_grad_enabled(with_gradient):
                active = state[: loop.active]
                active_inputs = inputs.first(loop.active)
                step = self.core_step
                if self.checkpoint_loops and with_gradient:
                    step = recomputed(step)
                core = functools.partial(step, inputs=active_inputs, index=loop.index, cache=cache)
                new = mechanism.step(active, history, loop.index, core)
                if loop.live is not None:  # tokens that are done keep their state
                    new = torch.where(like_state(loop.live, new), new, active)
            rest = state[loop.active :]
            state = torch.cat([new, rest]) if len(rest) else new
            yield state

    def loss(self, ids, targets, keys, n, k):
        """Summed cross-entropy of a micro-batch, nats, under truncated backpropagation through depth
        (paper, algorithm 2); and `statistics`.

        ids, targets (B, T) int64; keys (B,) int64 from `hash_keys`; n, k int arrays (B,) from
        `sample_depths`: loops without and with gradient, deepest sequences first.
        """
        ids = ids.contiguous()
        targets = targets.contiguous()
        h_0, inputs = self.enter_loop(ids, keys)
        if inputs is None:  # flat: h_0 is the prelude's output
            return self.coda_loss(h_0, ids, targets, inputs), {}
        state = before = None  # after the last loop, and after the one before it
        for new in self.unroll(h_0, inputs, training_plan(n, k, ids.device)):
            before, state = state, new
        h = self.mechanism.read(state)
        previous = h_0 if before is None else self.mechanism.read(before.detach())
        loss = self.coda_loss(h, ids, targets, inputs)
        return loss, self.statistics(h, previous, inputs)

    @torch.no_grad()
    def statistics(self, h, previous, inputs: LoopInputs) -> dict:
        """What the log says of the state after the last loop and before it: {name: sum over tokens}."""
        change = (h - previous).float()
        stats = {
            "residual": change.norm(dim=-1).sum(),
            "state_norm": h.float().norm(dim=-1).sum(),
        }
        tokens = h.size(0) * h.size(1)
        return stats | self.injection.statistics(inputs, tokens)

    # -- evaluation -------------------------------------------------------------------------------

    @torch.no_grad()
    def states(self, ids, depths: list[int], keys):
        """Yields (depth, h_depth (B, T, D), the loops' inputs) for increasing depths; deeper states
        continue the shallower ones.
        """
        h, inputs = self.enter_loop(ids, keys)
        wanted = sorted(set(depths))
        if inputs is None:
            for depth in wanted:
                yield depth, h, None
            return
        if wanted[0] == 0:
            state, _ = self.mechanism.start(h)
            yield 0, self.mechanism.read(state), inputs
        plan = even_plan(len(ids), wanted[-1], ids.device)
        for depth, state in enumerate(self.unroll(h, inputs, plan), 1):
            if depth in wanted:
                yield depth, self.mechanism.read(state), inputs

    @torch.no_grad()
    def forward(self, ids, depth: int | None = None, seed: int = 0):
        """ids (B, T) -> logits (B, T, V) after that many loops (None: mu_rec), without gradient;
        training calls `loss`.

        Row i's random h_0 is that of sample i of `tools.sample --seed`. Raises ValueError for more
        tokens than the model has positions.
        """
        if ids.size(1) > self.cfg.seq_len:
            raise ValueError(f"{ids.size(1)} tokens; the model takes {self.cfg.seq_len} at most")
        keys = hash_keys(seed, FOR_SAMPLE, each=range(len(ids)), device=ids.device)
        loops = self.cfg.mu_rec if depth is None else depth
        return self.head(self.hidden(ids, loops, keys))

    @torch.no_grad()
    def hidden(self, ids, depth: int, keys):
        """Normed final hidden state (B, T, D). Right padding is inert (causal)."""
        ((_, h, inputs),) = self.states(ids, [depth], keys)
        return self.coda(h, ids, inputs)

    @torch.no_grad()
    def losses(self, ids, targets, depths: list[int], keys) -> dict[int, torch.Tensor]:
        """Cross-entropy of each token at each depth: {depth: (B, T) float32 nats}."""
        by_depth = {}
        for depth, h, inputs in self.states(ids, depths, keys):
            by_depth[depth] = self.token_losses(h, ids, targets, inputs)
        return by_depth

    def spectra(self) -> dict:
        """Spectral radius and norm of the carry, norms of what multiplies e and of C; None where the
        model has no such part.

        They describe the linear path alone: not the blocks, and not the mechanism.
        """
        if self.injection is None:
            return dict.fromkeys(("rho", "carry_norm", "write_norm", "readout_norm"))
        readout = None if self.C is None else spectral_norm(self.C.weight.detach())
        return self.injection.spectra() | {"readout_norm": readout}

    # -- compilation ------------------------------------------------------------------------------

    PIECES = ("enter_loop", "core_step", "coda_loss", "token_losses")

    def compile_pieces(self, backend: str = "inductor", for_cpu: bool = False) -> None:
        """Replaces the pieces with compiled ones; for_cpu: only those for which that pays on a CPU.

        The loop stays in Python, since its length varies. core_step gets one graph with gradient and
        one without, for any number of sequences.
        """
        # one graph for any number of sequences, one included
        torch.fx.experimental._config.backed_size_oblivious = True
        compiled = functools.partial(torch.compile, backend=backend, dynamic=False)
        step = compiled(self.core_step)

        def core_step(h, inputs, index, cache=None):
            for x in tree_leaves((h, index, inputs)):
                if torch.is_tensor(x) and (x.dim() > 1 or x is index):
                    torch._dynamo.mark_dynamic(x, 0)
            return step(h, inputs, index, cache)

        self.core_step = core_step
        self.enter_loop = compiled(self.enter_loop)
        self.coda_loss = compiled(self.coda_loss)
        if for_cpu:  # results/cpu.md, "Compiling"
            self.initial_state = torch.compiler.disable(self.initial_state)
        else:
            self.token_losses = compiled(self.token_losses)

    def uncompile(self) -> None:
        for name in (*self.PIECES, "initial_state"):
            self.__dict__.pop(name, None)

    def uncompiled(self) -> "Model":
        """The same weights, with pieces that are not compiled: for shapes that vary."""
        model = copy.copy(self)
        model.uncompile()
        return model


def recomputed(step):
    """A loop whose activations are computed again in the backward pass, not kept."""
    return functools.partial(checkpoint, step, use_reentrant=False, preserve_rng_state=False)


def requiring_grad(state):
    """A state that requires gradient. torch compiles another graph for one that does not: let all loops
    with gradient use one.
    """
    return state if state.requires_grad else state.detach().requires_grad_()


def like_state(live, state):
    """live (B, T) with as many dimensions as a state (B, T, …)."""
    trailing = [1] * (state.dim() - 2)
    return live.view(*live.shape, *trailing)


def parameter_count(cfg: ModelConfig) -> int:
    """Number of parameters, without allocating any."""
    with torch.device("meta"):
        return sum(p.numel() for p in Model(cfg).parameters())


# -------------------------------------------------------------------------------------------------
# A run's model


def config_of(settings: dict) -> ModelConfig:
    """A ModelConfig from a run's settings; missing ones take defaults.

    Raises ValueError for settings that this code does not know: it would compute another function.
    """
    names = {f.name for f in fields(ModelConfig)}
    unknown = settings.keys() - names
    if unknown:
        raise ValueError(f"this code has no setting {', '.join(sorted(unknown))}")
    return ModelConfig(**settings)


def load_run(run_dir, device: str = "cpu", dtype: torch.dtype | None = None):
    """A finished or running training run -> (model in eval state, config.json as a dict with
    "checkpoint", the name of the newest one, which is read).

    Notes where other code trained the run. Raises FileNotFoundError without a checkpoint, ValueError
    for a checkpoint or settings of another model.
    """
    run = Path(run_dir)
    path = newest_checkpoint(run)
    if path is None:
        inside = sorted({file.parent.name for file in run.glob("*/step_*.pt")})
        runs = f"; the runs in it are {', '.join(inside)}" if inside else ""
        raise FileNotFoundError(f"{run} has no checkpoint (step_*.pt){runs}")
    config = json.loads((run / "config.json").read_text())
    cfg = config_of(config["model"])
    if config.get("code", code_hash()) != code_hash():
        commit = config["git"]["commit"] or "unknown"
        note(f"{run} was trained by other code (commit {commit:.10}), which may compute otherwise")
    residual = config.get("args", {}).get("residual_dtype", "auto")
    model = Model(cfg, dtype or getattr(torch, config.get("dtype", "float32")))
    if dtype is None and residual != "auto":
        model.residual_dtype = getattr(torch, residual)
    try:
        model.load_state_dict(read_checkpoint(path)["model"])
    except RuntimeError as e:
        raise ValueError(f"{path} is of another model than {run / 'config.json'}") from e
    return model.to(device).eval(), config | {"checkpoint": path.name}
