"""The one writer of pages: the answer, a picture, tables, cost, and where it all comes from.

For tools.report, tools.ablate and studies/.
"""

from pathlib import Path

import pandas as pd

from looped.common import write_atomic
from tools.arms import FEW_TOKENS, UNITS, Arm, Run, base_of, compare, compared_in, paired
from tools.figures import (
    Plot,
    depth_plot,
    figure,
    frame_table,
    half_width,
    has_values,
    plus_minus,
    records_table,
)

MARK = "<!-- From here on written by studies.experiments. -->"
TOKENS = "tokens trained, millions"
TRAINED = "at mu_rec"  # of the tables: at the depth that a run was trained with
SHOWN = [1, 2, 4, 8, 12, 16, 24, 64]  # depths of the tables
SENTENCES = 4  # a page with more comparisons names them in one
POINTS = 100  # of a curve over training, each the mean of its steps
CURVES = {  # {of the log's records: (the axis' label, its scale)}
    "loss": ("training loss, nats/token", "linear"),
    "grad_norm": ("gradient norm", "log"),
    "rho": ("spectral radius ρ(Ā)", "linear"),
    "decay_max": ("largest decay a loop", "linear"),
    "decay_mean": ("mean decay a loop", "linear"),
    "state_norm": ("state norm ‖h‖ after the last loop", "log"),
    "residual": ("residual ‖Δh‖ of the last loop", "log"),
}
COSTS = {  # {column: format of its numbers}
    "parameters": ",.0f", "tokens trained": ",.0f", "tokens a parameter": ".3g",
    "training FLOPs": ".4g", "tokens/s": ",.0f", "minutes in steps": ".1f",
    "peak memory, GiB": ".2f",
}  # fmt: skip


# -------------------------------------------------------------------------------------------------
# The answer


def pairs_of(arms: list[Arm]) -> list[tuple[Arm, Arm]]:
    """Each arm with the first of its group, both trained."""
    pairs = [(arm, base_of(arm, arms)) for arm in arms]
    return [(arm, base) for arm, base in pairs if arm is not base and arm.runs and base.runs]


def unit_of(arms: list[Arm]) -> str:
    """The unit of a page's losses: nats per token, where all arms were measured on the same tokens."""
    for arm, base in pairs_of(arms):
        if compared_in(arm, base) == "bpb":
            return "bpb"
    return "loss"


def answer(arms: list[Arm]) -> list[str]:
    """A sentence for each arm, or, where there are many, one that names them by what they are."""
    verdicts = {arm.name: compare(arm, base) for arm, base in pairs_of(arms)}
    if len(verdicts) <= SENTENCES:
        said = [verdict.sentence for verdict in verdicts.values()]
    else:
        by_kind = {}
        for name, verdict in verdicts.items():
            by_kind.setdefault(verdict.kind, []).append(name)
        parts = [f"{kind}: {', '.join(names)}" for kind, names in by_kind.items()]
        said = [f"Beside the first of its group, {'; '.join(parts)}."]
    few = [run for arm in arms for run in arm.runs if tokens_a_parameter(run) < FEW_TOKENS]
    if few:
        ratio = tokens_a_parameter(few[0])
        said.append(
            f"These runs are too short to rank models, {ratio:.2g} tokens a parameter: at less than "
            f"{FEW_TOKENS} the order is as good as random, at 20 it is not."
        )
    return said


def tokens_a_parameter(run: Run) -> float:
    return run.tokens / run.config["params"]


# -------------------------------------------------------------------------------------------------
# Tables


def loss_table(arms: list[Arm], depths: list[int]) -> list[str]:
    """A row an arm: val losses at mu_rec and at depths, mean over seeds ± half the 95 % t interval;
    then a row for each difference from the first of its group.
    """
    unit = unit_of(arms)
    first = f"val loss, {UNITS[unit]}"
    rows = []
    for arm in arms:
        row = cells(losses_of(arm, depths, unit), ".4f")
        if arm.diverged():
            steps = ", ".join(map(str, arm.diverged()))
            row[TRAINED] = f"diverges at step {steps}; {row[TRAINED]}".removesuffix("; –")
        rows.append({first: arm.name} | row)
    for arm, base in pairs_of(arms):
        gaps = paired(losses_of(arm, depths, unit), losses_of(base, depths, unit))
        if len(gaps):
            row = {first: f"{arm.name}: difference from {base.label}"}
            rows.append(row | cells(gaps, "+.4f"))
    return frame_table(pd.DataFrame(rows).set_index(first))


def losses_of(arm: Arm, depths: list[int], unit: str) -> pd.DataFrame:
    """A row a seed, a column for mu_rec and each depth."""
    losses = arm.losses_at(depths, unit)
    losses.insert(0, TRAINED, arm.losses(unit))
    return losses


