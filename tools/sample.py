"""Text from a trained model, at any depth.

    python -m tools.sample RUN --prompt "The sea" --depth 8
    python -m tools.sample RUN --prompt "The sea" --depth auto --exit-threshold 5e-4 --num 4

auto: a token leaves the loop when KL(answer_t || answer_{t-1}) falls under the threshold, where
answer_t is the model's next-token distribution after loop t (Geiping et al., arXiv 2502.05171,
"zero-shot adaptive compute"). A token is a function of (seed, sample, position) and the text
before it: not of a generator's state, nor of any other sample.
"""

import codecs
import sys
import time
from dataclasses import dataclass

import numpy as np
import torch

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
from looped.depth import even_plan, refuse_too_deep
from looped.endings import lacks_memory
from looped.machine import DEVICES, pick_device
from looped.randomness import FOR_SAMPLE, hash_key, uniforms
from looped.tokenizer import BOS, SPECIALS, encode

EXIT_THRESHOLD = 5e-4  # nats: the threshold of --depth auto


@dataclass
class Depth:
    """How many loops a token takes."""

    loops: int  # with a threshold, at most so many
    threshold: float | None = None  # nats: a token leaves when its answer changes by less


@dataclass
class Sampling:
    """How a token is drawn, and when a text ends."""

    temperature: float = 1.0  # 0: the likeliest token
    top_k: int = 0  # of so many likeliest tokens; 0: of all
    top_p: float = 1.0  # of the likeliest tokens that together exceed this probability
    tokens: int = 128  # to add
    stop: frozenset[int] = frozenset()  # tokens that end a text


@torch.no_grad()
def read(model, ids, keys, cache, depth: Depth):
    """Reads the next tokens, ids (B, T), into the cache -> (final hidden state (B, T, D), loops taken
    (B, T)).
    """
    if depth.threshold is not None:
        # one by one: each sees the last answers of those before it
        read_tokens = [read_token(model, token, keys, cache, depth) for token in ids.split(1, 1)]
        hidden, taken = zip(*read_tokens)
        return torch.cat(hidden, 1), torch.cat(taken, 1)
    cache.begin_piece(ids.size(1))
    h, inputs = model.enter_loop(ids, keys, cache)
    if inputs is not None:
        for state in model.unroll(h, inputs, even_plan(len(ids), depth.loops, ids.device), cache):
            h = state.h
    return model.coda(h, ids, cache), torch.full_like(ids, depth.loops)


def read_token(model, ids, keys, cache, depth: Depth):
    """The same for one token a row, (B, 1), which leaves the loop when its answer has settled."""
    cache.begin_piece(1)
    h, inputs = model.enter_loop(ids, keys, cache)
    live = torch.ones_like(ids, dtype=torch.bool)
    plan = list(even_plan(len(ids), depth.loops, ids.device))
    for loop in plan:
        loop.live = live  # one tensor for all, changed below
    taken = torch.zeros_like(ids)
    last = None
    for state in model.unroll(h, inputs, plan, cache):
        taken += live
        hidden = model.coda(state.h, ids, cache)  # what the coda keeps is of the last answer
        answer = logits_of(model, hidden).log_softmax(-1)  # (B, 1, V)
        if last is not None:
            change = (answer.exp() * (answer - last)).sum(-1)
            live &= change.clamp_min(0) >= depth.threshold  # rounding can take it below 0
            if not live.any():
                break
        last = answer
    return hidden, taken


def logits_of(model, hidden):
    """In float32 at least: in bfloat16 many a token's logit would equal the likeliest's."""
    return model.head(hidden.to(torch.promote_types(hidden.dtype, torch.float32)))


def pick(logits, u, how: Sampling):
    """logits (B, V), u (B,) float64 in (0, 1) -> tokens (B,), by inverting the distribution."""
    if how.temperature == 0:
        return logits.argmax(-1)
    if logits.device.type == "mps":  # it has no float64
        logits = logits.cpu()
    below = logits.double() - logits.amax(-1, keepdim=True)
    p = (below / how.temperature).softmax(-1)
    p, token = p.sort(dim=-1, descending=True, stable=True)
    if how.top_k:
        p[:, how.top_k :] = 0
    likelier = p.cumsum(-1) - p  # the probability of those before a token
    p = p * (likelier <= how.top_p * p.sum(-1, keepdim=True))
    cdf = p.cumsum(-1)
    drawn = (cdf <= u[:, None].to(cdf.device) * cdf[:, -1:]).sum(-1, keepdim=True)
    return token.gather(1, drawn)[:, 0]


