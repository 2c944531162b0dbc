"""Text from a trained model, at any depth.

    python -m tools.sample RUN --prompt "The sea" --depth 8
    python -m tools.sample RUN --prompt "The sea" --depth auto --exit kl --exit-threshold 5e-4 --num 4

auto: a token leaves the loop when KL(readout_t || readout_{t-1}), a readout being the model's
answer after loop t, or ‖h_t - h_{t-1}‖ / ‖h_t‖ falls under the threshold (Geiping et al., arXiv
2502.05171, "zero-shot adaptive compute"). A token is a function of (seed, sample, position) and the
text before it: of no generator's state, of no other sample.
"""

import argparse
import codecs
import sys
import time
from collections import Counter
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from core_eval import open_run
from looped.cache import KVCache
from looped.console import (
    Parser,
    fail,
    fraction,
    non_negative_float,
    non_negative_int,
    positive_int,
    run_cli,
)
from looped.depth import even_plan
from looped.machine import DEVICES, distributed
from looped.randomness import SEED_SAMPLE, sequence_key, uniforms
from looped.tokenizer import BOS, SPECIALS, encode

THRESHOLDS = {"kl": 5e-4, "residual": 0.03}  # nats; a ratio


@dataclass
class Depth:
    """How many loops a token takes."""

    loops: int  # all take so many; with an exit, at most so many
    exit: str | None = None  # "kl" or "residual": a token leaves when it falls under the threshold
    threshold: float = 0.0
    cache_loops: int = 0  # slots of keys and values that the loops share; 0: a slot for each


@dataclass
class Sampling:
    """How a token is drawn, and when a text ends."""

    temperature: float = 1.0  # 0: the likeliest token
    top_k: int = 0  # of so many likeliest tokens; 0: of all
    top_p: float = 1.0  # of the likeliest tokens that together exceed this probability
    tokens: int = 128  # to add
    stop: frozenset[int] = frozenset()  # tokens that end a text


class ExitRule:
    """Which tokens loop on: Model.unroll follows `plan`; the rest sees each loop's result."""

    def __init__(self, depth: Depth, live: torch.Tensor):
        self.depth = depth
        self.live = live  # (B, T) bool
        self.taken = torch.zeros_like(live, dtype=torch.int64)  # loops of each token
        self.readout = None  # of the last loop, log-probabilities

    def plan(self):
        for loop in even_plan(len(self.live), 0, self.depth.loops, self.live.device):
            loop.live = self.live if self.depth.exit else None
            self.taken = self.taken + self.live
            yield loop
            if not self.live.any():
                return

    def after_state(self, state) -> None:
        move = (state.h - state.previous).norm(dim=-1)
        self.leave(move / state.h.norm(dim=-1))

    def after_readout(self, logits) -> None:
        dtype = torch.promote_types(logits.dtype, torch.float32)
        last = self.readout
        self.readout = logits.to(dtype).log_softmax(-1)  # (B, T, V)
        if last is not None:
            self.leave((self.readout.exp() * (self.readout - last)).sum(-1))

    def leave(self, change) -> None:
        self.live = self.live & (change >= self.depth.threshold)


@torch.no_grad()
def read(model, ids, positions, keys, cache, depth: Depth, live=None):
    """Reads tokens ids at positions, both (B, T), into the cache -> (final hidden state (B, T, D),
    loops taken (B, T)).

    live (B, T): False for padding. Where a token sees the last loops of those before it, as a
    readout's coda and shared slots do, they are read one by one.
    """
    if live is None:
        live = torch.ones_like(ids, dtype=torch.bool)
    one_by_one = depth.exit == "kl" or 0 < cache.cache_loops < depth.loops
    if one_by_one and ids.size(1) > 1:
        columns = [part.split(1, 1) for part in (ids, positions, live)]
        done = []
        for token, at, alive in zip(*columns, strict=True):
            done.append(read(model, token, at, keys, cache, depth, alive))
        hidden, taken = zip(*done, strict=True)
        return torch.cat(hidden, 1), torch.cat(taken, 1)
    cache.place(positions, *model.rotary(positions))
    h, inputs = model.before(ids, keys, cache)
    rule = ExitRule(depth, live)
    if inputs is None:
        return model.after(h, ids, cache), rule.taken
    for state in model.unroll(h, inputs, rule.plan(), cache):
        if depth.exit == "kl":  # what the coda keeps is of the last readout
            hidden = model.after(state.h, ids, cache)
            rule.after_readout(model.head(hidden))
        elif depth.exit == "residual":
            rule.after_state(state)
    if depth.exit:
        cache.settle(int(rule.taken.max()))
    if depth.exit != "kl":
        hidden = model.after(state.h, ids, cache)
    return hidden, rule.taken


