"""Functional networks of a simulated cohort: 416 million latents through `pavi.fit`.

    python benchmarks/cohort.py                  # 1,000 subjects, 59,412 vertices: for a large GPU
    python benchmarks/cohort.py --size 0.01      # 100 subjects, 5,941 vertices: for a laptop
    python benchmarks/cohort.py --seeds 10       # how often all networks are found
    python benchmarks/cohort.py --growth         # step time and accuracy from 10 to 1,000 subjects
    python benchmarks/cohort.py --memory         # the plan against the peak, a step's bytes against a copy, its kernels
    python benchmarks/cohort.py --memory --placement host --size 0.04   # the same with rows and data in host memory
    python benchmarks/cohort.py --moments        # moments of all members to Zarr, and the rate of the storage
    python benchmarks/cohort.py --relaxed        # the paper's form: labels relaxed, its flows and its batch
    python benchmarks/cohort.py --polish 0       # trained only; at full size fits are polished by default

The model is `pavi.models.parcellation`, labels summed out unless `--relaxed`. Two settings: prior scales as in the paper,
and a hard one with smaller ones, in model and simulation alike, in which even the labels one would give knowing the true
fingerprints, scales and population logits are wrong for one vertex in ten; their accuracy is `best`. A polished fit trains
for a few steps, polishes, and trains the subjects' logits on for the steps of the table.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from scipy.optimize import linear_sum_assignment

import pavi
from pavi.experiments.stepwise import start
from pavi.models import Cohort, parcellation, simulate_cohort

SUBJECTS, SESSIONS, VERTICES, FEATURES, NETWORKS = 1000, 2, 59_412, 64, 7
SETTINGS: dict[str, dict[str, float]] = {
    "paper": {},
    "hard": {"fingerprint_scale": 0.1, "population_scale": 1.0, "spread": 0.3},
}
# Half precision would add to spreads that are a hundred times smaller than fingerprints; the relaxed form gives them no
# intervals, and its data are on the device twice, since sessions come before vertices there.
DTYPES = {"paper": jnp.float32, "hard": jnp.float16}
# Steps of a fit that is to be polished; narrow networks have to be known well by then.
BEFORE_POLISHING = {"paper": 1000, "hard": 500}
EVALUATED, LABEL_DRAWS = 20, 128
MOMENT_DRAWS = (32, 64, 128)
PAPER = pavi.PAVI(
    encodings=pavi.FreeEncodings(size={"mu": 16, ...: 8}),
    flow={"mu": pavi.MAF((64, 128, 64)), "kappa": pavi.PointMass(), "gamma": pavi.PointMass(), ...: pavi.Affine()},
)


def family(arguments: argparse.Namespace, pulled: bool = False) -> pavi.PAVI:
    """Affine flows for all sites, but for the paper's form, which has the paper's."""
    return PAPER if arguments.relaxed else pavi.PAVI(flow=pavi.Affine(hidden=tuple(arguments.hidden)), show_pull=pulled)


def best_labels(cohort: Cohort, subjects: np.ndarray) -> Any:
    """Labels given the true fingerprints, scales and population logits; the subjects' own logits averaged out."""
    draws = jax.random.normal(jax.random.key(1), (256, NETWORKS))
    prior = jax.lax.map(
        lambda logits: jax.nn.softmax(logits + cohort.gamma * draws).mean(0), cohort.population_logits, batch_size=1024
    )

    def one(x: Any) -> Any:
        around = ((x[:, None].astype(jnp.float32) - cohort.mu[None, :, None]) ** 2).sum((-2, -1))
        log_norm = x.shape[1] * x.shape[2] * jnp.log(cohort.kappa)
        return (jnp.log(prior) - 0.5 * around / cohort.kappa**2 - log_norm).argmax(-1)

    return jax.lax.map(one, cohort.x[subjects])


def share_right(found: Any, cohort: Cohort, subjects: np.ndarray) -> float:
    return float((np.asarray(found) == np.asarray(cohort.labels[subjects])).mean())


