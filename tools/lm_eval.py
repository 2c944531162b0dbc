"""
A run as a model of EleutherAI's harness, lm_eval (`pip install lm_eval`; its tasks are fetched from
the Hugging Face hub).

    python -m tools.lm_eval --model looped --model_args run=RUN,depth=8,batch=32 --tasks hellaswag

model_args: run, depth (default: mu_rec), batch (sequences, 16), seed (of initial states),
add_bos_token (<|bos|> before each context; default False, as Parcae's authors have it). Encoding,
windows and cropping are those of the harness' Hugging Face models; <|bos|> replaces an empty
context.
"""

import math
import zlib

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

from core_eval import open_run
from looped.console import fail
from looped.depth import refuse_too_deep
from looped.machine import pick_device
from looped.randomness import FOR_EVAL, hash_key
from looped.tokenizer import SPECIALS, encode
from tools.sample import Depth, Sampling, generate

try:
    from lm_eval.__main__ import cli_evaluate
    from lm_eval.api import model, registry
    from lm_eval.models.utils import normalize_gen_kwargs
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
except ImportError as e:
    fail(f"{e}; pip install lm_eval")

HARNESS_ARGS = {"batch_size", "max_batch_size", "trust_remote_code"}  # which it gives every model


def whole_number(name: str, value, minimum: int) -> int:
    if not str(value).isdecimal() or int(value) < minimum:
        fail(f"{name}={value} must be a whole number from {minimum} on")
    return int(value)


def usable_device(name: str | None) -> str:
    """The harness asks for "cuda" where its user named nothing, whether or not there is one."""
    if name is None or (name.startswith("cuda") and not torch.cuda.is_available()):
        return pick_device("auto")
    return name


@registry.register_model("looped")
class Looped(model.TemplateLM):
    eot_token_id = None  # of an instance
    prefix_token_id = None

    def __init__(
        self, run="", depth=None, batch=16, seed=1234, add_bos_token=False, device=None, **others
    ):
        super().__init__()
        for name in others.keys() - HARNESS_ARGS:
            known = "run, depth, batch, seed, add_bos_token"
            fail(f"--model_args {name} is not one of {known}")
        self._device = torch.device(usable_device(device))
        self.model, self.enc, _ = open_run(run, self._device)
        self.max_length = self.model.cfg.seq_len
        self.bos_first = add_bos_token
        if depth is None:
            depth = max(1, self.model.cfg.mu_rec)  # a flat model heeds none
        self.depth = whole_number("depth", depth, 1)
        refuse_too_deep("depth", [self.depth])
        self.batch = whole_number("batch", batch, 1)
        self.seed = whole_number("seed", seed, 0)
        self.stop = [self.enc.encode_single_token(name) for name in SPECIALS]
        self.prefix_token_id, self.eot_token_id, _ = self.stop

    def tok_encode(self, string, add_special_tokens=True, **_):
        ids = encode(self.enc, string)
        if self.bos_first and add_special_tokens:
            ids = [self.prefix_token_id, *ids]
        return ids

    def key(self, context):
        """All continuations of a context begin with the same initial states."""
        return hash_key(self.seed, FOR_EVAL, zlib.crc32(str(context).encode()))

    def _loglikelihood_tokens(self, requests, disable_tqdm=False, **_):
        """[(…, context, continuation)] -> [(log-probability of the continuation, whether it is the
        greedy one)].
        """
        pairs = []
        for _, context, continuation in requests:
            pairs.append((context or [self.prefix_token_id], continuation))
        lengths = [-len(context + rest) for context, rest in pairs]
        longest_first = np.argsort(lengths, kind="stable")
        found = {}
        for start in tqdm(range(0, len(pairs), self.batch), disable=disable_tqdm):
            some = longest_first[start : start + self.batch]
            found.update(zip(some, self.score([pairs[i] for i in some])))
        return [found[i] for i in range(len(pairs))]

    @torch.inference_mode()
    def score(self, pairs):
        """The same for one batch of (context, continuation), cropped on the left."""
        rows = []
        for context, continuation in pairs:
            n = len(continuation)
            if n > self.max_length:
                fail(f"a continuation has {n} tokens, the model's context {self.max_length}")
            rows.append(torch.tensor((context + continuation)[-self.max_length - 1 :]))
        ids = pad_sequence([row[:-1] for row in rows], batch_first=True)  # (B, T), inert padding
        keys = torch.tensor([self.key(context) for context, _ in pairs])
        hidden = self.model.hidden(ids.to(self._device), self.depth, keys.to(self._device))
        scores = []
        for row, (_, continuation), h in zip(rows, pairs, hidden):
            first = len(row) - len(continuation)
            targets = row[first:].to(self._device)  # (n,)
            logits = self.model.head(h[first - 1 : len(row) - 1].float())  # (n, V)
            nats = F.cross_entropy(logits, targets, reduction="sum").item()
            if not math.isfinite(nats):
                why = "training diverged, or that is too deep"
                fail(f"the model's answer at depth {self.depth} is not finite: {why}")
            scores.append((-nats, torch.equal(logits.argmax(-1), targets)))
        return scores

    def loglikelihood_rolling(self, requests, disable_tqdm=False):
        """Log-probability of each whole text, in windows that fill the context; every token counts
        once.
        """
        totals = []
        for request in requests:
            ids = encode(self.enc, request.args[0])
            windows = get_rolling_token_windows(ids, self.prefix_token_id, self.max_length, 1)
            pairs = [("", *make_disjoint_window(window)) for window in windows]
            scores = self._loglikelihood_tokens(pairs, disable_tqdm=True)
            totals.append(sum(nats for nats, _ in scores))
        return totals

    def generate_until(self, requests, disable_tqdm=False):
        """Text up to the first of the strings `until` or a special token."""
        requests = tqdm(requests, desc="texts", disable=disable_tqdm)
        return [self.complete(*request.args) for request in requests]

    def complete(self, text: str, settings: dict) -> str:
        settings = normalize_gen_kwargs(settings)
        until = [stop for stop in settings["until"] if stop]
        most = settings["max_gen_toks"]
        if most >= self.max_length:
            context = f"the context of {self.max_length} tokens; lower it with --gen_kwargs"
            fail(f"max_gen_toks={most} leaves no room for a prompt in {context}")
        ids = self.tok_encode(text) or [self.prefix_token_id]
        ids = ids[-(self.max_length - most) :]
        temperature = settings.get("temperature", 1.0) if settings["do_sample"] else 0
        law = (temperature, settings.get("top_k", 0), settings.get("top_p", 1.0))
        how = Sampling(*law, tokens=most, stop=frozenset(self.stop))
        tokens = []
        made = ""
        for drawn, _ in generate(self.model, ids, [self.key(ids)], Depth(self.depth), how):
            tokens += drawn.values()
            made = self.enc.decode(tokens)
            if any(stop in made for stop in until):
                break
        return min((made.split(stop)[0] for stop in until), key=len, default=made)


if __name__ == "__main__":
    cli_evaluate()
