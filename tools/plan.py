"""Estimates before a card is rented what fits on it, and how long a recipe takes.

    python -m tools.plan                                   # every large preset on one H100
    python -m tools.plan --preset parcae-140m --card a100-80 h100 --gpus 8

Nothing here is measured on a card. Time is the model's FLOPs over SHARE of a card's peak; memory is
one formula, within 4 % of the peaks in results/rehearsal.md.
"""

from looped.common import Parser
from looped.depth import deepest
from looped.machine import PEAK_FLOPS
from model import PRESETS, ModelConfig, parameter_count
from tools.figures import records_table
from train import DEVICE_BATCH, recipe_of

SHARE = 0.4  # of the peak FLOP/s; tools.bench measures it as MFU
ROOM = 0.9  # of a card's memory; the rest is for CUDA, NCCL and gaps between tensors
GIB = 2**30
MEMORY = {  # GiB, of a card with the peak of PEAK_FLOPS
    "4090": 23.5,
    "A100-40": 39.4,
    "A100-80": 79.1,
    "H100": 79.1,
    "H200": 139.8,
    "B200": 178.4,
}
COLUMNS = {  # {name: format of its numbers}
    "preset": "", "tokens": "", "batch": "", "at once": "", "GiB": ".1f", "tokens/s": ",.0f",
    "hours": ",.1f",
}  # fmt: skip


def peak_of(card: str) -> float:
    """Dense bfloat16 FLOP/s."""
    name, *_ = card.split("-")
    return PEAK_FLOPS[name]


def bytes_at_rest(cfg: ModelConfig, gpus: int) -> float:
    """Of one card: weights, gradients and two moments in float32, the moments shared by the cards."""
    return 8 * parameter_count(cfg) * (1 + 1 / gpus)


def bytes_a_row(cfg: ModelConfig) -> float:
    """What the backward pass keeps of a sequence at the deepest depth, compiled, in bfloat16, and
    its logits.
    """
    _, with_gradient = deepest(cfg, 1)
    loops = int(with_gradient[0])
    layers = cfg.n_prelude + cfg.n_coda + cfg.n_core * loops
    of_a_layer = 7 * cfg.d_model + cfg.block_matmul() / cfg.d_model
    return 2 * cfg.seq_len * (layers * of_a_layer + cfg.vocab_size)


def plan(preset: str, card: str, gpus: int) -> dict:
    """What the preset's recipe needs on so many cards of a kind: a row of the table."""
    cfg = PRESETS[preset]
    recipe = recipe_of(preset)
    at_rest = bytes_at_rest(cfg, gpus) / GIB
    each = bytes_a_row(cfg) / GIB
    room = ROOM * MEMORY[card]
    at_once = min(DEVICE_BATCH, recipe.batch_size // gpus)
    while at_once and at_rest + at_once * each > room:
        at_once //= 2
    speed = SHARE * peak_of(card) * gpus / cfg.flops_per_token()
    row = {"preset": preset}
    row["tokens"] = f"{recipe.tokens / 1e9:g}B"
    row["batch"] = f"{recipe.batch_size} × {cfg.seq_len:,}"
    row["at once"] = at_once
    row["GiB"] = at_rest + max(1, at_once) * each
    row["tokens/s"] = speed
    row["hours"] = recipe.tokens / speed / 3600
    return row


def main(argv=None):
    parser = Parser(description=__doc__, prog="python -m tools.plan")
    large = [name for name in PRESETS if not name.endswith("nano")]
    add = parser.add_argument
    add("--preset", nargs="+", choices=PRESETS, default=large, metavar="NAME",
        help="(default: the large ones)")  # fmt: skip
    cards = ", ".join(MEMORY)
    add("--card", nargs="+", choices=MEMORY, type=str.upper, default=["H100"], metavar="NAME",
        help=f"{cards} (default: H100)")  # fmt: skip
    add("--gpus", type=int, choices=(1, 2, 4, 8), default=1, help="cards of one machine")
    args = parser.parse_args(argv)
    for card in args.card:
        print(f"Estimated for {args.gpus} × {card}, {MEMORY[card]} GiB each, at {SHARE:.0%} of the")
        print(f"peak of {peak_of(card) / 1e12:,.0f} TFLOP/s. Nothing here is measured.\n")
        rows = [plan(preset, card, args.gpus) for preset in args.preset]
        lines = records_table(rows, COLUMNS)
        print("\n".join(lines))
    print("batch: sequences × tokens of an optimiser step. at once: sequences in a card's memory")
    print("during a forward and backward pass, 0 if none fits. GiB: the peak on each card.")


if __name__ == "__main__":
    main()
