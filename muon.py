"""
The optimiser: Muon for the blocks' matrices, AdamW for everything else, on one rank or any number
of them.

All parameters of a rule live in buffers, of which the parameters and their gradients are views:
matrices of one shape are stacked (N, rows, cols), others are laid end to end (N,). Rank r owns the
r-th part of every buffer: it receives that part of the reduced gradient, keeps the state of that
part only, updates it, and gathers the rest. That is ZeRO-1: the whole gradient stays on every rank.
Each buffer takes one collective each way and one batched update, with no copies. On CPUs, with
under a million parameters in all, messages cost more than the update: every rank then keeps and
updates everything, and one message sums all gradients, to the same bits on every rank.

Another optimiser is a class like AdamW below, whose state is of its buffer's shape (N,), and which
must multiply all that it changes by `ok`; and in train.py a function of its parameter groups with a
line in OPTIMIZERS.

Sources: Muon (Jordan et al. 2024), Polar Express (arXiv 2505.16932), NorMuon's factored variance
reduction (arXiv 2510.05491), cautious weight decay; values of the paper's table "Hyperparameter …
Transformers".
"""

import math
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

# torch before 2.13 has them under their old names
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

POLAR_EXPRESS = (  # arXiv 2505.16932, five steps
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)

# from this many numbers on, a table has its own buffer, and ranks share out the update
LARGE = 1 << 20

# -------------------------------------------------------------------------------------------------
# Updates, in place. ok: 1, or 0 if a loss or gradient is not finite: then nothing changes. A
# tensor, so that nothing waits for the device.


def polar_express(g: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """g (N, rows, cols) -> approximately U Vᵀ of each matrix's SVD, by five odd polynomials X (a +
    b XᵀX + c (XᵀX)²).

    The Frobenius norm, enlarged by 2 %, bounds the spectral norm, so all singular values start in
    (0, 1).
    """
    x = g.to(dtype)
    x = x / (x.norm(dim=(-2, -1), keepdim=True) * 1.02 + 1e-6)
    tall = x.size(-2) > x.size(-1)
    x = x.mT if tall else x  # the Gram matrix of the shorter side is the cheaper one
    for a, b, c in POLAR_EXPRESS:
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.mT if tall else x).to(g.dtype)


def muon_update(p, g, state: dict, rates: torch.Tensor, ok, dtype: torch.dtype):
    """One Muon step on a stack of matrices p, g (N, rows, cols).

    rates: learning rate, weight decay, momentum, 1 - momentum. state["first"] is the momentum;
    state["second"], (N, rows, 1) or (N, 1, cols), NorMuon's running mean square of the
    orthogonalised update over its shorter direction: dividing by its root evens out the neurons,
    and the update's norm is then put back to what it was. Weight decay does not act where update and
    weight differ in sign.
    """
    first, second = state["first"], state["second"]
    lr, weight_decay, momentum, one_minus_momentum = rates
    first.lerp_(g, one_minus_momentum * ok)
    g = g.lerp(first, momentum)  # Nesterov
    g = polar_express(g, dtype)
    dim = -1 if second.size(-1) == 1 else -2  # the shorter direction, as second was made
    mean_square = g.square().mean(dim=dim, keepdim=True)
    second.lerp_(mean_square, 0.05 * ok)  # beta2 0.95
    scale = second.clamp_min(1e-10).rsqrt()
    # squared norms, but for a factor: of the update, and of the update times the scale
    norm2 = mean_square.sum(dim=(-2, -1), keepdim=True)
    scaled_norm2 = (mean_square * scale.square()).sum(dim=(-2, -1), keepdim=True).clamp_min(1e-10)
    g = g * (scale * (norm2 / scaled_norm2).sqrt())
    rows, cols = p.shape[-2:]
    lr = lr * max(1.0, rows / cols) ** 0.5
    shrink = weight_decay * p * (g * p >= 0)
    p.sub_(ok * lr * (g + shrink))


def adamw_update(p, g, state: dict, lr, step, ok, constants: tuple):
    """One Adam step without weight decay. p, g (N,); lr 0-d or (N,); step (from 1) 0-d; constants:
    beta1, beta2, eps.

    eps = 0 means none: an element that never had a gradient stays, rather than becoming 0 / 0. The
    divisor is at least 1e-18: where a gradient is so small that its square is 0 in float32, as that
    of a token that never occurs, the update would else be huge.
    """
    first, second = state["first"], state["second"]
    beta1, beta2, eps = constants
    first.lerp_(g, (1 - beta1) * ok)
    second.lerp_(g.square(), (1 - beta2) * ok)
    denominator = (second / (1 - beta2**step)).sqrt_().add_(eps).clamp_min_(1e-18)
    p.sub_(first / denominator * (ok * lr / (1 - beta1**step)))


