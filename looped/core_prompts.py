"""CORE's prompts: which rows of a task are asked after which shots, and the tokens of each option.

The rules are those of Parcae's evaluator; nanochat's are the same. Rows are shuffled, shots are drawn
from the other rows, and a prompt is tokenised whole, after a BOS.
"""

import random
from dataclasses import dataclass, field
from functools import partial
from os.path import commonprefix
from typing import NamedTuple

import torch
from torch import Tensor

from looped.core_tasks import Panel, Task
from looped.machine import ONE_PROCESS, Rank
from looped.tokenizer import BOS, encode

# -- which rows, after which shots -----------------------------------------------------------------


class Example(NamedTuple):
    """A row that is asked."""

    options: list[tuple[str, str]]  # (all that comes before the answer, the answer)
    gold: int  # index of the right option; 0 where there is only one


def option_texts(row: dict, task: Task) -> list[tuple[str, str]]:
    """(context, answer) of each option."""
    if task.kind == "mc":
        texts = [(row["query"], choice) for choice in row["choices"]]
    elif task.kind == "schema":
        texts = [(context, row["continuation"]) for context in row["context_options"]]
    elif task.kind == "lm":
        texts = [(row["context"].strip(), row["continuation"])]
    else:
        texts = [(row["context"], row["continuation"].strip())]
    if task.trim:
        texts = [(context.rstrip(" "), answer.lstrip(" ")) for context, answer in texts]
    return texts


def draw_shots(seed: int, i: int, n: int, shots: int) -> list[int]:
    """The indices of the shots of example i of n: a sample of the others."""
    others = random.Random(seed + i).sample(range(n - 1), shots)
    return [j + (j >= i) for j in others]  # steps over i


def examples(task: Task, panel: Panel, seed: int) -> list[Example]:
    """The examples of a task, in the order of scoring. Rows beyond the limit are no shots either."""
    rows = list(panel.rows[task.label])
    if task.kind != "last-word":
        random.Random(1337).shuffle(rows)
    rows = rows[: panel.limit]
    texts = [option_texts(row, task) for row in rows]
    golds = [row.get("gold", 0) for row in rows]
    solved = [task.delimiter.join(options[gold]) for options, gold in zip(texts, golds)]
    asked = []
    for i, gold in enumerate(golds):
        shots = [solved[j] + "\n\n" for j in draw_shots(seed, i, len(rows), task.shots)]
        before = "".join(shots)
        options = [(before + context + task.delimiter, answer) for context, answer in texts[i]]
        asked.append(Example(options, gold))
    return asked


# -- the tokens of an option -----------------------------------------------------------------------

# For each kind: an example's options -> the tokens of each option with all that comes before it, and
# how many of them, at their end, are scored. BOS is still to be put before them.


def mc_options(options, encode) -> list[tuple[list, int]]:
    """Scored is what follows the common beginning of all choices."""
    prompts = [encode(before + answer) for before, answer in options]
    shared = len(commonprefix(prompts))
    return [(prompt, len(prompt) - shared) for prompt in prompts]


def schema_options(options, encode) -> list[tuple[list, int]]:
    """Scored is the common end of all options."""
    prompts = [encode(before + answer) for before, answer in options]
    shared = len(commonprefix([prompt[::-1] for prompt in prompts]))
    return [(prompt, shared) for prompt in prompts]


def lm_options(options, encode) -> list[tuple[list, int]]:
    """Scored is the continuation, with the blank before it. There is no option, and so no right
    answer, if the tokens do not begin with those of the prompt without its continuation.
    """
    ((before, answer),) = options
    prompt = encode(before + answer)
    start = encode(before.strip())
    begins = prompt[: len(start)] == start
    return [(prompt, len(prompt) - len(start))] if begins else []


def last_word_options(options, encode) -> list[tuple[list, int]]:
    """Scored is the last word, with the blank before it. Blanks at the end of its passage are left
    out where they would be tokens together with that blank.
    """
    ((before, word),) = options
    for context in (before[:-1], before.rstrip()):
        start = encode(context)
        prompt = encode(f"{context} {word}")
        if prompt[: len(start)] == start:
            break
    return [(prompt, len(prompt) - len(start))]


OPTIONS = {
    "mc": mc_options,
    "schema": schema_options,
    "lm": lm_options,
    "last-word": last_word_options,
}


# -- a task as rows of tokens ----------------------------------------------------------------------


@dataclass
class Row:
    """What the model is fed. Options of an example that differ in their last token alone share it."""

    example: int
    fed: Tensor  # (n,) int32
    targets: dict[int, Tensor] = field(default_factory=dict)  # by option: its scored tokens


@dataclass
class EncodedTask:
    """A task with the shots of one seed."""

    task: Task
    golds: list[int]  # of all examples
    cropped: Tensor  # (n,) float64: 1 for this rank's examples of which a prompt is cropped
    rows: list[Row] = field(default_factory=list)  # of this rank's examples


def encode_task(
    task: Task, panel: Panel, seed, enc, context: int, rank: Rank = ONE_PROCESS
) -> EncodedTask:
    """Renders and tokenises this rank's share of a task's examples. Of a prompt longer than `context`
    tokens the last ones are kept; its answer, if that is longer, is scored from the second of them.
    """
    asked = examples(task, panel, seed)
    golds = [example.gold for example in asked]
    work = EncodedTask(task, golds, torch.zeros(len(asked), dtype=torch.float64))
    bos = [] if task.kind == "last-word" else [enc.encode_single_token(BOS)]
    for number in range(rank.number, len(asked), rank.world):
        rows = {}  # by what is fed
        options = OPTIONS[task.kind](asked[number].options, partial(encode, enc))
        for option, (tokens, scored) in enumerate(options):
            prompt = bos + tokens
            if len(prompt) > context:
                work.cropped[number] = 1
                prompt = prompt[-context:]
                scored = min(scored, context - 1)
            ids = torch.tensor(prompt, dtype=torch.int32)
            row = rows.setdefault(tuple(prompt[:-1]), Row(number, ids[:-1]))
            row.targets[option] = ids[len(ids) - scored :]
        work.rows += rows.values()
    return work