def cells(losses: pd.DataFrame, spec: str) -> dict:
    """Of a row, the number of seeds and the depths that all of them have."""
    row = {"seeds": len(losses)}
    for depth, values in losses.items():
        name = depth if depth == TRAINED else f"depth {depth}"
        row[name] = "–" if values.hasnans else plus_minus(values, spec)
    return row


def depths_of(arms: list[Arm]) -> list[int]:
    """All depths that looped runs were evaluated at."""
    depths = set()
    for arm in arms:
        for run in arm.runs:
            depths.update(run.last["loss"])
    return sorted(depths - {0}) or [1]


def shown_depths(arms: list[Arm]) -> list[int]:
    return [depth for depth in depths_of(arms) if depth in SHOWN]


def cost_of(run: Run) -> dict:
    steps = pd.DataFrame(run.train, columns=["ms", "mem_gb"], dtype=float)
    seconds = steps.ms.sum() / 1e3
    return {
        "parameters": run.config["params"],
        "tokens trained": run.tokens,
        "tokens a parameter": tokens_a_parameter(run),
        "training FLOPs": run.flops,
        "tokens/s": run.tokens / seconds,
        "minutes in steps": seconds / 60,
        "peak memory, GiB": steps.mem_gb.max(),
    }


def cost_table(arms: list[Arm]) -> list[str]:
    """What a training takes, the median over seeds."""
    rows = []
    for arm in arms:
        costs = pd.DataFrame(map(cost_of, arm.runs))
        rows.append({"cost": arm.name} | costs.quantile(interpolation="higher").to_dict())
    return records_table(rows, {"cost": ""} | COSTS)


# -------------------------------------------------------------------------------------------------
# Figures


def labels_of(arms: list[Arm]) -> list[str]:
    return list(dict.fromkeys(arm.label for arm in arms))


def groups_of(arms: list[Arm]) -> dict[str, dict[str, Arm]]:
    """{group: {label: arm}}; every group has every label, missing arms have no runs."""
    groups = {arm.group: {label: Arm(label) for label in labels_of(arms)} for arm in arms}
    for arm in arms:
        groups[arm.group][arm.label] = arm
    return groups


def trained_depth(arms: list[Arm]) -> int:
    """The mu_rec of all looped runs; 0 where they differ."""
    depths = {run.depth for arm in arms for run in arm.runs if not run.has_one_depth()}
    return depths.pop() if len(depths) == 1 else 0


def loss_by_depth(arms: list[Arm], title: str, unit: str = "loss") -> Plot:
    """Val loss by depth, with its interval over seeds."""
    depths = depths_of(arms)
    means = []
    halves = []
    for arm in arms:
        losses = arm.losses_at(depths, unit).dropna(axis="columns")
        means.append(losses.mean().dropna().to_dict())
        halves.append([half_width(losses[depth]) for depth in means[-1]])
    plot = depth_plot(means, f"val loss, {UNITS[unit]}", trained_depth(arms))
    plot.settings["title"] = title
    plot.half_widths = halves
    return plot


def difference_over_training(arms: list[Arm], title: str, unit: str = "loss") -> Plot:
    """The difference of the val losses at mu_rec from the first arm's that was trained."""
    base = next(arm for arm in arms if arm.runs)
    curves = []
    halves = []
    for arm in arms:
        ours = Arm(arm.label) if arm is base else arm
        gaps = paired(ours.over_training(unit), base.over_training(unit))
        curves.append((gaps.columns.to_numpy(float) / 1e6, gaps.mean().to_numpy()))
        halves.append([half_width(gaps[tokens]) for tokens in gaps])
    label = f"difference from {base.label}, {UNITS[unit]}"
    return Plot(TOKENS, label, curves, {"title": title}, halves)


def comparison_figure(path: Path, arms: list[Arm], title: str = "") -> list[str]:
    """For each group the val loss by depth, and the differences over training."""
    unit = unit_of(arms)
    plots = []
    paired_too = False  # whether a difference is drawn
    for group, by_label in groups_of(arms).items():
        members = list(by_label.values())
        plots.append(loss_by_depth(members, group or title, unit))
        if pairs_of(members):
            plots.append(difference_over_training(members, group or title, unit))
            paired_too |= has_values(plots[-1])
    return figure(path, caption(arms, paired_too), labels_of(arms), plots)


def caption(arms: list[Arm], paired_too: bool) -> str:
    """What `comparison_figure` draws."""
    said = ["Val loss by depth"]
    if paired_too:
        said = ["Left val loss by depth, right the difference at mu_rec from the first model"]
        said.append(" over training (below 0 is better)")
    counts = sorted({len(arm.losses()) for arm in arms} - {0})
    if counts == [1]:
        said.append("; one seed each, no interval")
    else:
        seeds = " to ".join(map(str, dict.fromkeys([*counts[:1], *counts[-1:]])))
        said.append(f"; mean of {seeds} seeds, bars: 95 % interval over seeds")
    depth = trained_depth(arms)
    if depth:
        said.append(f"; the grey line marks {depth} loops, the mean in training")
    return "".join(said) + "."


