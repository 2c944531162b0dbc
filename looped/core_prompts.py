"""CORE's prompts: which rows of a task are asked after which shots, and the tokens of each option.

parcae  Parcae's rules, which are nanochat's too: rows shuffled, whole prompts tokenised at once
dclm    llm-foundry's: rows in file order and by category, texts stripped and tokenised apart
lambada Parcae's harness for LAMBADA: the last word after its passage, without BOS
"""

import math
import random
from collections import defaultdict
from dataclasses import dataclass, field
from functools import partial
from os.path import commonprefix

import torch
from torch import Tensor

from looped.core_tasks import Panel, Task
from looped.machine import ONE_PROCESS, Place
from looped.tokenizer import BOS, encode

# -- which rows, after which shots -----------------------------------------------------------------


@dataclass
class Option:
    """A choice, context or continuation."""

    targets: Tensor  # the scored tokens
    scores: Tensor | None = None  # what the model makes of them


@dataclass
class Example:
    """A row that is asked, and the solved ones that come before it."""

    number: int  # its place among the examples
    group: int  # of the averages within a category
    texts: list[tuple[str, str]]  # (context, answer) of each option
    gold: int  # the right option; of lm the only one
    shots: list[str]
    options: list[Option] = field(default_factory=list)  # equal ones are one object
    cropped: bool = False
    empty: bool = False  # an option has no scored token


def option_texts(row: dict, kind: str, protocol: str) -> list[tuple[str, str]]:
    """(context, answer) of each option. dclm strips all texts but those in lists."""
    if kind == "mc":
        query = row["query"].strip() if protocol == "dclm" else row["query"]
        return [(query, choice) for choice in row["choices"]]
    answer = row["continuation"] if protocol == "parcae" else row["continuation"].strip()
    if kind == "schema":
        return [(context, answer) for context in row["context_options"]]
    context = row["context"] if protocol == "lambada" else row["context"].strip()
    return [(context, answer)]


def parcae_shots(seed, n, shots):
    """Yields the indices of the shots of each of n examples, sampled from the others."""
    for i in range(n):
        others = random.Random(seed + i).sample(range(n - 1), shots)
        yield [j + (j >= i) for j in others]  # stepping over i


def dclm_shots(seed, n, shots):
    """The same by llm-foundry's rules: one random stream for all examples; a draw of i itself is
    repeated; the order is a Python set's.
    """
    stream = random.Random(seed)
    for i in range(n):
        chosen = set(stream.sample(range(n), min(shots, n - 1)))
        if i in chosen:
            chosen.remove(i)
            other = i
            while other == i or other in chosen:
                other = stream.choice(range(n))
            chosen.add(other)
        yield list(chosen)


def examples(task: Task, panel: Panel, seed: int) -> list[Example]:
    """The examples of a task, in the order of scoring.

    parcae cuts to the limit before it draws shots. dclm has no limit of its own: there rows are cut
    after the shots are drawn, an equal share of each category.
    """
    dclm = panel.protocol == "dclm"
    rows = list(panel.rows[task.label])
    if panel.protocol == "parcae":
        random.Random(1337).shuffle(rows)
        rows = rows[: panel.limit]
    pools = defaultdict(list)  # what shots are drawn from, by category
    for row in rows:
        category = row["category"].strip() if dclm and task.by_category else ""
        gold = row.get("gold", 0)  # of lm the only option
        pools[category].append((option_texts(row, task.kind, panel.protocol), gold))
    share = math.ceil(panel.limit / len(pools)) if panel.limit else None
    draw = dclm_shots if dclm else parcae_shots
    found = []
    for group, (_, pool) in enumerate(sorted(pools.items())):
        solved = [task.delimiter.join(texts[gold]) for texts, gold in pool]
        drawn = draw(seed, len(pool), task.shots)
        for (texts, gold), chosen in zip(pool[:share], drawn):
            shots = [solved[j] for j in chosen]
            found.append(Example(len(found), group, texts, gold, shots))
    return found


# -- the tokens of an option -----------------------------------------------------------------------

# What each protocol makes of an example: the tokens of each option, with all that comes before it,
# and how many of them, at their end, are scored. BOS is still to be put before them.


