"""
How fast a training step is, and where its time goes.

    python bench.py                          # CPU: tiny, about two minutes
    python bench.py --preset parcae-140m     # one GPU

Every variant takes the same batches and depths, round by round in turn, so that a drifting clock hurts all alike; the
median step counts. A step is forward, backward and optimiser on one micro-batch. MFU is against the device's dense bf16
peak, by the model's own FLOPs (PaLM's attention count and the causal half of it). `masked` computes every row at every
loop and keeps the live ones, as the reference implementation does; `active` computes the rows that have loops left.
"""

import argparse
import dataclasses
import json
import platform
import statistics
import time
from pathlib import Path

import numpy as np
import torch

from dataloader import fail, run_cli, write_atomic
from depth import sample_depths, sequence_key
from model import PRESETS, Model
from muon import MuonAdamW
from train import PEAK, probe_dtype


class Variant:
    """A model with its optimiser, ready to be stepped on a batch."""

    def __init__(self, cfg, args, masked=False):
        self.cfg, self.args, self.masked, self.times = cfg, args, masked, []
        self.model = Model(cfg)
        self.model.init_weights(0)
        self.model.to(args.device)
        self.model.dtype = getattr(torch, args.dtype)
        self.model.loss_chunk = 1024 if args.device == "cpu" else 0
        compiled = args.device == "cuda"
        self.opt = MuonAdamW(self.model.named_parameters(), self.model.muon_parameters(), compile=compiled)
        if compiled:
            self.model.compile_pieces()

    def step(self, ids, keys, n, k):
        if self.masked:
            n, k = (np.repeat(x[:, None], self.cfg.seq_len, 1) for x in (n, k))
        loss, _ = self.model.loss(ids[:, :-1], ids[:, 1:], keys, n, k)
        (loss / ids[:, 1:].numel()).backward()
        self.opt.step(1.0, 1.0, loss.detach()[None])


def sync(device):
    if device == "cuda":
        torch.cuda.synchronize()


def timed(device, work) -> float:
    sync(device)
    start = time.perf_counter()
    work()
    sync(device)
    return time.perf_counter() - start


def batch(cfg, rows, step, device):
    """Random tokens, keys and the step's depths, deepest first."""
    g = torch.Generator().manual_seed(step)
    ids = torch.randint(0, cfg.vocab_size, (rows, cfg.seq_len + 1), generator=g).to(device)
    n, k = sample_depths(cfg, 0, step, rows)
    order = np.argsort(-(n + k), kind="stable")
    return ids, torch.tensor([sequence_key(step, i) for i in range(rows)], device=device), n[order], k[order]


def breakdown(v: Variant, rows: int) -> dict:
    """Milliseconds of each part of a step at the mean depth, each timed by itself: forward and backward."""
    m, cfg, device = v.model, v.cfg, v.args.device
    ids, keys, *_ = batch(cfg, rows, 0, device)
    x, y = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
    h, decay, write, ve = m.before(x, keys)
    h, write = h.detach().requires_grad_(), write.detach().requires_grad_() if write is not None else None
    decay = decay.detach() if decay is not None else None
    ve = [t if t is None else t.detach().requires_grad_() for t in ve]

    def no_grad():
        with torch.no_grad():
            m.core_step(h, decay, write, ve)

    def head_only(z):
        return m.head(z).float().logsumexp(-1).sum()

    z = m.after(h, x).detach().requires_grad_()
    parts = {
        "before the loop (embedding, prelude, B e)": (
            1,
            lambda: sum(t.float().sum() for t in m.before(x, keys)[2:3]).backward(),
        )
    }
    if cfg.n_core:
        parts["loop without gradient"] = (cfg.mu_rec - cfg.mu_bwd, no_grad)
        parts["loop with gradient"] = (cfg.mu_bwd, lambda: m.core_step(h, decay, write, ve).float().sum().backward())
    else:
        parts = {"before the loop (embedding, all blocks)": (1, lambda: m.before(x, keys)[0].float().sum().backward())}
    parts["after the loop, head and loss included"] = (1, lambda: m.after_loss(h, x, y).backward())
    parts["of which head"] = (1, lambda: head_only(z).backward())
    parts["optimiser"] = (1, lambda: v.opt.step(1.0, 1.0, torch.zeros(1, device=device)))
    out = {}
    for name, (times, work) in parts.items():
        work()
        out[name] = times * statistics.median(timed(device, work) for _ in range(v.args.rounds)) * 1e3
    return out


