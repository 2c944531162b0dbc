"""CORE's protocols once more, one example at a time, in lists: what core_eval.py must answer
too."""

import math
import random

import torch
import torch.nn.functional as F

from looped.randomness import FOR_EVAL, hash_key


def slow_shots(protocol, seed, n, k):
    """Indices of the shots of every example."""
    out = []
    everything = list(range(n))
    stream = random.Random(seed)
    for i in range(n):
        if protocol != "dclm":
            others = [j for j in everything if j != i]
            generator = random.Random(seed + i)
            out.append(generator.sample(others, k))
            continue
        chosen = set(stream.sample(everything, min(k, n - 1)))
        if i in chosen:
            chosen.remove(i)
            j = i
            while j == i or j in chosen:
                j = stream.choice(everything)
            chosen.add(j)
        out.append(list(chosen))
    return out


def slow_examples(task, rows, protocol, limit=None):
    """[(pool, index in pool)] in the order of scoring."""
    if protocol != "dclm":
        rows = list(rows)
        random.Random(1337).shuffle(rows)
        rows = rows[:limit]
        return [(rows, i) for i in range(len(rows))]
    clean = []
    for row in rows:
        texts = {name: text.strip() for name, text in row.items() if isinstance(text, str)}
        clean.append({**row, **texts})
    if task.label not in ("jeopardy", "mmlu_zeroshot", "mmlu_fewshot", "bbq"):
        return [(clean, i) for i in range(len(clean[:limit]))]
    out = []
    names = sorted({row["category"] for row in clean})
    share = math.ceil(limit / len(names)) if limit else None
    for name in names:
        pool = [row for row in clean if row["category"] == name]
        out += [(pool, i) for i in range(len(pool[:share]))]
    return out


def slow_shot(task, shot):
    gold = shot.get("gold")
    if task.kind == "mc":
        return shot["query"] + task.delimiter + shot["choices"][gold]
    end = task.delimiter + shot["continuation"]
    if task.kind == "schema":
        return shot["context_options"][gold] + end
    return shot["context"].strip() + end


def slow_dclm_rows(task, row, shots, enc, context):
    encode = enc.encode_ordinary
    bos = enc.encode_single_token("<|bos|>")
    text = "\n".join(slow_shot(task, shot) for shot in shots)
    blank = " " if len(encode(" a")) == 1 else ""
    lead = "\n" if text else ""
    d = task.delimiter
    if task.kind == "mc":
        stem = lead + row["query"] + d
        pairs = [(stem.rstrip(), choice) for choice in row["choices"]]
    elif task.kind == "schema":
        stems = row["context_options"]
        if text:
            stems = [lead + stem + d.rstrip() for stem in stems]
        pairs = [(stem, row["continuation"]) for stem in stems]
    else:
        stem = lead + row["context"] + d
        pairs = [(stem.rstrip(), row["continuation"])]
    out = []
    for stem, answer in pairs:
        if not answer.startswith(" "):
            answer = blank + answer
        answer = encode(answer)
        stem = [bos, *encode(text), *encode(stem)]
        while len(stem) + len(answer) > context:
            stem = stem[1:]
        whole = stem + answer
        out.append((whole, len(stem), len(whole)))
    return out


def slow_parcae_rows(task, row, shots, enc):
    def encode(text):
        return [enc.encode_single_token("<|bos|>"), *enc.encode_ordinary(text)]

    d = task.delimiter
    text = "".join(slow_shot(task, shot) + "\n\n" for shot in shots)
    if task.kind == "mc":
        stem = text + row["query"] + d
        ids = [encode(stem + choice) for choice in row["choices"]]
        start = 0
        while all(start < len(x) and x[start] == ids[0][start] for x in ids):
            start += 1
        return [(x, start, len(x)) for x in ids]
    if task.kind == "schema":
        end = d + row["continuation"]
        ids = [encode(text + context + end) for context in row["context_options"]]
        m = 0
        while all(m < len(x) and x[-1 - m] == ids[0][-1 - m] for x in ids):
            m += 1
        return [(x, len(x) - m, len(x)) for x in ids]
    stem = text + row["context"].strip() + d
    without = encode(stem.strip())
    whole = encode(stem + row["continuation"])
    assert whole[: len(without)] == without
    return [(whole, len(without), len(whole))]


def slow_rows(task, protocol, row, shots, enc, context):
    """[(tokens, start, end)] of each option: tokens[start:end] are scored; start may be negative
    after cropping."""
    if protocol == "dclm":
        return slow_dclm_rows(task, row, shots, enc, context)
    cropped = []
    for x, start, end in slow_parcae_rows(task, row, shots, enc):
        over = max(0, len(x) - context)
        cropped.append((x[over:], start - over, end - over))
    return cropped


@torch.no_grad()
def slow_answer(model, task, protocol, rows, depth, key):
    """One forward pass for each option: all logits, all losses."""
    means = []
    for x, start, end in rows:
        ids = torch.tensor([x])
        (logits,) = model.head(model.hidden(ids, depth, torch.tensor([key]))).float()
        if task.kind == "lm":
            said = logits.argmax(-1)[start - 1 : end - 1]
            return 0 if said.tolist() == x[start:end] else -1
        loss = F.cross_entropy(logits[:-1], ids[0, 1:], reduction="none")
        loss = torch.cat([loss, torch.tensor([math.nan])])  # of the token after the last
        mean = loss[start - 1 : end - 1].mean()
        if protocol == "dclm":
            mean = mean.exp()
        means.append(mean.item())
    return means.index(min(means))


def slow_rendered(enc, task, panel, context, seed=1234):
    """Yields (number, row, its options' (tokens, start, end)) of a task's examples."""
    shots = {}
    protocol = panel.protocol
    rows = panel.rows[task.label]
    examples = slow_examples(task, rows, protocol, panel.limit)
    for number, (pool, i) in enumerate(examples):
        if id(pool) not in shots:
            shots[id(pool)] = slow_shots(protocol, seed, len(pool), task.shots)
        row = pool[i]
        chosen = [pool[j] for j in shots[id(pool)][i]]
        yield number, row, slow_rows(task, protocol, row, chosen, enc, context)


def slow_task(model, enc, task, panel, seed, depth):
    """-> answers and golds of a task, one example after the other."""
    answers = []
    gold = []
    for number, row, made in slow_rendered(enc, task, panel, model.cfg.seq_len, seed):
        key = hash_key(seed, FOR_EVAL, task.index, number)
        answers.append(slow_answer(model, task, panel.protocol, made, depth, key))
        gold.append(row.get("gold", 0))
    return answers, gold
