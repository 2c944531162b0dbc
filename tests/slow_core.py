"""CORE's rules once more, one example at a time, in lists: what core_eval.py must score too."""

import random

import torch
import torch.nn.functional as F

from looped.randomness import FOR_EVAL, hash_key


def slow_solved(task, row):
    """A row as a shot."""
    if task.kind == "mc":
        return row["query"] + task.delimiter + row["choices"][row["gold"]]
    end = task.delimiter + row["continuation"]
    if task.kind == "schema":
        return row["context_options"][row["gold"]] + end
    return row["context"].strip() + end


def slow_options(task, before, row, encode):
    """[(tokens, start)] of each option: tokens[start:] are scored."""
    d = task.delimiter
    if task.kind == "mc":
        ids = [encode(before + row["query"] + d + choice) for choice in row["choices"]]
        start = 0
        while all(start < len(x) and x[start] == ids[0][start] for x in ids):
            start += 1
        return [(x, start) for x in ids]
    if task.kind == "schema":
        end = d + row["continuation"]
        ids = [encode(before + context + end) for context in row["context_options"]]
        m = 0
        while all(m < len(x) and x[-1 - m] == ids[0][-1 - m] for x in ids):
            m += 1
        return [(x, len(x) - m) for x in ids]
    stem = before + row["context"].strip() + d
    start = encode(stem.strip())
    whole = encode(stem + row["continuation"])
    return [(whole, len(start))] if whole[: len(start)] == start else []


@torch.no_grad()
def slow_example(model, task, options, gold, depth, key):
    """One forward pass for each option, of all its tokens -> (1 if the answer is right, summed nats of
    the scored tokens, 1 if an option is longer than the context)."""
    greedy = False
    means = []
    nats = 0.0
    cropped = 0
    for tokens, start in options:
        over = max(0, len(tokens) - model.cfg.seq_len)
        cropped = max(cropped, min(over, 1))
        ids = torch.tensor([tokens[over:]])
        first = max(start - over, 1) - 1  # the first token has no loss
        (logits,) = model.head(model.hidden(ids, depth, torch.tensor([key])))
        logits, targets = logits[first:-1], ids[0, 1 + first :]
        losses = F.cross_entropy(logits, targets, reduction="none")
        greedy = torch.equal(logits.argmax(-1), targets)
        means.append(losses.mean().item())
        nats += losses.sum().item()
    right = greedy if task.kind == "lm" else means.index(min(means)) == gold
    return int(right), nats, cropped


def slow_task(model, enc, task, panel, seed, depth):
    """-> slow_example's numbers, each as (n,) float64, of a task's examples in the order of scoring."""

    def encode(text):
        return [enc.encode_single_token("<|bos|>"), *enc.encode_ordinary(text)]

    rows = list(panel.rows[task.label])
    random.Random(1337).shuffle(rows)
    rows = rows[: panel.limit]
    scores = []
    for i, row in enumerate(rows):
        shots = random.Random(seed + i).sample(rows[:i] + rows[i + 1 :], task.shots)
        before = "".join(slow_solved(task, shot) + "\n\n" for shot in shots)
        options = slow_options(task, before, row, encode)
        key = hash_key(seed, FOR_EVAL, task.index, i)
        scores.append(slow_example(model, task, options, row.get("gold"), depth, key))
    return torch.tensor(scores, dtype=torch.float64).T