def curve(run: Run, kind: str) -> tuple:
    """(millions of tokens, values) over training, as means of at most POINTS parts. kind: of the
    records of CURVES, or loss.DEPTH, the val loss at a depth.
    """
    records = pd.DataFrame(run.train)
    if kind not in records:
        records = pd.json_normalize(run.evals)
    values = records.reindex(columns=["tokens", kind]).astype(float)
    parts = values.index * POINTS // max(1, len(values))
    means = values.groupby(parts).mean(skipna=False)
    return means.tokens / 1e6, means[kind]


def curves_figure(path: Path, arms: list[Arm], kinds) -> list[str]:
    """Training curves of each arm's first run, by group and kind."""
    plots = []
    for group, by_label in groups_of(arms).items():
        for kind in kinds:
            curves = []
            for arm in by_label.values():
                curves.append(curve(arm.runs[0], kind) if arm.runs else ([], []))
            label, scale = CURVES.get(kind, (f"val {kind}", "linear"))
            plots.append(Plot(TOKENS, label, curves, {"yscale": scale, "title": group}))
    return figure(path, "Over training, the first seed of each.", labels_of(arms), plots)


# -------------------------------------------------------------------------------------------------
# The page


def in_words(values) -> str:
    """Different ones, in order."""
    return ", ".join(dict.fromkeys(map(str, values)))


def code_in_words(arm: Arm) -> str:
    """The commit that an arm was trained by, where it is known."""
    if arm.origin:
        return arm.origin
    config = arm.runs[0].config
    branch = config.get("branch") or ""
    edits = " with edits" if config.get("edited") else ""
    return f"{branch} {(config['commit'] or 'unknown'):.10}{edits}".strip()


def origin(arms: list[Arm], command: str) -> list[str]:
    """How, when, where and from what code and data the runs were made."""
    dates = set()
    machines = []
    versions = []
    ratios = []
    data = []
    evaluated = []
    for arm in arms:
        for run in arm.runs:
            config = run.config
            dates.add(config["date"])
            machines.append(config["machine"])
            versions.append(f"torch {config['versions']['torch']}, {config['dtype']}")
            ratios.append(f"{tokens_a_parameter(run):.3g}")
            folder = Path(config["data"].get("path", "")).name
            data.append(f"{folder} {config['data']['sha256']:.10}".strip())
            evaluated.append(f"{run.last.get('eval_tokens', 0):,}")
    first, last = min(dates), max(dates)
    commits = [code_in_words(arm) for arm in arms]
    if len(arms) <= SENTENCES and len(set(commits)) > 1:
        commits = [f"{code_in_words(arm)} ({arm.name})" for arm in arms]
    return [
        f"- command: `{command}`",
        f"- date: {first}" if first == last else f"- date: {first} to {last}",
        f"- machine: {in_words(machines)}; {in_words(versions)}",
        f"- commit: {in_words(commits)}",
        f"- training tokens a parameter: {in_words(ratios)}",
        f"- data: {in_words(data)}; validated on {in_words(evaluated)} tokens",
        "",
    ]


def notes(arms: list[Arm]) -> list[str]:
    """What the trainings noted of themselves."""
    said = [f"- {arm.name}: {note}" for arm in arms for run in arm.runs for note in run.notes]
    return ["## Notes of the trainings", "", *dict.fromkeys(said), ""] if said else []


def write_page(out: Path, title: str, arms: list[Arm], command: str, sections=()) -> None:
    """Writes OUT.md and OUT.png, then shows the answer and its table on the screen.

    sections: lines of markdown below all that every page has.
    """
    arms = [arm for arm in arms if arm.runs]
    said = answer(arms)
    losses = loss_table(arms, shown_depths(arms))
    picture = comparison_figure(Path(f"{out}.png"), arms)
    body = [*losses, *cost_table(arms), *origin(arms, command), *notes(arms), *sections]
    save_page(out, title, said, picture, body)
    print("\n".join([*said, "", *losses]), flush=True)


def save_page(out: Path, title: str, said: list[str], picture: list[str], body: list[str]) -> None:
    """Writes OUT.md: title, answer, picture, all else. In a page that is there, what somebody has written
    above MARK stays: its title and answer, and its notes below the picture.
    """
    file = Path(f"{out}.md")
    before = [f"# {title}", ""]
    for sentence in said:
        before += [sentence, ""]
    after = []
    lines = file.read_text().splitlines() if file.exists() else []
    if MARK in lines:
        above = lines[: lines.index(MARK)]
        image = [line.startswith("![") for line in above].index(True)
        before = above[:image]
        below = above[image:]
        after = [*below[below.index("") + 1 :], MARK, ""]
    file.parent.mkdir(parents=True, exist_ok=True)
    text = "\n".join([*before, *picture, *after, *body])
    write_atomic(file, text.rstrip() + "\n")
    print(f"written: {file}", flush=True)