def pick(logits, u, how: Sampling):
    """logits (B, V), u (B,) float64 in (0, 1) -> tokens (B,), by inverting the distribution."""
    if how.temperature == 0:
        return logits.argmax(-1)
    if logits.device.type == "mps":  # it has no float64
        logits = logits.cpu()
    p = (logits.double() / how.temperature).softmax(-1)
    p, token = p.sort(dim=-1, descending=True, stable=True)
    if how.top_k:
        p[:, how.top_k :] = 0
    likelier = p.cumsum(-1) - p  # the probability of those before a token
    p = p * (likelier <= how.top_p * p.sum(-1, keepdim=True))
    cdf = p.cumsum(-1)
    place = (cdf <= u[:, None].to(cdf.device) * cdf[:, -1:]).sum(-1, keepdim=True)
    return token.gather(1, place)[:, 0]


@torch.no_grad()
def generate(model, prompts, keys, depth: Depth, how: Sampling, count: Counter | None = None):
    """Yields {row: next token} of the rows going on, until each has its tokens, met a stop, or
    filled the context.

    prompts: lists of ids; keys: an integer for each, from which its randomness comes. count, if
    given, gets the tokens read, the loops they took and the bytes of the cache.
    """
    device = model.cos.device
    count = Counter() if count is None else count
    ends = [min(len(prompt) + how.tokens, model.cfg.seq_len + 1) for prompt in prompts]
    cache = KVCache(model.cfg, max(ends) - 1, depth.cache_loops)  # a last token is never read
    texts = [list(prompt) for prompt in prompts]
    unread = texts
    every = torch.arange(len(texts), device=device)
    row_keys = torch.tensor(keys, device=device)
    going = list(range(len(texts)))
    while going:
        sizes = torch.tensor([len(tokens) for tokens in unread], device=device)
        lengths = torch.tensor([len(text) for text in texts], device=device)
        ids = pad_sequence([torch.tensor(tokens) for tokens in unread], batch_first=True)
        column = torch.arange(ids.size(1), device=device)
        positions = (lengths - sizes)[:, None] + column  # (B, T)
        active = torch.isin(every, torch.tensor(going, device=device))
        live = (column < sizes[:, None]) & active[:, None]
        hidden, taken = read(model, ids.to(device), positions, row_keys, cache, depth, live)
        count.update(read=int(live.sum()), loops=int(taken.sum()))
        count["bytes"] = cache.bytes()
        logits = model.head(hidden[every, sizes - 1])
        if not torch.isfinite(logits).all():
            why = "training diverged, or the depth is too large"
            fail(f"the model's answer at depth {depth.loops} is not finite: {why}")
        u = []
        for key, text in zip(keys, texts, strict=True):
            number = np.array([len(text)])
            u.append(uniforms(sequence_key(key, 1), number)[0])
        drawn = pick(logits, torch.tensor(u), how).tolist()
        yield {row: drawn[row] for row in going}
        on = []
        for row in going:
            if drawn[row] not in how.stop and len(texts[row]) + 1 < ends[row]:
                texts[row].append(drawn[row])
                on.append(row)
        going = on
        unread = [text[-1:] for text in texts]


