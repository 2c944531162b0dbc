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
blocks". In shapes: B rows, T tokens, D width, H heads, K = D / H, V vocabulary.

Where to change what:
    the input gain            a function, and its line in GAINS
    decay and gain            DiagonalInjection.decay_and_write; each may be (D,) or (B, T, D)
    the linear path           a class like DiagonalInjection, and its line in INJECTIONS
    one whole loop            Model.core_step, which knows each row's own loop index
    how its change enters h   a class as in looped/mechanisms.py, and its line in MECHANISMS
    the log's statistics      Model.statistics, of the last loop's h and the one before
    how deep                  looped/depth.py
"""

import copy
import functools
import json
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from looped.checkpoint import (
    MISFIT_ERRORS,
    newest_checkpoint,
    read_checkpoint,
    same_settings,
)
from looped.console import flag, one_line
from looped.depth import DEPTH_LAWS, GRANULARITIES, MAX_DEPTH, Loop, even_plan, training_plan
from looped.flops import flops_per_token
from looped.layers import EPS, Embedding, Linear, RMSNorm, copied
from looped.machine import note_other_code, to_device
from looped.mechanisms import AttnRes, HyperConnected, PlainLoop
from looped.ops import (
    ChunkedCrossEntropy,
    attend,
    hash_keys,
    hashed_normal,
    orthogonal,
    rope,
    shift_keys,
    shift_values,
    spectral_norm,
)
from looped.randomness import FOR_INIT, FOR_SAMPLE, hash_key

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


@dataclass
class LoopInputs:
    """What a loop reads besides its state; tensors of two or more dimensions have rows first, those
    of one have none.
    """

    decay: torch.Tensor | None  # (D,) or (B, T, D), float32
    write: torch.Tensor  # (B, T, D), of the activations' dtype: gain ⊙ (B e), added to the state
    value_rows: list  # (B, T, D) or None for each core layer: rows of its value table

    def map(self, change: Callable) -> "LoopInputs":
        """A copy with change(x) in place of every tensor x."""
        changed = {}
        for name in vars(self):
            value = getattr(self, name)
            if isinstance(value, list):
                changed[name] = [None if x is None else change(x) for x in value]
            elif torch.is_tensor(value):
                changed[name] = change(value)
            elif value is None or isinstance(value, bool | int | float | str):
                changed[name] = value
            else:
                kind = type(value).__name__
                raise TypeError(
                    f"LoopInputs.{name} is a {kind}; make it a tensor, or a list of them"
                )
        return type(self)(**changed)

    def rows(self, count: int) -> "LoopInputs":
        """The inputs of the first `count` rows."""
        return self.map(lambda x: x[:count] if x.dim() > 1 else x)

    def detach(self) -> "LoopInputs":
        """A copy cut off from autograd."""
        return self.map(torch.Tensor.detach)


class Injection(nn.Module):
    """The linear path h + write; the others are made from it."""

    carry_is_matrix = False  # whether the state is multiplied by a matrix at every loop

    def __init__(self, cfg: "ModelConfig"):
        super().__init__()

    @staticmethod
    def write_matrices(cfg: "ModelConfig") -> float:
        """How many (D, D) matrices e is multiplied by, once; a smaller one is a fraction."""
        return 0

    def initial(self, part: str, std: float, generator: torch.Generator) -> torch.Tensor:
        """Initial value of the parameter `part`; std: that of the network's input matrices."""
        raise AssertionError(f"{part} has no initial value: add a case for it to `initial`")

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
        self.gain_rule = cfg.gain
        self.initial_decay = cfg.ssm_decay
        self.A_log = nn.Parameter(torch.empty(cfg.d_model))
        self.dt_bias = nn.Parameter(torch.empty(cfg.d_model))
        self.B = None
        if cfg.input_matrix:
            self.B = nn.Parameter(torch.empty(cfg.d_model, cfg.d_model))

    @staticmethod
    def write_matrices(cfg):
        return int(cfg.input_matrix)

    def initial(self, part, std, generator):
        if part == "A_log":
            return torch.zeros(self.A_log.shape)  # a = 1
        if part == "B":
            return torch.eye(self.B.size(0))
        if part != "dt_bias":
            return super().initial(part, std, generator)
        dt = -math.log(self.initial_decay)  # decay = exp(-Δ)
        inverse = dt + math.log(-math.expm1(-dt))  # softplus⁻¹(dt)
        return torch.full(self.dt_bias.shape, inverse)

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
        return {"decay_max": decay.amax(-1).mean() * tokens, "decay_mean": decay.mean() * tokens}

    @torch.no_grad()
    def spectra(self):
        decay, gain = discretise(self.A_log, self.dt_bias, self.gain_rule)
        rho = decay.max().item()
        write = gain.max().item() if self.B is None else spectral_norm(gain[:, None] * self.B)
        return {"rho": rho, "carry_norm": rho, "write_norm": write}


