"""Tables and figures of the experiments, made from their CSVs alone, each beside the paper's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from pavi.experiments import methods, paper
from pavi.experiments.comparing import GRE_DIM, GRE_GROUPS, GRE_POINTS, GRE_SIGMA
from pavi.experiments.comparing import scaling as scaling_problem
from pavi.experiments.problems import gre_posterior
from pavi.experiments.records import Row, read

Lines = list[str]
# A part of the page, from the rows of its CSV, the folder for images, and the folder of the CSVs.
Section = Callable[[Sequence[Row], Path, Path], Lines]


def write(folder: Path, page: Path) -> None:
    """Writes a page of all experiments whose CSVs are in a folder, and their figures beside it."""
    images = page.parent / "images" / page.stem
    parts: Lines = [
        "# The paper's experiments, run again",
        "",
        f"This page is written by `pavi reproduce report` from the CSVs in `{_plain(folder)}`, which "
        "`pavi reproduce NAME` fills; `pavi reproduce all` runs every one. Raw ELBOs are not comparable with the paper's, "
        "which leaves noise scales and points per group open; gaps to the exact evidence and ratios are.",
        "",
    ]
    for name, section in SECTIONS.items():
        path = folder / f"{name}.csv"
        if path.exists():
            rows = read(path)
            parts += [*section(rows, images, folder), "", _measured_on(rows), ""]
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text("\n".join(parts))


def _plain(folder: Path) -> str:
    """A folder as a reader of the project knows it."""
    root = Path(__file__).parents[3].resolve()
    folder = folder.resolve()
    return (folder.relative_to(root) if folder.is_relative_to(root) else Path(folder.name)).as_posix() + "/"


def scaling(rows: Sequence[Row], images: Path, folder: Path) -> Lines:
    del folder
    lines = [
        "## Scaling with plate cardinalities (figure 3, `tab:scaling`)",
        "",
        f"Gaussian random effects, D={GRE_DIM}, {GRE_POINTS} points per group with a standard deviation of {GRE_SIGMA} "
        f"(our choice), groups per step {', '.join(f'{most} of {all_:,}' for all_, most in GRE_GROUPS.items())}. The gap is "
        "to the exact evidence, per latent number; the paper's is to its asymptotic ELBO. Seconds are by the plateau rule, "
        "first with compilation, then for data sets that follow; the paper's were measured on a V100.",
        "",
        "| groups | method | ELBO | gap per latent | weights | seconds | paper's gap per latent | weights | seconds |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    means: dict[tuple[int, str], tuple[float, float, float]] = {}
    order = list(methods.scaling())
    known = [pair for pair in _pairs(rows) if pair[1] in order]
    for variant, method in sorted(known, key=lambda pair: (int(pair[0].split()[0]), order.index(pair[1]))):
        groups = int(variant.split()[0])
        some, latents = _of(rows, variant, method), GRE_DIM * (groups + 1)
        gap = np.mean([row["exact"] - row["elbo"] for row in some]) / latents
        means[groups, method] = gap, float(some[0]["weights"]), float(some[0]["plateau_seconds"])
        theirs = paper.SCALING.get(groups, {})
        told = ["", "", ""]
        if method in theirs:
            elbo, weights, seconds = theirs[method]
            told = [f"{(theirs['exact'][0] - elbo) / latents:.3f}", f"{weights:,}", f"{seconds:,.0f}"]
        ours = [f"{np.mean([r['elbo'] for r in some]):,.2f}", f"{gap:.5f}", f"{means[groups, method][1]:,.0f}"]
        lines.append("| " + " | ".join([f"{groups:,}", method, *ours, _seconds(some), *told]) + " |")
    with _axes(images / "scaling.svg", 3) as axes:
        for ax, k, title in zip(axes, range(3), ("gap per latent (nats)", "weights", "seconds to the plateau"), strict=True):
            for method in dict.fromkeys(method for _, method in means):
                groups_of = sorted(groups for groups, other in means if other == method)
                ax.loglog(groups_of, [max(means[g, method][k], 1e-6) for g in groups_of], "o-", label=method)
            ax.set(xlabel="groups", title=title)
        axes[0].legend(fontsize=7)
    return [*lines, "", f"![scaling](images/{images.name}/scaling.svg)"]


def comparison(title: str, theirs: Mapping[str, paper.Entry]) -> Section:
    """A section with one line per method: ELBO and seconds, ours and the paper's."""

    def section(rows: Sequence[Row], images: Path, folder: Path) -> Lines:
        del images, folder
        labels = any(row.get("labels_right", "") != "" for row in rows)
        head = ["method", "ELBO", "below the best", "seconds", *(["labels right"] if labels else [])]
        head += ["paper's ELBO", "below its best", "seconds"]
        lines = [f"## {title}", "", "| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
        found = {m: [row for row in _of(rows, v, m) if row["elbo"] != ""] for v, m in _pairs(rows)}
        best = _best_by_dataset(found)
        top = max((entry[0] for entry in theirs.values() if entry is not None), default=0.0)
        for method, some in sorted(found.items(), key=lambda item: [*theirs, item[0]].index(item[0])):
            cells = [method, "none", "", "", *([""] if labels else [])]
            if some:
                elbos = [row["elbo"] for row in some]
                below = float(np.mean([best[row["dataset"]] - row["elbo"] for row in some]))
                cells = [method, f"{np.mean(elbos):,.1f} (± {np.std(elbos):,.1f})", f"{below:,.1f}", _seconds(some)]
                cells += [f"{np.mean([row['labels_right'] for row in some]):.3f}"] if labels else []
            entry = theirs.get(method)
            cells += ["", "", ""] if entry is None else [f"{entry[0]:,.0f} (± {entry[1]:,.0f})", f"{top - entry[0]:,.0f}"]
            cells += [] if entry is None else [f"{entry[2]:,.0f}"]
            lines.append("| " + " | ".join(cells) + " |")
        return lines

    return section


def curves(title: str, name: str, note: str) -> Section:
    """A figure of gaps over steps, and the steps until the gap has fallen to a hundredth of that after ten."""

    def section(rows: Sequence[Row], images: Path, folder: Path) -> Lines:
        del folder
        head = "| method | steps to 1% of the gap after 10 steps (median) | gap at the last step (nats, median) |"
        lines = [f"## {title}", "", f"{note} {CONSTANT_RATE}", "", head, "|---|---|---|"]
        names = list(dict.fromkeys(row["method"] for row in rows))
        with _axes(images / f"{name}.svg", 1) as (ax,):
            for method in names:
                ends, lasts = [], []
                runs = [[r for r in rows if r["method"] == method and r["dataset"] == d] for d in _datasets(rows, method)]
                for k, run in enumerate(runs):
                    steps = np.array([row["step"] for row in run])
                    gaps = np.array([row["exact"] - row["elbo"] for row in run])
                    below = np.flatnonzero(gaps <= 0.01 * gaps[0])
                    ends.append(steps[below[0]] if len(below) else np.inf)
                    lasts.append(gaps[-1])
                    color = f"C{names.index(method)}"
                    ax.loglog(steps, np.maximum(gaps, 1e-3), color=color, label=method if k == 0 else None)
                lines.append(f"| {method} | {np.median(ends):,.0f} | {np.median(lasts):,.3f} |")
            ax.set(xlabel="step", ylabel="exact evidence - ELBO (nats)")
            ax.legend(fontsize=7)
        return [*lines, "", f"![{name}](images/{images.name}/{name}.svg)"]

    return section


def sanity(rows: Sequence[Row], images: Path, folder: Path) -> Lines:
    lines = [
        "## Sanity check (`fig:sanity`)",
        "",
        "Wasserstein distances between posterior draws and draws of the exact posterior, 20 groups: of all latents "
        "together, of the population mean, and of a group's mean on average. The line *exact* compares two sets of "
        "exact draws.",
        "",
        "| method | all | population | groups |",
        "|---|---|---|---|",
    ]
    for method in dict.fromkeys(row["method"] for row in rows):
        some = [row for row in rows if row["method"] == method]
        cells = [f"{np.mean([row[key] for row in some]):.3f}" for key in DISTANCES]
        lines.append("| " + " | ".join([method, *cells]) + " |")
    draws = folder / "draws"
    if draws.exists():
        _draw_sanity(draws, images / "sanity.png")
    return [*lines, "", f"![sanity](images/{images.name}/sanity.png)"]


def _draw_sanity(draws: Path, path: Path) -> None:
    """Draws of group means (colored) and of the population mean (black), with circles of two exact standard deviations."""
    names = list(dict.fromkeys(file.stem.rsplit("-", 1)[0] for file in sorted(draws.glob("*.npz"))))
    numbers = sorted({int(file.stem.rsplit("-", 1)[1]) for file in draws.glob("*.npz")})
    with _axes(path, len(numbers), len(names), 2.2) as axes:
        for i, method in enumerate(names):
            for k, number in enumerate(numbers):
                found, ax = np.load(draws / f"{method}-{number}.npz"), axes[i][k]
                exact_mu, exact = gre_posterior(scaling_problem(20).draw(number), GRE_SIGMA, 2000)
                for group in range(exact.shape[1]):
                    ax.scatter(*found["theta"][:100, group].T, s=0.5, alpha=0.4)
                    _circle(ax, exact[:, group])
                ax.scatter(*found["mu"][:100].T, s=0.5, color="black", alpha=0.4)
                _circle(ax, exact_mu)
                ax.set(xticks=[], yticks=[], aspect="equal", title=f"data set {number}" if i == 0 else "")
            axes[i][0].set_ylabel(method, fontsize=8)


def _circle(ax: Any, draws: np.ndarray) -> None:
    import matplotlib.pyplot as plt

    ax.add_patch(plt.Circle(draws.mean(0), 2 * draws.std(0).mean(), fill=False, linewidth=0.6))


# What is said of every figure of curves.
CONSTANT_RATE = (
    "Gaps are to the exact evidence, at the constant rates that a fit has before it decays: they end at the noise of a step."
)
DISTANCES = ("wasserstein", "wasserstein_mu", "wasserstein_theta")
SECTIONS: Mapping[str, Section] = {
    "convergence": curves(
        "Plate amortization and convergence speed (figure 2, left)",
        "convergence",
        "D=8, 100 groups, 2 per step. In the paper both plate-amortized methods converge ten to a hundred times faster. "
        "Informative data: 10 points per group with a standard deviation of 0.3; balanced: 5 with 1; weak: 3 with 3.",
    ),
    "encoding-sizes": curves(
        "Impact of encoding size (figure 2, right)",
        "encoding-sizes",
        "D=8, 20 groups, 2 per step. In the paper the ELBO rises with the size until 8, that of the sufficient statistics.",
    ),
    "scaling": scaling,
    "sanity": sanity,
    "reduced-plates": curves(
        "Effect of the reduced cardinalities (`fig:card_redu`)",
        "reduced-plates",
        "D=8, 1 to all of 20 groups per step. In the paper larger steps are faster for PAVI-F, and PAVI-E fails with 1. "
        "Our PAVI-E keeps moving summaries of the groups that a step does not draw; lines of one that sees only those "
        "it draws are as in the paper.",
    ),
    "mixture": comparison("Gaussian mixture (`tab:GM`)", paper.MIXTURE),
    "variance": comparison("Hierarchical variance (`tab:HV`)", paper.VARIANCE),
    "neuroimaging": comparison("Small neuroimaging model (`tab:HCPL`)", paper.NEUROIMAGING),
}


def _seconds(rows: Sequence[Row]) -> str:
    """Seconds to the plateau of the first data set, which compiles, and of the others, which do not."""
    times = [row["plateau_seconds"] for row in rows]
    if "together" in rows[0] and rows[0]["together"] not in ("", 1):
        return f"{times[0]:.2f}"
    later = [time for time in times[1:] if time != times[0]]  # amortized methods are trained once
    return f"{times[0]:.1f}" + (f", then {np.median(later):.1f}" if later else "")


def _pairs(rows: Sequence[Row]) -> list[tuple[str, str]]:
    return list(dict.fromkeys((row["variant"], row["method"]) for row in rows))


def _of(rows: Sequence[Row], variant: str, method: str) -> list[Row]:
    return [row for row in rows if row["variant"] == variant and row["method"] == method]


def _datasets(rows: Sequence[Row], method: str) -> list[int]:
    return sorted({row["dataset"] for row in rows if row["method"] == method})


def _best_by_dataset(found: Mapping[str, Sequence[Row]]) -> dict[int, float]:
    best: dict[int, float] = {}
    for row in (row for some in found.values() for row in some):
        best[row["dataset"]] = max(best.get(row["dataset"], -np.inf), row["elbo"])
    return best


def _measured_on(rows: Sequence[Row]) -> str:
    counts = len({(row.get("dataset"), row.get("seed", 0)) for row in rows})
    machines = sorted({f"{row['device']}, jax {row['jax']}, numpyro {row['numpyro']}" for row in rows})
    beside = max((int(row.get("together") or 1) for row in rows), default=1)
    shared = f" Up to {beside} fits side by side: seconds are theirs divided by their number." if beside > 1 else ""
    return f"*{counts} data sets and seeds per line; {'; '.join(machines)}.{shared}*"


@contextmanager
def _axes(path: Path, columns: int, rows: int = 1, size: float = 4.2) -> Iterator[Any]:
    """Rows of axes, or the axes of a single row, saved at the end."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(rows, columns, figsize=(size * columns, size * rows), squeeze=False)
    yield axes if rows > 1 else axes[0]
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)
