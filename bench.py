"""
How fast a training step is, and where its time goes.

    python bench.py                          # CPU: tiny, about three minutes
    python bench.py --preset parcae-140m     # one GPU

All variants take the same batches and depths, round by round in turn, so that a drifting clock hurts them alike. A step
is forward, backward and optimiser on one micro-batch; its time is the mean over the rounds. MFU is against the device's
dense bf16 peak, by the model's own FLOPs (PaLM's attention count, and its causal half). `masked` computes every row at
every loop and keeps the live ones, as the reference implementation does; the others compute rows with loops left.
"""

import argparse
import dataclasses
import json
import statistics
import time
from pathlib import Path

import numpy as np
import torch

from dataloader import fail, run_cli, write_atomic
from depth import sample_depths, sequence_key
from model import PRESETS, Model
from muon import MuonAdamW
from train import PEAK, deal, probe_dtype, processor

WARM_UP = 3  # rounds


class Variant:
    """A model with its optimiser, ready to be stepped."""

    def __init__(self, cfg, args, masked):
        before = memory(args.device)
        self.cfg, self.device, self.masked, self.times, self.peak = cfg, args.device, masked, [], 0
        self.model = Model(cfg)
        self.model.init_weights(0)
        self.model.to(args.device)
        self.model.dtype = getattr(torch, args.dtype)
        self.model.loss_chunk = 256 if args.device == "cpu" else 0
        compiled = args.device == "cuda"
        self.opt = MuonAdamW(self.model.named_parameters(), self.model.muon_parameters(), compile=compiled)
        if compiled:
            self.model.compile_pieces()
        self.own = memory(args.device) - before

    def step(self, ids, keys, n, k):
        if self.masked:
            n, k = (np.repeat(x[:, None], self.cfg.seq_len, 1) for x in (n, k))
        loss, _ = self.model.loss(ids[:, :-1], ids[:, 1:], keys, n, k)
        (loss / ids[:, 1:].numel()).backward()
        self.opt.step(1.0, 1.0, loss.detach()[None])

    def measure(self, batch, count: bool):
        others = memory(self.device) - self.own
        if self.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        seconds = timed(self.device, lambda: self.step(*batch))
        if count:
            self.times.append(seconds)
        if self.device == "cuda":
            self.peak = max(self.peak, torch.cuda.max_memory_allocated() - others)


def memory(device) -> int:
    return torch.cuda.memory_allocated() if device == "cuda" else 0


def timed(device, work) -> float:
    """Seconds."""
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    wait()
    start = time.perf_counter()
    work()
    wait()
    return time.perf_counter() - start


def random_batch(cfg, rows, step, device):
    """Random tokens, keys and the step's depths, deepest first."""
    ids = torch.randint(0, cfg.vocab_size, (rows, cfg.seq_len + 1), generator=torch.Generator().manual_seed(step))
    n, k = sample_depths(cfg, 0, step, rows)
    order = np.argsort(-(n + k), kind="stable")
    keys = torch.tensor([sequence_key(step, i) for i in range(rows)])
    return ids.to(device), keys.to(device), n[order], k[order]


def breakdown(v: Variant, rows: int, rounds: int) -> dict[str, float]:
    """Milliseconds of each part of a step at the mean depth, forward and backward, each part timed by itself."""
    m, cfg = v.model, v.cfg
    ids, keys, *_ = random_batch(cfg, rows, 0, v.device)
    x, y = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
    h, decay, write, ve = m.before(x, keys)
    h, write, decay = h.detach().requires_grad_(), write.detach().requires_grad_(), decay.detach()
    ve = [t if t is None else t.detach().requires_grad_() for t in ve]
    z = m.after(h, x).detach().requires_grad_()

    def no_grad():
        with torch.no_grad():
            m.core_step(h, decay, write, ve)

    parts = {
        "before the loop (embedding, prelude, B e)": (1, lambda: m.before(x, keys)[2].float().sum().backward()),
        "loops without gradient": (cfg.mu_rec - cfg.mu_bwd, no_grad),
        "loops with gradient": (cfg.mu_bwd, lambda: m.core_step(h, decay, write, ve).float().sum().backward()),
        "after the loop (C, coda, head, loss)": (1, lambda: m.after_loss(h, x, y).backward()),
        "of which head": (1, lambda: m.head(z).float().logsumexp(-1).sum().backward()),
        "optimiser": (1, lambda: v.opt.step(1.0, 1.0, torch.zeros(1, device=v.device))),
    }
    out = {}
    for name, (times, work) in parts.items():
        work()
        out[name] = times * statistics.median(timed(v.device, work) for _ in range(rounds)) * 1e3
    return out


