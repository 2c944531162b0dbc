"""
Plans a training run before a card is rented: what fits, and how long it takes.

    python -m tools.plan                                       # every large preset on one H100
    python -m tools.plan parcae-140m parcae-370m --card A100-80 --card H100 --gpus 8

Arithmetic on the configuration, answered at once on any machine. Nothing here is measured on a
card: memory is that of looped/memory.py; times are a roofline, operations and bytes divided by the
rates that CARDS assumes.
"""

import math
from dataclasses import dataclass

from looped.console import Parser, fail, positive_int, run_cli
from looped.depth import mean_loops
from looped.figures import table
from looped.memory import GIB, HEADROOM, Step, predict_memory, steps_to_try
from model import PRESETS, ModelConfig, parameter_count
from train import recipe_of


@dataclass(frozen=True)
class Card:
    """What a card has, and what a step is assumed to reach on it."""

    memory: float  # GiB, as the driver reports it
    products: float  # FLOP/s of matrix products of a model of this size
    attention: float  # FLOP/s of causal attention forward, counting what causality needs
    bandwidth: float  # bytes/s of elementwise kernels
    link: float  # bytes/s of a collective between the cards of a machine


# fmt: off
CARDS = {  #         memory   products  attention  bandwidth    link
    "4090":    Card(  23.5,   100e12,     80e12,   0.80e12,   20e9),
    "A100-40": Card(  39.4,   190e12,    150e12,   1.25e12,  230e9),
    "A100-80": Card(  79.1,   190e12,    150e12,   1.65e12,  230e9),
    "H100":    Card(  79.1,   600e12,    350e12,   2.70e12,  450e9),
    "H200":    Card( 139.8,   600e12,    350e12,   3.90e12,  450e9),
    "B200":    Card( 178.4,  1200e12,    700e12,   6.40e12,  800e9),
}
# fmt: on
CONTEXT = 0.6 * GIB  # CUDA's context and the kernels

# Bytes that Inductor's elementwise kernels move, per token and unit of D: in a block application
# without gradient, in one with gradient (forward and backward); and per logit.
BYTES_WITHOUT_GRADIENT = 46
BYTES_WITH_GRADIENT = 130
BYTES_TO_KEEP_LESS = 25  # more, where less is kept for the backward pass
BYTES_A_LOGIT = 6


def step_seconds(cfg: ModelConfig, step: Step, tokens: int, card: Card) -> float:
    """Seconds of an optimiser's step of so many tokens at the mean depth; every kind of work waits
    for the others.
    """
    width = cfg.d_model
    n, k = mean_loops(cfg.sampling, cfg.mu_rec, cfg.mu_bwd)
    without = cfg.n_core * n  # layers run without gradient, and with it
    learning = cfg.n_prelude + cfg.n_core * k + cfg.n_coda
    # backward, 2.5 times the forward pass's FLOPs at 0.8 of its rate
    attention = 2 * cfg.seq_len * width * (without + learning * (1 + 2.5 / 0.8))
    bytes_learning = BYTES_WITH_GRADIENT + BYTES_TO_KEEP_LESS * step.keep_less
    moved = width * (BYTES_WITHOUT_GRADIENT * without + bytes_learning * learning)
    moved += BYTES_A_LOGIT * cfg.vocab_size
    each = cfg.flops_per_token(attention=False) / card.products
    each += attention / card.attention + moved / card.bandwidth
    # the update, shared by the cards: bytes of weights, gradients and moments; Muon's products
    numbers = parameter_count(cfg)
    update = 40 * numbers / card.bandwidth
    if step.optimizer == "muon":
        block = cfg.block_matmul()
        matrices = 4 + (block - 4 * width**2) / (width * cfg.d_mlp)
        flops = 5 * cfg.n_layer() * (4 * width * block + 2 * width**3 * matrices)
        update += flops / card.products
    # gradients' reduce-scatter and weights' all-gather, as if neither overlapped with anything
    exchange = 2 * 4 * numbers * (step.world - 1) / card.link
    return (tokens * each + update + exchange) / step.world


@dataclass(frozen=True)
class Plan:
    """What a preset's recipe needs on a number of cards."""

    step: Step  # of a card: the first that train.py would try, or one row
    peak: float  # GiB
    fits: bool
    rate: float  # tokens a second, all cards
    hours: float


def plan(preset: str, card: Card, gpus: int) -> Plan:
    """What the preset's recipe needs on this many cards of a kind."""
    cfg = PRESETS[preset]
    recipe = recipe_of(preset)
    room = (1 - HEADROOM) * (card.memory * GIB - CONTEXT)
    one_row = Step(1, recipe.optimizer, gpus)
    for step in steps_to_try(cfg, one_row, recipe.batch_size):
        peak = predict_memory(cfg, step)
        if peak <= room:
            break
    tokens = recipe.batch_size * cfg.seq_len
    rate = tokens / step_seconds(cfg, step, tokens, card)
    return Plan(step, peak / GIB, peak <= room, rate, recipe.tokens / rate / 3600)


def row(preset: str, found: Plan) -> list:
    """A preset's line of the answer."""
    peak = f"{found.peak:.1f}"
    if not found.fits:
        return [preset, f"0: one row needs {peak} GiB", "", "", ""]
    device_batch = f"{found.step.rows}{'*' * found.step.keep_less}"
    return [preset, device_batch, peak, f"{found.rate:,.0f}", f"{found.hours:.1f}"]


def main(argv=None):
    parser = Parser(description=__doc__, prog="python -m tools.plan")
    large = [name for name in PRESETS if not name.endswith("nano")]
    add = parser.add_argument
    add("presets", nargs="*", metavar="PRESET", default=large, help="(default: the large ones)")
    add("--card", action="append", choices=CARDS, help="may be given again (default: H100)")
    add("--gpus", type=positive_int, default=1, help="of one machine (default: %(default)s)")
    args = parser.parse_args(argv)
    for name in args.presets:
        if name not in PRESETS:
            fail(f"no preset {name}; there are {', '.join(PRESETS)}")
        batch = recipe_of(name).batch_size
        if batch % args.gpus:
            advice = f"try --gpus {math.gcd(batch, args.gpus)}"
            fail(f"--gpus {args.gpus} does not divide {name}'s batch of {batch}; {advice}")
    for card in args.card or ["H100"]:
        rows = [row(name, plan(name, CARDS[card], args.gpus)) for name in args.presets]
        print(
            f"PREDICTED, not measured: {args.gpus} × {card}. *: less is kept for the backward pass.\n"
        )
        print("\n".join(table(["preset", "rows", "peak GiB", "tok/s", "hours"], rows)))


if __name__ == "__main__":
    run_cli(main)
