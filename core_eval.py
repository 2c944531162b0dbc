"""CORE (22 tasks), CORE Extended (46), LAMBADA perplexity and validation loss of a run, at any depth.

    python core_eval.py runs/tiny-euler                                   # CORE as the paper and the post report it
    python core_eval.py runs/tiny-euler --panel core-extended --depth 1,2,4,8,16 --max-per-task 100 --bundle DIR_OR_ZIP
    torchrun --standalone --nproc_per_node=8 core_eval.py runs/parcae-140m

A score is a function of (weights, data, seed, depth): a sequence draws its initial loop state from its own key, losses
are float32. Rounding, which depends on the batch, can still flip near ties: a gap of mean losses, or a greedy token's
lead, under 1e-3. Their number, summed over the seeds, is reported. Results: core_<panel>_<protocol>.json, .csv in RUN.
Sources: CORE is DCLM's (arXiv 2406.11794); the protocols are nanochat's, Parcae's, and llm-foundry's (dclm).
"""

import argparse
import io
import json
import math
import os
import random
import re
import sys
import zipfile
import zlib
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import datetime
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F

from dataloader import fail, file_hash, first_line, run_cli, write_atomic
from depth import SEED_EVAL, sequence_key
from model import load_run
from tokenizer_train import BOS, load_tokenizer, token_bytes, tokenizer_hash

URL, CACHE = "https://karpathy-public.s3.us-west-2.amazonaws.com/eval_bundle.zip", Path("data/eval_bundle.zip")
NEAR = 1e-3  # nats
# label, file, kind, shots, delimiter, chance in % (v1: nanochat, Parcae; v2: DCLM, 2025-09 on), CORE category, family.
# The first 22 are CORE. mc compares choices, schema contexts; lm asks whether the continuation is the greedy one.
TABLE = """
hellaswag_zeroshot               hellaswag                        mc      0 space  25   25   cont   LU
jeopardy                         jeopardy_all                     lm     10 line    0    0   fact   WK
bigbench_qa_wikidata             bigbench_qa_wikidata             lm     10 space   0    0   fact   WK
arc_easy                         arc_easy                         mc     10 line   25   25   sci    WK
arc_challenge                    arc_challenge                    mc     10 line   25   25   sci    WK
copa                             copa                             mc      0 space  50   50   common CS
commonsense_qa                   commonsense_qa                   mc     10 space  20   40.3 common CS
piqa                             piqa                             mc     10 line   50   50   common CS
openbook_qa                      openbook_qa                      mc      0 space  25   25   sci    CS
lambada_openai                   lambada_openai                   lm      0 space   0    0   cloze  LU
hellaswag                        hellaswag                        mc     10 space  25   25   cont   LU
winograd                         winograd_wsc                     schema  0 space  50   50   schema LU
winogrande                       winogrande                       schema  0 space  50   50   schema LU
bigbench_dyck_languages          bigbench_dyck_languages          lm     10 space   0    0   formal SM
agi_eval_lsat_ar                 agi_eval_lsat_ar                 mc      3 space  20   25   formal SM
bigbench_cs_algorithms           bigbench_cs_algorithms           lm     10 space   0    0   formal SM
bigbench_operators               bigbench_operators               lm     10 space   0    0   formal SM
bigbench_repeat_copy_logic       bigbench_repeat_copy_logic       lm     10 space   0    0   formal SM
squad                            squad                            lm     10 space   0    0   read   RD
coqa                             coqa                             lm      0 space   0    0   read   RD
boolq                            boolq                            mc     10 line   62   62   read   RD
bigbench_language_identification bigbench_language_identification mc     10 space   9.1 25   langid LU
mmlu_zeroshot                    mmlu                             mc      0 answer 25   25   -      WK
mmlu_fewshot                     mmlu                             mc      5 line   25   25   -      WK
siqa                             siqa                             mc     10 space  33.3 50   -      CS
bigbench_misconceptions          bigbench_misconceptions          mc     10 space  50   50   -      WK
bigbench_novel_concepts          bigbench_novel_concepts          mc     10 space  20   25   -      CS
bigbench_strange_stories         bigbench_strange_stories         mc     10 space  50   50   -      CS
bigbench_strategy_qa             bigbench_strategy_qa             mc     10 space  50   50   -      CS
bigbench_conlang_translation     bigbench_conlang_translation     lm      0 space   0    0   -      LU
bigbench_conceptual_combinations bigbench_conceptual_combinations mc     10 space  25   33   -      LU
bigbench_elementary_math_qa      bigbench_elementary_math_qa      mc     10 space  20   25   -      SM
bigbench_logical_deduction       bigbench_logical_deduction       mc     10 space  20   25   -      SM
simple_arithmetic_nospaces       simple_arithmetic_nospaces       lm     10 space   0    0   -      SM
simple_arithmetic_withspaces     simple_arithmetic_withspaces     lm     10 space   0    0   -      SM
math_qa                          math_qa                          mc     10 space  20   20   -      SM
logi_qa                          logi_qa                          mc     10 line   27   25   -      SM
pubmed_qa_labeled                pubmed_qa_labeled                lm     10 space   0    0   -      RD
agi_eval_lsat_rc                 agi_eval_lsat_rc                 mc      3 space  20   25   -      RD
agi_eval_lsat_lr                 agi_eval_lsat_lr                 mc      3 space  20   25   -      RD
bigbench_understanding_fables    bigbench_understanding_fables    mc     10 space  20   25   -      RD
agi_eval_sat_en                  agi_eval_sat_en                  mc      3 space  25   25   -      RD
winogender_mc_female             winogender_mc_female             mc     10 space  50   50   -      SB
winogender_mc_male               winogender_mc_male               mc     10 space  50   50   -      SB
enterprise_pii_classification    enterprise_pii_classification    mc     10 space  50   50   -      SB
bbq                              bbq                              mc      3 space  50   50   -      SB
"""
DELIMITERS = {"space": " ", "line": "\nAnswer: ", "answer": "Answer: "}
BY_CATEGORY = {"jeopardy", "mmlu_zeroshot", "mmlu_fewshot", "bbq"}  # in dclm: shots and averages within a category
FINE = {"cont": "commonsense continuation", "fact": "factual QA", "sci": "science QA",
        "common": "commonsense reasoning", "cloze": "cloze LM", "schema": "schema/coreference",
        "formal": "formal/symbolic", "read": "reading QA", "langid": "language identification", "-": ""}  # fmt: skip
