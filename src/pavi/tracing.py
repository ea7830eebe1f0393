"""From a NumPyro model to its `Template`, abstractly: nothing the size of the study is ever allocated.

The model is run twice under JAX's abstract evaluation. The first run has every plate whole, as plain NumPyro
would, and gives shapes, plates and supports. The second run shows the model **one member of each plate**, which
is how every later pass runs it (`pavi.cascade`), and follows which latent values and which plate indices reach
which site, through any computation in between: that gives the parents, and catches models that reach across a
plate. Comparing the two runs catches arrays of full plate size used where one member's part was meant.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax.extend.core import get_opaque_trace_state
from numpyro.distributions import constraints
from numpyro.distributions.transforms import biject_to
from numpyro.handlers import seed
from numpyro.ops.provenance import track_deps_jaxpr
from numpyro.primitives import Messenger

from pavi.errors import DataError, ModelError, PaviError
from pavi.mixing import averages
from pavi.template import Kind, Level, Plate, Site, Template, condition_sites

# NumPyro has one stack of handlers for all threads, and models are run in several while functions compile.
STACK = threading.RLock()

Message = dict[str, Any]


def read_template(
    model: Callable,
    data: Mapping[str, Any] | Sequence[str],
    *,
    model_args: tuple = (),
    model_kwargs: Mapping[str, Any] | None = None,
) -> Template:
    """Reads the template off a NumPyro model whose observed sites are those named in `data`.

    Example:
        >>> import numpyro, numpyro.distributions as dist, pavi
        >>> def model():
        ...     mu = numpyro.sample("mu", dist.Normal(0, 1))
        ...     with numpyro.plate("group", 3):
        ...         numpyro.sample("x", dist.Normal(mu, 1))
        >>> print(pavi.read_template(model, ["x"]))
        Template: 1 latent numbers in 1 sites
          plate group: 3 members (dim -1)
          kind      site  shape   level     distribution  parents
          latent    mu    scalar  (global)  Normal        -
          observed  x     scalar  group     Normal        mu
    """
    template, _ = trace(model, data, model_args, model_kwargs)
    return template


def trace(
    model: Callable, data: Mapping[str, Any] | Sequence[str], model_args: tuple, model_kwargs: Mapping[str, Any] | None
) -> tuple[Template, dict[str, constraints.Constraint | None]]:
    """The template, and the support of each observed site where it is known without running the model."""
    call = _Call(model, tuple(model_args), dict(model_kwargs or {}))
    names = tuple(data)
    full = _run(call, names)
    observed = [name for name, record in full.sites.items() if record.kind is Kind.OBSERVED]
    unknown = sorted(set(names) - {data_name(name, names) for name in observed})
    if unknown:
        known = sorted(name for name, record in full.sites.items() if record.kind is not Kind.DETERMINISTIC)
        raise DataError(f"`data` names {unknown}, which the model has no `numpyro.sample` site for. Its sites: {known}.")
    single, reach = _run_single(call, names, full)
    plates = tuple(Plate(name, size, full.dims.get(name, -1)) for name, size in full.plates.items())
    sites = condition_sites(
        tuple(_site(name, full, single, reach) for name in full.sites if _readable(name, full, single, reach))
    )
    supports = {name: full.sites[name].support for name in observed}
    return Template(plates, sites), supports


def data_name(site: str, names: Container[str]) -> str | None:
    """The entry of `data` that a site takes its values from: `sample(..., obs_mask=...)` adds "_observed" to the name."""
    plain = site.removesuffix("_observed")
    return site if site in names else plain if plain in names else None


def show_member(msg: Message, index: jax.Array) -> None:
    """Makes a `plate` message show the one member at `index` (shape ()) of its plate."""
    size, _ = msg["args"]
    msg["value"] = index[None]
    msg["args"] = (size, 1)


def refuse(msg: Message) -> None:
    """Raises on a message that inference cannot handle."""
    if msg["type"] == "control_flow":
        raise ModelError(
            "The model has sample sites inside `numpyro.contrib.control_flow.scan` or `cond`. Their number of sites is "
            "not fixed by plates, so they cannot be read. Write repeated independent sites as a plate; write a short "
            "time series as one multivariate site (for example `dist.GaussianRandomWalk`)."
        )
    if msg["type"] == "param":
        raise ModelError(
            f"The model has the trainable parameter {msg['name']!r} (`numpyro.param`). Give it a prior with "
            "`numpyro.sample`; `pavi.PointMass` as its flow then finds its single best value."
        )


@dataclasses.dataclass
class _Record:
    """What one run saw of a site."""

    kind: Kind
    frames: tuple[tuple[str, int], ...]  # (plate, dim)
    shape: tuple[int, ...]
    dtype: Any
    event_ndim: int = 0
    size: int = 0
    distribution: str = ""
    support: constraints.Constraint | None = None
    masked: bool = False
    mixes: bool = False


class _Recorder(Messenger):
    """Runs the model once, keeping a `_Record` of every site."""

    def __init__(self, observed: Sequence[str], latents: Mapping[str, jax.Array] | None, indices: Mapping | None):
        super().__init__()
        self.observed, self.latents, self.indices = observed, latents, indices
        self.sites: dict[str, _Record] = {}
        self.plates: dict[str, int] = {}
        self.dims: dict[str, int] = {}
        self.outputs: dict[str, jax.Array] = {}
        self.trace: Any = None

    def __enter__(self) -> None:
        super().__enter__()
        self.trace = get_opaque_trace_state(convention="flax")

    def process_message(self, msg: Message) -> None:
        refuse(msg)
        if msg["type"] in ("plate", "sample") and get_opaque_trace_state(convention="flax") != self.trace:
            raise ModelError(
                f"Site or plate {msg['name']!r} is stated inside a JAX control-flow function (`jax.lax.scan`, `cond`, "
                "`vmap`, `jit`, ...), where it cannot be read. Write repeated independent sites as a `numpyro.plate`."
            )
        if msg["type"] == "plate":
            self._plate(msg)
        elif msg["type"] == "sample":
            self._sample(msg)

    def postprocess_message(self, msg: Message) -> None:
        if msg["type"] == "deterministic":
            value = jnp.asarray(msg["value"])
            self._keep(msg, _Record(Kind.DETERMINISTIC, _frames(msg), value.shape, value.dtype), value)

    def _plate(self, msg: Message) -> None:
        name, size = msg["name"], msg["args"][0]
        if self.plates.setdefault(name, size) != size:
            raise ModelError(f"Plate {name!r} is used with two sizes, {self.plates[name]} and {size}. Name them apart.")
        index = jnp.arange(size) if self.indices is None else None
        if index is None:
            show_member(msg, self.indices[name])  # type: ignore[index]
        else:
            msg["value"], msg["args"] = index, (size, size)

    def _sample(self, msg: Message) -> None:
        name, fn = msg["name"], msg["fn"]
        factor = isinstance(_unwrapped(fn), dist.Unit)
        observed = data_name(name, self.observed) is not None
        if msg["is_observed"] and not observed and not factor:
            raise DataError(
                f"Site {name!r} is observed inside the model (`obs=...`) but is not in `data`. "
                f"Pass its values as data={{{name!r}: ...}}; `obs` may stay for use with plain NumPyro."
            )
        kind = Kind.FACTOR if factor else Kind.OBSERVED if observed else Kind.LATENT
        size = _unconstrained_size(name, fn) if kind is Kind.LATENT else 0
        shape = tuple(fn.shape())
        if kind is Kind.OBSERVED:
            dtype = jnp.int32 if fn.support is not None and fn.support.is_discrete else jnp.result_type(float)
            msg["value"] = jnp.zeros(shape, dtype)
        elif kind is Kind.LATENT:
            msg["value"] = jnp.zeros(shape) if self.latents is None else self.latents[name]
        msg["is_observed"] = True
        record = _Record(kind, _frames(msg), shape, jnp.result_type(float), fn.event_dim, size, _describe(fn))
        record.support = fn.support
        record.masked = kind is Kind.OBSERVED and _is_masked(fn)
        record.mixes = kind is Kind.OBSERVED and averages(fn)
        log_prob = fn.log_prob(msg["value"])
        self._keep(msg, record, log_prob if msg["scale"] is None else log_prob * msg["scale"])

    def _keep(self, msg: Message, record: _Record, output: jax.Array) -> None:
        name = msg["name"]
        if name in self.sites:
            raise ModelError(f"Two sites are named {name!r}. Give each `numpyro.sample` statement its own name.")
        self.sites[name] = record
        self.outputs[name] = output
        for plate, dim in record.frames:
            if self.dims.setdefault(plate, dim) != dim:
                raise ModelError(f"Plate {plate!r} is used at two dims, {self.dims[plate]} and {dim}. Give it one `dim`.")


class _Call:
    """The model with its arguments. Arrays among them are abstract here, as they are in every later run."""

    def __init__(self, model: Callable, args: tuple, kwargs: dict):
        self.model = model
        self.arrays, self.static = eqx.partition((args, kwargs), is_array)

    def __call__(self, arrays: Any) -> None:
        args, kwargs = eqx.combine(arrays, self.static)
        self.model(*args, **kwargs)


def is_array(leaf: Any) -> bool:
    """Whether a leaf of the model's arguments is passed to compiled functions as an array; the rest is built in."""
    return isinstance(leaf, jax.Array | np.ndarray)


