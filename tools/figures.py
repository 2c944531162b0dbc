"""Tables, figures and confidence intervals for report pages."""

import math
from dataclasses import dataclass, field

import numpy as np

# the curves of a figure; line styles and markers tell them apart in black and white
COLORS = ["k", "#d55e00", "#0072b2", "#009e73", "#cc79a7", "0.5", "#8c510a", "#56b4e9", "gold"]
MARKERS = list("os^Dvx*P<")
STYLE = {"color": COLORS * 4, "marker": MARKERS * 4, "linestyle": ["-", "--", "-.", ":"] * 9}


def fmt(value, spec: str = ".4f") -> str:
    """A dash for None and for NaN, which alone is unlike itself."""
    if value is None or value != value:
        return "–"
    return format(value, spec)


def t_quantile(freedom: int) -> float:
    """What |t| of Student's law exceeds in 5 % of draws."""
    from scipy.special import stdtrit

    return float(stdtrit(freedom, 0.975))


def half_width(values) -> float:
    """Half the width of the 95 % Student t interval of the mean; NaN of fewer than two values."""
    n = len(values)
    if n < 2:
        return math.nan
    return t_quantile(n - 1) * float(np.std(values, ddof=1)) / math.sqrt(n)


def plus_minus(values, spec: str = ".4f") -> str:
    """The mean, with half the width of its 95 % t interval where there are several."""
    if not len(values):
        return fmt(None)
    mean = fmt(np.mean(values), spec)
    if len(values) == 1:
        return mean
    half = format(half_width(values), spec.lstrip("+"))
    return f"{mean} ± {half}"


def table(header: list, rows) -> list[str]:
    """A markdown table as lines: the first column aligned left, the others right."""
    rule = ["---"] + ["---:"] * (len(header) - 1)
    lines = []
    for row in [header, rule, *rows]:
        cells = [str(cell).replace("|", "\\|") for cell in row]
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, ""]


def frame_table(frame) -> list[str]:
    """A frame of pandas, its index as the first columns."""
    rows = frame.fillna("–").reset_index()
    return table(list(rows), rows.to_numpy())


def records_table(rows: list[dict], formats: dict[str, str]) -> list[str]:
    """The table of rows {column: value}; formats: {column: format of its values}."""
    cells = []
    for row in rows:
        cells.append([fmt(row[name], spec) for name, spec in formats.items()])
    return table(list(formats), cells)


@dataclass
class Plot:
    """One pair of axes with a curve (x, y) for each name of its figure, maybe an empty one."""

    xlabel: str
    ylabel: str
    curves: list
    settings: dict = field(default_factory=dict)  # of matplotlib's Axes.set
    half_widths: list = field(default_factory=list)  # of an interval at each point, if any
    mark: float | None = None  # where a vertical line is drawn


def figure(path, caption: str, names: list[str], plots: list[Plot]) -> list[str]:
    """Draw the plots into one PNG, two in a row -> the markdown lines that show it.

    A plot without a finite value is left out; without any there is no file and no line.
    """
    from matplotlib.figure import Figure

    plots = [plot for plot in plots if has_values(plot)]
    if not plots:
        return []
    columns = min(2, len(plots))
    rows = math.ceil(len(plots) / 2)
    legend_height = 0.25 * len(names) / columns
    size = 5.6 * columns, rows * 3.3 + legend_height
    image = Figure(size, dpi=130, layout="constrained")
    for place, plot in enumerate(plots, 1):
        axes = image.add_subplot(rows, columns, place)
        draw(axes, plot, names)
    image.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=columns)
    path.parent.mkdir(parents=True, exist_ok=True)
    image.savefig(path)
    return [f"![{path.stem}]({path.name})  ", f"*{caption}*", ""]


def has_values(plot: Plot) -> bool:
    return any(np.isfinite(y).any() for _, y in plot.curves)


def draw(axes, plot: Plot, names: list[str]) -> None:
    axes.set_prop_cycle(**STYLE)
    halves = plot.half_widths or [None] * len(names)
    for name, (x, y), half in zip(names, plot.curves, halves, strict=True):
        every = max(1, len(x) // 10)
        axes.errorbar(x, y, half, label=name, linewidth=1.4, markersize=5, markevery=every)
    if plot.mark is not None:
        axes.axvline(plot.mark, color="0.6", linewidth=1, zorder=0)
    axes.set(xlabel=plot.xlabel, ylabel=plot.ylabel, **plot.settings)
    axes.grid(alpha=0.3)


def depth_plot(losses: list[dict[int, float]], ylabel: str, trained: int = 0) -> Plot:
    """Loss against depth on a logarithmic axis, losses as {depth: loss} of each run; trained: the
    depth to mark, if any.
    """
    depths = sorted(set().union(*losses)) or [1]
    curves = []
    for loss in losses:
        known = sorted(loss)
        values = [loss[depth] for depth in known]
        curves.append((np.log2(known), np.array(values, float)))
    first = int(np.log2(depths[0]))
    last = int(np.log2(depths[-1]))
    powers = np.arange(first, last + 1)
    ticks = {"xticks": powers, "xticklabels": 2**powers}
    mark = np.log2(trained) if trained else None
    return Plot("depth, loops", ylabel, curves, ticks, mark=mark)
