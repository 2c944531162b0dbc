"""
The network and its optimiser a second time, from the equations alone: float64, one row, one loop, one stream or entry,
one tensor at a time.

Nothing of the product is used. Settings are read from any object with ModelConfig's fields, weights from a dict by the
parameters' names. Shapes: T tokens, D width; a row has no batch dimension.
"""

import math

import torch

GOLDEN = 0x9E3779B97F4A7C15
WORD = (1 << 64) - 1
POLAR = (  # arXiv 2505.16932
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)


def split_mix(z: int) -> int:
    """SplitMix64's finaliser (Steele et al. 2014)."""
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & WORD
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & WORD
    return z ^ (z >> 31)


def hashed_state(key: int, tokens: int, width: int, std: float, cut: float):
    """(T, D): the inverse distribution function of a normal cut at ±cut std, at 24 hashed bits for each number."""
    hashes = [split_mix((key + i * GOLDEN) & WORD) for i in range(tokens * width)]
    low = torch.tensor([z & 0xFFFFFF for z in hashes], dtype=torch.float64)
    u = (low + 0.5) / 2**23 - 1
    inside = math.erf(cut / math.sqrt(2))
    return (std * math.sqrt(2) * torch.erfinv(u * inside)).view(tokens, width)


def rms(x, weight=1.0):
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight


def rotate(x, theta: float):
    """Rotary embedding of x (T, K): the two halves are the real and imaginary parts of K/2 numbers, each turned."""
    tokens, width = x.shape
    rate = theta ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    angle = torch.arange(tokens, dtype=torch.float64)[:, None] * rate
    real, imaginary = x[:, : width // 2], x[:, width // 2 :]
    turned = torch.complex(real, imaginary) * torch.exp(1j * angle)
    return torch.cat([turned.real, turned.imag], -1)


def preceding(x):
    """Each token's preceding one, (T, K); zeros before the first."""
    return torch.cat([torch.zeros_like(x[:1]), x[:-1]])


class Oracle:
    def __init__(self, cfg, weights: dict):
        self.cfg = cfg
        self.w = {name: w.detach().double().requires_grad_() for name, w in weights.items()}

    # -- the Transformer's pieces --------------------------------------------------------------------------------------

    def linear(self, x, name: str):
        return x @ self.w[name + ".weight"].T

    def attention(self, x, layer: int, ids):
        c = self.cfg
        at = f"blocks.{layer}.attn."
        K = c.d_model // c.n_head
        q, k, v = [self.linear(x, at + name) for name in "qkv"]
        table = self.w.get(f"ve.{layer}.weight")
        mask = torch.full((len(ids), len(ids)), -math.inf, dtype=torch.float64).triu(1)
        heads = []
        for head in range(c.n_head):
            own = slice(head * K, (head + 1) * K)
            queries, keys = rotate(q[:, own], c.rope_theta), rotate(k[:, own], c.rope_theta)
            if c.qk_norm:
                queries, keys = rms(queries), rms(keys)
            values = v[:, own]
            if table is not None:
                gate = 1 / (1 + torch.exp(-(x[:, :32] @ self.w[at + "gate.weight"][head])))
                values = values + 2 * gate[:, None] * table[ids][:, own]
            last = layer == c.n_prelude + c.n_core + c.n_coda - 1
            if c.token_shift and last:
                slow = torch.arange(K) % (K // 2) >= K // 4
                keys = torch.where(slow, preceding(keys), keys)
            elif c.token_shift and layer == 0:
                values = torch.where(torch.arange(K) >= K // 2, preceding(values), values)
            scores = (queries @ keys.T / math.sqrt(K) + mask).exp()
            heads.append(scores / scores.sum(1, keepdim=True) @ values)
        return self.linear(torch.cat(heads, -1), at + "o")

    def mlp(self, x, layer: int):
        at = f"blocks.{layer}.mlp."
        hidden = self.linear(x, at + "fc")
        if self.cfg.mlp == "swiglu":
            hidden = hidden / (1 + torch.exp(-hidden)) * self.linear(x, at + "up")
        else:
            hidden = torch.where(hidden > 0, hidden, 0) ** 2
        return self.linear(hidden, at + "proj")

    def blocks(self, x, first: int, count: int, ids):
        for layer in range(first, first + count):
            norms = [self.w.get(f"blocks.{layer}.norm{i}.weight") for i in (1, 2, 3, 4)]
            x = x + self.attention(rms(x, norms[0]), layer, ids)
            if self.cfg.block == "resnorm":
                x = rms(x, norms[2])
            x = x + self.mlp(rms(x, norms[1]), layer)
            if self.cfg.block == "resnorm":
                x = rms(x, norms[3])
        return x

    # -- before, in and after the loop ---------------------------------------------------------------------------------

    def prelude(self, ids):
        e = self.blocks(self.w["wte.weight"][ids], 0, self.cfg.n_prelude, ids)
        return rms(e, self.w["norm_e.weight"]) if "norm_e.weight" in self.w else e

    def first_state(self, key: int, tokens: int):
        c = self.cfg
        std, cut = {
            "like-init": (math.sqrt(2 / (5 * c.d_model)), 3),
            "normal": (1, 5),
            "zero": (0, 3),
        }[c.state_init]
        return hashed_state(key, tokens, c.d_model, std, cut)

    def propose(self, h, e, ids):
        """One loop of the plain network: the linear path of the injection, then the core blocks."""
        kind = self.cfg.injection
        if kind == "diagonal":
            a = self.w["injection.A_log"].exp()
            dt = torch.log(1 + self.w["injection.dt_bias"].exp())
            decay = torch.exp(-dt * a)
            gain = dt if self.cfg.gain == "euler" else (1 - decay) / a
            if "injection.B" in self.w:
                e = e @ self.w["injection.B"].T
            x = decay * h + gain * e
        elif kind == "concat":
            x = torch.cat([h, e], -1) @ self.w["injection.W"].T
        else:
            x = h + e
        x = self.blocks(x, self.cfg.n_prelude, self.cfg.n_core, ids)
        return x - e if kind == "none" else x  # h + what the core adds to h + e

    def logits(self, h, ids):
        if "C.weight" in self.w:
            h = self.linear(h, "C")
        x = self.blocks(h, self.cfg.n_prelude + self.cfg.n_core, self.cfg.n_coda, ids)
        return rms(x, self.w["norm_f.weight"]) @ self.w["wte.weight"].T

    # -- the loop ------------------------------------------------------------------------------------------------------

    def states(self, ids, key: int, n, k) -> list:
        """[h_0, h_1 …] of a row (T, D): n loops cut off the gradient, then k with it; n, k ints, or (T,) for tokens."""
        e = self.prelude(ids)
        if self.cfg.n_core == 0:
            return [e]
        loop = {"none": self.plain, "attnres": self.attnres, "hyper": self.hyper}
        h = self.first_state(key, len(ids))
        return loop[self.cfg.mechanism](h, e, ids, n, k)

    def plain(self, h, e, ids, n, k):
        tokens = len(ids)
        n, k = [torch.as_tensor(x).expand(tokens) for x in (n, k)]
        states = [h]
        for counts in (n, k):
            for t in range(int(counts.max())):
                new = self.propose(h, e, ids)
                h = torch.stack([new[i] if t < counts[i] else h[i] for i in range(tokens)])
                h = h.detach() if counts is n else h
                states.append(h)
        return states

    def attnres(self, h, e, ids, n, k):
        query = self.w["mechanism.query"]
        values, states = [h], [h]
        for t in range(n + k):
            values.append(self.propose(states[-1], e, ids) - states[-1])
            q = query[min(t, len(query) - 1)]
            weights = torch.stack([(rms(v) @ q).exp() for v in values])  # (entries, T)
            h = sum(w[:, None] * v for w, v in zip(weights / weights.sum(0), values, strict=True))
            states.append(h)
            if t < n:
                values, states = [v.detach() for v in values], [x.detach() for x in states]
        return states

    def hyper(self, h, e, ids, n, k):
        S = self.cfg.streams
        gate, bias, phase = [self.w["mechanism." + name] for name in ("gate", "bias", "phase")]
        streams, states = [h] * S, [h]
        for t in range(n + k):
            z = rms(torch.cat(streams, -1), self.w["mechanism.norm"])  # (T, S D)
            gates = 1 / (1 + torch.exp(-(z @ gate.T + bias)))  # (T, 3 S)
            read, write, keep = [gates[:, i * S : (i + 1) * S] for i in (0, 1, 2)]
            c = sum(read[:, j, None] * streams[j] for j in range(S))
            u = self.propose(c, e, ids) - c + phase[min(t, len(phase) - 1)]
            streams = [keep[:, j, None] * streams[j] + 2 * write[:, j, None] * u for j in range(S)]
            streams = [x.detach() for x in streams] if t < n else streams
            states.append(sum(streams) / S)
        return states

    # -- losses --------------------------------------------------------------------------------------------------------

    def token_losses(self, h, ids, targets):
        """(T,) cross-entropies, nats."""
        logits = self.logits(h, ids)
        return logits.exp().sum(1).log() - logits[torch.arange(len(ids)), targets]

    def loss(self, ids, targets, keys, n, k):
        """Summed cross-entropy of rows (B, T), with the norms of the states and, where rows loop as a whole, of their
        last changes, summed.
        """
        total, norms = 0.0, {"state_norm": 0.0, "residual": 0.0}
        for i in range(len(ids)):
            states = self.states(ids[i], int(keys[i]), n[i], k[i])
            total = total + self.token_losses(states[-1], ids[i], targets[i]).sum()
            if len(states) > 1:
                norms["state_norm"] += states[-1].norm(dim=-1).sum().item()
                norms["residual"] += (states[-1] - states[-2]).norm(dim=-1).sum().item()
        return total, norms

    def gradients(self, loss) -> dict:
        grads = torch.autograd.grad(loss, list(self.w.values()), allow_unused=True)
        found = {}
        for (name, w), grad in zip(self.w.items(), grads, strict=True):
            found[name] = torch.zeros_like(w) if grad is None else grad
        return found


class SlowOptimizer:
    """Clipping to norm 1, Muon for `matrices`, AdamW for the rest.

    weights: {name: tensor}, changed in place.
    """

    def __init__(self, weights: dict, matrices: set, muon_lr: float, adam_lr: float):
        self.weights = weights
        self.matrices = matrices
        self.muon_lr = muon_lr
        self.adam_lr = adam_lr
        self.steps = 0
        self.first = dict.fromkeys(weights, 0.0)
        self.second = dict.fromkeys(weights, 0.0)

    @torch.no_grad()
    def step(self, gradients: dict, lr: float, weight_decay: float, momentum: float):
        """lr, weight_decay: multiples of the peaks."""
        self.steps += 1
        norm = torch.stack([g.double().norm() for g in gradients.values()]).norm()
        for name, w in self.weights.items():
            g = gradients[name].double() * min(1, 1 / norm)
            if name in self.matrices:
                w -= self.muon_lr * lr * self.muon(name, w, g, 0.2 * weight_decay, momentum)
            else:
                w -= self.adam_lr * lr * self.adam(name, g)

    def adam(self, name: str, g):
        self.first[name] = 0.8 * self.first[name] + 0.2 * g
        self.second[name] = 0.95 * self.second[name] + 0.05 * g**2
        root = (self.second[name] / (1 - 0.95**self.steps)).sqrt() + 1e-10
        return self.first[name] / (1 - 0.8**self.steps) / root

    def muon(self, name: str, w, g, weight_decay: float, momentum: float):
        self.first[name] = momentum * self.first[name] + (1 - momentum) * g
        u = (1 - momentum) * g + momentum * self.first[name]
        u = u / (u.norm() * 1.02 + 1e-6)
        for a, b, c in POLAR:
            u = a * u + b * u @ u.T @ u + c * u @ u.T @ u @ u.T @ u
        rows, cols = u.shape
        mean = (u**2).mean(1 if rows >= cols else 0, keepdim=True)
        self.second[name] = 0.95 * self.second[name] + 0.05 * mean
        even = u / self.second[name].clamp(min=1e-10).sqrt()
        even = even * u.norm() / even.norm().clamp(min=1e-10)
        decayed = weight_decay * w * (even * w >= 0)
        return max(1, rows / cols) ** 0.5 * (even + decayed)