class Verdict(NamedTuple):
    """What a fit got right: labels, fingerprints (lowest correlation with the true ones), and 95% intervals that cover.

    And mean, standard deviation and truth of `gamma`.
    """

    right: float
    lowest: float
    covered: dict[str, float]
    gamma: np.ndarray


def judge(fit: pavi.Fit, cohort: Cohort, subjects: np.ndarray) -> Verdict:
    """Compares a fit with the truth.

    Intervals are those of every number of `mu`, `kappa` and `gamma`, and of the population's logits at some vertices, around
    their mean (a constant added to all does nothing).
    """
    moments = fit.moments(sites=["mu", "kappa", "gamma"], num_samples=200)
    correlation = np.corrcoef(moments["mu"].values[0], cohort.mu)[:NETWORKS, NETWORKS:]
    truly = linear_sum_assignment(-correlation)[1]
    covered = {}
    for name in ("mu", "kappa", "gamma"):
        mean, sd = moments[name].values
        covered[name] = float((np.abs(mean - np.asarray(getattr(cohort, name))[truly]) < 1.96 * sd).mean())
    some = np.linspace(0, cohort.population_logits.shape[0] - 1, 500).astype(int)
    draws = fit.sample(200, sites=["population_logits"], where={"vertex": some})["population_logits"].values[0]
    draws = draws - draws.mean(-1, keepdims=True)
    truth = np.asarray(cohort.population_logits)[some][:, truly]
    truth = truth - truth.mean(-1, keepdims=True)
    covered["population"] = float((np.abs(draws.mean(0) - truth) < 1.96 * draws.std(0)).mean())
    probs = fit.moments(sites=["label_probs"], where={"subject": subjects}, num_samples=LABEL_DRAWS)["label_probs"].values[0]
    right = share_right(truly[probs.argmax(-1)], cohort, subjects)
    gamma = np.stack([*moments["gamma"].values, np.asarray(cohort.gamma)[truly]])
    return Verdict(right, float(correlation[np.arange(NETWORKS), truly].min()), covered, gamma[:, np.argsort(truly)])


def timed_fit(model: Any, x: Any, **settings: Any) -> tuple[pavi.Fit, float]:
    started = time.perf_counter()
    fit = pavi.fit(model, {"x": x}, progress_bar=False, **settings)
    jax.block_until_ready(fit._weights.shared)
    return fit, time.perf_counter() - started


def polishing(arguments: argparse.Namespace, steps: int) -> dict[str, Any]:
    """How fits are polished: subjects' logits are trained anew, shown which way their data pull."""
    points = {"num_draws": arguments.draws, "inner_points": arguments.points}
    return {"steps": steps, "family": family(arguments, pulled=True), "num_particles": arguments.particles, **points}


def print_row(name: str, seed: int, fit: pavi.Fit, seconds: float, found: Verdict, best: float) -> None:
    print(
        f"| {name} | {seed} | {fit.template.num_latents:,} | {len(fit.history['step']):,} | {seconds:.1f} "
        f"| {fit.history['seconds'][0]:.1f} | {found.right:.4f} | {best:.4f} | {found.lowest:.4f} | "
        + " | ".join(f"{share:.3f}" for share in found.covered.values())
        + " |",
        flush=True,
    )