def collect(enc, rows, events, stop, stream):
    """-> (tokens of each row without stops, the time of each event); `stream` prints a row."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")  # a token may be part of a letter
    tokens = [[] for _ in range(rows)]
    times = []
    for event in events:
        times.append(time.perf_counter())
        for row, token in event.items():
            if token in stop:
                continue
            tokens[row].append(token)
            if stream:
                print(decoder.decode(enc.decode_single_token_bytes(token)), end="", flush=True)
    if stream:
        print(decoder.decode(b"", True))
    return tokens, times


def open_model(run, device):
    """-> (model with matrices in its activations' dtype, tokenizer, config); float32 on a CPU."""
    model, enc, config = open_run(run, distributed(device).device)
    for name, parameter in model.named_parameters():
        if name.endswith("weight"):  # as every use would cast it
            parameter.data = parameter.data.to(model.dtype)
    return model, enc, config


def auto_or_loops(text):
    if text == "auto" or (text.isdecimal() and int(text) < 10_000):
        return text
    raise argparse.ArgumentTypeError(f"{text} must be auto or a whole number up to 9999")


def parse_args():
    parser = Parser(description=__doc__)
    add = parser.add_argument
    add("run", metavar="RUN", help="run directory")
    add("--prompt", action="append", required=True, help="text to go on from; may be repeated")
    add("--depth", type=auto_or_loops, help="loops, or auto (default: the run's mu_rec)")
    add("--exit", choices=list(THRESHOLDS),
        help="of --depth auto: what must fall under the threshold (default: kl)")  # fmt: skip
    add("--exit-threshold", type=non_negative_float,
        help="nats for kl, a ratio for residual (default: 5e-4, 0.03)")  # fmt: skip
    add("--max-depth", type=positive_int,
        help="of --depth auto: most loops (default: twice the run's mu_rec)")  # fmt: skip
    add("--cache-loops", type=positive_int, default=0,
        help="slots of keys and values that the loops share (default: one for each loop)")  # fmt: skip
    add("--temperature", type=non_negative_float, default=0.8,
        help="0 takes the likeliest token (default: %(default)s)")  # fmt: skip
    add("--top-k", type=non_negative_int, default=0,
        help="only the likeliest K tokens; 0 means all (default: %(default)s)")  # fmt: skip
    add("--top-p", type=fraction, default=0.95,
        help="only the likeliest of so much probability (default: %(default)s)")  # fmt: skip
    add("--max-tokens", type=positive_int, default=128, help="tokens to add (default: %(default)s)")
    add("--num", type=positive_int, default=1, help="samples of each prompt (default: %(default)s)")
    add("--seed", type=int, default=0, help="(default: %(default)s)")
    add("--device", default="auto", choices=DEVICES, help="auto: a GPU if there is one")
    args = parser.parse_args()
    exits = (args.exit, args.exit_threshold, args.max_depth)
    if args.depth != "auto" and exits != (None, None, None):
        fail(
            "--exit, --exit-threshold and --max-depth go with --depth auto only; "
            "add that, or leave them out"
        )
    if not all(args.prompt):
        fail('there is an empty prompt; give some text, for example --prompt "The"')
    return args


def chosen_depth(args, cfg) -> Depth:
    if not cfg.n_core:
        if args.depth not in (None, "0") or args.cache_loops:
            fail("this model has no loop; leave --depth and --cache-loops out")
        return Depth(0)
    if args.depth == "auto":
        criterion = args.exit or "kl"
        threshold = args.exit_threshold
        if threshold is None:
            threshold = THRESHOLDS[criterion]
        return Depth(args.max_depth or 2 * cfg.mu_rec, criterion, threshold, args.cache_loops)
    if args.depth == "0":
        fail(f"--depth 0 must be at least 1; try --depth {cfg.mu_rec}")
    return Depth(int(args.depth or cfg.mu_rec), cache_loops=args.cache_loops)


def main():
    args = parse_args()
    model, enc, _ = open_model(args.run, args.device)
    depth = chosen_depth(args, model.cfg)
    stop = frozenset(enc.encode_single_token(name) for name in SPECIALS)
    how = Sampling(args.temperature, args.top_k, args.top_p, args.max_tokens, stop)
    room = model.cfg.seq_len
    prompts = []
    keys = []
    for text in args.prompt:
        prompt = [enc.encode_single_token(BOS), *encode(enc, text)]
        if len(prompt) > room:
            fail(
                f"the prompt has {len(prompt):,} tokens, {BOS} included, and the context {room:,}; "
                "give a shorter one"
            )
        prompts += [prompt] * args.num
        keys += [sequence_key(args.seed, SEED_SAMPLE, i) for i in range(args.num)]
    alone = len(prompts) == 1
    if alone:
        print(args.prompt[0], end="", flush=True)
    count = Counter()
    events = generate(model, prompts, keys, depth, how, count)
    tokens, times = collect(enc, len(prompts), events, stop, alone)
    if not alone:
        for i, made in enumerate(tokens):
            prompt, sample = divmod(i, args.num)
            print(f"--- prompt {prompt + 1}, sample {sample + 1}")
            print(args.prompt[prompt] + enc.decode_bytes(made).decode(errors="replace"))
    full = any(len(p) + len(made) > room for p, made in zip(prompts, tokens, strict=True))
    print(summary(tokens, times, count, room if full else None), file=sys.stderr)


def summary(tokens, times, count, full) -> str:
    """The last line; rates leave out each row's first token, which had the prompt to read.

    full: the size of the context if a row filled it.
    """
    parts = [f"{sum(map(len, tokens))} tokens"]
    if len(times) > 1:
        seconds = times[-1] - times[0]
        later = sum(max(0, len(made) - 1) for made in tokens)
        parts.append(f"{later / seconds:.0f} tokens/s")
        parts.append(f"{1e3 * seconds / (len(times) - 1):.1f} ms a token")
    parts.append(f"mean depth {count['loops'] / count['read']:.2f}")
    parts.append(f"keys and values {count['bytes']:,} bytes")
    if full:
        parts.append(f"the context of {full:,} tokens is full")
    return "\n" + ", ".join(parts)


if __name__ == "__main__":
    run_cli(main)