class ConcatInjection(Injection):
    """RDM: W [h; e], unconstrained."""

    carry_is_matrix = True

    def __init__(self, cfg: "ModelConfig"):
        super().__init__(cfg)
        self.width = cfg.d_model
        self.W = nn.Parameter(torch.empty(cfg.d_model, 2 * cfg.d_model))  # [carry, write]

    @staticmethod
    def write_matrices(cfg):
        return 1

    def initial(self, part, std, generator):
        return orthogonal(self.W.shape, std, generator)

    def decay_and_write(self, e):
        write = self.W[:, self.width :].to(e.dtype)
        return None, F.linear(e, write)

    def inject(self, h, inputs):
        dtype = inputs.write.dtype
        carry = self.W[:, : self.width].to(dtype)
        return F.linear(h.to(dtype), carry).to(h.dtype) + inputs.write

    @torch.no_grad()
    def spectra(self):
        carry, write = self.W.float().split(self.width, dim=1)
        finite = bool(carry.isfinite().all())
        rho = torch.linalg.eigvals(carry).abs().max().item() if finite else math.nan
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
# Transformer pieces. Master weights are float32 and are cast to the activations' dtype: the core's
# once for all loops (looped/layers.py), the others at every use. No autocast: on some versions of
# torch, casts that it caches under no_grad would cut the core's weights out of the gradient.


class Attention(nn.Module):
    def __init__(self, cfg: "ModelConfig", value_gate: bool, shift: Callable | None):
        super().__init__()
        d = cfg.d_model
        self.n_head = cfg.n_head
        self.qk_norm = cfg.qk_norm
        self.shift = shift
        self.q = Linear(d, d)
        self.k = Linear(d, d)
        self.v = Linear(d, d)
        self.o = Linear(d, d)
        self.gate = Linear(min(32, d), cfg.n_head) if value_gate else None

    def forward(self, x, cos, sin, value_rows=None, attend=attend):
        """x (B, T, D) -> (B, T, D); value_rows (B, T, D) or None: the tokens' own value vectors."""
        B, T, D = x.shape
        heads = (B, T, self.n_head, -1)
        q = self.q(x).view(heads)  # (B, T, H, K)
        k = self.k(x).view(heads)
        v = self.v(x).view(heads)
        if value_rows is not None:  # gated per head
            gate = 2 * torch.sigmoid(self.gate(x[..., : self.gate.in_features]))  # (B, T, H)
            v = v + gate.unsqueeze(-1) * value_rows.view(heads)
        q = rope(q, cos, sin)
        k = rope(k, cos, sin)
        if self.qk_norm:
            q = F.rms_norm(q, (q.size(-1),), eps=EPS)
            k = F.rms_norm(k, (k.size(-1),), eps=EPS)
        y = attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), self.shift)
        return self.o(y.transpose(1, 2).reshape(B, T, D))


class MLP(nn.Module):
    """W' relu²(W x)"""

    def __init__(self, cfg: "ModelConfig"):
        super().__init__()
        self.fc = Linear(cfg.d_model, cfg.d_mlp)
        self.proj = Linear(cfg.d_mlp, cfg.d_model)

    def forward(self, x):
        return self.proj(F.relu(self.fc(x)).square())


class SwiGLU(nn.Module):
    """W' (silu(W x) ⊙ (W'' x))"""

    def __init__(self, cfg: "ModelConfig"):
        super().__init__()
        self.fc = Linear(cfg.d_model, cfg.d_mlp)
        self.up = Linear(cfg.d_model, cfg.d_mlp)
        self.proj = Linear(cfg.d_mlp, cfg.d_model)

    def forward(self, x):
        return self.proj(F.silu(self.fc(x)) * self.up(x))