FAMILY = {"LU": ("language understanding", "language_understanding"), "WK": ("world knowledge", "world_knowledge"),
          "CS": ("commonsense", "commonsense_reasoning"), "SM": ("symbolic/math", "symbolic_problem_solving"),
          "RD": ("reading", "reading_comprehension"), "SB": ("safety/bias", "safety")}  # name, folder; fmt: skip
KEYS = {"mc": {"query": str, "choices": list, "gold": int}, "lm": {"context": str, "continuation": str},
        "schema": {"context_options": list, "continuation": str, "gold": int}}  # fmt: skip
ODD = {"near_ties": "near ties", "cropped": "prompts cropped", "cut": "answers cut", "empty": "empty spans",
       "not_prefix": "prompts no prefix, counted wrong"}  # fmt: skip
Task = namedtuple("Task", "index label file kind shots delim baseline fine family")


def read_table():
    for index, line in enumerate(TABLE.strip().split("\n")):
        label, file, kind, shots, delim, v1, v2, fine, family = line.split()
        family, folder = FAMILY[family]
        file, baseline = f"{folder}/{file}.jsonl", {"v1": float(v1) / 100, "v2": float(v2) / 100}
        yield Task(index, label, file, kind, int(shots), DELIMITERS[delim], baseline, FINE[fine], family)


TASKS = list(read_table())
PANELS = {"core": TASKS[:22], "core-extended": TASKS, "lambada": TASKS[9:10]}
TITLES = {"core": "CORE", "core-extended": "CORE Extended", "lambada": "LAMBADA perplexity"}

# ---- the bundle


def fetch_bundle(path=CACHE, url=URL):
    """Downloads once, continuing where it was interrupted. The SHA-256 is kept beside the file and compared later."""
    import requests

    part, note = Path(f"{path}.part"), Path(f"{path}.sha256")
    if path.is_file():
        if note.is_file() and note.read_text().strip() != file_hash(path):
            fail(f"{path} has changed since it was fetched (see {note}); delete both to fetch it again")
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    have = part.stat().st_size if part.is_file() else 0
    try:
        with requests.get(url, stream=True, timeout=30, headers={"Range": f"bytes={have}-"} if have else {}) as r:
            if r.status_code != 416:  # 416: nothing is left to send
                r.raise_for_status()
                have = have if r.status_code == 206 else 0
                total = have + int(r.headers["Content-Length"])
                print(f"fetching {url}, {total / 1e6:.1f} MB, to {path}", flush=True)
                with open(part, "ab" if have else "wb") as f:
                    f.writelines(r.iter_content(1 << 16))
                if part.stat().st_size != total:
                    fail(f"{part} has {part.stat().st_size} of {total} bytes; run the command again, it continues")
    except (requests.RequestException, KeyError) as e:
        fail(f"cannot fetch {url} ({type(e).__name__}); try again, or give the zip or its folder with --bundle PATH")
    if not zipfile.is_zipfile(part):
        part.unlink()
        fail(f"{url} did not send a zip file; give the zip or its folder with --bundle PATH")
    note.write_text(file_hash(part) + "\n")
    os.replace(part, path)


