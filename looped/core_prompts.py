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

# -- which rows, after which shots -----------------------------------------------------------------


@dataclass
class Question:
    """A row that is asked, and the solved ones that come before it."""

    group: int  # of the averages within a category
    row: dict
    shots: list[dict]


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


def stripped(row: dict) -> dict:
    """dclm strips the texts, but not the choices."""
    return {k: v.strip() if isinstance(v, str) else v for k, v in row.items()}


def questions(task: Task, rows, protocol, limit, seed) -> list[Question]:
    """The examples of a task, in the order of scoring.

    parcae cuts to `limit` before it draws shots. dclm has no limit of its own: there rows are cut
    after the shots are drawn, an equal share of each category.
    """
    pools = defaultdict(list)  # what shots are drawn from, by category
    if protocol == "parcae":
        rows = list(rows)
        random.Random(1337).shuffle(rows)
        pools[""] = rows[:limit]
    elif protocol == "dclm":
        for row in rows:
            row = stripped(row)
            pools[row["category"] if task.by_category else ""].append(row)
    else:
        pools[""] = rows
    share = math.ceil(limit / len(pools)) if limit else None
    draw = dclm_shots if protocol == "dclm" else parcae_shots
    found = []
    for group, (_, pool) in enumerate(sorted(pools.items())):
        for row, chosen in zip(pool[:share], draw(seed, len(pool), task.shots)):
            found.append(Question(group, row, [pool[j] for j in chosen]))
    return found


# -- the tokens of an option -----------------------------------------------------------------------


@dataclass
class Option:
    """One choice, context or continuation, with all that comes before it."""

    tokens: np.ndarray  # (n,) int32
    first: int  # the scored tokens are tokens[first:]


@dataclass
class Encoder:
    """How texts become tokens."""

    encode: Callable  # text -> (n,) int32
    bos: np.ndarray  # (1,)
    blank: str  # what dclm puts before an answer: a space where " a" is one token, else nothing


def line_encoder(enc) -> Encoder:
    """An encoder that tokenises each distinct line once: shots return in many prompts.

    With our pattern, a token that continues past a line end continues with white space only. So a
    text may be cut after each line end not followed by white space: the pieces' tokens are those
    of the whole. With another pattern, texts are encoded whole.
    """
    by_line = enc._pat_str == PATTERN

    @functools.cache
    def tokens(line):
        return np.array(enc.encode_ordinary(line), np.int32)

    def encode(text):
        if not by_line:
            return tokens(text)
        *lines, last = re.split(r"\n(?=\S)", text)
        return np.concatenate([*(tokens(line + "\n") for line in lines), tokens(last)])

    bos = np.array([enc.encode_single_token(BOS)], np.int32)
    blank = " " if len(tokens(" a")) == 1 else ""
    return Encoder(encode, bos, blank)


def question_text(task, row):
    if task.kind == "mc":
        return row["query"]
    if task.kind == "schema":
        return row["context_options"][row["gold"]]
    return row["context"].strip()


def solved(task, row):
    """The text of a shot."""
    question = question_text(task, row) + task.delimiter
    if task.kind == "mc":
        return question + row["choices"][row["gold"]]
    return question + row["continuation"]


def begins(whole, start) -> bool:
    """Whether a token array begins with another."""
    return np.array_equal(whole[: len(start)], start)


def common_prefix(rows) -> int:
    """Length of the common beginning of token arrays."""
    n = min(map(len, rows))
    same = np.all([row[:n] == rows[0][:n] for row in rows], axis=0)
    return n if same.all() else int(same.argmin())


def parcae_options(task, question, text: Encoder) -> list[Option]:
    """What is scored: for mc, what follows the common beginning of all choices; for schema, their
    common end; for lm, the continuation. No options if the tokens of an lm prompt do not begin with
    those of the prompt without its continuation.
    """
    row = question.row
    before = "".join(solved(task, shot) + "\n\n" for shot in question.shots)

    def encode(prompt):
        return np.concatenate([text.bos, text.encode(prompt)])

    if task.kind == "mc":
        stem = before + row["query"] + task.delimiter
        prompts = [encode(stem + choice) for choice in row["choices"]]
        shared = common_prefix(prompts)
        return [Option(x, shared) for x in prompts]
    if task.kind == "schema":
        end = task.delimiter + row["continuation"]
        prompts = [encode(before + context + end) for context in row["context_options"]]
        shared = common_prefix([x[::-1] for x in prompts])
        return [Option(x, len(x) - shared) for x in prompts]
    stem = before + question_text(task, row) + task.delimiter
    whole = encode(stem + row["continuation"])
    start = encode(stem.strip())  # a blank at the stem's end belongs to the continuation
    if not begins(whole, start):
        return []
    return [Option(whole, len(start))]