MLPS = {"relu2": MLP, "swiglu": SwiGLU}


# What is applied to the residual stream after each of a layer's two sums.
BLOCKS = {"prenorm": nn.Identity, "resnorm": RMSNorm}


class Block(nn.Module):
    """One layer.

    prenorm: x += Attn(N(x)); x += MLP(N(x))
    resnorm (RDM): x = N(Attn(N(x)) + x); x = N(MLP(N(x)) + x)
    """

    def __init__(self, cfg: "ModelConfig", value_gate: bool, shift: Callable | None):
        super().__init__()
        self.attn = Attention(cfg, value_gate, shift)
        self.mlp = MLPS[cfg.mlp](cfg)
        self.norm1 = RMSNorm(cfg.d_model)
        self.norm2 = RMSNorm(cfg.d_model)
        self.norm3 = BLOCKS[cfg.block](cfg.d_model)
        self.norm4 = BLOCKS[cfg.block](cfg.d_model)

    def forward(self, x, cos, sin, value_rows=None, attend=attend):
        """x (B, T, D) in the residual stream's dtype; the branches run in the activations' dtype,
        which cos and sin have.
        """
        normed = self.norm1(x).to(cos.dtype)
        x = self.norm3(x + self.attn(normed, cos, sin, value_rows, attend))
        normed = self.norm2(x).to(cos.dtype)
        return self.norm4(x + self.mlp(normed))


# -------------------------------------------------------------------------------------------------
# Configuration


def zeros(shape, std, layers, generator):
    return torch.zeros(shape)


def scaled_by_depth(shape, std, layers, generator):
    return orthogonal(shape, std / math.sqrt(2 * layers), generator)


# Initial loop states: the standard deviation of a normal (None: that of the input matrices), and at
# how many standard deviations it is truncated.
STATE_INITS = {"like-init": (None, 3.0), "normal": (1.0, 5.0), "zero": (0.0, 3.0)}
# Attention and MLP output matrices start at zero, or with a std that falls as 1 / sqrt(2 L).
INITS = {"scaled-zero": zeros, "scaled": scaled_by_depth}
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
    mu_rec: int = setting(8, "loops of evaluation, and in training the law's mean", most=MAX_DEPTH)
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
    ssm_decay: float = setting(math.sqrt(1 / 5), "decay at initialisation, between 0 and 1")
    rope_theta: float = setting(50_000.0, "base of the rotary embedding", least=1, most=1 << 31)
    sampling: str = setting("poisson-truncated-full", "law of a sequence's depth: looped/depth.py")
    granularity: str = setting("sequence", "what has a depth of its own in training")

    def __post_init__(self):
        for name, allowed in CHOICES.items():
            value = getattr(self, name)
            if value not in allowed:
                raise ValueError(f"{flag(name)} {value} is not one of {', '.join(allowed)}")
        for item in fields(self):
            value = getattr(self, item.name)
            least = item.metadata.get("least", value)
            most = item.metadata.get("most", value)
            if type(value) in (int, float) and not least <= value <= most:
                raise ValueError(f"{flag(item.name)} {value} must lie between {least} and {most}")
        if self.n_core:
            self._check_loop()
        else:
            self._check_flat()
        self._check_shapes()

    def _check_flat(self):
        self.mu_rec = 0
        self.mu_bwd = 0
        if self.mechanism != "none":
            raise ValueError(
                f"--mechanism {self.mechanism} needs a loop, but --n-core is 0; try --n-core 1"
            )

    def _check_loop(self):
        if self.mechanism != "none" and self.granularity == "token":
            raise ValueError(
                f"--mechanism {self.mechanism} excludes --granularity token; "
                "try --granularity sequence"
            )
        if self.mu_rec < 1:
            raise ValueError(f"--mu-rec {self.mu_rec} must be at least 1")
        if self.mu_bwd == 0:
            self.mu_bwd = math.ceil(self.mu_rec / 2)
        if self.mu_bwd > self.mu_rec:
            raise ValueError(
                f"--mu-bwd {self.mu_bwd} exceeds --mu-rec {self.mu_rec}; try --mu-bwd {self.mu_rec}"
            )
        if not 0 < self.ssm_decay < 1:
            raise ValueError(f"--ssm-decay {self.ssm_decay} must lie between 0 and 1, excluded")

    def _check_shapes(self):
        # a head's channels rotate in pairs; half of the pairs may be the preceding token's
        part = 4 if self.token_shift else 2
        unit = part * self.n_head
        if self.d_model % unit:
            fits = math.ceil(self.d_model / unit) * unit
            raise ValueError(
                f"--d-model {self.d_model} is no multiple of {part} × --n-head {self.n_head}; "
                f"try --d-model {fits}"
            )
        outside = min(self.n_prelude, self.n_coda) if self.n_core else self.n_layer() - 1
        if self.token_shift and outside < 1:
            raise ValueError(
                "--token-shift needs a first and a last layer outside the loop; try --no-token-shift"
            )

    def n_layer(self) -> int:
        return self.n_prelude + self.n_core + self.n_coda

    def value_layers(self) -> list[int]:
        """Layers with a value table, looped ones counted once: every second, the last included."""
        if not self.value_embeds:
            return []
        last = self.n_layer() - 1
        return [i for i in range(self.n_layer()) if (last - i) % 2 == 0]

    def block_matmul(self) -> int:
        """Weights of one block that multiply activations; norms, gates and tables are left out."""
        with torch.device("meta"):
            block = Block(self, value_gate=False, shift=None)
        return sum(part.weight.numel() for part in block.modules() if isinstance(part, Linear))

    def flops_per_token(self, attention: bool = True) -> float:
        """Training FLOPs per token: looped/flops.py."""
        return flops_per_token(self, INJECTIONS[self.injection], attention)


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
    """Parcae in the setup of Geiping et al."""
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