def open_bundle(path):
    """A zip, or the folder that is, holds or surrounds eval_data -> ({file: reader}, SHA-256). Nothing is unpacked."""
    path = Path(path)
    if path.is_dir():
        root = next((p for p in (path / "eval_bundle/eval_data", path / "eval_data") if p.is_dir()), path).resolve()
        inside = [f for f in sorted(root.rglob("*.jsonl")) if f.resolve().is_relative_to(root)]
        found = {f.relative_to(root).as_posix(): f for f in inside}
        digest = sha256("".join(f"{name} {file_hash(f)}\n" for name, f in found.items()).encode())
        return {name: f.read_bytes for name, f in found.items()}, digest.hexdigest()
    if not path.is_file():
        fail(f"no evaluation bundle at {path}; give the zip or its folder with --bundle PATH")
    try:
        archive = zipfile.ZipFile(io.BytesIO(path.read_bytes()))
        names = archive.namelist()
        if unsafe := [n for n in names if n[:1] in "/\\" or ":" in n or ".." in re.split(r"[/\\]", n)]:
            fail(f"{path} holds {unsafe[0]!r}, which leaves its folder; use another bundle")
        if bad := archive.testzip():
            raise zipfile.BadZipFile(f"{bad} does not match its checksum")
    except (zipfile.BadZipFile, zipfile.LargeZipFile, EOFError, NotImplementedError, RuntimeError, zlib.error) as e:
        fail(f"{path} is not a usable zip file ({first_line(e)}); get it again")
    inside = {n.partition("eval_data/")[2]: n for n in names if n.endswith(".jsonl")}
    return {name: lambda n=n: archive.read(n) for name, n in inside.items()}, file_hash(path)