def _run(call: _Call, observed: Sequence[str]) -> _Recorder:
    recorder = _Recorder(observed, None, None)

    def run(arrays: Any) -> None:
        with STACK, seed(rng_seed=0), recorder:
            call(arrays)

    _abstractly(lambda: jax.eval_shape(run, call.arrays))
    return recorder


def _run_single(call: _Call, observed: Sequence[str], full: _Recorder) -> tuple[_Recorder, dict[str, frozenset[str]]]:
    """The one-member run; which "latent:..." and "plate:..." inputs reach each site."""
    recorder: list[_Recorder] = []

    def run(inputs: dict[str, Any]) -> dict[str, jax.Array]:
        latents = {name[7:]: value for name, value in inputs.items() if name.startswith("latent:")}
        indices = {name[6:]: value for name, value in inputs.items() if name.startswith("plate:")}
        recorder.append(_Recorder(observed, latents, indices))
        with STACK, seed(rng_seed=0), recorder[-1]:
            call(inputs["arrays"])
        return recorder[-1].outputs

    inputs: dict[str, Any] = {"arrays": call.arrays}
    inputs |= {f"plate:{name}": jax.ShapeDtypeStruct((), jnp.int32) for name in full.plates}
    for name, record in full.sites.items():
        if record.kind is Kind.LATENT:
            shape = list(record.shape)
            for axis in _axes(record).values():
                shape[axis] = 1
            inputs[f"latent:{name}"] = jax.ShapeDtypeStruct(tuple(shape), record.dtype)
    reach = _abstractly(lambda: _provenance(run, inputs), subsampled=True)
    single = recorder[-1]
    for name, record in single.sites.items():
        for plate, axis in _axes(record).items():
            if axis < 0 or (record.kind is not Kind.DETERMINISTIC and record.shape[axis] != 1):
                raise _not_subsampled(name, plate, full.plates[plate], record)
    return single, reach