def run(arguments: argparse.Namespace, names: list[str]) -> None:
    """The main table: one fit after the other, each from nothing but compiled code."""
    share = np.sqrt(arguments.size)
    subjects, vertices = round(SUBJECTS * share), round(VERTICES * share)
    form = "relaxed" if arguments.relaxed else "summed"
    evaluated = np.arange(min(subjects, EVALUATED))
    batch = {"subject": min(arguments.batch[0], subjects), "vertex": min(arguments.batch[1], vertices)}
    if arguments.relaxed:
        batch["session"] = 1
    settings = {"family": family(arguments), "batch": batch, "num_particles": arguments.particles}
    print(f"{jax.devices()[0].device_kind}, labels {form}, {subjects:,} subjects, {vertices:,} vertices, {batch} per step\n")
    columns = ["setting", "seed", "latents", "steps", "seconds", "before the first step", "accuracy", "best", "lowest r"]
    columns += [f"{name} covered" for name in ("mu", "kappa", "gamma", "population logits")]
    print("| " + " | ".join(columns) + " |\n|" + "---|" * len(columns))
    reached: dict[str, list[tuple[float, float]]] = {}
    gammas: list[tuple[str, int, int, np.ndarray]] = []
    for name in names:
        model = parcellation(subjects, SESSIONS, vertices, FEATURES, NETWORKS, labels=form, **SETTINGS[name])
        for seed in range(arguments.seeds):
            sizes = (subjects, SESSIONS, vertices, FEATURES, NETWORKS)
            dtype = jnp.float16 if arguments.relaxed else DTYPES[name]
            cohort = simulate_cohort(*sizes, seed=seed, dtype=dtype, **SETTINGS[name])
            best = share_right(best_labels(cohort, evaluated), cohort, evaluated)
            x = cohort.x.transpose(0, 2, 1, 3) if arguments.relaxed else cohort.x
            cohort = cohort._replace(x=None)
            for steps in arguments.steps:
                kind, more = name, {"steps": steps}
                usual = BEFORE_POLISHING[name] if arguments.size == 1 and not arguments.relaxed else 0
                before = usual if arguments.polish is None else arguments.polish
                if before:
                    kind, more = f"{name}, polished", {"steps": before, "polish": polishing(arguments, steps)}
                fit, seconds = timed_fit(model, x, rng_key=seed, **settings, **more)
                found = judge(fit, cohort, evaluated)
                reached.setdefault(kind, []).append((found.right / best, seconds))
                print_row(kind, seed, fit, seconds, found, best)
                gammas.append((kind, seed, steps, found.gamma))
                del fit
            del cohort, x
    print("\n| setting | seconds to 90% of the best accuracy | to 99% | to 99.8% |\n|---|---|---|---|")
    for name, found in reached.items():
        times = [min((taken for share, taken in found if share >= goal), default=np.inf) for goal in (0.9, 0.99, 0.998)]
        print(f"| {name} | " + " | ".join(f"{taken:.1f}" for taken in times) + " |")
    print("\n| setting | seed | steps | gamma of each network: mean (sd), true |\n|---|---|---|---|")
    for name, seed, steps, each in gammas:
        print(f"| {name} | {seed} | {steps:,} | " + "; ".join(f"{m:.3f} ({sd:.3f}), {t:.3f}" for m, sd, t in each.T) + " |")