# -------------------------------------------------------------------------------------------------
# Rules: how the parameters of a group are laid out, what state they have, and their update.


@dataclass
class Rates:
    """What the schedule says of a step: multiples in [0, 1] of the peaks, and Muon's momentum."""

    lr: float = 1.0
    weight_decay: float = 1.0
    momentum: float = 0.95


@dataclass
class Buffer:
    """Parameters of one rule, side by side, and this rank's part of them."""

    members: list  # (name, parameter)
    spans: list[slice]  # of each member in data
    data: torch.Tensor
    grad: torch.Tensor
    part: slice  # this rank's
    g: torch.Tensor  # the reduced gradient of the part
    sizes: torch.Tensor  # numbers of each member
    state: dict = field(default_factory=dict)  # {name: tensor} for the part

    @property
    def p(self) -> torch.Tensor:
        return self.data[self.part]

    def held(self) -> int:
        """How many members of a stack are this rank's."""
        starts = [span.start for span in self.spans]
        return sum(self.part.start <= start < self.part.stop for start in starts)


class Muon:
    """For matrices (paper, table of groups): stacked by shape."""

    stacked = True

    def __init__(self, lr: float = 8e-3, weight_decay: float = 0.2, compile: bool = False):
        self.lr = lr
        self.weight_decay = weight_decay
        self.update = torch.compile(muon_update, dynamic=False) if compile else muon_update

    def new_state(self, p: torch.Tensor) -> dict:
        count, rows, cols = p.shape
        factor = (count, rows, 1) if rows >= cols else (count, 1, cols)
        return {"first": torch.zeros_like(p), "second": p.new_zeros(factor)}

    def step_rates(self, rates: Rates) -> list[float]:
        lr = rates.lr * self.lr
        weight_decay = rates.weight_decay * self.weight_decay
        return [lr, weight_decay, rates.momentum, 1 - rates.momentum]

    def apply(self, buffer: Buffer, g, rates: torch.Tensor, step, ok) -> None:
        """Updates the matrices of this rank's part of the stack; the padding at its end is left out."""
        dtype = torch.bfloat16 if g.is_cuda else torch.float32
        held = slice(0, buffer.held())
        if held.stop == 0:
            return
        state = {name: tensor[held] for name, tensor in buffer.state.items()}
        self.update(buffer.p[held], g[held], state, rates, ok, dtype)


class AdamW:
    """For everything else, laid end to end.

    update_clip divides the rate of a tensor by max(1, RMS of gradient / root of its second moment)
    (Wortsman et al. 2023; the RDM's setting). Weight decay is 0.
    """

    stacked = False

    def __init__(
        self, lr: float = 8e-3, betas=(0.8, 0.95), eps=1e-10, update_clip=False, compile=False
    ):
        self.lr = lr
        self.betas = betas
        self.eps = eps
        self.update_clip = update_clip
        self.update = torch.compile(adamw_update, dynamic=False) if compile else adamw_update

    def new_state(self, p: torch.Tensor) -> dict:
        return {"first": torch.zeros_like(p), "second": torch.zeros_like(p)}

    def step_rates(self, rates: Rates) -> list[float]:
        return [rates.lr * self.lr]

    def apply(self, buffer: Buffer, g, rates: torch.Tensor, step, ok) -> None:
        lr = rates[0]
        if self.update_clip:
            lr = self.clipped_rate(buffer, g, lr, step)
        constants = (*self.betas, self.eps)
        self.update(buffer.p, g, buffer.state, lr, step, ok, constants)

    def clipped_rate(self, buffer: Buffer, g, lr, step):
        """The learning rate of each element of this rank's part, (N,), after update clipping."""
        beta2 = self.betas[1]
        second = buffer.state["second"].lerp(g.square(), 1 - beta2) / (1 - beta2**step)
        ratio = g.square() / second.clamp_min(1e-30)
        own = []
        for span in buffer.spans:  # where this part cuts each tensor
            start = min(max(span.start - buffer.part.start, 0), len(g))
            stop = min(max(span.stop - buffer.part.start, 0), len(g))
            own.append(slice(start, stop))
        sums = torch.stack([ratio[cut].sum() for cut in own])
        if len(buffer.p) < len(buffer.data):  # the rest is other ranks'
            dist.all_reduce(sums)
        mean = sums / buffer.sizes
        rate = torch.zeros_like(g)
        for cut, root in zip(own, mean.sqrt().clamp(min=1), strict=True):
            rate[cut] = lr / root
        return rate


