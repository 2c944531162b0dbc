"""core_eval.py against the slow one-example-at-a-time loop: same model, same data, same answers.

    python tests/bench_core.py --bundle eval_bundle.zip                     # 100 examples a task
    python tests/bench_core.py --bundle eval_bundle.zip --depth 1,2,4,8,16
    python tests/bench_core.py --bundle eval_bundle.zip --run runs/nano-euler-s0
    python tests/bench_core.py --bundle eval_bundle.zip --panel core --host 1 8 --tokenizer … --seq-len 2048

The slow loop (slow_core.py) does what the public evaluators do: one forward pass for each example
and depth, its rows padded to the longest, logits, losses and greedy tokens at every position. Tasks
alternate between the two, so that a busy machine slows both. Without --run: a random model.

--host: no model at all, the processor time of what a rank's host does beside the GPU, all examples, one seed.
"""

import argparse
import sys
import time
from collections import Counter
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

from slow_core import slow_rendered, slow_task  # noqa: E402

import core_eval as ce  # noqa: E402
from looped.console import positive_ints, run_cli  # noqa: E402
from looped.core_tasks import load_panel  # noqa: E402
from looped.tokenizer import load_tokenizer  # noqa: E402
from model import Model, ModelConfig, load_run  # noqa: E402


def random_model(enc, seq_len, seed=0):
    """A small model with all weights moved off their zero initialisation."""
    cfg = ModelConfig(vocab_size=enc.n_vocab, seq_len=seq_len, d_model=128, n_head=2, d_mlp=512)
    model = Model(cfg)
    model.init_weights(seed)
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            noise = torch.randn(p.shape, generator=g)
            p += 0.02 * noise
    return model.eval()


def timed(name, total, action):
    """action(), its wall and processor seconds added to total."""
    wall = time.perf_counter()
    cpu = time.process_time()
    out = action()
    total[name] += time.perf_counter() - wall
    total[f"{name} core"] += time.process_time() - cpu
    return out


def compare(model, enc, task, panel, settings, total):
    """Scores a task both ways."""
    context = model.cfg.seq_len

    def fast():
        work = ce.encode_task(task, panel, 1234, enc, context)
        total["fed"] += sum(len(row[0].fed) for row in work.rows)
        return ce.run_task(model, work, settings, 1234)

    def slow():
        return [slow_task(model, enc, task, panel, 1234, depth) for depth in settings.depths]

    found = timed("fast", total, fast)
    for depth, (answers, _) in zip(settings.depths, timed("slow", total, slow)):
        result = found[depth]
        wrong = result["answer"] != answers
        total["examples"] += len(answers)
        total["differ"] += int(wrong.sum())
        total["near"] += int(result["near_ties"][wrong].sum())
    for _, _, made in slow_rendered(enc, task, panel, context):
        width = max(len(x) for x, _, _ in made)
        total["tokens"] += len(made) * width


def host_seconds(args, enc) -> None:
    """Prints the core-seconds of rank 0 of as many ranks as are asked for, by part."""
    for world in args.host:
        total = Counter()
        place = ce.Place(0, world, torch.device("cpu"))

        def load():
            return load_panel(args.bundle, args.panel, args.protocol, None)

        panel = timed("read the bundle", total, load)
        for task in panel.tasks:

            def encode(task=task, panel=panel, place=place):
                return ce.encode_task(task, panel, 1234, enc, args.seq_len, place)

            work = timed("render and encode", total, encode)

            def fill(work=work):
                for batch in ce.batches(work.rows, ce.BATCH_TOKENS["cuda"]):
                    ce.fill_batch(batch)

            timed("fill batches", total, fill)
        parts = [f"{name} {total[name + ' core']:.1f}" for name in total if "core" not in name]
        print(f"core-seconds of rank 0 of {world}: {', '.join(parts)}", flush=True)


def parse_args():
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = p.add_argument
    add("--bundle", required=True, help="zip or folder of the task data")
    add("--run", default="", help="run directory (default: a random one)")
    add("--tokenizer", default="data/tokenizer.json", help="when no run is given")
    add("--panel", default="core-extended", choices=["core", "core-extended"])
    add("--protocol", default="parcae", choices=["parcae", "dclm"])
    add("--depth", type=positive_ints, default="8", help="loops, between commas")
    add("--seq-len", type=int, default=256, help="context of the random model, tokens")
    add("--max-per-task", type=int, default=100, help="examples")
    add("--host", type=int, nargs="+", help="measure the host's work alone, for so many ranks")
    return p.parse_args()


def main():
    args = parse_args()
    if args.host:
        host_seconds(args, load_tokenizer(args.tokenizer))
        return
    if args.run:
        model, _, _ = load_run(args.run, "cpu", torch.float32)
        enc = load_tokenizer(Path(args.run) / "tokenizer.json")
    else:
        enc = load_tokenizer(args.tokenizer)
        model = random_model(enc, args.seq_len)
    settings = ce.Settings(args.depth, [1234])
    panel = load_panel(args.bundle, args.panel, args.protocol, args.max_per_task)
    total = Counter()
    for task in panel.tasks:
        if task.label in panel.rows:
            before = total.copy()
            compare(model, enc, task, panel, settings, total)
            slow = total["slow"] - before["slow"]
            fast = total["fast"] - before["fast"]
            print(f"{task.label:33} slow {slow:6.2f} s  fast {fast:6.2f} s", flush=True)
    for name in ("slow", "fast"):
        print(f"{name}: {total[name]:.1f} s, {total[f'{name} core']:.1f} core-s")
    times = total["slow"] / total["fast"]
    core_times = total["slow core"] / total["fast core"]
    threads = torch.get_num_threads()
    print(
        f"{times:.2f} times the slow loop ({core_times:.2f} in core-seconds), depths {args.depth}"
    )
    print(f"context {model.cfg.seq_len}, {threads} threads")
    print(f"{total['tokens']:,} tokens became {total['fed']:,}")
    print(f"{total['differ']} of {total['examples']} answers differ", end=", ")
    print(f"{total['near']} of them near ties")


if __name__ == "__main__":
    run_cli(main)
