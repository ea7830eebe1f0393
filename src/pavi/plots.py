"""Pictures: the plate diagram of a model, how a fit went, and what it found. Needs the `plots` extra (matplotlib)."""

from __future__ import annotations

from typing import Any

import numpy as np

from pavi.errors import SettingError
from pavi.fitting import Fit
from pavi.posterior import Posterior
from pavi.template import Kind, Template

_FILL = {Kind.LATENT: "white", Kind.OBSERVED: "lightgray", Kind.FACTOR: "black", Kind.DETERMINISTIC: "white"}


def plate_diagram(template: Template, ax: Any = None) -> Any:
    """Draws a template: circles for sites (gray: observed, dashed: deterministic), boxes for plates, arrows from parents.

    Example:
        >>> import numpyro, numpyro.distributions as dist, pavi
        >>> def model():
        ...     mu = numpyro.sample("mu", dist.Normal(0, 1))
        ...     with numpyro.plate("group", 3):
        ...         numpyro.sample("x", dist.Normal(mu, 1))
        >>> ax = pavi.plots.plate_diagram(pavi.read_template(model, ["x"]))
    """
    positions = _positions(template)
    plt = _pyplot()
    width = 2.0 * max(1.0, np.ptp([x for x, _ in positions.values()])) + 3
    height = 1.5 * max(1.0, np.ptp([y for _, y in positions.values()])) + 2
    ax = ax or plt.subplots(figsize=(min(width, 14), min(height, 12)))[1]
    _draw_plates(template, positions, ax)
    for site in template.sites:
        x, y = positions[site.name]
        style = "--" if site.kind is Kind.DETERMINISTIC else "-"
        ax.add_patch(plt.Circle((x, y), 0.3, facecolor=_FILL[site.kind], edgecolor="black", linestyle=style, zorder=3))
        ax.annotate(site.name, (x + 0.36, y), ha="left", va="center", fontsize=10, zorder=4)
        for parent in site.parents:
            px, py = positions[parent]
            gap = 0.32 / max(np.hypot(x - px, y - py), 0.32)
            start, end = (px + gap * (x - px), py + gap * (y - py)), (x - gap * (x - px), y - gap * (y - py))
            ax.annotate("", end, start, arrowprops={"arrowstyle": "-|>", "color": "black"}, zorder=2)
    ax.set_aspect("equal")
    ax.axis("off")
    ax.autoscale_view()
    return ax


def _positions(template: Template) -> dict[str, tuple[float, float]]:
    """Rows by how many plates a site is in, then by its distance from the top; within a row, plates side by side."""
    depth: dict[str, int] = {}
    for site in template.sites:
        depth[site.name] = 1 + max((depth[parent] for parent in site.parents), default=-1)
    order = {plate.name: k for k, plate in enumerate(template.plates)}
    rows: dict[tuple[int, int], list[str]] = {}
    for site in template.sites:
        rows.setdefault((len(site.level), depth[site.name]), []).append(site.name)
    positions = {}
    for y, row in enumerate(sorted(rows)):
        names = sorted(rows[row], key=lambda name: np.mean([order[p] for p in template.site(name).level] or [0]))
        for k, name in enumerate(names):
            positions[name] = (1.9 * (k - (len(names) - 1) / 2), -1.5 * y)
    return positions


def _draw_plates(template: Template, positions: dict[str, tuple[float, float]], ax: Any) -> None:
    plt = _pyplot()
    inside = {p.name: [s.name for s in template.sites if p.name in s.level] for p in template.plates}
    for plate in template.plates:
        members = set(inside[plate.name])
        if not members:
            continue
        nested = sum(1 for other in inside.values() if other and set(other) < members)
        pad = 0.5 + 0.3 * nested
        xs, ys = zip(*(positions[name] for name in members), strict=True)
        low, high = (min(xs) - pad, min(ys) - pad - 0.15), (max(xs) + pad + 0.7, max(ys) + pad)
        box = plt.Rectangle(low, high[0] - low[0], high[1] - low[1], fill=False, edgecolor="gray", linewidth=1.2, zorder=1)
        ax.add_patch(box)
        label = f"{plate.name}: {plate.size:,}"
        ax.annotate(label, (high[0] - 0.05, low[1] + 0.05), ha="right", va="bottom", fontsize=9, color="gray")


def history(fit: Fit, ax: Any = None) -> Any:
    """Plots the ELBO over training steps, with a running median through its noise.

    Example:
        >>> ax = pavi.plots.history(fit)  # doctest: +SKIP
    """
    plt = _pyplot()
    ax = ax or plt.subplots(figsize=(6, 3.5))[1]
    step, elbo = fit.history["step"], fit.history["elbo"]
    window = max(len(elbo) // 100, 1)
    edges = np.arange(0, len(elbo) - window + 1, window)
    ax.plot(step, elbo, color="tab:green", alpha=0.25, linewidth=0.8)
    ax.plot(step[edges + window // 2], [np.nanmedian(elbo[a : a + window]) for a in edges], color="tab:green")
    low, high = np.nanquantile(elbo[len(elbo) // 4 :], [0.01, 0.999])
    ax.set_ylim(low - 0.5 * (high - low) - 1e-3, high + 0.2 * (high - low) + 1e-3)
    ax.set(xlabel="step", ylabel="ELBO (nats)", title=fit.stop.name.lower().replace("_", " "))
    return ax


def forest(posterior: Posterior, site: str, ax: Any = None, num_samples: int = 1000, most: int = 40) -> Any:
    """Plots posterior means with 50% and 95% intervals of one site, member by member.

    Example:
        >>> ax = pavi.plots.forest(fit, "theta")  # doctest: +SKIP
    """
    if site not in {s.name for s in (*posterior.template.latents, *posterior.template.deterministics)}:
        raise SettingError(f"forest: {site!r} is no latent or deterministic site of the model.")
    plt = _pyplot()
    level = posterior.template.site(site).level
    where = {plate: slice(most) for plate in level}
    draws = posterior.sample(num_samples, sites=[site], where=where)[site]
    stacked = draws.stack(member=[dim for dim in draws.dims if dim not in ("chain", "draw")])[0, :, :most]
    labels = [", ".join(str(part) for part in label) for label in stacked["member"].values] if stacked["member"].size else []
    low, lower, upper, high = np.quantile(stacked.values, [0.025, 0.25, 0.75, 0.975], axis=0)
    ax = ax or plt.subplots(figsize=(6, 0.25 * len(labels) + 1.2))[1]
    rows = np.arange(len(labels))[::-1]
    ax.hlines(rows, low, high, color="tab:green", linewidth=1)
    ax.hlines(rows, lower, upper, color="tab:green", linewidth=3)
    ax.plot(stacked.values.mean(0), rows, "o", color="black", markersize=3)
    ax.set_yticks(rows, labels)
    ax.set(xlabel=site, title=f"{site}: mean, 50% and 95% intervals")
    return ax


def _pyplot() -> Any:
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise SettingError("Plots need matplotlib: install the `plots` extra.") from error
    return plt
