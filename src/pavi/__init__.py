"""Plate-amortized variational inference for NumPyro models of large populations."""

from pavi import baselines, models, plots
from pavi.amortize import Amortized, amortize
from pavi.api import fit
from pavi.diagnostics import BiasCheck, bias_check
from pavi.encodings import FreeEncodings, SetEncoder
from pavi.errors import DataError, LoadError, ModelError, PaviError, SettingError, TrainingError
from pavi.families import PAVI
from pavi.fitting import Fit
from pavi.flows import MAF, Affine, Flow, PointMass, Spline
from pavi.loading import load
from pavi.planning import Plan, plan
from pavi.posterior import Posterior
from pavi.schedule import Stop
from pavi.template import Plate, Site, Template
from pavi.tracing import read_template

__version__ = "0.1.0"

__all__ = [
    "MAF",
    "PAVI",
    "Affine",
    "Amortized",
    "BiasCheck",
    "DataError",
    "Fit",
    "Flow",
    "FreeEncodings",
    "LoadError",
    "ModelError",
    "PaviError",
    "Plan",
    "Plate",
    "PointMass",
    "Posterior",
    "SetEncoder",
    "SettingError",
    "Site",
    "Spline",
    "Stop",
    "Template",
    "TrainingError",
    "amortize",
    "baselines",
    "bias_check",
    "fit",
    "load",
    "models",
    "plan",
    "plots",
    "read_template",
]
