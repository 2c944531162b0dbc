"""
Plans a training run before a card is rented: what fits, how long it takes, what it costs.

    python -m tools.plan                                       # every large preset on one H100
    python -m tools.plan parcae-140m parcae-370m --card A100-80 --card H100 --gpus 8

Arithmetic on the configuration, answered at once on any machine. Nothing here is measured on a
card: memory is that of looped/memory.py; times are a roofline, operations and bytes divided by the
rates that CARDS assumes; prices are rough.
"""

from dataclasses import dataclass

from looped.console import Parser, fail, positive_int, run_cli
from looped.figures import table
from looped.machine import PEAK_FLOPS
from looped.memory import (
    CHUNK,
    FEW_TOKENS,
    GIB,
    Step,
    device_batches,
    matrix_stacks,
    predict_memory,
    steps_to_try,
    usable_memory,
)
from looped.settings import DEVICE_BATCH
from model import PRESETS, ModelConfig, parameter_count
from train import recipe_of


@dataclass(frozen=True)
class Card:
    """A card as its maker states it, and what a step is assumed to reach on it."""

    memory: float  # GiB, as the driver reports it
    peak: float  # dense bfloat16 FLOP/s, data sheet
    products: float  # FLOP/s of matrix products of a model of this size
    attention: float  # FLOP/s of causal attention forward, counting what causality needs
    bandwidth: float  # bytes/s of elementwise kernels
    link: float  # bytes/s of a collective between the cards of a machine
    price: float  # dollars an hour


# fmt: off
CARDS = {
    "4090":    Card(memory=23.5,  peak=PEAK_FLOPS["4090"], products=100e12,  attention=80e12,  bandwidth=0.80e12, link=20e9,  price=0.4),
    "A100-40": Card(memory=39.4,  peak=PEAK_FLOPS["A100"], products=190e12,  attention=150e12, bandwidth=1.25e12, link=230e9, price=1.3),
    "A100-80": Card(memory=79.1,  peak=PEAK_FLOPS["A100"], products=190e12,  attention=150e12, bandwidth=1.65e12, link=230e9, price=1.8),
    "H100":    Card(memory=79.1,  peak=PEAK_FLOPS["H100"], products=600e12,  attention=350e12, bandwidth=2.70e12, link=450e9, price=3.0),
    "H200":    Card(memory=139.8, peak=PEAK_FLOPS["H200"], products=600e12,  attention=350e12, bandwidth=3.90e12, link=450e9, price=3.8),
    "B200":    Card(memory=178.4, peak=PEAK_FLOPS["B200"], products=1200e12, attention=700e12, bandwidth=6.40e12, link=800e9, price=6.0),
}
# fmt: on
CONTEXT = 0.6 * GIB  # CUDA's context and the kernels
BACKWARD_ATTENTION = 0.8  # of the forward pass's rate

# Bytes that Inductor's elementwise kernels move, per token and unit of D: in a block application
# without gradient, in one with gradient (forward and backward); and per logit.
BYTES_WITHOUT_GRADIENT = 46
BYTES_WITH_GRADIENT = 130
BYTES_TO_KEEP_LESS = 25  # more, where less is kept for the backward pass
BYTES_A_LOGIT = 6

DISK_BYTES_A_TOKEN = 2 + 3.2  # packed; compressed source text, cropped parts included


@dataclass(frozen=True)
class Plan:
    """What a preset's recipe needs on a number of cards."""

    step: Step | None  # of a card; None: not even one row fits
    peak: float  # bytes, of this step or of one row
    seconds: dict[str, float]  # of an optimiser's step, by part
    tokens: float
    rate: float  # tokens a second, all cards
    mfu: float  # by PaLM's count of FLOPs

    def hours(self) -> float:
        return self.tokens / self.rate / 3600


def step_seconds(cfg: ModelConfig, step: Step, tokens: int, card: Card) -> dict[str, float]:
    """Seconds of an optimiser's step of so many tokens, by part, at the mean depth.

    The cards share the update: Muon's products, and the bytes of weights, gradients and moments.
    exchange: the gradients' reduce-scatter and the weights' all-gather, float32, counted as if
    they overlapped with nothing, though `muon.Reducer` hides a part of the first.
    """
    own = tokens / step.world
    without = cfg.n_core * (cfg.mu_rec - cfg.mu_bwd)  # layers run without gradient, and with it
    with_gradient = cfg.n_prelude + cfg.n_core * cfg.mu_bwd + cfg.n_coda
    pair = 2 * cfg.seq_len * cfg.d_model  # attention of a layer
    attention = pair * (without + with_gradient * (1 + 2.5 / BACKWARD_ATTENTION))
    learning = BYTES_WITH_GRADIENT + BYTES_TO_KEEP_LESS * step.keep_less
    moved = cfg.d_model * (BYTES_WITHOUT_GRADIENT * without + learning * with_gradient)
    numbers = parameter_count(cfg)
    update = 40 * numbers / card.bandwidth
    if step.optimizer == "muon":
        for stack in matrix_stacks(cfg):
            short = min(stack.rows, stack.columns)
            flops = 5 * (4 * short * stack.numbers() + 2 * short**3 * stack.count)
            update += flops / card.products
    return {
        "products": own * cfg.flops_per_token(attention=False) / card.products,
        "attention": own * attention / card.attention,
        "other kernels": own * moved / card.bandwidth,
        "logits": own * BYTES_A_LOGIT * cfg.vocab_size / card.bandwidth,
        "update": update / step.world,
        "exchange": 2 * 4 * numbers * (step.world - 1) / step.world / card.link,
    }


