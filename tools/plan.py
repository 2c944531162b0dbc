"""Estimates before a card is rented what fits on it, and how long a recipe takes.

    python -m tools.plan                                   # every large preset on one H100
    python -m tools.plan --preset parcae-140m --card a100-80 --card h100 --gpus 8

Nothing here is measured on a card. Time is the model's FLOPs over SHARE of a card's peak; memory is
one formula, within 4 % of the peaks in results/rehearsal.md.
"""

from math import gcd

from looped.common import Parser, fail, positive_int
from looped.depth import deepest
from looped.machine import PEAK_FLOPS
from model import PRESETS, ModelConfig, parameter_count
from tools.figures import records_table
from train import DEVICE_BATCH, recipe_of

SHARE = 0.4  # of the peak FLOP/s; tools.bench measures it as MFU
ROOM = 0.9  # of a card's memory; the rest is for CUDA, NCCL and gaps between tensors
GIB = 2**30
CARDS = {  # (memory in GiB, dense bfloat16 FLOP/s)
    "4090": (23.5, PEAK_FLOPS["4090"]),
    "A100-40": (39.4, PEAK_FLOPS["A100"]),
    "A100-80": (79.1, PEAK_FLOPS["A100"]),
    "H100": (79.1, PEAK_FLOPS["H100"]),
    "H200": (139.8, PEAK_FLOPS["H200"]),
    "B200": (178.4, PEAK_FLOPS["B200"]),
}
COLUMNS = {  # {name: format of its numbers}
    "preset": "", "tokens": "", "batch": "", "at once": "", "GiB": ".1f", "tokens/s": ",.0f",
    "hours": ",.1f",
}  # fmt: skip


def bytes_at_rest(cfg: ModelConfig, gpus: int) -> float:
    """Of one card: weights, gradients and two moments in float32, the moments shared by the cards."""
    return 8 * parameter_count(cfg) * (1 + 1 / gpus)


def bytes_a_row(cfg: ModelConfig) -> float:
    """What the backward pass keeps of a sequence at the deepest depth, compiled, in bfloat16, and
    its logits.
    """
    _, with_gradient = deepest(cfg, 1)
    layers = cfg.n_prelude + cfg.n_coda + cfg.n_core * int(with_gradient[0])
    of_a_layer = 7 * cfg.d_model + cfg.block_matmul() / cfg.d_model
    return 2 * cfg.seq_len * (layers * of_a_layer + cfg.vocab_size)


def plan(preset: str, card: str, gpus: int) -> dict:
    """What the preset's recipe needs on so many cards of a kind: a row of the table."""
    cfg = PRESETS[preset]
    recipe = recipe_of(preset)
    memory, flops = CARDS[card]
    at_rest = bytes_at_rest(cfg, gpus) / GIB
    each = bytes_a_row(cfg) / GIB
    share = recipe.batch_size // gpus
    fitting = [0]
    for rows in range(1, DEVICE_BATCH + 1):
        if share % rows == 0 and at_rest + rows * each <= ROOM * memory:
            fitting.append(rows)
    at_once = fitting[-1]
    rate = SHARE * flops * gpus / cfg.flops_per_token()
    return {
        "preset": preset,
        "tokens": f"{recipe.tokens / 1e9:g}B",
        "batch": f"{recipe.batch_size} × {cfg.seq_len:,}",
        "at once": at_once,
        "GiB": at_rest + max(1, at_once) * each,
        "tokens/s": rate,
        "hours": recipe.tokens / rate / 3600,
    }


def main(argv=None):
    parser = Parser(description=__doc__, prog="python -m tools.plan")
    large = [name for name in PRESETS if not name.endswith("nano")]
    add = parser.add_argument
    about = "may be given again (default: the large ones)"
    add("--preset", action="append", choices=PRESETS, metavar="NAME", help=about)
    about = f"{', '.join(CARDS)}; may be given again (default: H100)"
    add("--card", action="append", choices=CARDS, type=str.upper, metavar="NAME", help=about)
    add("--gpus", type=positive_int, default=1, help="cards of one machine (default: %(default)s)")
    args = parser.parse_args(argv)
    presets = args.preset or large
    for name in presets:
        batch = recipe_of(name).batch_size
        if batch % args.gpus:
            advice = f"try --gpus {gcd(batch, args.gpus)}"
            fail(f"--gpus {args.gpus} does not divide {name}'s batch of {batch}; {advice}")
    for card in args.card or ["H100"]:
        memory, flops = CARDS[card]
        print(f"Estimated for {args.gpus} × {card}, {memory} GiB each, at {SHARE:.0%} of the")
        print(f"peak of {flops / 1e12:,.0f} TFLOP/s. Nothing here is measured.\n")
        rows = [plan(name, card, args.gpus) for name in presets]
        print("\n".join(records_table(rows, COLUMNS)))
    print("batch: sequences × tokens of an optimiser step. at once: sequences in a card's memory")
    print("during a forward and backward pass, 0 if none fits. GiB: the peak on each card.")


if __name__ == "__main__":
    main()