def dclm_options(task, question, text: Encoder) -> list[Option]:
    """Shots, contexts and answers are tokenised apart; the whole answer is scored."""
    row = question.row
    shots = "\n".join(solved(task, shot) for shot in question.shots)
    gap = "\n" if question.shots else ""
    if task.kind == "schema":
        contexts = row["context_options"]
        if question.shots:
            end = task.delimiter.rstrip()
            contexts = [gap + context + end for context in contexts]
    else:
        context = gap + question_text(task, row) + task.delimiter
        contexts = [context.rstrip()]
    answers = row["choices"] if task.kind == "mc" else [row["continuation"]]
    start = np.concatenate([text.bos, text.encode(shots)])
    options = []
    for context in contexts:
        stem = np.concatenate([start, text.encode(context)])
        for answer in answers:
            answer = answer if answer.startswith(" ") else text.blank + answer
            tokens = np.concatenate([stem, text.encode(answer)])
            options.append(Option(tokens, len(stem)))
    return options


def lambada_options(task, question, text: Encoder) -> list[Option]:
    context = question.row["context"]
    word = " " + question.row["continuation"].strip()
    if not begins(text.encode(context + word), text.encode(context)):
        context = context.rstrip()
    start = text.encode(context)
    return [Option(text.encode(context + word), len(start))]


OPTIONS = {"parcae": parcae_options, "dclm": dclm_options, "lambada": lambada_options}


def crop(option: Option, context: int, task: Task, protocol: str):
    """-> (the last `context` tokens, the positions whose next token is scored, what is odd).

    If that cuts into the scored tokens ("cut"), Parcae slices as Python does: first = 0 gives
    an empty span, -k the last k tokens. Two public evaluators fail on such an example: dclm's, and
    Parcae's on an lm task where first = 0. There we score what is left of the answer.
    """
    over = max(0, len(option.tokens) - context)
    tokens = option.tokens[over:].copy()  # lets go of the rest
    first = option.first - over
    odd = {"cropped"} if over else set()
    if over and first < 1:
        odd.add("cut")
        if protocol != "parcae" or (task.kind == "lm" and first == 0):
            first = 1
    positions = range(len(tokens))[first - 1 : len(tokens) - 1]
    if not positions:
        odd.add("empty")
    return tokens, positions, odd


# -- a task as rows of tokens ----------------------------------------------------------------------


@dataclass(eq=False)
class Span:
    """Scored tokens of a row. Identical options share one span."""

    positions: range  # whose next tokens they are
    targets: np.ndarray  # (len(positions),) they themselves


@dataclass
class Row:
    """What is fed to the model."""

    example: int
    tokens: np.ndarray
    spans: list[Span]


@dataclass
class Example:
    number: int
    gold: int  # the right option; lm: 1; -1: none is
    spans: list[Span | None]  # of each option; None: nothing is scored
    odd: set[str]


@dataclass
class EncodedTask:
    """A task with its shots of one seed."""

    task: Task
    protocol: str
    groups: np.ndarray  # (n,) of all examples
    examples: list[Example]  # of this rank
    rows: list[Row]


def lay_out(number, cropped) -> tuple[list[Row], list[Span | None]]:
    """Rows and spans of an example from its options' (tokens, positions). The model is causal and
    all options start from the same states, so an option that is a prefix of another needs no row.
    """
    rows = []
    spans = [None] * len(cropped)
    known = {}
    longest_first = sorted(range(len(cropped)), key=lambda i: -len(cropped[i][0]))
    for i in longest_first:
        tokens, positions = cropped[i]
        if not positions:
            continue
        same = positions.start, tokens.tobytes()
        if same not in known:
            fed = tokens[: positions.stop]
            home = next((row for row in rows if begins(row.tokens, fed)), None)
            if home is None:
                home = Row(number, fed, [])
                rows.append(home)
            known[same] = Span(positions, tokens[positions.start + 1 :])
            home.spans.append(known[same])
        spans[i] = known[same]
    return rows, spans


def encode_task(
    task: Task, panel: Panel, seed, text: Encoder, context, place: Place = ONE_PROCESS
) -> EncodedTask:
    """Renders and tokenises this rank's share of a task's examples; context: tokens that the model
    reads.
    """
    protocol = panel.protocol
    asked = questions(task, panel.rows[task.label], protocol, panel.limit, seed)
    groups = np.array([question.group for question in asked])
    work = EncodedTask(task, protocol, groups, [], [])
    for number in range(place.rank, len(asked), place.world):
        options = OPTIONS[protocol](task, asked[number], text)
        gold = asked[number].row.get("gold", 1) if options else -1
        odd = set() if options else {"not_prefix"}
        cropped = []
        for option in options:
            tokens, positions, strange = crop(option, context, task, protocol)
            cropped.append((tokens, positions))
            odd |= strange
        rows, spans = lay_out(number, cropped)
        work.rows += rows
        work.examples.append(Example(number, gold, spans, odd))
    return work