def memory(arguments: argparse.Namespace) -> None:
    """The plan, the peak as measured, and a step's bytes against the bandwidth of a copy."""
    share = np.sqrt(arguments.size)
    subjects, vertices = round(SUBJECTS * share), round(VERTICES * share)
    model = parcellation(subjects, SESSIONS, vertices, FEATURES, NETWORKS)
    batch = {"subject": min(arguments.batch[0], subjects), "vertex": min(arguments.batch[1], vertices)}
    settings = {"family": family(arguments), "batch": batch, "num_particles": arguments.particles, "starts": 1}
    settings["placement"] = arguments.placement
    ones = jnp.ones if arguments.placement is None else np.ones
    x = ones((subjects, vertices, SESSIONS, FEATURES), jnp.float16)
    plan = pavi.plan(model, {"x": x}, **settings)
    print(f"{plan}\n")
    fit, _ = timed_fit(model, x, steps=400, **settings)
    each = step_seconds(fit)
    del fit
    print(f"one step          {1e3 * each:.3f} ms, {operations(arguments) / 1e9:.2f} billion operations")
    stats = jax.devices()[0].memory_stats()
    if stats:
        peak = stats["peak_bytes_in_use"]
        print(f"peak as measured  {peak / 1e9:.1f} GB: {peak / plan.device_bytes:.3f} of the plan")
        few, many = (kernels(partial(timed_fit, model, x, steps=steps, **settings)) for steps in (100, 400))
        print("\n| kernel | times per step | microseconds per step |\n|---|---|---|")
        ran = {name: (np.array(many[name]) - few.get(name, (0, 0))) / 300 for name in many}
        print("| all | {:.0f} | {:.0f} |".format(*sum(ran.values())))
        for name in sorted(ran, key=lambda name: -ran[name][1])[:10]:
            print("| {} | {:.0f} | {:.1f} |".format(name, *ran[name]))
    del x
    array = jnp.zeros(2**28 if stats else 2**24, jnp.float32)
    copy = jax.jit(lambda array: array + 1)
    copy(array).block_until_ready()
    started = time.perf_counter()
    for _ in range(10):
        array = copy(array)
    array.block_until_ready()
    rate = 20 * array.nbytes / (time.perf_counter() - started)
    print(
        f"copy bandwidth {rate / 1e9:.0f} GB/s: a step's bytes take {plan.step_bytes / rate * 1e6:.1f} microseconds; "
        f"it moves them at {plan.step_bytes / each / 1e9:.1f} GB/s"
    )


def operations(arguments: argparse.Namespace) -> float:
    """Floating-point operations of a step, as XLA counts them; they do not depend on the size of the study."""
    subjects, vertices = (2 * count for count in arguments.batch)
    model = parcellation(subjects, SESSIONS, vertices, FEATURES, NETWORKS)
    batch = dict(zip(("subject", "vertex"), arguments.batch, strict=True))
    x = jnp.ones((subjects, vertices, SESSIONS, FEATURES), jnp.float16)
    problem, inputs, state, _ = start(model, {"x": x}, family(arguments), batch, arguments.particles)
    return jax.jit(problem.step).lower(inputs, state, jnp.float32(1.0)).compile().cost_analysis()["flops"]


def step_seconds(fit: pavi.Fit) -> float:
    """Seconds per step in the second half of a fit."""
    seconds = fit.history["seconds"]
    half = len(seconds) // 2
    return (seconds[-1] - seconds[half]) / (len(seconds) - half - 1)