def _provenance(run: Callable[[dict[str, Any]], dict[str, jax.Array]], inputs: dict[str, Any]) -> dict[str, frozenset[str]]:
    """Which of the named inputs reach each of the named outputs, through any computation."""
    jaxpr, outputs = jax.make_jaxpr(run, return_shape=True)(inputs)
    origins = {name: jax.tree.map(lambda _, name=name: frozenset({name}), value) for name, value in inputs.items()}
    found = track_deps_jaxpr(jaxpr.jaxpr, jax.tree.leaves(origins))
    return jax.tree.unflatten(jax.tree.structure(outputs), found)


def _not_subsampled(name: str, plate: str, size: int, record: _Record) -> ModelError:
    return ModelError(
        f"Site {name!r}, shown one member of plate {plate!r} ({size} members), still has shape {record.shape}: an array "
        "of full plate size is used inside the plate. Wrap it where it is used: "
        "`numpyro.subsample(array, event_dim=...)`, or index it with what the plate yields (`with plate as index`)."
    )


def _abstractly(run: Callable[[], Any], subsampled: bool = False) -> Any:
    try:
        return run()
    except PaviError:
        raise
    except NotImplementedError as error:
        if "control flow" in str(error).lower():
            raise ModelError(
                "The model has control flow (`scan` or `cond`) around sample sites inside a plate, which cannot be read. "
                "Write repeated independent sites as a plate of their own."
            ) from error
        raise
    except Exception as error:
        hint = (
            "It runs with whole plates but fails when shown one member of each: an array of full plate size inside a "
            "plate must be wrapped in `numpyro.subsample(array, event_dim=...)`."
            if subsampled
            else "Check that it runs under plain NumPyro with the same `model_args` and `model_kwargs`. Arrays among them "
            "are traced: sizes and other numbers that Python must know belong in arguments of their own."
        )
        raise ModelError(f"The model failed while it was read: {type(error).__name__}: {error}. {hint}") from error


def _unconstrained_size(name: str, fn: dist.Distribution) -> int:
    """Unconstrained numbers in the whole array of a latent site; refuses what has no density to push forward."""
    if fn.support is not None and fn.support.is_discrete:
        raise ModelError(
            f"Latent site {name!r} is discrete ({_describe(fn)}). Discrete latents have no gradient. Ways out: sum it out "
            "(a mixture likelihood such as `dist.MixtureSameFamily`), relax it (`dist.RelaxedBernoulli`, or a "
            "Gumbel-Softmax built from `dist.Gumbel`), or, if it was observed, name it in `data`."
        )
    if isinstance(_unwrapped(fn), dist.ImproperUniform):
        raise ModelError(
            f"Latent site {name!r} has an improper prior (ImproperUniform), from which nothing can be drawn. Give it a "
            "proper one, however wide, such as `dist.Normal(0, 100)`."
        )
    try:
        transform = biject_to(fn.support)
    except NotImplementedError as error:
        raise ModelError(
            f"Latent site {name!r} has the support {fn.support}, which has no map from unconstrained space. "
            "Write the site through supported ones with `numpyro.deterministic`."
        ) from error
    return int(np.prod(fn.batch_shape, dtype=int) * np.prod(transform.inverse_shape(fn.event_shape), dtype=int))


