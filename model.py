"""
Looped language models: a Transformer whose middle block is applied a variable number of times
("depth").

    e       = RMSNorm(P(wte[s]))                                prelude, run once
    h_{t+1} = decay ⊙ h_t + gain ⊙ (B e) + R̄(h_t, e)            core, run `depth` times
    logits  = head(RMSNorm(coda(C h_depth)))                    coda, run once

    a = exp(A_log), Δ = softplus(dt_bias), decay = exp(-Δ a)    exact (zero-order hold) state decay
    gain = Δ                 `euler`   Parcae (Prairie et al. 2026, section 4)
    gain = (1 - decay) / a   `zoh`     Exact-ZOH (Huang 2026): the held-input integral, solved exactly

R̄ is what the core blocks add to the injected state, so one loop is "inject, then run the core
blocks". In shapes, such as (B, T, D), B is sequences (not the matrix B), T tokens, D width, H heads,
V vocabulary. The RDM is the recurrent-depth model of Geiping et al. 2025, the paper's baseline.

Where to change what:
    the input gain            a function, and its line in GAINS
    decay and gain            DiagonalInjection.decay_and_write; each may be (D,) or (B, T, D)
    the linear path           a class like DiagonalInjection, and its line in INJECTIONS
    which tokens see which    Attention.sees
    one whole loop            Model.core_step, which knows each sequence's own loop index; a table by it:
                              at_index (looped/mechanisms.py), trained_loops (looped/depth.py)
    the loss                  Model.head_loss in training, Model.token_losses in validation; a further
                              term: Model.loss, a sum over tokens
    a flag of the network     a field of ModelConfig; a word's choices: its line in CHOICES
    how its change enters h   a class as in looped/mechanisms.py, and its line in MECHANISMS
    the log's statistics      Model.statistics, of the last loop's h and the one before
    how deep                  looped/depth.py
A new parameter gets its init and its optimiser where it is created (looped/ops.py).
"""