def kernels(run: Callable[[], Any]) -> dict[str, tuple[int, float]]:
    """How often each kernel of the device ran, and for how many microseconds in all."""
    found: dict[str, tuple[int, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            run()
        (path,) = Path(folder).rglob("*.xplane.pb")
        for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
            for line in plane.lines if "GPU" in plane.name else ():
                for event in line.events if "Compute" in line.name else ():
                    count, taken = found.get(event.name, (0, 0.0))
                    found[event.name] = count + 1, taken + event.duration_ns / 1e3
    return found


def moments(arguments: argparse.Namespace) -> None:
    """Moments of all subjects' logits and label probabilities streamed to Zarr, against a plain write of as many bytes.

    Until they are on the disk: a machine with much memory takes in what is written in no time.
    """
    import zarr

    share = np.sqrt(arguments.size)
    subjects, vertices = round(SUBJECTS * share), round(VERTICES * share)
    cohort = simulate_cohort(subjects, SESSIONS, vertices, FEATURES, NETWORKS, **SETTINGS["hard"])
    model = parcellation(subjects, SESSIONS, vertices, FEATURES, NETWORKS, **SETTINGS["hard"])
    batch = {"subject": min(arguments.batch[0], subjects), "vertex": min(arguments.batch[1], vertices)}
    fit, _ = timed_fit(model, cohort.x, family=family(arguments), batch=batch, num_particles=1, steps=100, starts=1)
    sites = ["logits", "label_probs"]
    fit.moments(sites=sites, where={"vertex": slice(0, 1)}, num_samples=1)  # what else is used for the first time
    print(f"| {subjects * vertices:,} members | GB | seconds | MB/s |\n|---|---|---|---|")

    def row(what: str, seconds: float) -> None:
        print(f"| {what} | {found.nbytes / 1e9:.3f} | {seconds:.1f} | {found.nbytes / seconds / 1e6:.0f} |", flush=True)

    with tempfile.TemporaryDirectory() as folder:
        for draws in MOMENT_DRAWS:
            os.sync()
            started = time.perf_counter()
            found = fit.moments(sites=sites, num_samples=draws, store=f"{folder}/moments.zarr")
            os.sync()
            row(f"moments of {draws} draws to Zarr, compilation included", time.perf_counter() - started)
        written = {name: (each.values, each.encoding["chunks"]) for name, each in found.data_vars.items()}
        started = time.perf_counter()
        for name, (values, chunks) in written.items():
            zarr.create_array(f"{folder}/{name}.zarr", shape=values.shape, chunks=chunks, dtype=values.dtype)[:] = values
        os.sync()
        row("the same bytes, written at once", time.perf_counter() - started)


def growth(arguments: argparse.Namespace) -> None:
    """Step time at a fixed batch, and accuracy after a fixed number of steps per subject."""
    print(
        "| subjects | latents | ms per step | seconds of 2,000 steps | ms per subject | accuracy | best | lowest r |"
        "\n|---|---|---|---|---|---|---|---|"
    )
    vertices = round(VERTICES * np.sqrt(arguments.size))
    for subjects in (10, 32, 100, 1000):
        cohort = simulate_cohort(subjects, SESSIONS, vertices, FEATURES, NETWORKS, **SETTINGS["hard"])
        model = parcellation(subjects, SESSIONS, vertices, FEATURES, NETWORKS, **SETTINGS["hard"])
        evaluated = np.arange(10)
        batch = {"subject": 10, "vertex": min(512, vertices)}
        fit, seconds = timed_fit(model, cohort.x, family=family(arguments), batch=batch, steps=2000, num_particles=1)
        found = judge(fit, cohort, evaluated)
        best = share_right(best_labels(cohort, evaluated), cohort, evaluated)
        latents = fit.template.num_latents
        print(
            f"| {subjects:,} | {latents:,} | {1e3 * step_seconds(fit):.3f} | {seconds:.1f} | {1e3 * seconds / subjects:.0f} "
            f"| {found.right:.4f} | {best:.4f} | {found.lowest:.4f} |",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=float, default=1.0, help="share of the full number of members")
    parser.add_argument("--steps", type=int, nargs="+", help="3,000 by default, 1,000 for a part of the study")
    parser.add_argument("--batch", type=int, nargs=2, help="subjects and vertices per step; 125 512, or 50 128 for a part")
    parser.add_argument("--hidden", type=int, nargs="*", default=[32, 32], help="widths of what flows make of encodings")
    parser.add_argument("--particles", type=int, default=1)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--only", choices=list(SETTINGS))
    parser.add_argument("--growth", action="store_true")
    parser.add_argument("--relaxed", action="store_true")
    parser.add_argument("--polish", type=int, help="steps before polishing; 0: none, as by default for a part of the study")
    parser.add_argument("--draws", type=int, default=32, help="draws of vertices' logits in polishing")
    parser.add_argument("--points", type=int, default=4096, help="points that subjects' logits are averaged out over")
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--placement", help="where rows and data lie, with --memory")
    parser.add_argument("--moments", action="store_true")
    arguments = parser.parse_args()
    arguments.steps = arguments.steps or ([3000] if arguments.size == 1 else [1000])
    arguments.batch = arguments.batch or ([125, 512] if arguments.size == 1 else [50, 128])
    if arguments.growth:
        growth(arguments)
    elif arguments.memory:
        memory(arguments)
    elif arguments.moments:
        moments(arguments)
    else:
        run(arguments, list(SETTINGS) if arguments.only is None else [arguments.only])


if __name__ == "__main__":
    main()
