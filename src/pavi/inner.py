"""How latents inside plates are averaged out: the innermost ones over points of their prior, those of a plate by draws."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import numpy as np
from jaxtyping import Float
from scipy.stats import qmc

from pavi.errors import SettingError
from pavi.template import Kind, Level, Site, Template

# Where members' latents are likeliest is found with so many times fewer points, but at least this many.
COARSER, COARSE_POINTS = 4, 256


class Inner(NamedTuple):
    """The innermost level of a model, whose latents are averaged out over points of their prior."""

    level: Level
    points: int

    def holds(self, site: Site) -> bool:
        """Whether a site has an axis of points: it is in all the plates of the level."""
        return set(self.level) <= set(site.level)

    def below(self, template: Template) -> set[str]:
        """The plates of what depends on the level's latents that these are not in."""
        return {plate for site in template.sites if self.holds(site) for plate in site.level} - set(self.level)

    def chances(self, template: Template) -> dict[str, Float[np.ndarray, "point size"]]:
        """The points of each latent of the level, as chances: a Sobol net over all of its numbers."""
        latents = [site for site in template.latents if self.holds(site)]
        ends = np.cumsum([0, *(site.size for site in latents)])
        found = net(self.points, int(ends[-1]))
        return {site.name: found[:, start:end] for site, start, end in zip(latents, ends[:-1], ends[1:], strict=True)}

    def shared(self, template: Template) -> Level:
        """The plates that the priors of the level depend on: members that share them may share their points."""
        latents = [site for site in template.latents if self.holds(site)]
        parents = {name for site in latents for name in site.parents} - {site.name for site in latents}
        plates = {plate for name in parents for plate in template.site(name).level}
        return tuple(plate for plate in self.level if plate in plates)

    def mixing(self, template: Template) -> Site | None:
        """The one site that depends on the level's latents, if it is in the level and its mean density has a simple form."""
        latents = {site.name for site in template.latents if self.holds(site)}
        scored = [
            site for site in template.sites if site.kind in (Kind.OBSERVED, Kind.FACTOR) and latents & set(site.parents)
        ]
        mixes = len(scored) == 1 and set(scored[0].level) == set(self.level) and scored[0].mixes
        return scored[0] if mixes else None

    def work(self, template: Template) -> dict[Level, int]:
        """Numbers that points add to what a step touches: for one member of a level."""
        latents = sum(site.size for site in template.latents if self.holds(site))
        if self.mixing(template) is not None:
            return {self.shared(template): self.points * latents}
        inside = sum(
            math.prod(site.member_shape) * math.prod(template.plate(name).size for name in set(site.level) - set(self.level))
            for site in template.observed
            if self.holds(site)
        )
        return {self.level: self.points * (latents + inside)}


class Marginal(NamedTuple):
    """How latents inside plates are averaged out: those of one plate by draws, those further inside over points."""

    plate: str
    inner: Inner | None
    draws: int

    @property
    def coarse(self) -> Marginal:
        """The same with fewer points: for where draws are made, not for what they weigh."""
        if self.inner is None or self.inner.points <= COARSE_POINTS:
            return self
        return self._replace(inner=self.inner._replace(points=max(self.inner.points // COARSER, COARSE_POINTS)))

    def latents(self, template: Template) -> list[Site]:
        """The latents of the plate alone, which are averaged out by draws."""
        return [site for site in template.latents if site.level == (self.plate,)]

    def size(self, template: Template) -> int:
        """Numbers of one member's latents."""
        return sum(site.size for site in self.latents(template))


@functools.lru_cache(maxsize=16)
def net(points: int, size: int) -> Float[np.ndarray, "point size"]:
    """Points that fill the unit cube evenly."""
    return qmc.Sobol(size, scramble=True, rng=np.random.default_rng(0)).random(points).astype(np.float32)


def inner_of(template: Template, points: int) -> Inner | None:
    """The level to average out, for some number of points: of those nothing outside depends on, the one with most members.

    Raises:
        SettingError: if there is none, or it cannot be so many points.
    """
    if points == 0:
        return None
    if points < 2 or points & (points - 1):
        raise SettingError(f"inner_points={points}: expected a power of two, such as 64, or 0 for none.")

    def closed(level: Level) -> bool:
        names = {site.name for site in template.latents if site.level == level}
        deeper = any(set(level) < set(site.level) for site in template.latents)
        return not deeper and all(set(level) <= set(site.level) for site in template.sites if names & set(site.parents))

    levels = [level for level in {site.level for site in template.latents} if level and closed(level)]
    if not levels:
        raise SettingError(
            f"inner_points={points}: no plate of this model has latents that nothing outside of it depends on."
        )
    return Inner(max(levels, key=lambda level: (math.prod(template.sizes(level)), level)), points)