def parcae_options(task: Task, example: Example, encode) -> list[tuple[list, int]]:
    """Scored is, for mc, what follows the common beginning of all choices; for schema, their common
    end; for lm, the continuation. No options if the tokens of an lm prompt do not begin with those
    of the prompt without its continuation.
    """
    before = "".join(shot + "\n\n" for shot in example.shots)
    stems = [before + context + task.delimiter for context, _ in example.texts]
    prompts = [encode(stem + answer) for stem, (_, answer) in zip(stems, example.texts)]
    if task.kind == "mc":
        shared = len(commonprefix(prompts))
        return [(prompt, len(prompt) - shared) for prompt in prompts]
    if task.kind == "schema":
        shared = len(commonprefix([prompt[::-1] for prompt in prompts]))
        return [(prompt, shared) for prompt in prompts]
    (prompt,) = prompts
    start = encode(stems[0].strip())  # a blank at the stem's end belongs to the continuation
    begins = prompt[: len(start)] == start
    return [(prompt, len(prompt) - len(start))] if begins else []


def dclm_options(task: Task, example: Example, encode) -> list[tuple[list, int]]:
    """Shots, contexts and answers are tokenised apart; the whole answer is scored."""
    shots = encode("\n".join(example.shots))
    gap = "\n" if example.shots else ""
    blank = " " if len(encode(" a")) == 1 else ""
    options = []
    for context, answer in example.texts:
        if task.kind != "schema":
            context = (gap + context + task.delimiter).rstrip()
        elif example.shots:
            context = gap + context + task.delimiter.rstrip()
        if not answer.startswith(" "):
            answer = blank + answer
        scored = encode(answer)
        options.append((shots + encode(context) + scored, len(scored)))
    return options


def lambada_options(task: Task, example: Example, encode) -> list[tuple[list, int]]:
    ((context, word),) = example.texts
    start = encode(context)
    if encode(f"{context} {word}")[: len(start)] != start:
        context = context.rstrip()
    whole = encode(f"{context} {word}")
    return [(whole, len(whole) - len(encode(context)))]


OPTIONS = {"parcae": parcae_options, "dclm": dclm_options, "lambada": lambada_options}


def crop(tokens: list, scored: int, context: int, task: Task, protocol: str):
    """-> (the last `context` tokens, how many of them, at their end, are scored).

    If no token is left before the scored ones, Parcae slices as Python does, with a negative
    beginning: of five scored tokens of which three fit, two are cut off, and [-2:] scores two. Two
    public evaluators fail on such an example: dclm's, and Parcae's on an lm task where none is cut
    off. There we score what is left but its first token.
    """
    tokens = tokens[-context:]
    cut_off = scored - len(tokens)
    if cut_off < 0:
        return tokens, scored
    scored = len(tokens) - 1
    if protocol == "parcae" and (task.kind != "lm" or cut_off):
        scored = min(scored, cut_off)
    return tokens, scored


# -- a task as rows of tokens ----------------------------------------------------------------------


@dataclass
class Row:
    """What the model is fed. Options that differ in their last token alone share it."""

    example: int
    fed: Tensor  # (n,) int32
    options: dict[tuple, Option] = field(default_factory=dict)  # by last token and length


@dataclass
class EncodedTask:
    """A task with its shots of one seed."""

    task: Task
    protocol: str
    groups: list[int]  # of all examples
    examples: list[Example]  # of this rank
    rows: list[Row] = field(default_factory=list)


def encode_task(
    task: Task, panel: Panel, seed, enc, context, place: Place = ONE_PROCESS
) -> EncodedTask:
    """Renders and tokenises this rank's share of a task's examples; context: tokens that the model
    reads.
    """
    protocol = panel.protocol
    asked = examples(task, panel, seed)
    groups = [example.group for example in asked]
    work = EncodedTask(task, protocol, groups, asked[place.rank :: place.world])
    bos = [] if protocol == "lambada" else [enc.encode_single_token(BOS)]
    for example in work.examples:
        rows = {}  # by what is fed
        for tokens, scored in OPTIONS[protocol](task, example, partial(encode, enc)):
            whole = bos + tokens
            tokens, scored = crop(whole, scored, context, task, protocol)
            example.cropped |= len(tokens) < len(whole)
            example.empty |= not scored
            ids = torch.tensor(tokens, dtype=torch.int32)
            row = rows.setdefault(tuple(tokens[:-1]), Row(example.number, ids[:-1]))
            option = Option(ids[len(ids) - scored :])
            option = row.options.setdefault((tokens[-1], scored), option)
            example.options.append(option)
        work.rows += rows.values()
    return work
