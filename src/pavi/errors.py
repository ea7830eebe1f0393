"""The exceptions. Each message names the culprit, what was expected, what was found and what to do.

All of them are a [`PaviError`][pavi.PaviError], so `except pavi.PaviError` catches whatever this package
raises on purpose; anything else is a bug worth reporting.
"""


class PaviError(Exception):
    """Base class of every error raised on purpose by this package."""


class ModelError(PaviError):
    """The model cannot be read, or says something plate-amortized inference cannot express."""


class DataError(PaviError):
    """The data does not fit the model: missing, unknown, misshapen, not finite or outside the support."""


class SettingError(PaviError):
    """A setting given by the caller does not make sense for this model."""


class TrainingError(PaviError):
    """Training could not make a single finite step."""


class LoadError(PaviError):
    """A saved fit cannot be read, or belongs to another model."""
