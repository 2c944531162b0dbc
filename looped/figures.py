"""Tables, figures and confidence intervals for report pages."""

import math
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from looped.console import fail
from looped.files import write_atomic

# the curves of a figure; line styles and markers tell them apart in black and white
COLORS = ["#000000", "#d55e00", "#0072b2", "#009e73", "#cc79a7", "#7f7f7f", "#8c510a"]
MARKERS = list("os^Dvx*")
STYLE = {"color": COLORS * 4, "marker": MARKERS * 4, "linestyle": ["-", "--", "-.", ":"] * 7}


def fmt(value: float | None, spec: str = ".4f") -> str:
    if value is None or math.isnan(value):
        return "–"
    return format(value, spec)


def half_width(values) -> float:
    """Half the width of the 95 % Student t interval of the mean of two or more values."""
    try:
        from scipy import stats
    except ImportError:
        fail("confidence intervals need scipy; type pip install scipy")
    return stats.sem(values) * stats.t.ppf(0.975, len(values) - 1)


def plus_minus(values, spec: str = ".4f") -> str:
    """The mean, with half the width of its 95 % t interval where there are several."""
    if len(values) == 0:
        return "–"
    mean = fmt(np.mean(values), spec)
    if len(values) == 1:
        return mean
    return f"{mean} ± {half_width(values):{spec.lstrip('+')}}"


def interval_note(values) -> str:
    """What is said beside plus_minus of differences."""
    n = f"n = {len(values)}"
    if len(values) == 1:
        return n
    inside = ", includes 0" if abs(np.mean(values)) <= half_width(values) else ""
    return f"{n} (95 % t interval{inside}; standard deviation {np.std(values, ddof=1):.4f})"


def table(header: list, rows) -> list[str]:
    """A markdown table as lines: the first column aligned left, the others right."""
    rule = ["---"] + ["---:"] * (len(header) - 1)
    lines = []
    for row in [header, rule, *rows]:
        cells = [str(cell).replace("|", "\\|") for cell in row]
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, ""]


def save_page(out: Path, lines: list[str]) -> None:
    """Writes out.md; `out` has no suffix, since the page's figures begin with it too."""
    file = Path(f"{out}.md")
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(file, "\n".join(lines).encode())
    print(f"written: {file}")


def frame_table(frame) -> list[str]:
    """A frame of pandas, its index as the first columns."""
    rows = frame.fillna("–").reset_index()
    return table(list(rows), rows.to_numpy())


def records_table(rows: list[dict], formats: dict[str, str]) -> list[str]:
    """The table of rows {column: value}; formats: {column: format of its numbers, or ""}."""
    cells = []
    for row in rows:
        cells.append([fmt(row[key], spec) if spec else row[key] for key, spec in formats.items()])
    return table(list(formats), cells)


@dataclass
class Plot:
    """One pair of axes with a curve (x, y) for each name of its figure, maybe an empty one."""

    xlabel: str
    ylabel: str
    curves: list
    settings: dict = field(default_factory=dict)  # of matplotlib's Axes.set
    half_widths: list = field(default_factory=list)  # of a band around each curve, if any


def figure(path, caption: str, names: list[str], plots: list[Plot], polar=False) -> list[str]:
    """Draw the plots into one PNG, two in a row -> the markdown lines that show it.

    A plot without a finite value is left out; without any there is no file and no line.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    plots = [plot for plot in plots if any(np.isfinite(y).any() for _, y in plot.curves)]
    if not plots:
        return []
    columns = min(2, len(plots))
    rows = math.ceil(len(plots) / 2)
    height = 4.6 if polar else 3.3
    size = (5.6 * columns, height * rows + 0.5)  # inches
    image = Figure(size, dpi=130, layout="constrained")
    for place, plot in enumerate(plots, 1):
        axes = image.add_subplot(rows, columns, place, polar=polar)
        draw(axes, plot, names)
        if polar:
            axes.tick_params(axis="x", pad=26)  # labels beside the circle
            axes.yaxis.set_major_locator(MaxNLocator(4))
    handles, labels = image.axes[0].get_legend_handles_labels()
    longest = max(map(len, names))
    fit = 56 * columns // (longest + 8)  # a letter's width, and a line and its gaps
    image.legend(handles, labels, loc="outside lower center", ncols=min(4, max(1, fit)))
    path.parent.mkdir(parents=True, exist_ok=True)
    image.savefig(path)
    return [f"![{caption}]({path.name})", "", caption, ""]


def draw(axes, plot: Plot, names: list[str]) -> None:
    axes.set_prop_cycle(**STYLE)
    bands = plot.half_widths or [None] * len(names)
    for name, (x, y), half in zip(names, plot.curves, bands, strict=True):
        every = max(1, len(x) // 10)
        (line,) = axes.plot(x, y, label=name, linewidth=1.4, markersize=5, markevery=every)
        if half is not None:
            axes.fill_between(
                x, y - half, y + half, color=line.get_color(), alpha=0.15, linewidth=0
            )
    axes.set(xlabel=plot.xlabel, ylabel=plot.ylabel, **plot.settings)
    axes.grid(alpha=0.3)


def depth_plot(losses: list[dict[int, float]], ylabel: str) -> Plot:
    """Loss against depth on a logarithmic axis, losses as {depth: loss} of each run.

    A run without a loop, whose only depth is 0, is a horizontal line across the others' depths.
    """
    depths = sorted(set().union(*losses) - {0}) or [1]
    curves = []
    for loss in losses:
        if 0 in loss:
            loss = dict.fromkeys([depths[0], depths[-1]], loss[0])
        known = sorted(loss)
        values = [loss[depth] for depth in known]
        curves.append((np.log2(known), np.array(values, float)))
    labelled = depths[:1]
    for depth in depths:
        if depth >= 4 / 3 * labelled[-1]:  # closer ones would overlap
            labelled.append(depth)
    ticks = {"xticks": np.log2(labelled), "xticklabels": labelled}
    return Plot("depth, loops", ylabel, curves, ticks)