@torch.no_grad()
def generate(model, prompt: list[int], keys: list[int], depth: Depth, how: Sampling):
    """Continues a prompt in one text for each key; a text's randomness comes from its key.

    Yields ({row: next token} of the rows that go on, the loops that the tokens just read took) until
    each row has its tokens, has met a stop, or has filled the context.
    """
    row_keys = torch.tensor(keys, device=model.cos.device)
    end = min(len(prompt) + how.tokens, model.cfg.seq_len + 1)
    cache = KVCache(model, end - 1, depth.loops)  # a last token is never read
    ids = torch.tensor([prompt] * len(keys), device=row_keys.device)
    going = list(range(len(keys)))
    for number in range(len(prompt), end):  # of the token to be drawn
        hidden, taken = read(model, ids, row_keys, cache, depth)
        logits = logits_of(model, hidden[:, -1])
        if not torch.isfinite(logits).all():
            why = "training diverged, or the depth is too large"
            fail(f"the model's answer at depth {depth.loops} is not finite: {why}")
        u = [uniforms(hash_key(key, 1), np.array([number]))[0] for key in keys]
        drawn = pick(logits, torch.tensor(u), how).tolist()
        ids = torch.tensor(drawn, device=row_keys.device)[:, None]
        taken = taken[going]
        going = [row for row in going if drawn[row] not in how.stop]
        yield {row: drawn[row] for row in going}, taken
        if not going:
            return


def loops_or_auto(text):
    return text if text == "auto" else positive_int(text)


def parse_args(argv):
    parser = Parser(description=__doc__, prog="python -m tools.sample")
    add = parser.add_argument
    add("run", metavar="RUN", help="run directory")
    add("--prompt", action="append", required=True, help="text to go on from; may be repeated")
    add("--depth", type=loops_or_auto, help="loops, or auto (default: the run's mu_rec)")
    add("--exit-threshold", type=non_negative_float,
        help="of --depth auto, which takes at most twice mu_rec loops: nats "
        f"(default: {EXIT_THRESHOLD})")  # fmt: skip
    add("--temperature", type=non_negative_float, default=0.8,
        help="0 takes the likeliest token (default: %(default)s)")  # fmt: skip
    add("--top-k", type=non_negative_int, default=0,
        help="only the likeliest K tokens; 0 means all (default: %(default)s)")  # fmt: skip
    add("--top-p", type=fraction, default=0.95,
        help="only the likeliest of so much probability (default: %(default)s)")  # fmt: skip
    add("--max-tokens", type=positive_int, default=128, help="tokens to add (default: %(default)s)")
    add("--num", type=positive_int, default=1, help="samples of each prompt (default: %(default)s)")
    add("--seed", type=int, default=0, help="(default: %(default)s)")
    add("--device", default="auto", choices=DEVICES,
        help="auto: an NVIDIA GPU or the CPU; mps, an Apple GPU, is untried")  # fmt: skip
    return parser.parse_args(argv)


def chosen_depth(args, cfg) -> Depth:
    if cfg.n_core == 0 and (args.depth or args.exit_threshold is not None):
        fail("the model has no loop; leave --depth and --exit-threshold out")
    if args.depth == "auto":
        threshold = EXIT_THRESHOLD if args.exit_threshold is None else args.exit_threshold
        return Depth(2 * cfg.mu_rec, threshold)
    if args.exit_threshold is not None:
        fail("--exit-threshold has no meaning without --depth auto; add it, or leave this out")
    loops = args.depth or cfg.mu_rec
    refuse_too_deep("--depth", [loops])
    return Depth(loops)


def write_texts(model, enc, text: str, keys: list[int], depth: Depth, how: Sampling) -> None:
    """Prints what follows a prompt, in one text for each key; a single one as it is drawn."""
    prompt = [enc.encode_single_token(BOS), *encode(enc, text)]
    room = model.cfg.seq_len
    if len(prompt) > room:
        what = f"the prompt has {len(prompt):,} tokens, {BOS} included, and the context {room:,}"
        fail(f"{what}; give a shorter one")
    single = len(keys) == 1
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    texts = [[] for _ in keys]
    loops = []  # of every token that was read
    start = time.perf_counter()
    if single:
        print(text, end="")
    for drawn, taken in generate(model, prompt, keys, depth, how):
        loops += taken.flatten().tolist()
        for row, token in drawn.items():
            texts[row].append(token)
            if single:
                new = decoder.decode(enc.decode_single_token_bytes(token))
                print(new, end="", flush=True)
    seconds = time.perf_counter() - start
    if single:
        print(decoder.decode(b"", final=True))
    else:
        for number, tokens in enumerate(texts, 1):
            print(f"--- sample {number}\n{text}{enc.decode(tokens)}")
    made = sum(map(len, texts))
    about = f"{made} tokens, {made / seconds:.0f} tokens/s, the prompt's reading included"
    print(f"{about}; mean depth {np.mean(loops):.2f}", file=sys.stderr)


def main(argv=None):
    args = parse_args(argv)
    model, enc, _ = open_run(args.run, torch.device(pick_device(args.device)))
    if model.residual_dtype is None:
        model.blocks.to(model.dtype)  # as every use would cast them
    depth = chosen_depth(args, model.cfg)
    stop = frozenset(enc.encode_single_token(name) for name in SPECIALS)
    how = Sampling(args.temperature, args.top_k, args.top_p, args.max_tokens, stop)
    keys = [hash_key(args.seed, FOR_SAMPLE, i) for i in range(args.num)]
    for text in args.prompt:
        try:
            write_texts(model, enc, text, keys, depth, how)
        except (RuntimeError, MemoryError) as e:
            if not lacks_memory(e) or args.num == 1:
                raise
            fail(f"--num {args.num} texts do not fit the memory at once; try --num {args.num // 2}")


if __name__ == "__main__":
    run_cli(main)