def main():
    p = argparse.ArgumentParser(description="Time training steps.", allow_abbrev=False)
    cuda = torch.cuda.is_available()
    p.add_argument(
        "--preset", default="parcae-140m" if cuda else "tiny", choices=[n for n in PRESETS if "transformer" not in n]
    )
    p.add_argument(
        "--rows", default="8,16,32,64" if cuda else "16", help="device batches, sequences (default: %(default)s)"
    )
    p.add_argument("--rounds", type=int, default=12, help="timed steps of each variant (default: 12)")
    p.add_argument("--device", default="cuda" if cuda else "cpu", choices=("cpu", "cuda"))
    p.add_argument(
        "--dtype", default=None, choices=("float32", "bfloat16"), help="of activations (default: the faster)"
    )
    p.add_argument(
        "--out", default="results/bench", help="results go to OUT-DEVICE.json and .md (default: results/bench)"
    )
    args = p.parse_args()
    if args.rounds < 1:
        fail(f"--rounds {args.rounds} must be at least 1")
    args.dtype = args.dtype or ("bfloat16" if cuda else probe_dtype()[0])
    name = torch.cuda.get_device_name() if args.device == "cuda" else platform.processor() or platform.machine()
    peak = next((v for k, v in PEAK.items() if k in name), None)
    cfg, flat = (
        PRESETS[args.preset],
        PRESETS[args.preset.replace("parcae", "transformer").replace("tiny", "transformer-tiny")],
    )
    kinds = {"Transformer": (flat, False), "Parcae Euler": (cfg, False), "Parcae ZOH": (dataclasses.replace(cfg, gain="zoh"), False),
             "Parcae Euler, fixed depth": (dataclasses.replace(cfg, sampling="fixed"), False), "Parcae Euler, masked": (cfg, True)}  # fmt: skip
    head = (f"{args.preset}, {cfg.seq_len} tokens a row, {args.dtype}, {name}, {torch.get_num_threads()} threads, "
            f"torch {torch.__version__}, {time.strftime('%Y-%m-%d')}")  # fmt: skip
    print(head)
    table = []
    for rows in map(int, args.rows.split(",")):
        variants = {k: Variant(c, args, masked) for k, (c, masked) in kinds.items()}
        memory = {}
        for r in range(-3, args.rounds):  # three rounds of warm-up
            for kind, v in variants.items():
                b = batch(v.cfg, rows, r + 3, args.device)
                if args.device == "cuda":
                    torch.cuda.reset_peak_memory_stats()
                seconds = timed(args.device, lambda: v.step(*b))
                if r >= 0:
                    v.times.append(seconds)
                if args.device == "cuda":
                    memory[kind] = torch.cuda.max_memory_allocated() / 2**30
        for kind, v in variants.items():
            s = statistics.median(v.times)
            tok_s = rows * cfg.seq_len / s
            ratio = statistics.median(a / b for a, b in zip(v.times, variants["Parcae Euler"].times))
            row = {
                "rows": rows,
                "model": kind,
                "ms": s * 1e3,
                "tok_s": tok_s,
                "time_over_euler": ratio,
                "peak_gib": memory.get(kind),
            }
            row |= {f"mfu_{c}": tok_s * v.cfg.flops_per_token(c) / peak if peak else None for c in ("palm", "causal")}
            table.append(row)
            print(
                "  ".join(f"{k} {x:.4g}" if isinstance(x, float) else f"{x}" for k, x in row.items() if x is not None),
                flush=True,
            )
    parts = breakdown(variants["Parcae Euler"], rows)
    lines = [f"# Training step: {head}", "", f"`python bench.py --preset {args.preset} --rows {args.rows} --rounds {args.rounds}`", "",
             "| rows | model | ms | tok/s | time over Euler | MFU PaLM | MFU causal | peak GiB |", "|---|---|---|---|---|---|---|---|"]  # fmt: skip
    show = lambda x, f: "" if x is None else format(x, f)
    lines += [f"| {r['rows']} | {r['model']} | {r['ms']:.1f} | {r['tok_s']:,.0f} | {r['time_over_euler']:.3f} | {show(r['mfu_palm'], '.3f')} "
              f"| {show(r['mfu_causal'], '.3f')} | {show(r['peak_gib'], '.1f')} |" for r in table]  # fmt: skip
    lines += [
        "",
        f"Where the time goes (Parcae Euler, {rows} rows, mean depth, parts timed alone):",
        "",
        "| part | ms |",
        "|---|---|",
    ]
    lines += [f"| {k} | {v:.1f} |" for k, v in parts.items()]
    Path(args.out).parent.mkdir(parents=True, exist_ok=True)
    write_atomic(f"{args.out}-{args.device}.md", ("\n".join(lines) + "\n").encode())
    write_atomic(
        f"{args.out}-{args.device}.json",
        json.dumps({"head": head, "table": table, "parts_ms": parts}, indent=1).encode(),
    )
    print("\n".join(lines[-len(parts) - 4 :]))


if __name__ == "__main__":
    run_cli(main)