def stack_slots(count: int, world: int, first: int) -> list[int]:
    """Where `count` matrices stand in a stack of which each rank owns an equal part: given out one
    by one, from rank `first` on.
    """
    own = math.ceil(count / world)
    slots = []
    for i in range(count):
        rank = (first + i) % world
        slots.append(rank * own + i // world)
    return slots


def members_of_buffers(rule, members: list) -> list[list]:
    """The parameters of each buffer: matrices of one shape; each large table; the rest."""
    kinds: dict = {}
    for name, p in members:
        kind = "rest"
        if rule.stacked:
            kind = tuple(p.shape)
        elif p.numel() >= LARGE:
            kind = name
        kinds.setdefault(kind, []).append((name, p))
    # the last first: their order decides how sums are rounded, and with it recorded runs' last bits
    return [same[::-1] for same in kinds.values()]


class Optimizer:
    """Owns the buffers, reduces the gradients, clips, updates, gathers.

    groups: (rule, [(name, parameter), …]), parameters in float32. They are moved into the buffers
    and get a `.grad` there, into which backward accumulates. Gradients are summed over ranks, so
    each rank's loss must already be divided by the whole step's tokens. clip: of the global
    gradient norm.
    """

    def __init__(self, groups: list, clip: float = 1.0, rank: int = 0, world: int = 1):
        self.clip = clip
        numbers = 0
        for _, members in groups:
            for _, p in members:
                numbers += p.numel()
                device = p.device
        self.world = world
        # not on GPUs: each rank times its own kernels, and they may round differently
        small = numbers < LARGE and device.type == "cpu"
        self.shards = 1 if small else world  # into which the update is cut
        self.shard = rank % self.shards
        self.buffers: list[tuple] = []  # (rule, Buffer)
        # matrices so far: a stack goes on where the last ended, which evens out the ranks
        stacked = 0
        for rule, members in groups:
            for part in members_of_buffers(rule, members):
                if rule.stacked:
                    buffer = self._stack(rule, part, stacked)
                    stacked += len(part)
                else:
                    buffer = self._flat(rule, part)
                self.buffers.append((rule, buffer))
        self.steps = torch.zeros((), device=device)  # for Adam's bias correction

    def _flat(self, rule, members: list) -> Buffer:
        """Parameters end to end."""
        spans = []
        end = 0
        for _, p in members:
            spans.append(slice(end, end + p.numel()))
            end += p.numel()
        own = math.ceil(end / self.shards)
        return self._buffer(rule, members, spans, (own * self.shards,))

    def _stack(self, rule, members: list, first: int) -> Buffer:
        """Matrices of one shape."""
        own = math.ceil(len(members) / self.shards)
        spans = []
        for slot in stack_slots(len(members), self.shards, first):
            spans.append(slice(slot, slot + 1))
        shape = (own * self.shards, *members[0][1].shape)
        return self._buffer(rule, members, spans, shape)

    def _buffer(self, rule, members: list, spans: list[slice], shape: tuple) -> Buffer:
        data = torch.zeros(shape, device=members[0][1].device)
        grad = torch.zeros_like(data)
        for (_, p), span in zip(members, spans, strict=True):
            data[span].copy_(p.data.reshape(data[span].shape))
            p.data = data[span].view(p.shape)
            p.grad = grad[span].view(p.shape)
        own = shape[0] // self.shards
        part = slice(self.shard * own, (self.shard + 1) * own)
        g = grad if self.shards == 1 else torch.zeros_like(data[part])
        sizes = torch.tensor([p.numel() for _, p in members], device=data.device)
        buffer = Buffer(members, spans, data, grad, part, g, sizes)
        buffer.state = rule.new_state(buffer.p)
        return buffer

    @torch.no_grad()
    def step(self, rates: Rates, own: dict) -> dict:
        """One update. own: this rank's "loss", and other scalars on the device.

        Returns "grad_norm2", the squared gradient norm before clipping, and the sums of `own` over
        the ranks, on the device. If the norm or the loss is not finite, no rank changes anything.
        Nothing here waits for the device.
        """
        sums = torch.stack(list(own.values()))
        if self.shards > 1:
            self._reduce_shards()
        elif self.world > 1:
            sums = self._sum_all(sums)
        squares = torch.stack([buffer.g.square().sum() for _, buffer in self.buffers])
        totals = torch.cat([squares.sum()[None], sums])
        if self.shards > 1:
            dist.all_reduce(totals)
        out = dict(zip(["grad_norm2", *own], totals, strict=True))
        finite = torch.isfinite(out["grad_norm2"]) & torch.isfinite(out["loss"])
        ok = finite.float()
        self.steps += ok
        step = self.steps.clamp(min=1)
        norm = out["grad_norm2"].sqrt()
        scale = torch.where(finite, (self.clip / (norm + 1e-6)).clamp(max=1.0), 0.0)
        gathers = []
        for (rule, buffer), given in zip(self.buffers, self._device_rates(rates), strict=True):
            g = buffer.g.mul_(scale).nan_to_num_(0.0, 0.0, 0.0)
            rule.apply(buffer, g, given, step, ok)
            if self.shards > 1:  # gathered while the next buffer is updated
                gathers.append(all_gather(buffer.data, buffer.p, async_op=True))
        for work in gathers:
            work.wait()
        self.zero_grad()
        return out

    def _reduce_shards(self) -> None:
        """Sums each buffer's gradients over the ranks into the g of the rank that owns the part."""
        sent = [reduce_scatter(buffer.g, buffer.grad, async_op=True) for _, buffer in self.buffers]
        for work in sent:
            work.wait()

    def _sum_all(self, sums: torch.Tensor) -> torch.Tensor:
        """Sums all gradients over the ranks, and `sums`, which it returns, in one message."""
        grads = [buffer.grad.flatten() for _, buffer in self.buffers]
        message = torch.cat([*grads, sums])
        dist.all_reduce(message)
        *totals, sums = message.split([len(part) for part in (*grads, sums)])
        for grad, total in zip(grads, totals, strict=True):
            grad.copy_(total)
        return sums

    def rehearse(self) -> None:
        """One step that changes nothing, as after a loss that is not finite: compiles the updates,
        takes their memory.
        """
        self.step(Rates(), {"loss": torch.full((), torch.nan, device=self.steps.device)})

    def _device_rates(self, rates: Rates) -> list[torch.Tensor]:
        """Each buffer's rates as a tensor on the device, by one copy that it need not wait for."""
        values = [rule.step_rates(rates) for rule, _ in self.buffers]
        flat = torch.tensor(sum(values, []))
        device = self.steps.device
        if device.type == "cuda":
            flat = flat.pin_memory().to(device, non_blocking=True)
        return flat.to(device).split([len(v) for v in values])

    def zero_grad(self) -> None:
        for _, buffer in self.buffers:
            buffer.grad.zero_()

    # -- state, by parameter name, so that no file belongs to a rank ------------------------------

    def state_dict(self) -> dict:
        """{"steps", state's name: {parameter's name: tensor}}, on rank 0's CPU; every rank calls
        it.
        """
        state = {"steps": self.steps.cpu().clone()}
        for _, buffer in self.buffers:
            for key, part in buffer.state.items():
                whole = self._whole(part)
                if self.shard == 0:
                    named = state.setdefault(key, {})
                    for name, view in self._views(buffer, whole):
                        named[name] = view.to("cpu", copy=True)
        return state

    @torch.no_grad()
    def load_state_dict(self, state: dict) -> None:
        """Takes this rank's part of an unsharded state; the number of ranks may differ from the one
        that wrote it.
        """
        self.steps.copy_(state["steps"])
        for _, buffer in self.buffers:
            for key, part in buffer.state.items():
                whole = torch.zeros(part.size(0) * self.shards, *part.shape[1:])
                for name, view in self._views(buffer, whole):
                    view.copy_(state[key][name])
                part.copy_(whole[buffer.part])

    def _whole(self, part: torch.Tensor) -> torch.Tensor:
        """A state tensor of all ranks; every rank must call it."""
        if self.shards == 1:
            return part
        shape = (part.size(0) * self.shards, *part.shape[1:])
        whole = torch.empty(shape, device=part.device)
        all_gather(whole, part)
        return whole

    def _views(self, buffer: Buffer, whole: torch.Tensor):
        """(name, view) of each member's state."""
        for (name, p), span in zip(buffer.members, buffer.spans, strict=True):
            if whole.dim() == 1:
                yield name, whole[span].view(p.shape)
            else:
                yield name, whole[span][0]