def step_that_fits(cfg: ModelConfig, batch: int, base: Step, card: Card) -> Step | None:
    """What train.py would try first: the largest device batch that divides its share of the batch
    and is predicted to fit the card.
    """
    counts = device_batches(DEVICE_BATCH, batch, base.world)
    room = usable_memory(card.memory * GIB - CONTEXT)
    for step in steps_to_try(cfg, base, counts, [0, CHUNK], FEW_TOKENS):
        if predict_memory(cfg, step).peak() <= room:
            return step
    return None


def plan(preset: str, card: Card, gpus: int) -> Plan:
    """What the preset's recipe needs on this many cards of a kind."""
    cfg = PRESETS[preset]
    recipe = recipe_of(preset)
    one_row = Step(1, recipe.optimizer, gpus)
    fitting = step_that_fits(cfg, recipe.batch_size, one_row, card)
    step = fitting or one_row
    tokens = recipe.batch_size * cfg.seq_len
    seconds = step_seconds(cfg, step, tokens, card)
    rate = tokens / sum(seconds.values())
    mfu = rate * cfg.flops_per_token() / card.peak / gpus
    return Plan(fitting, predict_memory(cfg, step).peak(), seconds, recipe.tokens, rate, mfu)


# -- the page


HEADER = ["preset", "rows", "peak GiB", "tok/s", "MFU", "hours", "$", "disk GB"]


def summary_row(preset: str, p: Plan, price: float) -> list:
    """price: dollars an hour, all cards."""
    peak = f"{p.peak / GIB:.1f}"
    if p.step is None:
        return [preset, f"0: one row needs {peak} GiB", *[""] * 6]
    hours = p.hours()
    rows = f"{p.step.rows}*" if p.step.keep_less else p.step.rows
    disk = DISK_BYTES_A_TOKEN * p.tokens / 1e9
    costs = [f"{hours:.1f}", f"{hours * price:,.0f}", f"{disk:.0f}"]
    return [preset, rows, peak, f"{p.rate:,.0f}", f"{p.mfu:.2f}", *costs]


def page(presets: list[str], name: str, gpus: int) -> list[str]:
    """One card's part of the answer."""
    card = CARDS[name]
    lines = [
        f"PREDICTED, not measured: {gpus} × {name}, {card.memory} GiB. Assumed: products "
        f"{card.products / 1e12:.0f} TFLOP/s, attention {card.attention / 1e12:.0f}, "
        f"{card.bandwidth / 1e12:.2f} TB/s, link {card.link / 1e9:.0f} GB/s, ${card.price} an hour "
        "and card. *: less is kept for the backward pass.",
        "",
    ]
    summary = []
    times = []
    for preset in presets:
        p = plan(preset, card, gpus)
        summary.append(summary_row(preset, p, card.price * gpus))
        times.append([preset, *(f"{seconds:.3f}" for seconds in p.seconds.values())])
    lines += table(HEADER, summary)
    return lines + table(["seconds of a step", *p.seconds], times)


def main(argv=None):
    parser = Parser(description=__doc__, prog="python -m tools.plan")
    large = [name for name in PRESETS if not name.endswith(("nano", "tiny"))]
    parser.add_argument(
        "presets", nargs="*", metavar="PRESET", default=large, help="(default: the large ones)"
    )
    parser.add_argument(
        "--card", action="append", choices=CARDS, help="may be given again (default: H100)"
    )
    parser.add_argument(
        "--gpus", type=positive_int, default=1, help="of one machine (default: %(default)s)"
    )
    args = parser.parse_args(argv)
    for name in args.presets:
        if name not in PRESETS:
            fail(f"no preset {name}; there are {', '.join(PRESETS)}")
        batch = recipe_of(name).batch_size
        if batch % args.gpus:
            fits = max(n for n in range(1, min(args.gpus, batch + 1)) if batch % n == 0)
            advice = f"does not divide {name}'s batch of {batch}; try --gpus {fits}"
            fail(f"--gpus {args.gpus} {advice}")
    for card in args.card or ["H100"]:
        print("\n".join(page(args.presets, card, args.gpus)))


if __name__ == "__main__":
    run_cli(main)
