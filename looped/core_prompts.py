"""CORE's prompts: which rows of a task are asked after which shots, and the tokens of each option.

parcae  Parcae's rules, which are nanochat's too: rows shuffled, whole prompts tokenised at once
dclm    llm-foundry's: rows in file order and by category, texts stripped and tokenised apart
lambada Parcae's harness for LAMBADA: the last word after its passage, without BOS
"""

import functools
import math
import random
import re
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from looped.core_tasks import Panel, Task
from looped.machine import ONE_PROCESS, Place
from looped.tokenizer import BOS, PATTERN
from looped.tokenizer import encode as encode_text

# -- which rows, after which shots -----------------------------------------------------------------


@dataclass
class Question:
    """A row that is asked, and the solved ones that come before it."""

    group: int  # of the averages within a category
    texts: list[tuple[str, str]]  # (context, answer) of each option
    gold: int  # the right option; of lm the only one
    shots: list[str]


def option_texts(row: dict, kind: str, protocol: str) -> list[tuple[str, str]]:
    """(context, answer) of each option, stripped as the protocol does: dclm strips all but what
    comes in lists.
    """
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


def questions(task: Task, rows, protocol, limit, seed) -> list[Question]:
    """The examples of a task, in the order of scoring.

    parcae cuts to `limit` before it draws shots. dclm has no limit of its own: there rows are cut
    after the shots are drawn, an equal share of each category.
    """
    if protocol == "parcae":
        rows = list(rows)
        random.Random(1337).shuffle(rows)
        rows = rows[:limit]
    pools = defaultdict(list)  # what shots are drawn from, by category
    for row in rows:
        category = ""
        if protocol == "dclm" and task.by_category:
            category = row["category"].strip()
        texts = option_texts(row, task.kind, protocol)
        gold = 0 if task.kind == "lm" else row["gold"]
        pools[category].append((texts, gold))
    share = math.ceil(limit / len(pools)) if limit else None
    draw = dclm_shots if protocol == "dclm" else parcae_shots
    found = []
    for group, (_, pool) in enumerate(sorted(pools.items())):
        solved = [task.delimiter.join(texts[gold]) for texts, gold in pool]
        drawn = draw(seed, len(pool), task.shots)
        for (texts, gold), chosen in zip(pool[:share], drawn):
            shots = [solved[j] for j in chosen]
            found.append(Question(group, texts, gold, shots))
    return found


# -- the tokens of an option -----------------------------------------------------------------------


def line_encoder(enc) -> Callable[[str], np.ndarray]:
    """text -> (n,) int32, tokenising each distinct line once: shots return in many prompts.

    With our pattern, a token that continues past a line end continues with white space only. So a
    text may be cut after each line end not followed by white space: the pieces' tokens are those
    of the whole. With another pattern, texts are encoded whole.
    """
    by_line = enc._pat_str == PATTERN

    @functools.cache
    def tokens(line):
        return np.array(encode_text(enc, line), np.int32)

    def encode(text):
        if not by_line:
            return tokens(text)
        *lines, last = re.split(r"\n(?=\S)", text)
        return np.concatenate([*(tokens(line + "\n") for line in lines), tokens(last)])

    return encode


def begins(whole, start) -> bool:
    """Whether a token array begins with another."""
    return np.array_equal(whole[: len(start)], start)


def common_prefix(rows) -> int:
    """Length of the common beginning of token arrays."""
    n = min(map(len, rows))
    same = np.all([row[:n] == rows[0][:n] for row in rows], axis=0)
    return int(np.append(same, False).argmin())


# What each protocol makes of a question: the tokens of each option, with all that comes before it,
# and how many of them, at their end, are scored. BOS is still to be put before them.


def parcae_options(task, question: Question, encode) -> list[tuple[np.ndarray, int]]:
    """Scored is, for mc, what follows the common beginning of all choices; for schema, their common
    end; for lm, the continuation. No options if the tokens of an lm prompt do not begin with those
    of the prompt without its continuation.
    """
    before = "".join(shot + "\n\n" for shot in question.shots)
    stems = [before + context + task.delimiter for context, _ in question.texts]
    prompts = [encode(stem + answer) for stem, (_, answer) in zip(stems, question.texts)]
    if task.kind == "mc":
        shared = common_prefix(prompts)
        return [(prompt, len(prompt) - shared) for prompt in prompts]
    if task.kind == "schema":
        shared = common_prefix([prompt[::-1] for prompt in prompts])
        return [(prompt, shared) for prompt in prompts]
    start = encode(stems[0].strip())  # a blank at the stem's end belongs to the continuation
    return [(prompt, len(prompt) - len(start)) for prompt in prompts if begins(prompt, start)]


