"""
Text from a trained model, at any depth.

    python -m tools.sample RUN --prompt "The sea" --depth 8
    python -m tools.sample RUN --prompt "The sea" --depth auto --num 4

From Python, on a GPU with "cuda" in place of "cpu":

    import torch
    from core_eval import open_run
    from tools.sample import generate
    model, enc, _ = open_run("RUN", torch.device("cpu"))
    print(generate(model, enc, "The sea", depth=8))

auto: a token leaves the loop when KL(answer_t || answer_{t-1}) falls under the threshold, where
answer_t is the model's next-token distribution after loop t (Geiping et al., arXiv 2502.05171,
"zero-shot adaptive compute"). An answer costs the coda and the head, so fewer loops need not be less
time. A token is a function of (seed, sample, position) and the text before it, so samples drawn
together are those drawn one by one.
"""

import functools
import sys
import time
from dataclasses import dataclass

import numpy as np
import torch

from core_eval import open_run
from looped.common import Parser, fail, non_negative_float, note, positive_int
from looped.depth import even_plan
from looped.machine import DEVICES, connect
from looped.randomness import FOR_SAMPLE, hash_key, uniforms
from looped.tokenizer import BOS, SPECIALS, encode
from model import like_state

# Nats, the default threshold of --depth auto. Measured on a run of nano (mu_rec 8, 5 tokens a parameter,
# Python's library, 2026-11-27), 24,576 validation tokens: loss 2.7937 after 5.18 loops on average, for
# which a fixed depth needs 5.7 (loss 2.7944 at 5, 2.7934 at 6, 2.7929 at 8). 2e-3: 2.7957 after 4.19
# loops (fixed: 4.6); 1e-4: 2.7931 after 6.46 (fixed: 6.8). It does not hold for `--sampling fixed`, whose
# answers do not settle: at mu_rec 4, 2.8086 after 7.51 loops, where 4 give 2.7815.
EXIT_THRESHOLD = 5e-4


@dataclass
class Depth:
    """How many loops a token takes."""

    loops: int  # with a threshold, at most so many
    threshold: float | None = None  # nats: a token leaves when its answer changes by less


@dataclass
class Sampling:
    """How a token is drawn, and how many."""

    temperature: float = 0.8  # 0: the likeliest token
    top_k: int = 0  # of so many likeliest tokens; 0 or -1: of all
    top_p: float = 0.95  # of the likeliest tokens that together exceed this probability
    tokens: int = 128  # to add

    def __post_init__(self):
        if self.temperature < 0 or self.top_k < -1 or not 0 <= self.top_p <= 1:
            raise ValueError(
                f"{self}: temperature >= 0, top_k >= -1 and 0 <= top_p <= 1 are needed"
            )


# -------------------------------------------------------------------------------------------------
# Reading a text piece by piece


class KVCache:
    """Keys and values of past tokens.

    A layer outside the loop has one slot; a core layer has one for each loop, since its keys and
    values differ from loop to loop. Where tokens may leave early, a loop also writes to the deeper
    slots: later tokens that loop on find a token's last keys and values there (Geiping et al.).
    """

    def __init__(self, model, room: int, loops: int):
        """room: tokens of the longest text; loops: the most that a token takes."""
        self.model = model
        self.room = room
        self.loops = loops
        self.length = 0  # tokens so far
        self.slots = {}  # {layer: keys and values (slots, 2, B, H, room, D/H)}

    def begin_piece(self, tokens: int) -> None:
        """Before each piece of the text."""
        first = self.length
        self.length += tokens
        self.new = slice(first, self.length)  # the piece's positions
        self.positions = torch.arange(first, self.length, device=self.model.cos.device)
        self.live = None

    def begin_loop(self, loop: int, live: torch.Tensor | None) -> None:
        """live (B, T) bool: the tokens that take this loop; None: all of them."""
        self.loop = loop
        self.live = live

    def extend(self, layer: int, k, v):
        """Keys and values (B, H, T, D/H) of the piece's tokens -> those of all tokens so far. They are
        kept before any shift, so that a piece's first token can use its predecessor's.
        """
        new = torch.stack([k, v])
        looped = layer in self.model.core_layers
        if layer not in self.slots:
            B, H, _, width = k.shape
            count = self.loops if looped else 1
            self.slots[layer] = k.new_zeros(count, 2, B, H, self.room, width)
        slots = self.slots[layer]
        slot = self.loop if looped else 0
        if self.live is None:  # every token takes each loop: no deeper slot lacks an entry
            slots[slot, ..., self.new, :] = new
        else:
            new = torch.where(self.live[:, None, :, None], new, slots[slot, ..., self.new, :])
            slots[slot:, ..., self.new, :] = new
        return slots[slot, ..., : self.length, :]


