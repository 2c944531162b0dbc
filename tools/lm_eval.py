"""A run as a model of EleutherAI's harness, lm_eval (`pip install lm_eval`; its tasks are fetched
from the Hugging Face hub).

    python -m tools.lm_eval --model looped --model_args run=RUN,depth=8,batch=32 --tasks hellaswag

model_args: run, depth (default: mu_rec), batch (sequences, 16), seed (of initial states),
add_bos_token (<|bos|> before each context and at the head of each window of a rolling perplexity;
default False, as Parcae's authors have it). Encoding, windows and cropping are those of the
harness' Hugging Face models; <|bos|> replaces an empty context.
"""

import zlib

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

from core_eval import open_run
from looped.randomness import FOR_EVAL, hash_key
from looped.tokenizer import encode
from tools.sample import Depth, Sampling, draw, logits_of, special_tokens

HARNESS_ARGS = {"batch_size", "max_batch_size", "trust_remote_code"}  # which it gives every model
MAX_TOKENS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")


def encode_pair(enc, context: str, continuation: str) -> tuple[list[int], list[int]]:
    """Ids of a context and of what follows it, encoded together; blanks at the end of the context
    count as the continuation's. If the two share a token, the continuation is encoded by itself.
    """
    if not continuation:
        raise ValueError(f"the continuation of {context!r} is empty")
    words = context.rstrip()
    continuation = context[len(words) :] + continuation
    before = encode(enc, words)
    after = encode(enc, words + continuation)[len(before) :]
    return before, after or encode(enc, continuation)


def windows(ids: list[int], bos: int, size: int, bos_first: bool):
    """Pairs (context, continuation) that fill the model's context and score every token once. BOS
    begins the first one, or all of them, in the place of a token of context.
    """
    for start in range(0, len(ids), size):
        new = ids[start : start + size]
        before = [bos, *ids[:start]][len(new) - size - 1 :]
        if bos_first:
            before[0] = bos
        yield before, new


def sampling_of(settings: dict) -> Sampling:
    """The harness' generation settings. Without do_sample, a temperature above 0 asks for it."""
    sampled = settings.get("do_sample")
    temperature = float(settings.get("temperature", 1.0 if sampled else 0.0))
    if sampled is False:
        temperature = 0.0
    top_k = int(settings.get("top_k", 0))
    top_p = float(settings.get("top_p", 1.0))
    tokens = 256
    for name in MAX_TOKENS:
        tokens = settings.get(name) or tokens
    return Sampling(temperature, top_k, top_p, int(tokens))


class Looped:
    """What the harness asks of a model. It joins its class LM in main()."""

    def __init__(
        self, run="", depth=None, batch=16, seed=1234, add_bos_token=False, device=None, **others
    ):
        super().__init__()
        unknown = others.keys() - HARNESS_ARGS
        if unknown:
            raise ValueError(f"unknown --model_args: {', '.join(unknown)}")
        if not torch.cuda.is_available():
            device = "cpu"  # the harness' own default is "cuda"
        self._device = torch.device(device or "cuda")
        self.model, self.enc, _ = open_run(run, self._device)
        self.size = self.model.cfg.seq_len
        self.bos_first = add_bos_token
        self.depth = self.model.cfg.mu_rec if depth is None else int(depth)
        self.batch = int(batch)
        self.seed = int(seed)
        self.specials = special_tokens(self.enc)
        self.bos = self.specials[0]

    def key(self, context: list[int]) -> int:
        """All continuations of a context begin with the same initial states."""
        return hash_key(self.seed, FOR_EVAL, zlib.crc32(str(context).encode()))

    def begin(self, ids: list[int]) -> list[int]:
        """A context's ids as the model reads them."""
        return [self.bos, *ids] if self.bos_first or not ids else ids

    def loglikelihood(self, requests, disable_tqdm=False):
        """-> [(log-probability of the continuation, whether it is the greedy one)]."""
        pairs = []
        for request in requests:
            context, continuation = encode_pair(self.enc, *request.args)
            pairs.append((self.begin(context), continuation))
        return self.score_all(pairs, disable_tqdm)

    def score_all(self, pairs: list, disable_tqdm: bool):
        """In batches, the longest pairs first."""
        lengths = [-len(context + rest) for context, rest in pairs]
        longest_first = np.argsort(lengths, kind="stable")
        scores = [None] * len(pairs)
        for start in tqdm(range(0, len(pairs), self.batch), disable=disable_tqdm):
            batch = longest_first[start : start + self.batch]
            for i, score in zip(batch, self.score([pairs[i] for i in batch])):
                scores[i] = score
        return scores

    @torch.inference_mode()
    def score(self, pairs: list):
        """One batch, cropped on the left."""
        rows = []
        for context, continuation in pairs:
            n = len(continuation)
            if n > self.size:
                raise ValueError(f"a continuation has {n} tokens, the model's context {self.size}")
            rows.append(torch.tensor((context + continuation)[-self.size - 1 :]))
        ids = pad_sequence([row[:-1] for row in rows], batch_first=True)  # (B, T), inert padding
        seeds = torch.tensor([self.key(context) for context, _ in pairs], device=self._device)
        hidden = self.model.hidden(ids.to(self._device), self.depth, seeds)
        scores = []
        for row, (_, continuation), h in zip(rows, pairs, hidden):
            first = len(row) - len(continuation)
            targets = row[first:].to(self._device)  # (n,)
            logits = logits_of(self.model, h[first - 1 : len(row) - 1])  # (n, V)
            nats = F.cross_entropy(logits, targets, reduction="sum").item()
            scores.append((-nats, torch.equal(logits.argmax(-1), targets)))
        return scores

    def loglikelihood_rolling(self, requests, disable_tqdm=False):
        """Log-probability of each whole text."""
        totals = []
        for request in requests:
            ids = encode(self.enc, request.args[0])
            pairs = list(windows(ids, self.bos, self.size, self.bos_first))
            totals.append(sum(nats for nats, _ in self.score_all(pairs, disable_tqdm=True)))
        return totals

    def generate_until(self, requests, disable_tqdm=False):
        """Text up to the first of the strings `until` or a special token."""
        requests = tqdm(requests, desc="texts", disable=disable_tqdm)
        return [self.complete(*request.args) for request in requests]

    def complete(self, text: str, settings: dict) -> str:
        how = sampling_of(settings)
        room = self.size - how.tokens
        if room < 1:
            tokens = f"max_gen_toks={how.tokens}"
            raise ValueError(f"{tokens} leaves no room for a prompt in {self.size} tokens")
        until = settings.get("until") or []
        if isinstance(until, str):
            until = [until]
        until = [stop for stop in until if stop]
        prompt = self.begin(encode(self.enc, text))[-room:]
        text = ""
        made = []
        for (token,), _ in draw(self.model, prompt, [self.key(prompt)], Depth(self.depth), how):
            if token in self.specials:
                break
            made.append(token)
            text = self.enc.decode(made)
            if any(stop in text for stop in until):
                break
        for stop in until:
            text, *_ = text.split(stop)
        return text


def main():
    from lm_eval.__main__ import cli_evaluate
    from lm_eval.api.model import LM
    from lm_eval.api.registry import register_model

    register_model("looped")(type("LoopedLM", (Looped, LM), {}))
    cli_evaluate()


if __name__ == "__main__":
    main()