def imbalance(cfg, ranks=8, steps=1000) -> float:
    """Mean over steps of the largest rank's work over the mean rank's, in loops (2 units each, 6 with gradient)."""
    worst = []
    for step in range(steps):
        n, k = sample_depths(cfg, 0, step, 256)
        work = [(2 * n[p] + 6 * k[p]).sum() for p in deal(n, k, ranks)]
        worst.append(max(work) / np.mean(work))
    return float(np.mean(worst))


def main():
    p = argparse.ArgumentParser(description="Time training steps.", allow_abbrev=False)
    cuda, add = torch.cuda.is_available(), p.add_argument
    looped = [name for name, cfg in PRESETS.items() if cfg.injection == "diagonal" and cfg.n_core and "rdm" not in name]
    add("--preset", default="parcae-140m" if cuda else "tiny", choices=looped, help="(default: %(default)s)")
    add("--rows", default="8,16,32,64" if cuda else "16", help="device batches, sequences (default: %(default)s)")
    add("--rounds", type=int, default=30, help="timed steps of each variant (default: 30)")
    add("--device", default="cuda" if cuda else "cpu", choices=("cpu", "cuda"))
    add("--dtype", choices=("float32", "bfloat16"), help="of activations (default: the faster)")
    add("--out", default="results/bench", help="results go to OUT-DEVICE.json and .md (default: %(default)s)")
    args = p.parse_args()
    if args.rounds < 1:
        fail(f"--rounds {args.rounds} must be at least 1")
    args.dtype = args.dtype or ("bfloat16" if cuda else probe_dtype()[0])
    name = torch.cuda.get_device_name() if args.device == "cuda" else processor()
    peak = next((v for k, v in PEAK.items() if k in name), None)
    cfg, flat = PRESETS[args.preset], PRESETS["transformer-" + args.preset.removeprefix("parcae-")]
    kinds = {
        "Parcae Euler": (cfg, False),
        "Parcae ZOH": (dataclasses.replace(cfg, gain="zoh"), False),
        "Parcae Euler, fixed depth": (dataclasses.replace(cfg, sampling="fixed"), False),
        "Parcae Euler, masked": (cfg, True),
        "Transformer": (flat, False),
    }
    head = (f"{args.preset}, {cfg.seq_len} tokens a row, {args.dtype}, {name}, {torch.get_num_threads()} threads, "
            f"torch {torch.__version__}, {time.strftime('%Y-%m-%d')}")  # fmt: skip
    lines = [f"# Training step: {head}", "",
             f"`python bench.py --preset {args.preset} --rows {args.rows} --rounds {args.rounds}`", "",
             "| rows | model | ms | tok/s | time over Euler | MFU PaLM | MFU causal | peak GiB |",
             "|---|---|---|---|---|---|---|---|"]  # fmt: skip
    print("\n".join(lines))
    table = []
    for rows in map(int, args.rows.split(",")):
        variants = {kind: Variant(c, args, masked) for kind, (c, masked) in kinds.items()}
        for r in range(-WARM_UP, args.rounds):
            for v in variants.values():
                v.measure(random_batch(v.cfg, rows, r + WARM_UP, args.device), r >= 0)
        base = statistics.mean(variants["Parcae Euler"].times)
        for kind, v in variants.items():
            s = statistics.mean(v.times)
            row = {"rows": rows, "model": kind, "ms": s * 1e3, "tok_s": rows * cfg.seq_len / s, "over_euler": s / base}
            row |= {c: row["tok_s"] * v.cfg.flops_per_token(c) / peak if peak else None for c in ("palm", "causal")}
            row |= {"peak_gib": v.peak / 2**30 or None, "times": v.times}
            table.append(row)
            mfu = [f"{row[c]:.3f}" if peak else "" for c in ("palm", "causal")]
            lines.append(f"| {rows} | {kind} | {row['ms']:.1f} | {row['tok_s']:,.0f} | {row['over_euler']:.3f} "
                         f"| {mfu[0]} | {mfu[1]} | {v.peak / 2**30:.1f} |")  # fmt: skip
            print(lines[-1], flush=True)
    parts = breakdown(variants["Parcae Euler"], rows, args.rounds)
    ranks = imbalance(cfg)
    lines += ["", f"Where the time goes: Parcae Euler, {rows} rows, mean depth, parts timed alone.", ""]
    lines += ["| part | ms |", "|---|---|", *(f"| {k} | {v:.1f} |" for k, v in parts.items()), ""]
    lines += [f"Largest of 8 ranks' loop work over the mean, 256 sequences a step, mean of 1,000 steps: {ranks:.4f}."]
    print("\n".join(lines[-len(parts) - 6 :]))
    result = {"head": head, "table": table, "parts_ms": parts, "imbalance_8_ranks": ranks}
    Path(args.out).parent.mkdir(parents=True, exist_ok=True)
    write_atomic(f"{args.out}-{args.device}.md", ("\n".join(lines) + "\n").encode())
    write_atomic(f"{args.out}-{args.device}.json", json.dumps(result, indent=1).encode())


if __name__ == "__main__":
    run_cli(main)