@torch.no_grad()
def read(model, ids, keys, cache: KVCache, depth: Depth):
    """Reads the next tokens, ids (B, T), into the cache -> (final hidden state (B, T, D), loops taken
    (B, T)). keys (B,): what each sequence's randomness comes from.
    """
    if depth.threshold is not None:
        # one by one: each sees the last answers of those before it
        tokens = [read_token(model, token, keys, cache, depth) for token in ids.split(1, 1)]
        hidden, taken = zip(*tokens, strict=True)
        return torch.cat(hidden, 1), torch.cat(taken, 1)
    cache.begin_piece(ids.size(1))
    h, inputs = model.enter_loop(ids, keys, cache)
    if inputs is not None:
        for state in model.unroll(h, inputs, even_plan(len(ids), depth.loops, ids.device), cache):
            h = model.mechanism.read(state)
    return model.coda(h, ids, inputs, cache), torch.full_like(ids, depth.loops)


def read_token(model, ids, keys, cache: KVCache, depth: Depth):
    """The same for one token of each sequence, ids (B, 1), which leaves the loop when its answer has
    settled.
    """
    cache.begin_piece(1)
    h, inputs = model.enter_loop(ids, keys, cache)
    state, history = model.mechanism.start(h)
    live = torch.ones_like(ids, dtype=torch.bool)
    taken = torch.zeros_like(ids)
    last = None
    for loop in range(depth.loops):
        cache.begin_loop(loop, live)
        index = torch.full_like(keys, loop)
        core = functools.partial(model.core_step, inputs=inputs, index=index, cache=cache)
        new = model.mechanism.step(state, history, index, core)
        state = torch.where(like_state(live, new), new, state)
        taken = taken + live
        hidden = model.coda(model.mechanism.read(state), ids, inputs, cache)
        answer = logits_of(model, hidden).log_softmax(-1)  # (B, 1, V)
        if last is not None:
            change = (answer.exp() * (answer - last)).sum(-1)
            live = live & (change.clamp_min(0) >= depth.threshold)  # rounding can take it below 0
            if not live.any():
                break
        last = answer
    return hidden, taken


def logits_of(model, hidden):
    """In float32 at least: in bfloat16 many a token's logit would equal the likeliest's."""
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    return model.head(hidden.to(dtype))


# -------------------------------------------------------------------------------------------------
# Drawing tokens


def pick(logits, u, how: Sampling):
    """logits (B, V), u (B,) float64 in (0, 1) -> tokens (B,), by inverting the distribution."""
    if how.temperature == 0:
        return logits.argmax(-1)
    if logits.device.type == "mps":  # it has no float64
        logits = logits.cpu()
    below = logits.double() - logits.amax(-1, keepdim=True)
    p = (below / how.temperature).softmax(-1)
    p, token = p.sort(dim=-1, descending=True, stable=True)
    if how.top_k > 0:
        p[:, how.top_k :] = 0
    likelier = p.cumsum(-1) - p  # the probability of those before a token
    p = p * (likelier <= how.top_p * p.sum(-1, keepdim=True))
    cdf = p.cumsum(-1)
    goal = u[:, None].to(cdf.device) * cdf[:, -1:]
    drawn = (cdf <= goal).sum(-1, keepdim=True)
    return token.gather(1, drawn)[:, 0]


@torch.no_grad()
def draw(model, prompt: list[int], keys: list[int], depth: Depth, how: Sampling):
    """Continues a prompt once for each key, from which the continuation's randomness comes.

    Yields (each continuation's next token, the loops of the tokens just read (B, T)), until there are
    how.tokens of them or the context is full. Raises ValueError for a prompt longer than the context.
    """
    room = model.cfg.seq_len
    if len(prompt) > room:
        raise ValueError(f"the prompt has {len(prompt)} tokens, {BOS} included; the context {room}")
    wanted = len(prompt) + how.tokens
    end = min(wanted, room + 1)  # a last token is never read
    cache = KVCache(model, end - 1, depth.loops)
    device = model.cos.device
    rows = torch.tensor(keys, device=device)  # (B,)
    ids = torch.tensor([prompt] * len(keys), device=device)
    for position in range(len(prompt), end):  # of the token to be drawn
        hidden, taken = read(model, ids, rows, cache, depth)
        u = [uniforms(hash_key(key, 1), np.array([position]))[0] for key in keys]
        logits = logits_of(model, hidden[:, -1])
        tokens = pick(logits, torch.tensor(u), how)  # (B,)
        yield tokens.tolist(), taken
        ids = tokens[:, None].to(device)
    if end < wanted:
        note(f"the context of {room} tokens is full")