def _unwrapped(fn: dist.Distribution) -> dist.Distribution:
    while isinstance(fn, dist.ExpandedDistribution | dist.MaskedDistribution | dist.Independent):
        fn = fn.base_dist
    return fn


def _is_masked(fn: dist.Distribution) -> bool:
    while isinstance(fn, dist.ExpandedDistribution | dist.Independent):
        fn = fn.base_dist
    return isinstance(fn, dist.MaskedDistribution)


def _describe(fn: dist.Distribution) -> str:
    return type(_unwrapped(fn)).__name__


def _frames(msg: Message) -> tuple[tuple[str, int], ...]:
    return tuple((frame.name, frame.dim) for frame in msg["cond_indep_stack"])


def _axes(record: _Record) -> dict[str, int]:
    """Which axis of the site's array each of its plates runs along."""
    return {plate: len(record.shape) - record.event_ndim + dim for plate, dim in record.frames}


def _level(plates: Sequence[str] | set[str], full: _Recorder) -> Level:
    return tuple(name for name in full.plates if name in plates)


def _reached(name: str, reach: Mapping[str, frozenset[str]]) -> frozenset[str]:
    found = reach.get(name, frozenset())
    return found if isinstance(found, frozenset) else frozenset()


def _deterministic_axes(name: str, full: _Recorder, single: _Recorder, reach: Mapping) -> dict[str, int] | None:
    """Plates and axes of a deterministic site, or None where it sums over a plate and so has no per-member value.

    Such a site is often stated after its plate was left, so its plates are found from what it depends on, and
    their axes from where its shape differs between the whole run and the one-member run.
    """
    plates = {plate for plate, _ in full.sites[name].frames}
    for source in _reached(name, reach):
        if source.startswith("latent:"):
            plates |= {plate for plate, _ in full.sites[source[7:]].frames}
        elif source.startswith("plate:"):
            plates.add(source[6:])
    whole, one = full.sites[name].shape, single.sites[name].shape
    if len(whole) != len(one):
        return None
    differing = [axis for axis, (a, b) in enumerate(zip(whole, one, strict=True)) if a != b]
    axes: dict[str, int] = {}
    for plate in sorted(plates, key=lambda plate: full.dims[plate]):
        if full.plates[plate] == 1:
            axis = len(whole) + full.dims[plate]
            if axis < 0:
                return None
            axes[plate] = axis
        elif differing and whole[differing[0]] == full.plates[plate] and one[differing[0]] == 1:
            axes[plate] = differing.pop(0)
        else:
            return None
    return None if differing else axes


def _readable(name: str, full: _Recorder, single: _Recorder, reach: Mapping) -> bool:
    if full.sites[name].kind is not Kind.DETERMINISTIC:
        return True
    return _deterministic_axes(name, full, single, reach) is not None


def _site(name: str, full: _Recorder, single: _Recorder, reach: Mapping) -> Site:
    record = full.sites[name]
    axes = _axes(record)
    if record.kind is Kind.DETERMINISTIC:
        axes = _deterministic_axes(name, full, single, reach) or {}
    level = _level(set(axes), full)
    found = _reached(name, reach)
    if record.kind is not Kind.DETERMINISTIC:
        outside = {source[6:] for source in found if source.startswith("plate:")} - set(level)
        if outside:
            raise ModelError(
                f"Site {name!r} (level {level}) uses the member index of plate(s) {sorted(outside)} it is not in. "
                f"Move it inside the plate(s)."
            )
    parents = tuple(other for other in full.sites if f"latent:{other}" in found and other != name)
    return Site(
        name=name,
        kind=record.kind,
        level=level,
        shape=record.shape,
        axes=tuple(axes[plate] for plate in level),
        event_ndim=record.event_ndim,
        size=single.sites[name].size,
        parents=parents,
        distribution=record.distribution,
        support=_support_name(record.support),
        masked=record.masked,
        mixes=single.sites[name].mixes,
    )


def _support_name(support: constraints.Constraint | None) -> str:
    """The support in words; bounds that the model computes from latents have no value yet."""
    if support is None or any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(support)):
        return ""
    return str(support)