def parse_rows(blob, kind, where):
    """One JSON object a line, split at \\n only: U+0085 occurs inside strings. A bad line ends the program."""
    rows, options = [], {"mc": "choices", "schema": "context_options"}.get(kind)
    for number, line in enumerate(blob.split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            for key, expected in KEYS[kind].items():
                if type(row[key]) is not expected:
                    raise ValueError(f"{key} is no {expected.__name__}")
            if options and not (all(type(x) is str for x in row[options]) and 0 <= row["gold"] < len(row[options])):
                raise ValueError(f"{options} must be texts, and gold one of them")
        except (ValueError, KeyError, TypeError, RecursionError) as e:
            fail(f"{where}, line {number}: {type(e).__name__}: {first_line(e)}; get the bundle again")
        rows.append(row)
    return rows


def load_panel(path, name="core", protocol="parcae", limit=None):
    """-> the panel: its tasks, the rows of each, and the tasks that cannot be run, with the reason."""
    files, digest = open_bundle(path)
    panel = SimpleNamespace(name=name, protocol=protocol, limit=limit, sha256=digest, tasks=PANELS[name])
    panel.rows, panel.missing = {}, {}
    for task in panel.tasks:
        rows = parse_rows(files[task.file](), task.kind, task.file) if task.file in files else []
        n = min(len(rows), limit or len(rows))
        if n > (0 if protocol in ("dclm", "lambada") else task.shots):  # dclm takes fewer shots rather than fail
            panel.rows[task.label] = rows
        else:
            why = f"{task.shots} shots need more than {n} examples" if rows else f"no rows of {task.file}"
            panel.missing[task.label] = why
    return panel


# ---- prompts


def pools(task, rows, protocol, limit):
    """-> [(rows to draw shots from, how many of the first are scored)].

    nanochat, parcae: shuffle, cut to `limit`, draw shots inside the cut. dclm: file order, every text but the choices
    stripped, a pool for each category where it has them. It knows no limit: here the first of each pool are scored,
    with the shots of the full run.
    """
    if protocol in ("nanochat", "parcae"):
        rows = list(rows)
        random.Random(1337).shuffle(rows)
        return [(rows[:limit], len(rows[:limit]))]
    groups = {}
    for row in rows:
        name = row.get("category", "") if protocol == "dclm" and task.label in BY_CATEGORY else ""
        row = {k: v.strip() if isinstance(v, str) else v for k, v in row.items()} if protocol == "dclm" else row
        groups.setdefault(name, []).append(row)
    share = math.ceil(limit / len(groups)) if limit else len(rows)
    return [(groups[name], min(len(groups[name]), share)) for name in sorted(groups)]


def shot_indices(protocol, seed, n, shots):
    """Yields, for each of n examples in order, the indices of its shots.

    nanochat, parcae: a fresh Random(seed + i) samples from the others, which is sampling from range(n - 1) and stepping
    over i. dclm: one Random serves all examples; i itself is redrawn; the order is that in which a Python set of the
    indices iterates, so a real set goes through the same operations.
    """
    stream = random.Random(seed)
    for i in range(n):
        if shots and protocol != "dclm":
            yield [j + (j >= i) for j in random.Random(seed + i).sample(range(n - 1), shots)]
            continue
        chosen = set(stream.sample(range(n), min(shots, n - 1))) if shots else set()
        if i in chosen:
            chosen.remove(i)
            while (j := stream.choice(range(n))) in chosen or j == i:
                pass
            chosen.add(j)
        yield list(chosen)


def prompts(task, protocol, row, shots, blank=" "):
    """Texts of one example to encode; `spans` puts them together.

    nanochat, parcae: whole prompts, one for each choice or context; lm: the prompt without and with its continuation,
    the first stripped, as a trailing blank would be encoded with the next word. dclm: shots, contexts, answers apart;
    answers begin with `blank`, a space where " a" is one token. lambada: context, whole, context without end blanks.
    """
    d, kind = task.delim, task.kind
    if protocol == "lambada":
        return [row["context"], row["context"] + " " + row["continuation"].strip(), row["context"].rstrip()]

    def stem(r):
        return r["context"].strip() if kind == "lm" else r["query"] if kind == "mc" else r["context_options"][r["gold"]]

    parts = [stem(r) + d + (r["choices"][r["gold"]] if kind == "mc" else r["continuation"]) for r in shots]
    options = row.get("choices", row.get("context_options"))
    if protocol != "dclm":
        before = "".join(part + "\n\n" for part in parts)
        if kind == "mc":
            return [before + row["query"] + d + choice for choice in options]
        if kind == "schema":
            return [before + option + d + row["continuation"] for option in options]
        return [(before + stem(row) + d).strip(), before + stem(row) + d + row["continuation"]]
    gap = "\n" if parts else ""
    contexts = [(gap + stem(row) + d).rstrip()]
    if kind == "schema":  # nothing follows the option when there are no shots
        contexts = [gap + option + d.rstrip() if parts else option for option in options]
    answers = options if kind == "mc" else [row["continuation"]]
    return ["\n".join(parts), *contexts, *(a if a.startswith(" ") else blank + a for a in answers)]


def shared(rows):
    """Length of the longest common prefix of int arrays."""
    n = min(map(len, rows))
    differ = (np.stack([x[:n] for x in rows]) != rows[0][:n]).any(0)
    return int(differ.argmax()) if differ.any() else n


def spans(task, protocol, ids, bos, context):
    """Encoded texts of an example -> ([(tokens, positions that predict the scored tokens)], what is odd about it).

    Scored is, nanochat and parcae: mc, what follows the common prefix of all choices; schema, the common suffix; lm,
    what follows the prompt. dclm: the whole answer. Each row keeps its last `context` tokens. If that cuts into what is
    scored (`cut`), its first index is 0 or negative: nanochat asserts that it is not negative, parcae slices on. Here
    both slice as Python does: 0 gives an empty span, -k the last k tokens. Where the originals stop (lm at 0; dclm; an
    lm prompt that is no prefix) the example counts, and is named. An empty span's mean is NaN; for lm it is right.
    """
    ids, odd = [np.array(x, np.int32) for x in ids], set()
    if protocol == "lambada":  # no BOS, as Parcae's harness has it
        prefix = np.array_equal(ids[0], ids[1][: len(ids[0])])
        rows, firsts = [ids[1]], [len(ids[0] if prefix else ids[2])]
    elif protocol == "dclm":
        n = len(ids) - 2 if task.kind == "schema" else 1  # contexts
        pairs = [(np.concatenate([[bos], ids[0], c]), a) for c in ids[1 : 1 + n] for a in ids[1 + n :]]
        rows, firsts = [np.concatenate(pair) for pair in pairs], [len(c) for c, _ in pairs]
    else:
        rows = [np.concatenate([[bos], x]) for x in ids]
        if task.kind == "mc":
            firsts = [shared(rows)] * len(rows)
        elif task.kind == "schema":
            suffix = shared([x[::-1] for x in rows])
            firsts = [len(x) - suffix for x in rows]
        else:
            without, rows = rows[0], rows[1:]
            firsts = [len(without)]
            odd |= set() if np.array_equal(without, rows[0][: len(without)]) else {"not_prefix"}
    out = []
    for row, first in zip(rows, firsts):
        over = max(0, len(row) - context)
        first -= over
        odd |= {"cropped"} if over else set()
        if over and first < 1:
            odd.add("cut")
            first = 1 if protocol in ("dclm", "lambada") or (task.kind == "lm" and first == 0) else first
        positions = range(len(row) - over)[first - 1 : len(row) - over - 1]
        odd |= set() if positions else {"empty"}
        out.append((row[over:].astype(np.int32), positions))
    return out, odd


# ---- scoring


def prepare(task, panel, seed, enc, context, rank=0, world=1):
    """Renders every example, and encodes this rank's share: every world-th by length, so that ranks get equal tokens.

    A row is fed up to its last scored position. If it is then the beginning of another row of its example, it is left
    out: both have the same key and the model is causal, so the longer row has the same states. Thus choices that differ
    in their last token only take one row. asks[r]: what row r answers, (example, option, positions, target tokens).
    """
    blank, bos = " " * (len(enc.encode_ordinary(" a")) == 1), enc.encode_single_token(BOS)
    threads = max(1, os.cpu_count() // world)  # as if all ranks were on this machine
    work = SimpleNamespace(task=task, gold=[], group=[], rows=[], owner=[], asks=[], options={})
    work.odd, texts = dict.fromkeys(ODD, 0), []
    for group, (rows, count) in enumerate(pools(task, panel.rows[task.label], panel.protocol, panel.limit)):
        for row, chosen in zip(rows[:count], shot_indices(panel.protocol, seed, len(rows), task.shots)):
            work.gold.append(row.get("gold", 1))
            work.group.append(group)
            texts.append(prompts(task, panel.protocol, row, [rows[j] for j in chosen], blank))
    mine = sorted(range(len(texts)), key=lambda i: (-sum(map(len, texts[i])), i))[rank::world]
    for at in range(0, len(mine), 256):
        part = mine[at : at + 256]
        encoded = iter(enc.encode_ordinary_batch([t for i in part for t in texts[i]], num_threads=threads))
        for i in part:
            found, odd = spans(task, panel.protocol, [next(encoded) for _ in texts[i]], bos, context)
            work.options[i], kept = len(found), []
            for name in odd:
                work.odd[name] += 1
            work.gold[i] = -1 if "not_prefix" in odd else work.gold[i]
            for option, (row, span) in sorted(enumerate(found), key=lambda x: -len(x[1][0])):
                if not span:
                    continue
                fed = row[: span.stop]
                home = next((r for r in kept if np.array_equal(work.rows[r][: len(fed)], fed)), len(work.rows))
                if home == len(work.rows):
                    kept.append(home)
                    work.rows.append(fed)
                    work.owner.append(i)
                    work.asks.append([])
                work.asks[home].append((i, option, np.array(span), row[span.start + 1 : span.stop + 1]))
    return work


@torch.inference_mode()
def score_batch(model, work, batch, depths, keys, device):
    """Rows of a batch -> (asks, {depth: (3, S) float32: loss, hit, lead of every scored token}).

    hit: the token is the greedy one. lead: its logit less the best other one's. Right padding is inert: all is causal.
    """
    ids = np.zeros((len(batch), max(len(work.rows[r]) for r in batch)), np.int64)  # (B, T)
    for b, r in enumerate(batch):
        ids[b, : len(work.rows[r])] = work.rows[r]
    asks = [(b, ask) for b, r in enumerate(batch) for ask in work.asks[r]]
    at = torch.from_numpy(np.concatenate([b * ids.shape[1] + ask[2] for b, ask in asks])).to(device)  # (S,)
    targets = torch.from_numpy(np.concatenate([ask[3] for _, ask in asks])).long().to(device)  # (S,)
    ids, out = torch.from_numpy(ids).to(device), {}
    for depth, h in model.states(ids, depths, torch.tensor(keys, device=device)):
        parts = []
        for x, y in zip(model.after(h, ids).flatten(0, 1)[at].split(4096), targets.split(4096)):
            logits = model.head(x.float()).float()  # (s, V)
            loss = hit = lead = F.cross_entropy(logits, y, reduction="none")
            if work.task.kind == "lm":
                top, hit = logits.topk(2).values, logits.argmax(-1) == y  # (s, 2), (s,)
                lead = logits.gather(1, y[:, None])[:, 0] - torch.where(hit, top[:, 1], top[:, 0])
            parts.append(torch.stack([loss, hit.float(), lead]))
        out[depth] = torch.cat(parts, 1)
    return [ask for _, ask in asks], out


def decide(kind, protocol, options):
    """Scores (3, s) of an example's options, None for an empty span -> (answer, margin, nats of an lm continuation).

    mc, schema: the first least mean loss, by Python's min and index: a NaN wins in first place and loses elsewhere.
    dclm compares exp(mean loss) in float32, which ties where losses may not. lm: 1 if all tokens (or none) are greedy.
    """
    if kind == "lm":
        part = options[0]
        return (1, math.inf, 0.0) if part is None else (
            int(part[1].all()), abs(part[2].min().item()), part[0].double().sum().item())  # fmt: skip
    means = [torch.tensor(math.nan) if part is None else part[0].mean() for part in options]
    values = [(m.exp() if protocol == "dclm" else m).item() for m in means]
    ranked = sorted(m.item() for m in means if not m.isnan())
    return values.index(min(values)), ranked[1] - ranked[0] if len(ranked) > 1 else math.inf, 0.0


def run_task(model, work, protocol, depths, seed, device="cpu", world=1, budget=None, tick=lambda tokens: None):
    """-> {depth: (4, n) float64: answer, correct, near tie, nats of every example}, odd counts; the same on every rank.

    Rows run longest first in batches of at most `budget` tokens. On a CPU each core takes batches of its own: products
    this small gain little from being split over cores. All options of an example share one key: they are compared under
    the same initial states, and rows with a common beginning have common states.
    """
    cpu, threads = torch.device(device).type == "cpu", torch.get_num_threads()
    budget, batches = budget or (1024 if cpu else 65_536), []
    for r in sorted(range(len(work.rows)), key=lambda r: (-len(work.rows[r]), r)):
        if not batches or (len(batches[-1]) + 1) * len(work.rows[batches[-1][0]]) > budget:
            batches.append([])
        batches[-1].append(r)

    def run(batch):
        keys = [sequence_key(seed, SEED_EVAL, work.task.index, work.owner[r]) for r in batch]
        return score_batch(model, work, batch, depths, keys, device)

    scores = {d: {i: [None] * count for i, count in work.options.items()} for d in depths}
    with ThreadPoolExecutor(threads) as pool:
        torch.set_num_threads(1 if cpu else threads)
        try:
            done = []
            for batch, result in zip(batches, pool.map(run, batches) if cpu else map(run, batches)):
                done.append(result)
                tick(sum(len(work.rows[r]) for r in batch))
        finally:
            torch.set_num_threads(threads)
    for asks, out in done:
        for d, values in out.items():
            for (i, option, *_), part in zip(asks, values.cpu().split([len(ask[2]) for ask in asks], dim=1)):
                scores[d][i][option] = part
    table = torch.zeros(len(depths), 4, len(work.gold), dtype=torch.float64)
    for d, depth in enumerate(depths):
        for i, options in scores[depth].items():
            answer, margin, nats = decide(work.task.kind, protocol, options)
            table[d, :, i] = torch.tensor([answer, answer == work.gold[i], margin < NEAR, nats], dtype=torch.float64)
    table, odd = table.to(device), torch.tensor(list(work.odd.values()), device=device)
    if world > 1:
        dist.all_reduce(table)
        dist.all_reduce(odd)
    return dict(zip(depths, table.cpu().numpy())), dict(zip(work.odd, odd.tolist()))


# ---- averages


def accuracy(correct, group):
    """Mean of 0s and 1s in float32, as in the public evaluators; with categories (dclm), the plain mean of theirs."""
    parts = [correct[np.array(group) == g] for g in sorted(set(group))]
    return float(np.mean([float(np.float32(p.sum()) / np.float32(len(p))) for p in parts]))


def spread(per_seed):
    """Mean and population standard deviation over seeds."""
    values = list(per_seed.values())
    return {"mean": float(np.mean(values)), "std": float(np.std(values)), "per_seed": per_seed}


def mean_centred(tasks, entries):
    """The mean over tasks, seed by seed, so that its deviation is that of the means."""
    scores = [entries[t.label]["centered"]["per_seed"] for t in tasks]
    return spread({seed: float(np.mean([s[seed] for s in scores])) for seed in scores[0]})


def aggregate(name, entries, limit=None):
    """The unweighted mean of the centred scores, called CORE only if no task is missing."""
    tasks, total = [t for t in PANELS[name] if t.label in entries], len(PANELS[name])
    title = TITLES[name] if len(tasks) == total else f"mean of {len(tasks)} of the {total} {TITLES[name]} tasks"
    values = {"mean": None, "std": None, "per_seed": {}}
    if tasks:
        values = entries[tasks[0].label]["perplexity"] if name == "lambada" else mean_centred(tasks, entries)
    title += f", at most {limit} examples a task" if limit else ""
    return {"name": title if tasks else None, **values, "tasks_done": len(tasks), "tasks_total": total}


def summarise(panel, entries):
    """Entries of the tasks at one depth -> the record of that depth. An incomplete category says so in its name."""
    total = aggregate(panel.name, entries, panel.limit)
    record = {"aggregate": total, "per_seed": total.pop("per_seed"), "tasks": entries}
    if panel.name == "core-extended":
        record["core"] = aggregate("core", entries, panel.limit)
    for kind, field, tasks in (("categories_fine", "fine", TASKS[:22]), ("categories_ext", "family", panel.tasks)):
        record[kind], names = {}, dict.fromkeys(getattr(t, field) for t in tasks)
        for name in names if panel.name != "lambada" else ():
            members = [t for t in tasks if getattr(t, field) == name]
            if have := [t for t in members if t.label in entries]:
                name += "" if len(have) == len(members) else f" ({len(have)} of {len(members)})"
                record[kind][name] = mean_centred(have, entries)["mean"]
    return record


def entry(work, depth, results, baselines, protocol):
    """The record of a task at one depth, from {seed: result of run_task}."""
    base, tables = work.task.baseline[baselines], {str(s): found[depth] for s, (found, _) in results.items()}
    acc = {s: accuracy(t[1], work.group) for s, t in tables.items()}
    centred = {s: (a - base) / (1 - base) for s, a in acc.items()}
    out = {"accuracy": spread(acc), "centered": spread(centred), "n": len(work.gold)}
    out |= {name: sum(odd[name] for _, odd in results.values()) for name in ODD}
    out["near_ties"] = int(sum(t[2].sum() for t in tables.values()))
    if protocol == "lambada":
        out["perplexity"] = spread({s: math.exp(t[3].mean()) for s, t in tables.items()})
    return out


@contextmanager
def plain(model):
    """Full float32 products, and none of the pieces that train.py compiles: those expect the shapes of training."""
    matmul = torch.backends.cuda.matmul
    compiled = {k: v for k, v in vars(model).items() if callable(getattr(type(model), k, 0))}
    tf32, matmul.allow_tf32 = matmul.allow_tf32, False
    try:
        for name in compiled:
            delattr(model, name)
        yield
    finally:
        vars(model).update(compiled)
        matmul.allow_tf32 = tf32


def evaluate(model, enc, panel, depths, seeds, baselines="v1", device="cpu", rank=0, world=1, budget=None, done=None,
             on_task=lambda label, records: None, show=False):  # fmt: skip
    """All tasks of a panel (from load_panel) -> {depth: record}; every rank calls it, as train.py --core-every does.

    Shots follow the seed in parcae; nanochat and dclm fix them at 1234, so there a seed changes initial states only.
    What no seed can change is computed once. The next task is encoded while one runs. done: {depth: {label: entry}}.
    """
    from tqdm import tqdm

    cfg, entries = model.cfg, {d: dict((done or {}).get(d, {})) for d in depths}
    random_state, jobs, weight = cfg.n_core > 0 and cfg.state_init != "zero", [], {}
    for task in panel.tasks:
        if task.label in panel.rows and not all(task.label in entries[d] for d in depths):
            rows, moves = panel.rows[task.label], panel.protocol == "parcae" and task.shots > 0
            jobs += [(task, seed, seed if moves else 1234) for seed in (seeds if moves or random_state else seeds[:1])]
            size = sum(len(str(row)) for row in rows[:50]) / len(rows[:50]) / 4 * (1 + task.shots)  # tokens, roughly
            weight[task.label] = min(cfg.seq_len, size) * min(panel.limit or len(rows), len(rows))
    total = sum(weight[t.label] for t, *_ in jobs) * (1 + 1e-9) or 1  # a little more than what rounding may add up to
    style = "{percentage:3.0f}% |{bar:40}| {elapsed} gone, {remaining} left"
    bar = tqdm(total=total, disable=rank > 0 or not show, bar_format=style)
    with bar, plain(model), ThreadPoolExecutor(1) as ahead:
        start = lambda j: ahead.submit(prepare, jobs[j][0], panel, jobs[j][2], enc, cfg.seq_len, rank, world)
        future, results = start(0) if jobs else None, {}
        for j, (task, seed, shot_seed) in enumerate(jobs):
            work, last = future.result(), j + 1 == len(jobs)
            if not last and (jobs[j + 1][0], jobs[j + 1][2]) != (task, shot_seed):
                future = start(j + 1)
            share = weight[task.label] / max(1, sum(map(len, work.rows)))
            results[seed] = run_task(model, work, panel.protocol, depths, seed, device, world, budget,
                                     lambda tokens: bar.update(tokens * share))  # fmt: skip
            if last or jobs[j + 1][0] != task:
                results = {seed: results.get(seed, results[seeds[0]]) for seed in seeds}
                for d in depths:
                    entries[d][task.label] = entry(work, d, results, baselines, panel.protocol)
                on_task(task.label, {d: summarise(panel, entries[d]) for d in depths})
                results = {}
    return {d: summarise(panel, entries[d]) for d in depths}


# ---- the program


def task_line(label, e):
    notes = ", ".join(f"{e[name]} {text}" for name, text in ODD.items() if e[name])
    acc, centred = e["accuracy"], e["centered"]["mean"]
    return f"{label:33} {acc['mean']:.4f} ± {acc['std']:.4f}  centred {centred:+.4f}  n {e['n']:5d}  {notes}".rstrip()


def save(path, header, records):
    """Everything as JSON; the scores as CSV."""
    depths = {str(d): record for d, record in sorted(records.items())}
    write_atomic(f"{path}.json", json.dumps({**header, "depths": depths}, indent=1).encode())
    lines = ["depth,task,accuracy,accuracy_std,centered,centered_std,n,near_ties"]
    for d, record in depths.items():
        for label, e in record["tasks"].items():
            values = [e[k][s] for k in ("accuracy", "centered") for s in ("mean", "std")]
            lines.append(",".join([d, label, *(f"{v:.6f}" for v in values), str(e["n"]), str(e["near_ties"])]))
        if (a := record["aggregate"])["name"]:
            lines.append(f'{d},"{a["name"]}",,,{a["mean"]:.6f},{a["std"]:.6f},,')
    write_atomic(f"{path}.csv", "\n".join([*lines, ""]).encode())


def earlier(path, header, say):
    """{depth: {label: entry}} of an earlier start with the same settings; else nothing, and a line that says why."""
    try:
        old = json.loads(Path(f"{path}.json").read_text(encoding="utf-8"))
        differ = [k for k, v in header.items() if k not in ("date", "command", "missing") and old[k] != v]
        if not differ:
            return {int(d): record["tasks"] for d, record in old["depths"].items()}
        say(f"{path}.json was made with another {', '.join(differ)}; all tasks run again")
    except FileNotFoundError:
        pass
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        say(f"{path}.json is damaged ({first_line(e)}); all tasks run again")
    return {}


def parse_args(argv=None):
    p = argparse.ArgumentParser(description="Evaluate a run.", allow_abbrev=False)
    add = p.add_argument
    add("run", metavar="RUN", help="run directory")
    add("--panel", default="core", choices=[*PANELS, "val"], help="what to evaluate (default: %(default)s)")
    add("--protocol", default="parcae", choices=["parcae", "nanochat", "dclm"], help="whose rules (default: parcae)")
    add("--depth", default="", help="loops, one or several between commas (default: the run's mu_rec)")
    add("--seeds", default="", help="for shots and initial states (default: parcae 1234,2345,3456; others 1234)")
    add("--max-per-task", type=int, default=0, help="examples; 0 means all (default: %(default)s)")
    add("--bundle", default="", help=f"zip or folder of the task data (default: {CACHE}, fetched once)")
    add("--baselines", default="v1", choices=["v1", "v2"], help="chance: the paper's, or DCLM's (default: v1)")
    add("--dtype", default="", choices=["float32", "bfloat16"], help="default: CPU float32, GPU the run's")
    args = p.parse_args(argv)
    args.seeds = args.seeds or ("1234,2345,3456" if args.protocol == "parcae" else "1234")
    for name in ("depth", "seeds"):
        text = getattr(args, name)
        if text and not re.fullmatch(r"\d{1,9}(,\d{1,9})*", text):
            fail(f"--{name} {text} must be whole numbers between commas, e.g. --{name} 1,2,4")
        setattr(args, name, sorted({int(x) for x in text.split(",")}) if text else [])
    if args.max_per_task < 0:
        fail(f"--max-per-task {args.max_per_task} must be 0 (all) or more, e.g. --max-per-task 100")
    return args


def open_run(args, device):
    """-> (model, tokenizer, config); a tokenizer that is not the checkpoint's is refused."""
    dtype = args.dtype or ("float32" if device.type == "cpu" else "")
    try:
        model, cfg, config = load_run(args.run, device, getattr(torch, dtype) if dtype else None)
    except (FileNotFoundError, ValueError, RuntimeError, KeyError) as e:
        fail(f"{args.run}: {first_line(e)}; name the directory of a run that has a checkpoint")
    path = Path(args.run) / "tokenizer.json"
    enc = load_tokenizer(path)
    if tokenizer_hash(path) != config["tokenizer"]["sha256"] or enc.n_vocab != cfg.vocab_size:
        fail(f"{path} is not the tokenizer the checkpoint was trained with; copy {config['tokenizer']['path']} there")
    if 0 in args.depth and cfg.n_core:
        fail(f"--depth {','.join(map(str, args.depth))} must be 1 loop or more, e.g. --depth 8")
    args.depth = args.depth if args.depth and cfg.n_core else [cfg.mu_rec]  # a flat model has depth 0 only
    return model, enc, config


def validation(args, model, enc, config, rank, world, device):
    """Loss over all packed validation rows, with the initial states of the run's own evaluations -> {depth: record}."""
    from dataloader import PackedData
    from train import validate

    data = PackedData(config["data"]["path"])
    if data.manifest["tokenizer_sha256"] != config["tokenizer"]["sha256"]:
        fail(f"{config['data']['path']} was packed with another tokenizer; pack it with {args.run}/tokenizer.json")
    sizes = torch.from_numpy(token_bytes(enc)).to(device)
    found = validate(model, data, sizes, args.depth, 2**62, 16, rank, world, device)
    one = lambda d: {"name": "validation loss", "mean": found["loss"][d], "std": 0.0, "bpb": found["bpb"][d],
                     "perplexity": math.exp(found["loss"][d]), "tasks_done": 1, "tasks_total": 1}  # fmt: skip
    return {d: {"aggregate": one(str(d)), "per_seed": {}, "tasks": {}} for d in args.depth}


def main():
    from tqdm import tqdm

    from train import distributed

    args = parse_args()
    rank, world, device = distributed("cuda" if torch.cuda.is_available() else "cpu")
    model, enc, config = open_run(args, device)
    say = (lambda text: tqdm.write(text)) if rank == 0 else (lambda text: None)
    run = Path(args.run)
    checkpoint, path = sorted(run.glob("step_*.pt"))[-1], run / f"core_{args.panel}_{args.protocol}"
    header = {"panel": args.panel, "protocol": args.protocol, "baselines": args.baselines, "bundle_sha256": None,
              "max_per_task": args.max_per_task or None, "seeds": args.seeds, "dtype": str(model.dtype)[6:],
              "checkpoint": f"{checkpoint.name} {file_hash(checkpoint)}", "missing": {},
              "command": " ".join(sys.argv), "date": datetime.now().isoformat(timespec="seconds")}  # fmt: skip
    if args.panel == "val":
        records = validation(args, model, enc, config, rank, world, device)
    else:
        if not args.bundle and rank == 0:
            fetch_bundle()
        if world > 1:
            dist.barrier()
        protocol = "lambada" if args.panel == "lambada" else args.protocol
        panel = load_panel(args.bundle or CACHE, args.panel, protocol, args.max_per_task or None)
        header |= {"bundle_sha256": panel.sha256, "missing": panel.missing}
        for label, why in panel.missing.items():
            say(f"left out: {label}: {why}")
        done = earlier(path, header, say)
        other = {d: summarise(panel, e) for d, e in done.items() if d not in args.depth}
        if world > 1:
            dist.barrier()  # nobody reads what rank 0 is about to write

        def on_task(label, records):
            say(task_line(label, records[args.depth[-1]]["tasks"][label]))
            if rank == 0:
                save(path, header, other | records)

        records = other | evaluate(model, enc, panel, args.depth, args.seeds, args.baselines, device, rank, world,
                                   done=done, on_task=on_task, show=True)  # fmt: skip
    if rank == 0:
        save(path, header, records)
        for d in args.depth:
            a = records[d]["aggregate"]
            value = f"{a['name']} {a['mean']:.4f} ± {a['std']:.4f}" if a["name"] else "no task could be run"
            say(f"depth {d}: {value} ({args.protocol}, baselines {args.baselines})")
        say(f"written: {path}.json, {path}.csv")
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    run_cli(main)