def special_tokens(enc) -> list[int]:
    """BOS, EOS and padding: each ends a text."""
    return [enc.encode_single_token(name) for name in SPECIALS]


def complete(model, enc, text: str, keys: list[int], depth: Depth, how: Sampling):
    """Continues a text once for each key -> (lists of new tokens, the loops of every token read)."""
    specials = special_tokens(enc)
    prompt = [enc.encode_single_token(BOS), *encode(enc, text)]
    texts = [[] for _ in keys]
    going = list(range(len(keys)))  # texts that have not ended
    loops = []
    for tokens, taken in draw(model, prompt, keys, depth, how):
        loops += taken[going].flatten().tolist()
        going = [i for i in going if tokens[i] not in specials]
        for i in going:
            texts[i].append(tokens[i])
        if not going:
            break
    return texts, loops


def generate(model, enc, text: str, depth=None, how: Sampling | None = None, seed: int = 0) -> str:
    """What the model writes after a text. depth: loops, or "auto" (default: mu_rec)."""
    key = hash_key(seed, FOR_SAMPLE, 0)
    (tokens,), _ = complete(model, enc, text, [key], depth_of(model.cfg, depth), how or Sampling())
    return enc.decode(tokens)


def depth_of(cfg, depth, threshold: float = EXIT_THRESHOLD) -> Depth:
    """What `--depth` means: loops, "auto", or None for mu_rec."""
    if depth == "auto":
        return Depth(2 * cfg.mu_rec, threshold)
    return Depth(cfg.mu_rec if depth is None else depth)


# -------------------------------------------------------------------------------------------------
# The program


def loops_or_auto(text):
    return text if text == "auto" else positive_int(text)


def parse_args(argv):
    parser = Parser(description=__doc__, prog="python -m tools.sample")
    add = parser.add_argument
    add("run", metavar="RUN", help="run directory")
    add("--prompt", required=True, help="text to go on from")
    add("--depth", type=loops_or_auto, help="loops, or auto (default: the run's mu_rec)")
    add("--exit-threshold", type=non_negative_float, default=EXIT_THRESHOLD,
        help="of --depth auto, which takes at most twice mu_rec loops: nats "
        "(default: %(default)s)")  # fmt: skip
    add("--temperature", type=float, default=Sampling.temperature,
        help="0 takes the likeliest token (default: %(default)s)")  # fmt: skip
    add("--top-k", type=int, default=Sampling.top_k,
        help="only the likeliest K tokens; 0 or -1 means all (default: %(default)s)")  # fmt: skip
    add("--top-p", type=float, default=Sampling.top_p,
        help="only the likeliest tokens that together exceed this probability (default: %(default)s)")  # fmt: skip
    add("--max-tokens", type=positive_int, default=Sampling.tokens,
        help="new tokens a sample, at most (default: %(default)s)")  # fmt: skip
    add("--num", type=positive_int, default=1, help="how many samples (default: %(default)s)")
    add("--seed", type=int, default=0,
        help="seed of the draws and of random initial states (default: %(default)s)")  # fmt: skip
    add("--device", default="auto", choices=DEVICES,
        help="auto: an NVIDIA GPU or the CPU; mps, an Apple GPU, is untried")  # fmt: skip
    return parser.parse_args(argv)


def main(argv=None):
    args = parse_args(argv)
    how = Sampling(args.temperature, args.top_k, args.top_p, args.max_tokens)
    rank = connect(args.device)
    model, enc, _ = open_run(args.run, rank.device)
    if model.cfg.n_core == 0 and args.depth:
        fail("the model has no loop; leave --depth out")
    if model.residual_dtype is None:
        model.blocks.to(model.dtype)  # as every use would cast them
    keys = [hash_key(args.seed, FOR_SAMPLE, i) for i in range(args.num)]
    depth = depth_of(model.cfg, args.depth, args.exit_threshold)
    start = time.perf_counter()
    texts, loops = complete(model, enc, args.prompt, keys, depth, how)
    seconds = time.perf_counter() - start
    for number, tokens in enumerate(texts, 1):
        if args.num > 1:
            print(f"--- sample {number}")
        print(args.prompt + enc.decode(tokens), flush=True)
    count = sum(map(len, texts))
    speed = f"{count} tokens, {count / seconds:.0f} tokens/s, reading of the prompt included"
    fixed = f", fixed depth {model.cfg.mu_rec}" if args.depth == "auto" else ""
    print(f"{speed}; mean depth {np.mean(loops):.2f}{fixed}", file=sys.stderr)


if __name__ == "__main__":
    main()