@dataclass
class LoopState:
    """The state after a loop and before it; h is computed, when asked for, from what the loop
    carries.
    """

    mechanism: nn.Module
    carried: torch.Tensor
    carried_before: torch.Tensor

    @property
    def h(self) -> torch.Tensor:
        """(B, T, D)"""
        return self.mechanism.read(self.carried)

    @property
    def previous(self) -> torch.Tensor:
        """(B, T, D)"""
        return self.mechanism.read(self.carried_before)


def where_live(live: torch.Tensor, new: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    """new (B, T, …) for the rows (B,) or tokens (B, T) that are live, old for the others."""
    live = live.view(live.shape + (1,) * (new.dim() - live.dim()))
    return torch.where(live, new, old)


class Model(nn.Module):
    """The three equations at the head of this file are `prelude`, `core_step` and `coda`; `unroll`
    runs the loops between.

    torch.compile sees these pieces (PIECES: the coda with its loss); the loop itself stays in
    Python, since its length varies.
    """

    def __init__(self, cfg: ModelConfig):
        super().__init__()
        self.cfg = cfg
        d = cfg.d_model
        self.dtype = torch.float32  # of activations
        self.residual_dtype = None  # of residual stream and loop state; None: as activations
        self.loss_chunk = 0  # tokens; 0 keeps all logits of a micro-batch
        self.checkpoint_loops = False
        self.is_compiled = False
        self.whole_step = None  # core_step compiled for all rows
        self.injection = None
        if cfg.n_core:
            self.injection = INJECTIONS[cfg.injection](cfg)
        self.wte = Embedding(cfg.vocab_size, d)
        # numbers of the unique layers
        first, last = cfg.n_prelude, cfg.n_prelude + cfg.n_core
        self.prelude_layers = range(first)
        self.core_layers = range(first, last)
        self.coda_layers = range(last, cfg.n_layer())
        tables = cfg.value_layers()
        shifts = {0: shift_values, cfg.n_layer() - 1: shift_keys} if cfg.token_shift else {}
        self.blocks = nn.ModuleList()
        for layer in range(cfg.n_layer()):
            self.blocks.append(Block(cfg, layer in tables, shifts.get(layer)))
        self.ve = nn.ModuleDict({str(i): Embedding(cfg.vocab_size, d) for i in tables})
        self.norm_f = RMSNorm(d)
        self.norm_e = RMSNorm(d) if cfg.n_core and cfg.prelude_norm else None
        self.C = Linear(d, d) if cfg.n_core and cfg.readout else None
        self.mechanism = MECHANISMS[cfg.mechanism](cfg)
        K = d // cfg.n_head
        # numpy's arange: torch's loads the compiler where the device is "meta"
        pairs = torch.from_numpy(np.arange(0, K, 2, dtype=np.float32))
        positions = torch.from_numpy(np.arange(cfg.seq_len, dtype=np.float32))
        rate = cfg.rope_theta ** (-pairs / K)
        angle = torch.outer(positions, rate)[:, None, :]  # (T, 1, K/2)
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)

    # -- initialisation ---------------------------------------------------------------------------

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        """Draws each parameter from a generator keyed by (seed, its name), so a flag that adds one
        changes no other.

        | wte, q, k, v, fc, up, C          | orthogonal, entries of std s = sqrt(2 / (5 D))                |
        | attention o, MLP proj            | scaled-zero: 0; scaled: std s / sqrt(2 L), L = layers applied |
        | value tables; value gates; norms | N(0, 1); U(±1/sqrt(fan in)), as torch's Linear; 1             |
        | injection, mechanism             | their own method `initial`                                    |
        """
        for name, p in self.named_parameters():
            own = name.removeprefix("injection.")
            key = hash_key(seed, FOR_INIT, *own.encode())
            generator = torch.Generator().manual_seed(key & 0x7FFFFFFFFFFFFFFF)
            value = self._initial(name, p, generator)
            if value.shape != p.shape:
                raise AssertionError(
                    f"{name} is {tuple(p.shape)}, its initial value {tuple(value.shape)}"
                )
            p.copy_(value)

    def _initial(self, name: str, p: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """The initial value of a parameter."""
        cfg = self.cfg
        part = name.removesuffix(".weight").split(".")[-1]
        std = input_std(cfg.d_model)
        if name.startswith("mechanism."):
            return self.mechanism.initial(part, std, generator)
        if name.startswith("injection."):
            return self.injection.initial(part, std, generator)
        if isinstance(self.get_submodule(name.rpartition(".")[0]), RMSNorm):
            return torch.ones(p.shape)
        if name.startswith("ve."):
            return torch.randn(p.shape, generator=generator)
        if part in ("wte", "q", "k", "v", "fc", "up", "C"):
            return orthogonal(p.shape, std, generator)
        if part in ("o", "proj"):
            applied = cfg.n_prelude + cfg.n_core * cfg.mu_rec + cfg.n_coda
            return INITS[cfg.init](p.shape, std, applied, generator)
        if part == "gate":
            uniform = torch.rand(p.shape, generator=generator) * 2 - 1
            return uniform / math.sqrt(p.size(1))
        raise AssertionError(f"{name} has no initial value: add a case for it to Model._initial")

    def muon_parameters(self) -> set[str]:
        """Names of Muon's matrices: weights of attention's q, k, v, o and of the MLP (paper, table of
        groups).
        """
        parts = {"q", "k", "v", "o", "fc", "up", "proj"}
        names = set()
        for name, p in self.named_parameters():
            path = name.split(".")
            if path[0] == "blocks" and path[-2] in parts and path[-1] == "weight" and p.dim() == 2:
                names.add(name)
        return names

    # -- prelude, core, coda ----------------------------------------------------------------------

    def prelude(self, ids, cache=None):
        """ids (B, T) -> e (B, T, D), the prelude's output."""
        x = self.wte(ids).to(self.residual_dtype or self.dtype)
        value_rows = self.value_rows(ids, self.prelude_layers)
        x = self.run_blocks(x, self.prelude_layers, value_rows, cache)
        return x if self.norm_e is None else self.norm_e(x)

    def initial_state(self, e, keys, positions=None):
        """h_0 (B, T, D), a function of (key, position, channel): see STATE_INITS."""
        B, T, D = e.shape
        std, cut = STATE_INITS[self.cfg.state_init]
        if std == 0:
            return torch.zeros_like(e)
        if std is None:
            std = input_std(D)
        # a copy: given a view, torch recompiles whenever the tensor behind the view changes shape
        return hashed_normal(keys, T, D, std, cut, positions).to(e.dtype, copy=True)

    def enter_loop(self, ids, keys, cache=None):
        """ids (B, T), keys (B,) -> h_0 (B, T, D) and LoopInputs; a model without a loop: the
        prelude's output, None.
        """
        e = self.prelude(ids, cache)
        if self.cfg.n_core == 0:
            return e, None
        decay, write = self.injection.decay_and_write(e.to(self.dtype))
        if decay is not None and decay.element_size() < 4:
            raise TypeError(f"decay is {decay.dtype}, where 0.999 is 1; compute it in float32")
        value_rows = self.value_rows(ids, self.core_layers)
        positions = None if cache is None else cache.positions
        inputs = LoopInputs(decay, write, value_rows)
        return self.initial_state(e, keys, positions), inputs

    def core_step(self, h, inputs: LoopInputs, index, cache=None):
        """One loop: h (B, T, D) -> decay ⊙ h + gain ⊙ (B e) + R̄(h, e). `inject` gives the first two
        terms; the blocks are residual and add R̄. index (B,) or (B, T): how many loops each row (or
        token) has already taken.
        """
        x = self.injection.inject(h, inputs)
        out = self.run_blocks(x, self.core_layers, inputs.value_rows, cache)
        return self.injection.finish(out, x, h, inputs)

    def coda(self, h, ids, cache=None):
        """h after the last loop (B, T, D) -> the normed final hidden state (B, T, D) that the head reads."""
        if self.C is not None:
            h = self.C(h.to(self.dtype)).to(h.dtype)
        value_rows = self.value_rows(ids, self.coda_layers)
        x = self.run_blocks(h, self.coda_layers, value_rows, cache)
        return self.norm_f(x).to(self.dtype)

    def value_rows(self, ids, layers: range) -> list:
        """Value-table rows of the tokens for each of these layers: (B, T, D), None where there is
        no table.
        """
        value_rows = []
        for layer in layers:
            name = str(layer)
            value_rows.append(self.ve[name](ids).to(self.dtype) if name in self.ve else None)
        return value_rows

    def run_blocks(self, x, layers: range, value_rows: list, cache=None):
        """These layers, each with its entry of value_rows, applied to x (B, T, D).

        cache: for text that comes piece by piece (looped/cache.py); it knows the tokens' positions
        and computes their attention.
        """
        if cache is None:
            cos = self.cos[: x.size(1)].to(self.dtype)
            sin = self.sin[: x.size(1)].to(self.dtype)
        else:
            cos, sin = cache.cos, cache.sin
        for layer, own in zip(layers, value_rows, strict=True):
            attention = attend if cache is None else functools.partial(cache.attend, layer)
            x = self.blocks[layer](x, cos, sin, own, attention)
        return x

    def rotary(self, positions):
        """positions (B, T) -> the rotary embedding's cos and sin (B, T, 1, K/2) in the activations'
        dtype.
        """
        return self.cos[positions].to(self.dtype), self.sin[positions].to(self.dtype)

    # -- the head ---------------------------------------------------------------------------------

    def head(self, x):
        """x (..., D) -> logits (..., V) in x's dtype."""
        return F.linear(x, self.wte.weight.to(x.dtype))

    def head_loss(self, x, targets):
        """x (N, D), targets (N,) -> the summed cross-entropy, nats, float32."""
        if self.loss_chunk and torch.is_grad_enabled():
            return ChunkedCrossEntropy.apply(x, self.wte.weight, targets, self.loss_chunk)
        return F.cross_entropy(self.head(x).float(), targets, reduction="sum")

    def coda_loss(self, h, ids, targets):
        """The last loop's h (B, T, D) -> summed cross-entropy of a micro-batch, nats, float32."""
        return self.head_loss(self.coda(h, ids).flatten(0, 1), targets.flatten())

    def token_losses(self, h, ids, targets):
        """The last loop's h (B, T, D) -> cross-entropy of each token (B, T), nats, float32."""
        x = self.coda(h, ids).flatten(0, 1)
        size = self.loss_chunk or len(x)
        losses = []
        for part, target in zip(x.split(size), targets.flatten().split(size), strict=True):
            losses.append(F.cross_entropy(self.head(part).float(), target, reduction="none"))
        return torch.cat(losses).view_as(ids)

    # -- the loop ---------------------------------------------------------------------------------

    def unroll(self, h, inputs: LoopInputs, plan: Iterable[Loop], cache=None):
        """Runs the loops of a plan from h_0 (B, T, D); yields the LoopState after each.

        The one loop over depth: training, evaluation, sampling and the mechanisms all use it. The
        plan is read as it goes, so it may depend on what was yielded. Only a loop's active rows are
        computed; the others keep their state.
        """
        mechanism = self.mechanism
        carried, history = mechanism.start(h)
        before = carried.detach()
        constants = inputs.detach()
        learning = False
        core = [self.blocks[layer] for layer in self.core_layers]
        # no copies for recomputed loops: those run again after the copies are gone
        with copied([] if self.checkpoint_loops else core, self.dtype):
            for loop in plan:
                if loop.gradient and torch.is_grad_enabled() and not learning:
                    # torch compiles one graph for states that require gradient and another for
                    # those that do not: all loops with gradient should use one
                    if not carried.requires_grad:
                        carried = carried.detach().requires_grad_()
                    history = mechanism.resume(history)
                    learning = True
                if cache is not None:
                    cache.begin_loop(loop.number, loop.live)
                given = (inputs if learning else constants).rows(loop.active)
                active = carried[: loop.active]
                with torch.set_grad_enabled(learning):
                    whole = loop.active == len(carried)
                    propose = self._proposal(given, loop.index, cache, whole)
                    new = mechanism.step(active, history, loop.index, propose)
                if new.dtype != active.dtype:
                    raise TypeError(
                        f"a loop made {new.dtype} of {active.dtype}; end it with .to(h.dtype)"
                    )
                if loop.live is None:
                    before = carried
                else:  # rows or tokens that stand still keep their state and last change
                    new = where_live(loop.live, new, active)
                    before = where_live(loop.live, carried.detach(), before)
                carried = new if whole else torch.cat([new, carried[loop.active :]])
                yield LoopState(mechanism, carried, before)

    def _proposal(self, inputs: LoopInputs, index, cache, whole: bool):
        """The function h -> core_step(h) of one loop; whole: whether the loop takes all rows."""
        step = self.whole_step if whole and self.whole_step else self.core_step

        def propose(h):
            if self.checkpoint_loops and torch.is_grad_enabled():
                return checkpoint(
                    step, h, inputs, index, use_reentrant=False, preserve_rng_state=False
                )
            return step(h, inputs, index, cache)

        return propose

    def loss(self, ids, targets, keys, n, k):
        """Summed cross-entropy of a micro-batch under truncated backpropagation through depth
        (paper, algorithm 2).

        ids, targets (B, T) int64; keys (B,) int64 from `hash_key`; n, k int arrays (B,) (or (B,
        T)) from `sample_depths`. Returns the loss sum in nats, and `statistics`.
        """
        n, k = np.asarray(n), np.asarray(k)
        if n.ndim == 1 and (np.diff(n + k) > 0).any():
            order = np.argsort(-(n + k), kind="stable")
            n, k = n[order], k[order]
            at = to_device(torch.from_numpy(order), ids.device)
            ids, targets, keys = ids[at], targets[at], keys[at]
        ids = ids.contiguous()
        targets = targets.contiguous()
        h, inputs = self.enter_loop(ids, keys)
        plan = training_plan(n, k, ids.device)
        if not self.mechanism.can_wait and any(loop.live is not None for loop in plan):
            name = self.cfg.mechanism
            raise ValueError(f"--mechanism {name} needs a law of depths whose rows loop together")
        state = LoopState(self.mechanism, h, h)  # of a model without a loop
        if inputs is not None:
            for state in self.unroll(h, inputs, plan):  # noqa: B007
                pass
        loss = self.coda_loss(state.h, ids, targets)
        return loss, self.statistics(state, inputs)

    @torch.no_grad()
    def statistics(self, state: LoopState, inputs: LoopInputs | None) -> dict:
        """What is logged of a micro-batch's loops: sums over its tokens."""
        if inputs is None:
            return {}
        h = state.h
        change = h - state.previous
        stats = {
            "residual": change.float().norm(dim=-1).sum(),
            "state_norm": h.float().norm(dim=-1).sum(),
        }
        tokens = h.size(0) * h.size(1)
        return stats | self.injection.statistics(inputs, tokens)

    # -- evaluation -------------------------------------------------------------------------------

    @torch.no_grad()
    def states(self, ids, depths: list[int], keys):
        """Yields (depth, h_depth (B, T, D)) for increasing depths; deeper states continue the
        shallower ones.
        """
        h, inputs = self.enter_loop(ids, keys)
        wanted = sorted(set(depths))
        if inputs is None:
            for depth in wanted:
                yield depth, h
            return
        if wanted[0] == 0:
            yield 0, self.mechanism.read(self.mechanism.start(h)[0])
        plan = even_plan(len(ids), wanted[-1], ids.device)
        for depth, state in enumerate(self.unroll(h, inputs, plan), 1):
            if depth in wanted:
                yield depth, state.h

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
        ((_, h),) = self.states(ids, [depth], keys)
        return self.coda(h, ids)

    @torch.no_grad()
    def losses(self, ids, targets, depths: list[int], keys) -> dict[int, torch.Tensor]:
        """Cross-entropy of each token at each depth: {depth: (B, T) float32 nats}."""
        found = {}
        for depth, h in self.states(ids, depths, keys):
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

        core_step gets a graph for all rows of a micro-batch, one for any number of active rows and
        one for a single row, each with and without gradient; `enter_loop` one with and one
        without, coda_loss one with, token_losses one without. After that nothing is compiled. The
        all-rows graph has a wrapper of its own, whole_step: in a shared one, the graph for
        any number of rows would be used for all rows too.
        """
        self.is_compiled = True
        # Inductor may split "any number" by size; past torch's limit of 8 graphs, loops run uncompiled
        torch._dynamo.config.recompile_limit = 32
        compiled = functools.partial(torch.compile, backend=backend)
        self.whole_step = compiled(self.core_step, dynamic=False)
        self.core_step = compiled(self.core_step)
        self.enter_loop = compiled(self.enter_loop, dynamic=False)
        self.coda_loss = compiled(self.coda_loss, dynamic=False)
        if for_cpu:  # LOG.md, "Compiling on a CPU"
            self.initial_state = torch.compiler.disable(self.initial_state)
        else:
            self.token_losses = compiled(self.token_losses, dynamic=False)

    def __getstate__(self) -> dict:
        """What copies are made of: all but the compiled pieces, which would use this model's weights."""
        state = self.__dict__ | {"whole_step": None, "is_compiled": False}
        for name in (*self.PIECES, "initial_state"):
            state.pop(name, None)
        return state

    def uncompiled(self) -> "Model":
        """The same weights, with pieces that are not compiled: for shapes that vary."""
        return copy.copy(self)


def input_std(d_model: int) -> float:
    """Standard deviation of the input matrices' entries and of the initial loop state."""
    return math.sqrt(2 / (5 * d_model))


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
    dict).

    config["checkpoint"] names the file. Raises FileNotFoundError when there is no configuration or
    whole checkpoint, ValueError when they are damaged or do not fit.
    """
    run = Path(run_dir)
    file = run / "config.json"
    if not file.is_file():
        raise FileNotFoundError(f"{run} is not a run directory: it has no config.json")
    path = newest_checkpoint(run)
    if path is None:
        raise FileNotFoundError(f"{run} has no whole checkpoint (step_*.pt)")
    state = read_checkpoint(path)
    try:
        config = json.loads(file.read_text())
        cfg = config_of(config["model"])
        same_settings(state, cfg)
        model = Model(cfg)
        model.load_state_dict(state["model"])
        model.dtype = dtype or getattr(torch, config.get("dtype", "float32"))
        residual = config.get("args", {}).get("residual_dtype", "auto")
        if dtype is None and residual != "auto":
            model.residual_dtype = getattr(torch, residual)
    except MISFIT_ERRORS as e:
        raise ValueError(f"{file} and {path.name} do not fit ({one_line(e)})") from None
    note_other_code(run, config)
    return model.to(device).eval(), cfg, config | {"checkpoint": path.name}