def dclm_options(task, question: Question, encode) -> list[tuple[np.ndarray, int]]:
    """Shots, contexts and answers are tokenised apart; the whole answer is scored."""
    shots = encode("\n".join(question.shots))
    gap = "\n" if question.shots else ""
    blank = " " if len(encode(" a")) == 1 else ""
    options = []
    for context, answer in question.texts:
        if task.kind != "schema":
            context = (gap + context + task.delimiter).rstrip()
        elif question.shots:
            context = gap + context + task.delimiter.rstrip()
        if not answer.startswith(" "):
            answer = blank + answer
        scored = encode(answer)
        whole = np.concatenate([shots, encode(context), scored])
        options.append((whole, len(scored)))
    return options


def lambada_options(task, question: Question, encode) -> list[tuple[np.ndarray, int]]:
    ((context, word),) = question.texts
    if not begins(encode(f"{context} {word}"), encode(context)):
        context = context.rstrip()
    whole = encode(f"{context} {word}")
    return [(whole, len(whole) - len(encode(context)))]


OPTIONS = {"parcae": parcae_options, "dclm": dclm_options, "lambada": lambada_options}


def crop(tokens, scored: int, context: int, task: Task, protocol: str):
    """-> (the last `context` tokens, how many of them, at their end, are scored, what is odd).

    If no token is left before the scored ones ("cut"), Parcae slices as Python does, with a negative
    beginning: of five scored tokens of which three fit, two are cut off, and [-2:] scores two. Two
    public evaluators fail on such an example: dclm's, and Parcae's on an lm task where none is cut
    off. There we score what is left but its first token.
    """
    odd = set()
    if len(tokens) > context:
        odd.add("cropped")
        tokens = tokens[-context:]
    cut_off = scored - len(tokens)
    if cut_off >= 0:
        odd.add("cut")
        scored = len(tokens) - 1
        if protocol == "parcae" and (task.kind != "lm" or cut_off):
            scored = min(scored, cut_off)
    if not scored:
        odd.add("empty")
    return tokens, scored, odd


# -- a task as rows of tokens ----------------------------------------------------------------------


@dataclass(eq=False)
class Option:
    """A choice, context or continuation as the model reads it."""

    example: int
    fed: np.ndarray  # (n,) int32
    targets: np.ndarray  # the scored tokens: those that follow the last ones of `fed`


@dataclass
class Example:
    number: int
    gold: int
    options: list[Option]  # equal ones are one object; none: the example counts as wrong
    odd: set[str]  # names of what is odd


@dataclass
class EncodedTask:
    """A task with its shots of one seed."""

    task: Task
    protocol: str
    groups: np.ndarray  # (n,) of all examples
    examples: list[Example]  # of this rank
    rows: list[list[Option]]  # a row is what its first option is fed; the others' begins it


def share_rows(options) -> list[list[Option]]:
    """The model is causal and all options start from the same states, so an option that begins
    another's text needs no row of its own.
    """
    rows = []
    for option in sorted(options, key=lambda option: -len(option.fed)):
        if not len(option.targets):
            continue
        home = next((row for row in rows if begins(row[0].fed, option.fed)), None)
        if home:
            home.append(option)
        else:
            rows.append([option])
    return rows


def encode_task(
    task: Task, panel: Panel, seed, enc, context, place: Place = ONE_PROCESS
) -> EncodedTask:
    """Renders and tokenises this rank's share of a task's examples; context: tokens that the model
    reads.
    """
    protocol = panel.protocol
    asked = questions(task, panel.rows[task.label], protocol, panel.limit, seed)
    groups = np.array([question.group for question in asked])
    work = EncodedTask(task, protocol, groups, [], [])
    encode = line_encoder(enc)
    start = [] if protocol == "lambada" else [enc.encode_single_token(BOS)]
    for number in range(place.rank, len(asked), place.world):
        options = OPTIONS[protocol](task, asked[number], encode)
        odd = set() if options else {"not_prefix"}
        example = Example(number, asked[number].gold, [], odd)
        distinct = {}
        for tokens, scored in options:
            whole = np.concatenate([start, tokens], dtype=np.int32, casting="unsafe")
            tokens, scored, odd = crop(whole, scored, context, task, protocol)
            option = Option(number, tokens[:-1], tokens[len(tokens) - scored :])
            key = scored, tokens.tobytes()
            example.options.append(distinct.setdefault(key, option))
            example.odd |= odd
        work.examples.append(example)
        work.rows += share_rows(distinct.values())
    return work
