"""Conditional flows: one file per flow, written for one member, on FlowJAX bijections."""

from pavi.flows.affine import Affine
from pavi.flows.base import Flow, Path, enter, push, without_paths
from pavi.flows.highway import Highway
from pavi.flows.maf import MAF
from pavi.flows.networks import Conditioner, Perceptron
from pavi.flows.point_mass import PointMass
from pavi.flows.spline import Spline

__all__ = [
    "MAF",
    "Affine",
    "Conditioner",
    "Flow",
    "Highway",
    "Path",
    "Perceptron",
    "PointMass",
    "Spline",
    "enter",
    "push",
    "without_paths",
]
