"""core_eval.py against the slow one-example-at-a-time loop: same model, same data, same answers, in one run.

    python tests/bench_core.py --bundle eval_bundle.zip                       # 100 examples of each of the tasks
    python tests/bench_core.py --bundle eval_bundle.zip --depth 1,2,4,8,16    # accuracy against depth
    python tests/bench_core.py --bundle eval_bundle.zip --run runs/tiny-euler

The slow loop (slow_task in test_core_eval.py) does what the public evaluators do: one forward pass for each example and
depth, its rows padded to the longest, logits, losses and greedy tokens at every position. Tokens are those it feeds.
Tasks alternate between the two, so that a busy machine slows both. Without --run: a random `tiny` model.
"""

import argparse
import sys
import time
from pathlib import Path

import torch

sys.path[:0] = [str(Path(__file__).resolve().parent.parent), str(Path(__file__).resolve().parent)]

from test_core_eval import slow_examples, slow_rows, slow_shots, slow_task  # noqa: E402

import core_eval as ce  # noqa: E402
from model import PRESETS, Model, load_run  # noqa: E402
from tokenizer_train import load_tokenizer  # noqa: E402


def random_model(seed=0):
    """The `tiny` preset with all weights moved off their zero initialisation."""
    model = Model(PRESETS["tiny"])
    model.init_weights(seed)
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p += 0.02 * torch.randn(p.shape, generator=g)
    return model.eval()


def slow_tokens(task, rows, panel, enc, context):
    """(rows, tokens) that the slow loop feeds."""
    count = [0, 0]
    shots = {}
    for pool, i in slow_examples(task, rows, panel.protocol, panel.limit):
        if id(pool) not in shots:
            shots[id(pool)] = slow_shots(panel.protocol, 1234, len(pool), task.shots)
        made = slow_rows(task, panel.protocol, pool[i], [pool[j] for j in shots[id(pool)][i]], enc, context)
        count[0] += len(made)
        count[1] += len(made) * max(len(x) for x, _, _ in made)
    return count


def main():
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("--bundle", required=True, help="zip or folder of the task data")
    p.add_argument("--run", default="", help="run directory (default: a random tiny model)")
    p.add_argument("--tokenizer", default="data/tokenizer.json", help="when no run is given")
    p.add_argument("--panel", default="core-extended", choices=list(ce.PANELS))
    p.add_argument("--protocol", default="parcae", choices=["parcae", "nanochat", "dclm"])
    p.add_argument("--depth", default="8", help="loops, between commas")
    p.add_argument("--max-per-task", type=int, default=100, help="examples")
    p.add_argument("--budget", type=int, default=0, help="tokens a batch; 0 is core_eval's own")
    args = p.parse_args()
    if args.run:
        model, enc = load_run(args.run, "cpu", torch.float32)[0], load_tokenizer(Path(args.run) / "tokenizer.json")
    else:
        model, enc = random_model(), load_tokenizer(args.tokenizer)
    depths = [int(d) for d in args.depth.split(",")]
    panel = ce.load_panel(args.bundle, args.panel, args.protocol, args.max_per_task)
    total = dict(slow=0.0, fast=0.0, slow_cpu=0.0, fast_cpu=0.0, rows=0, tokens=0, fed=0, examples=0, differ=0, near=0)
    for task in panel.tasks:
        if task.label not in panel.rows:
            continue
        rows = panel.rows[task.label]
        start, cpu = time.perf_counter(), time.process_time()
        work = ce.prepare(task, panel, 1234, enc, model.cfg.seq_len)
        key = lambda i: ce.sequence_key(1234, ce.SEED_EVAL, task.index, i)
        found, _ = ce.run_task(model, work, args.protocol, depths, key, "cpu", args.budget)
        fast, start = time.perf_counter() - start, time.perf_counter()
        fast_cpu, cpu = time.process_time() - cpu, time.process_time()
        slow_found = [slow_task(model, enc, task, rows, args.protocol, 1234, d, args.max_per_task)[0] for d in depths]
        slow, slow_cpu = time.perf_counter() - start, time.process_time() - cpu
        n_rows, tokens = slow_tokens(task, rows, panel, enc, model.cfg.seq_len)
        wrong = [(d, i) for d, s in zip(depths, slow_found) for i, a in enumerate(s) if a != found[d]["answers"][i]]
        near = sum(found[d]["near"][i] > 0 for d, i in wrong)
        for k, v in dict(slow=slow, fast=fast, slow_cpu=slow_cpu, fast_cpu=fast_cpu, rows=n_rows, tokens=tokens, fed=sum(map(len, work.rows)), near=near,
                         examples=len(work.gold), differ=len(wrong)).items():  # fmt: skip
            total[k] += v
        print(f"{task.label:33} slow {slow:6.2f} s  fast {fast:6.2f} s  {slow / fast:5.2f}x   {tokens:7d} -> "
              f"{sum(map(len, work.rows)):6d} tokens   {len(wrong)} answers differ ({near} of them near ties)", flush=True)
    t = total
    for name in ("slow", "fast"):
        print(f"{name}: {t[name]:.1f} s ({t[name + '_cpu']:.1f} core-s), {t['examples'] / t[name]:.1f} examples/s, {t['rows'] / t[name]:.1f} sequences/s, "
              f"{t['tokens'] * len(depths) / t[name]:,.0f} tokens/s")
    print(f"{t['slow'] / t['fast']:.2f} times the slow loop ({t['slow_cpu'] / t['fast_cpu']:.2f} in core-seconds) at depth {args.depth}, context {model.cfg.seq_len}, "
          f"{torch.get_num_threads()} cores; {t['tokens']:,} tokens -> {t['fed']:,} fed; "
          f"{t['differ']} of {t['examples'] * len(depths)} answers differ, {t['near']} of them near ties")


if __name__ == "__main__":
    main()