import copy
import functools
import json
import math
from collections.abc import Callable, Iterable
from dataclasses import astuple, dataclass, field, fields, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.fx.experimental._config
import torch.nn as nn
import torch.nn.functional as F
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from looped.depth import (
    DEPTH_LAWS,
    GRANULARITIES,
    MAX_DEPTH,
    Loop,
    even_plan,
    mean_loops,
    training_plan,
)
from looped.machine import to_device
from looped.mechanisms import AttnRes, HyperConnected, PlainLoop
from looped.ops import (
    EPS,
    attend,
    constant,
    hash_keys,
    hashed_normal,
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


# An input gain is a function of a and Δ, two tensors of the same shape.


def euler_gain(a: torch.Tensor, dt: torch.Tensor) -> torch.Tensor:
    """Parcae: the first-order term of the held-input integral."""
    return dt


def zoh_gain(a: torch.Tensor, dt: torch.Tensor) -> torch.Tensor:
    """Exact-ZOH: the integral itself, (1 - exp(-Δa)) / a, to full relative precision as Δa -> 0,
    where it tends to Δ.
    """
    return -torch.expm1(-dt * a) / a


GAINS = {"euler": euler_gain, "zoh": zoh_gain}


def discretise(
    A_log: torch.Tensor, dt_bias: torch.Tensor, gain_rule: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """(A_log, dt_bias), each (D,) or (B, T, D) -> (decay, gain) of the same shape, float32.

    dh/dτ = -a h + B e with e held over a step of length Δ has the exact solution
    h(Δ) = exp(-Δ a) h(0) + (1 - exp(-Δ a)) / a · B e.

    A_log and dt_bias act as if clamped to [-40, 40], and decay is kept in [exp(-80), 1 - 2^-24], so
    that 0 < decay < 1 holds in float32 for every parameter value; beyond the ends the gradient is
    zero.
    """
    a = A_log.float().clamp(-40, 40).exp()
    dt = F.softplus(dt_bias.float().clamp(-40, 40))
    decay = torch.exp(-(dt * a).clamp(2.0**-24, 80.0))
    return decay, GAINS[gain_rule](a, dt)


class LoopInputs(NamedTuple):
    """What all loops read besides the state; sequences first, but for a decay (D,)."""

    decay: torch.Tensor | None  # (D,) or (B, T, D), float32
    write: torch.Tensor  # (B, T, D), of the activations' dtype: gain ⊙ (B e), added to the state
    values: list  # (B, T, D) or None for each core layer: the tokens' rows of its value table

    def first(self, n: int) -> "LoopInputs":
        """The inputs of the first n sequences. A field that is added must be cut here too."""
        decay = self.decay
        if decay is not None and decay.dim() > 1:
            decay = decay[:n]
        values = [None if own is None else own[:n] for own in self.values]
        return LoopInputs(decay, self.write[:n], values)


class Injection(nn.Module):
    """The linear path h + write; the others are made from it."""

    def __init__(self, cfg: "ModelConfig"):
        super().__init__()

    def decay_and_write(self, e):
        """e (B, T, D) -> decay, (D,) or (B, T, D), or None; and the written input, (B, T, D). All
        loops of the sequence use these two.
        """
        return None, e

    def inject(self, h, inputs: LoopInputs):
        """The linear part of a loop: h (B, T, D) -> what the core blocks read."""
        return h + inputs.write

    def finish(self, out, x, h, inputs: LoopInputs):
        """The state after the loop: out is what the core blocks made of x, h the state before, (B, T,
        D) each.
        """
        return out

    def statistics(self, inputs: LoopInputs, tokens: int) -> dict:
        """What is logged of the inputs that the loops used: sums over tokens."""
        return {}

    def spectra(self) -> dict:
        """Spectral radius and norm of the carry (what multiplies h), and the norm of the written
        input's matrix; None: not known.
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
        dt = -math.log(cfg.ssm_decay)  # since a = 1 at first, decay = exp(-Δ)
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
        self.W = parameter((d, 2 * d), orthogonal(input_std(d)))  # [carry, write]

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
    """The raw loop h + R̄(h, e), R̄ = core(h + e) - (h + e): blocks read e, h does not keep it."""

    def finish(self, out, x, h, inputs):
        return h + (out - x)  # out - e would round h where R̄ is 0

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
# Transformer pieces. Master weights are float32 and are cast to the activations' dtype at every
# use. No autocast: on some versions of torch, casts that it caches under no_grad would cut the
# core's weights out of the gradient.


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


def input_std(d_model: int) -> float:
    """Standard deviation of the input matrices' entries and of the initial loop state."""
    return math.sqrt(2 / (5 * d_model))


def zero_outputs(cfg: "ModelConfig") -> Callable:
    return zeros


def outputs_scaled_by_depth(cfg: "ModelConfig") -> Callable:
    """A standard deviation that falls as 1 / sqrt(2 L), L the layers that are applied."""
    layers = cfg.n_prelude + cfg.n_core * cfg.mu_rec + cfg.n_coda
    return orthogonal(input_std(cfg.d_model) / math.sqrt(2 * layers))


# How the output matrices of attention and MLP begin.
INITS = {"scaled-zero": zero_outputs, "scaled": outputs_scaled_by_depth}


class Context(NamedTuple):
    """What all layers of a pass read besides the residual stream."""

    cos: torch.Tensor  # (T, 1, D/2H), the rotary embedding's, of the activations' dtype
    sin: torch.Tensor
    index: torch.Tensor | None  # (B,) or (B, T): loops that a sequence, or token, has taken; None
    # outside the loop
    cache: object  # tools.sample.KVCache of a text that comes piece by piece, or None


class Attention(nn.Module):
    """Causal attention of layer number `layer`, with rotary embedding and the tokens' own values."""

    def __init__(self, cfg: "ModelConfig", layer: int):
        super().__init__()
        d, H = cfg.d_model, cfg.n_head
        self.layer = layer
        self.n_head = H
        self.qk_norm = cfg.qk_norm
        self.shift = cfg.shifts().get(layer)
        self.is_causal = self.has_causal_mask(cfg.seq_len)
        init = orthogonal(input_std(d))
        self.q = Linear(d, d, init, muon=True)
        self.k = Linear(d, d, init, muon=True)
        self.v = Linear(d, d, init, muon=True)
        output_init = INITS[cfg.init](cfg)
        self.o = Linear(d, d, output_init, muon=True)
        self.gate = None
        self.gate_width = min(32, d)
        if layer in cfg.value_layers():
            self.gate = Linear(self.gate_width, H, uniform_by_width)

    def sees(self, query, key):
        """Whether the token at position `query` sees the one at `key`; for a window of 128 tokens,
        add `& (key > query - 128)`. All of attention follows this line.
        """
        return key <= query

    def mask(self, queries: int, keys: int, device="cpu"):
        """Whether each query sees each key, bool (queries, keys); the queries are the last tokens."""
        key = torch.arange(keys, device=device)
        return self.sees(key[keys - queries :, None], key)

    def has_causal_mask(self, tokens: int) -> bool:
        """Whether a token sees itself and all before it, for which torch's kernels need no mask."""
        every = torch.ones(tokens, tokens, dtype=torch.bool, device="cpu")
        return torch.equal(self.mask(tokens, tokens), every.tril())

    def forward(self, x, values, context: Context):
        """x (B, T, D) -> (B, T, D); values (B, T, D) or None: the tokens' own value vectors."""
        B, T, D = x.shape
        q = self.q(x).view(B, T, self.n_head, -1)  # (B, T, H, D/H)
        q = self.turned(q, context)
        k, v = self.keys_and_values(x, values, context)  # (B, H, S, D/H), S tokens so far
        mask = None
        if context.cache is not None or not self.is_causal:
            mask = self.mask(T, k.size(2), x.device)
        y = attend(q, k, v, mask)
        y = y.transpose(1, 2)
        return self.o(y.reshape(B, T, D))

    def keys_and_values(self, x, values, context: Context):
        heads = (*x.shape[:2], self.n_head, -1)
        k = self.k(x).view(heads)
        v = self.v(x).view(heads)
        if values is not None:  # gated per head
            gate = self.gate(x[..., : self.gate_width])  # (B, T, H)
            weight = 2 * torch.sigmoid(gate)
            v = v + weight.unsqueeze(-1) * values.view(heads)
        k = self.turned(k, context)
        v = v.transpose(1, 2)
        if context.cache is not None:
            k, v = context.cache.extend(self.layer, k, v)
        if self.shift is not None:
            k, v = self.shift(k, v)
        return k, v

    def turned(self, x, context: Context):
        """Queries or keys (B, T, H, D/H), rotated by their positions and normed -> (B, H, T, D/H)."""
        x = rope(x, context.cos, context.sin)
        if self.qk_norm:
            x = F.rms_norm(x, x.shape[-1:], eps=EPS)
        return x.transpose(1, 2)


class MLP(nn.Module):
    """W' relu²(W x)"""

    def __init__(self, cfg: "ModelConfig", layer: int):
        super().__init__()
        init = orthogonal(input_std(cfg.d_model))
        output_init = INITS[cfg.init](cfg)
        self.fc = Linear(cfg.d_model, cfg.d_mlp, init, muon=True)
        self.proj = Linear(cfg.d_mlp, cfg.d_model, output_init, muon=True)

    def forward(self, x, context: Context):
        hidden = F.relu(self.fc(x))
        return self.proj(hidden.square())


class SwiGLU(nn.Module):
    """W' (silu(W x) ⊙ (W'' x))"""

    def __init__(self, cfg: "ModelConfig", layer: int):
        super().__init__()
        init = orthogonal(input_std(cfg.d_model))
        output_init = INITS[cfg.init](cfg)
        self.fc = Linear(cfg.d_model, cfg.d_mlp, init, muon=True)
        self.up = Linear(cfg.d_model, cfg.d_mlp, init, muon=True)
        self.proj = Linear(cfg.d_mlp, cfg.d_model, output_init, muon=True)

    def forward(self, x, context: Context):
        hidden = F.silu(self.fc(x))
        return self.proj(hidden * self.up(x))


# Each is made from (cfg, layer) and called with (x, context), so that one may depend on the loop.
MLPS = {"relu2": MLP, "swiglu": SwiGLU}


def no_norm(d: int) -> nn.Module:
    return nn.Identity()


# --block: the norms after the sums
NORMS_OF_SUMS = {"prenorm": no_norm, "resnorm": RMSNorm}


class Block(nn.Module):
    """Layer number `layer`: looped if that is in cfg.core_layers().

    prenorm: x += Attn(N(x)); x += MLP(N(x))
    resnorm (RDM): x = N(Attn(N(x)) + x); x = N(MLP(N(x)) + x)
    """

    def __init__(self, cfg: "ModelConfig", layer: int):
        super().__init__()
        d = cfg.d_model
        self.attn = Attention(cfg, layer)
        self.mlp = MLPS[cfg.mlp](cfg, layer)
        self.norm1 = RMSNorm(d)
        self.norm2 = RMSNorm(d)
        self.norm3 = NORMS_OF_SUMS[cfg.block](d)
        self.norm4 = NORMS_OF_SUMS[cfg.block](d)

    def forward(self, x, values, context: Context):
        """x (B, T, D), the residual stream -> the same shape and dtype. The branches compute in the
        activations' dtype, which may be a shorter one.
        """
        dtype = context.cos.dtype  # the activations'
        y = self.attn(self.norm1(x).to(dtype), values, context)
        x = self.norm3(x + y)
        y = self.mlp(self.norm2(x).to(dtype), context)
        return self.norm4(x + y)


# -------------------------------------------------------------------------------------------------
# Configuration


# Initial loop states: the standard deviation of a normal (None: that of the input matrices), and at
# how many standard deviations it is truncated.
STATE_INITS = {"like-init": (None, 3.0), "normal": (1.0, 5.0), "zero": (0.0, 3.0)}
CHOICES = {
    "injection": INJECTIONS,
    "gain": GAINS,
    "mechanism": MECHANISMS,
    "block": NORMS_OF_SUMS,
    "mlp": MLPS,
    "state_init": STATE_INITS,
    "init": INITS,
    "sampling": DEPTH_LAWS,
    "granularity": GRANULARITIES,
}


def setting(default, about: str, least: float = 0, most: float = 1 << 20):
    """A field of ModelConfig, the help of its flag, and the bounds of a number."""
    return field(default=default, metadata={"help": about, "least": least, "most": most})


@dataclass
class ModelConfig:
    """The network. n_core = 0 makes it a plain Transformer. The defaults are the paper's model, at
    the size of the preset `nano`; `nano` itself departs from the paper's (NANO, below).
    """

    vocab_size: int = setting(1024, "entries of the tokenizer", least=1)
    seq_len: int = setting(256, "tokens a row", least=1)
    d_model: int = setting(64, "width of the residual stream", least=1)
    n_head: int = setting(1, "attention heads", least=1)
    d_mlp: int = setting(256, "width of the MLP", least=1)
    n_prelude: int = setting(1, "layers before the loop", most=4096)
    n_core: int = setting(1, "layers in the loop; 0: a plain Transformer", most=4096)
    n_coda: int = setting(1, "layers after the loop", most=4096)
    mu_rec: int = setting(8, "loops at evaluation; mean loops in training", most=MAX_DEPTH)
    mu_bwd: int = setting(0, "loops with gradient, at most; 0: half of mu_rec, rounded up")
    injection: str = setting("diagonal", "linear path of a loop; none: the raw loop h + R(h, e)")
    gain: str = setting("euler", "input gain of the diagonal path")
    mechanism: str = setting("none", "how a loop's change enters the state: looped/mechanisms.py")
    streams: int = setting(4, "copies of the state in --mechanism hyper", least=1)
    block: str = setting(
        "prenorm", "norms before the branches; resnorm: after the sums too, the RDM's"
    )
    mlp: str = setting("relu2", "the MLP's nonlinearity; swiglu has a third matrix")
    qk_norm: bool = setting(True, "normalise queries and keys")
    token_shift: bool = setting(
        False,
        "take half the channels of the first layer's values and the last layer's keys from the "
        "preceding token",
    )
    value_embeds: bool = setting(True, "value tables, on every second layer")
    prelude_norm: bool = setting(True, "normalise the prelude's output")
    input_matrix: bool = setting(True, "the diagonal path's matrix B; without: the identity")
    readout: bool = setting(True, "a matrix C between loop and coda; without: the identity")
    state_init: str = setting(
        "like-init", "h_0: random, with the std of the matrices' initial values or 1, or zero"
    )
    init: str = setting(
        "scaled-zero", "initial attention and MLP outputs: zero, or scaled by depth"
    )
    ssm_decay: float = setting(
        math.sqrt(1 / 5), "decay at initialisation, between 0 and 1", least=1e-6, most=1 - 1e-6
    )
    rope_theta: float = setting(50_000.0, "base of the rotary embedding", least=1, most=1 << 31)
    sampling: str = setting("poisson-truncated-full", "law of a sequence's depth: looped/depth.py")
    granularity: str = setting("sequence", "unit that draws its own training depth")

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
        if self.n_core:
            self._settle_loop()
        else:
            self.mu_rec = self.mu_bwd = 0
            if self.mechanism != "none":
                raise ValueError(f"--mechanism {self.mechanism} needs a loop; try --n-core 1")

    def _settle_loop(self):
        self.mu_bwd = self.mu_bwd or math.ceil(self.mu_rec / 2)
        if not 1 <= self.mu_bwd <= self.mu_rec:
            raise ValueError(
                f"--mu-bwd {self.mu_bwd} exceeds --mu-rec {self.mu_rec}; try --mu-bwd {self.mu_rec}"
            )
        if self.mechanism != "none" and self.granularity == "token":
            raise ValueError(
                f"--mechanism {self.mechanism} excludes --granularity token; "
                "try --granularity sequence"
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

    def block_matmul(self) -> int:
        """Weights of one block that multiply activations; norms, gates and tables are left out."""
        with torch.device("meta"):
            block = Block(replace(self, value_embeds=False), 0)
        return sum(part.weight.numel() for part in block.modules() if isinstance(part, Linear))

    def flops_per_token(self, attention: bool = True) -> float:
        """Training FLOPs per token at the means of the depth law, a backward pass being twice a forward
        one. attention: with the products of all pairs of tokens, masked ones included (PaLM's count).
        """
        once, loop = forward_flops(astuple(self), self.seq_len if attention else 1)
        n, k = mean_loops(self.sampling, self.mu_rec, self.mu_bwd)
        return 3 * once + (n + 3 * k) * loop


# Presets: paper, tables "Model definitions", heads 128 wide; `nano` is for CPUs.


def large(d_model: int, layers: int) -> ModelConfig:
    """Parcae in the paper's Transformer setup: `layers` each in prelude, core and coda."""
    return ModelConfig(
        vocab_size=32768,
        seq_len=2048,
        d_model=d_model,
        n_head=d_model // 128,
        d_mlp=4 * d_model,
        n_prelude=layers,
        n_core=layers,
        n_coda=layers,
    )


def flat(looped: ModelConfig) -> ModelConfig:
    """The Transformer with the same layers, each run once."""
    return replace(looped, n_prelude=looped.n_layer(), n_core=0, n_coda=0)


def rdm_setup(looped: ModelConfig, d_mlp: int) -> ModelConfig:
    """Parcae in the setup of Geiping et al., in which it is compared with the RDM."""
    without = {"qk_norm": False, "value_embeds": False, "prelude_norm": False, "readout": False}
    return replace(looped, d_mlp=d_mlp, mlp="swiglu", init="scaled", **without)


def large_rdm_setup(d_model: int, d_mlp: int, n_core: int, mu_rec: int) -> ModelConfig:
    """The same at the paper's sizes: one layer each in prelude and coda."""
    size = {"d_model": d_model, "n_head": d_model // 128, "n_core": n_core, "mu_rec": mu_rec}
    return rdm_setup(ModelConfig(vocab_size=65536, seq_len=2048, **size), d_mlp)


def rdm(parcae: ModelConfig) -> ModelConfig:
    """The RDM, Geiping et al.'s own model: unconstrained, with norms on the residual stream."""
    return replace(parcae, injection="concat", block="resnorm")


SMALL = ModelConfig()
# LOG.md: what B, C, the prelude norm and a random start cost there, and how copying is learned
NANO = replace(
    SMALL,
    input_matrix=False,
    readout=False,
    prelude_norm=False,
    state_init="zero",
    token_shift=True,
)
RDM_NANO = rdm_setup(replace(SMALL, token_shift=True), d_mlp=176)
RDM_100M = large_rdm_setup(d_model=1024, d_mlp=3520, n_core=1, mu_rec=16)
RDM_350M = large_rdm_setup(d_model=2048, d_mlp=7040, n_core=2, mu_rec=8)
PRESETS = {
    "nano": NANO,
    "parcae-140m": large(768, 2),
    "parcae-370m": large(1024, 4),
    "parcae-770m": large(1280, 6),
    "parcae-1.3b": large(1536, 8),
    "transformer-nano": flat(NANO),
    "transformer-140m": flat(large(768, 2)),
    "transformer-370m": flat(large(1024, 4)),
    "transformer-770m": flat(large(1280, 6)),
    "transformer-1.3b": flat(large(1536, 8)),
    "parcae-rdm-nano": RDM_NANO,
    "parcae-rdm-100m": RDM_100M,
    "parcae-rdm-350m": RDM_350M,
    "rdm-nano": rdm(RDM_NANO),
    "rdm-100m": rdm(RDM_100M),
    "rdm-350m": rdm(RDM_350M),
}


# -------------------------------------------------------------------------------------------------
# The model


MAX_LOGITS = 1 << 31  # of a micro-batch at once: 32 sequences of 2,048 tokens under 32,768 entries


class Model(nn.Module):
    """The three equations at the head of this file are `prelude`, `core_step` and `coda`; `unroll`
    runs the loops between.

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
        init = orthogonal(input_std(d))
        self.injection = INJECTIONS[cfg.injection](cfg) if cfg.n_core else None
        self.wte = Embedding(V, d, init)
        layers = range(cfg.n_layer())
        self.blocks = nn.ModuleList(Block(cfg, layer) for layer in layers)
        tables = {str(layer): Embedding(V, d, standard_normal) for layer in cfg.value_layers()}
        self.ve = nn.ModuleDict(tables)
        self.norm_f = RMSNorm(d)
        self.norm_e = RMSNorm(d) if cfg.n_core and cfg.prelude_norm else None
        self.C = Linear(d, d, init) if cfg.n_core and cfg.readout else None
        self.mechanism = MECHANISMS[cfg.mechanism](cfg)
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
            own = name.removeprefix("injection.")  # under which recorded runs drew it
            key = hash_key(seed, FOR_INIT, *own.encode())
            generator = torch.Generator().manual_seed(key & 0x7FFFFFFFFFFFFFFF)
            p.copy_(p.init(p.shape, generator))

    # -- prelude, core, coda ----------------------------------------------------------------------

    def prelude(self, ids, cache=None):
        """ids (B, T) -> e (B, T, D), the prelude's output."""
        x = self.wte(ids).to(self.residual_dtype or self.dtype)
        values = self.values(ids, self.prelude_layers)
        context = self.context(ids, cache=cache)
        x = self.run_blocks(x, self.prelude_layers, values, context)
        return x if self.norm_e is None else self.norm_e(x)

    def initial_state(self, e, seeds, positions=None):
        """h_0 (B, T, D), a function of (seed, position, channel): see STATE_INITS."""
        B, T, D = e.shape
        std, cut = STATE_INITS[self.cfg.state_init]
        if std == 0:
            return torch.zeros_like(e)
        if std is None:
            std = input_std(D)
        # a copy: given a view, torch recompiles whenever the tensor behind the view changes shape
        h = hashed_normal(seeds, T, D, std, cut, positions)
        return h.to(e.dtype, copy=True)

    def enter_loop(self, ids, seeds, cache=None):
        """ids (B, T), seeds (B,) -> h_0 (B, T, D) and LoopInputs; a model without a loop: the
        prelude's output, None.
        """
        e = self.prelude(ids, cache)
        if self.cfg.n_core == 0:
            return e, None
        decay, write = self.injection.decay_and_write(e.to(self.dtype))
        positions = None if cache is None else cache.positions
        h = self.initial_state(e, seeds, positions)
        values = self.values(ids, self.core_layers)
        return h, LoopInputs(decay, write, values)

    def core_step(self, h, inputs: LoopInputs, index, cache=None):
        """One loop: h (B, T, D) -> decay ⊙ h + gain ⊙ (B e) + R̄(h, e). `inject` gives the first two
        terms; the blocks are residual and add R̄. index (B,) or (B, T): how many loops each sequence
        (or token) has already taken.
        """
        x = self.injection.inject(h, inputs)
        context = self.context(h, index, cache)
        out = self.run_blocks(x, self.core_layers, inputs.values, context)
        return self.injection.finish(out, x, h, inputs)

    def coda(self, h, ids, cache=None):
        """h after the last loop (B, T, D) -> the normed final hidden state (B, T, D) that the head reads."""
        if self.C is not None:
            h = self.C(h.to(self.dtype)).to(h.dtype)
        values = self.values(ids, self.coda_layers)
        context = self.context(ids, cache=cache)
        x = self.run_blocks(h, self.coda_layers, values, context)
        return self.norm_f(x).to(self.dtype)

    def values(self, ids, layers: range) -> list:
        """The tokens' rows of these layers' value tables: (B, T, D), None for a layer without."""
        found = []
        for layer in layers:
            name = str(layer)
            own = None
            if name in self.ve:
                own = self.ve[name](ids).to(self.dtype)
            found.append(own)
        return found

    def context(self, x, index=None, cache=None) -> Context:
        """What the blocks need to know of x (B, T, …): whole sequences, or the cache's next tokens."""
        at = slice(x.size(1)) if cache is None else cache.positions
        cos = self.cos[at].to(self.dtype)
        sin = self.sin[at].to(self.dtype)
        return Context(cos, sin, index, cache)

    def run_blocks(self, x, layers: range, values: list, context: Context):
        """These layers, each with its entry of `values`, applied to x (B, T, D)."""
        for layer, own in zip(layers, values, strict=True):
            x = self.blocks[layer](x, own, context)
        return x

    # -- the head ---------------------------------------------------------------------------------

    def head(self, x):
        """x (..., D) -> logits (..., V) in x's dtype."""
        return F.linear(x, self.wte.weight.to(x.dtype))

    def head_loss(self, x, targets):
        """x (N, D), targets (N,) -> the summed cross-entropy, nats, float32."""
        return F.cross_entropy(self.head(x).float(), targets, reduction="sum")

    def coda_loss(self, h, ids, targets):
        """The last loop's h (B, T, D) -> summed cross-entropy of a micro-batch, nats, float32."""
        x = self.coda(h, ids).flatten(0, 1)
        chunks = self.head_chunks(x, targets)
        if len(chunks) == 1:
            return self.head_loss(*chunks[0])
        losses = []
        for part, target in chunks:
            # its logits are made again in the backward pass
            loss = checkpoint(
                self.head_loss, part, target, use_reentrant=False, preserve_rng_state=False
            )
            losses.append(loss)
        return torch.stack(losses).sum()

    def head_chunks(self, x, targets) -> list:
        """x (N, D), targets (B, T) in pieces small enough for their logits to fit."""
        size = max(1, MAX_LOGITS // self.cfg.vocab_size)
        targets = targets.flatten()
        return list(zip(x.split(size), targets.split(size), strict=True))

    def token_losses(self, h, ids, targets):
        """The last loop's h (B, T, D) -> cross-entropy of each token (B, T), nats, float32."""
        x = self.coda(h, ids).flatten(0, 1)
        losses = []
        for part, target in self.head_chunks(x, targets):
            logits = self.head(part).float()
            losses.append(F.cross_entropy(logits, target, reduction="none"))
        return torch.cat(losses).view_as(ids)

    # -- the loop ---------------------------------------------------------------------------------

    def unroll(self, h, inputs: LoopInputs, plan: Iterable[Loop], cache=None):
        """Runs a plan's loops from h_0 (B, T, D); yields after each what the mechanism carries, which
        `mechanism.read` makes the state h.

        The one loop over depth: training, evaluation and sampling all use it. The plan is read as it
        goes, so it may depend on what was yielded. Sequences come deepest first: a loop takes the
        first `loop.active` ones, the others keep their state.
        """
        mechanism = self.mechanism
        state, history = mechanism.start(h)
        learning = False
        for loop in plan:
            if loop.gradient and torch.is_grad_enabled() and not learning:
                learning = True
                # torch compiles another graph for states that do not require gradient: let all
                # loops with gradient use one
                if not state.requires_grad:
                    state = state.detach().requires_grad_()
                history = mechanism.resume(history)
            if cache is not None:
                cache.begin_loop(loop.number, loop.live)
            with torch.set_grad_enabled(learning):
                active = state[: loop.active]
                core = self.core(inputs.first(loop.active), loop.index, cache)
                new = mechanism.step(active, history, loop.index, core)
                if loop.live is not None:  # tokens that are done keep their state
                    trailing = [1] * (new.dim() - 2)
                    live = loop.live.view(*loop.live.shape, *trailing)
                    new = torch.where(live, new, active)
            whole = loop.active == len(state)
            state = new if whole else torch.cat([new, state[loop.active :]])
            yield state

    def core(self, inputs: LoopInputs, index, cache=None) -> Callable:
        """The function h -> core_step(h) of one loop."""
        step = functools.partial(self.core_step, inputs=inputs, index=index, cache=cache)
        if self.checkpoint_loops and torch.is_grad_enabled():
            return functools.partial(
                checkpoint, step, use_reentrant=False, preserve_rng_state=False
            )
        return step

    def loss(self, ids, targets, seeds, n, k):
        """Summed cross-entropy of a micro-batch, nats, under truncated backpropagation through depth
        (paper, algorithm 2); and `statistics`.

        ids, targets (B, T) int64; seeds (B,) int64 from `hash_key`; n, k int arrays (B,) (or (B,
        T)) from `sample_depths`: loops without and with gradient.
        """
        n = np.asarray(n)
        k = np.asarray(k)
        if n.ndim == 1:  # deepest first
            order = np.argsort(-(n + k), kind="stable")
            n = n[order]
            k = k[order]
            at = to_device(torch.from_numpy(order), ids.device)
            ids = ids[at]
            targets = targets[at]
            seeds = seeds[at]
        ids = ids.contiguous()
        targets = targets.contiguous()
        start, inputs = self.enter_loop(ids, seeds)
        if inputs is None:
            return self.coda_loss(start, ids, targets), {}
        before = state = None
        for new in self.unroll(start, inputs, training_plan(n, k, ids.device)):
            before, state = state, new
        h = self.mechanism.read(state)
        previous = start
        if before is not None:
            previous = self.mechanism.read(before.detach())
        loss = self.coda_loss(h, ids, targets)
        return loss, self.statistics(h, previous, inputs)

    @torch.no_grad()
    def statistics(self, h, previous, inputs: LoopInputs) -> dict:
        """What is logged of the state after the last loop and before it: sums over tokens."""
        change = (h - previous).float()
        stats = {
            "residual": change.norm(dim=-1).sum(),
            "state_norm": h.float().norm(dim=-1).sum(),
        }
        tokens = h.size(0) * h.size(1)
        return stats | self.injection.statistics(inputs, tokens)

    # -- evaluation -------------------------------------------------------------------------------

    @torch.no_grad()
    def states(self, ids, depths: list[int], seeds):
        """Yields (depth, h_depth (B, T, D)) for increasing depths; deeper states continue the
        shallower ones.
        """
        h, inputs = self.enter_loop(ids, seeds)
        wanted = sorted(set(depths))
        if inputs is None:
            for depth in wanted:
                yield depth, h
            return
        if wanted[0] == 0:
            state, _ = self.mechanism.start(h)
            yield 0, self.mechanism.read(state)
        plan = even_plan(len(ids), wanted[-1], ids.device)
        for depth, state in enumerate(self.unroll(h, inputs, plan), 1):
            if depth in wanted:
                yield depth, self.mechanism.read(state)

    @torch.no_grad()
    def forward(self, ids, depth: int | None = None, seed: int = 0):
        """ids (B, T) -> logits (B, T, V) after that many loops (None: mu_rec), without gradient;
        training calls `loss`.

        Row i's random h_0 is that of sample i of `tools.sample --seed`. Raises ValueError for more
        tokens than the model has positions.
        """
        if ids.size(1) > self.cfg.seq_len:
            raise ValueError(f"{ids.size(1)} tokens; the model takes {self.cfg.seq_len} at most")
        seeds = hash_keys(seed, FOR_SAMPLE, each=range(len(ids)), device=ids.device)
        loops = self.cfg.mu_rec if depth is None else depth
        return self.head(self.hidden(ids, loops, seeds))

    @torch.no_grad()
    def hidden(self, ids, depth: int, seeds):
        """Normed final hidden state (B, T, D). Right padding is inert (causal)."""
        ((_, h),) = self.states(ids, [depth], seeds)
        return self.coda(h, ids)

    @torch.no_grad()
    def losses(self, ids, targets, depths: list[int], seeds) -> dict[int, torch.Tensor]:
        """Cross-entropy of each token at each depth: {depth: (B, T) float32 nats}."""
        found = {}
        for depth, h in self.states(ids, depths, seeds):
            found[depth] = self.token_losses(h, ids, targets)
        return found

    def spectra(self) -> dict:
        """Spectral radius and norm of the carry Ā, norms of the input matrix B̄ and of C; None if
        the model has no such matrix.

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


@functools.cache
def forward_flops(settings: tuple, tokens: int) -> tuple[float, float]:
    """FLOPs per token of rows of so many tokens, counted as they run: of a forward pass outside the
    loop, and of one loop. settings: a ModelConfig's.
    """
    with torch.device("meta"):
        model = Model(ModelConfig(*settings)).to("meta")
        ids = torch.zeros(1, tokens, dtype=torch.int64)
        seeds = index = torch.zeros(1, dtype=torch.int64)
    with FlopCounterMode(display=False) as once:
        h, inputs = model.enter_loop(ids, seeds)
        model.head(model.coda(h, ids))
    loop = FlopCounterMode(display=False)
    if inputs is not None:
        state, history = model.mechanism.start(h)
        with loop:
            core = model.core(inputs, index)
            model.mechanism.step(state, history, index, core)
    return once.get_total_flops() / tokens, loop.get_total_flops() / tokens


def parameter_count(cfg: ModelConfig) -> int:
    """Number of parameters, without allocating any."""
    with torch.device("meta"):
        return sum(p.numel() for p in Model(cfg).parameters())


# -------------------------------------------------------------------------------------------------
# A run's model


def config_of(settings: dict) -> ModelConfig:
    """A ModelConfig from a run's settings: unknown ones are ignored, missing ones take defaults."""
    known = {f.name for f in fields(ModelConfig)}
    own = {name: value for name, value in settings.items() if name in known}
    return ModelConfig(**own)


def load_run(run_dir, device: str = "cpu", dtype: torch.dtype | None = None):
    """A finished or running training run -> (model in eval state, ModelConfig, config.json as a
    dict, with the name of its newest checkpoint, which is read).
    """
    run = Path(run_dir)
    path = newest_checkpoint(run)
    if path is None:
        raise FileNotFoundError(f"{run} has no checkpoint (step_*.pt)")
    config = json.loads((run / "config.json").read_text())
    cfg = config_of(config["model"])
    residual = config.get("args", {}).get("residual_dtype", "auto")
    own_dtype = config.get("dtype", "float32")
    model = Model(cfg, dtype or getattr(torch, own_dtype))
    if dtype is None and residual != "auto":
        model.residual_dtype = getattr(torch, residual)
    try:
        model.load_state_dict(read_checkpoint(path)["model"])
    except RuntimeError as e:
        raise ValueError(f"{path} is of another model than {run / 'config.json'}") from e
    return model.to(device).eval(), cfg, config | {"checkpoint": path.name}
