"""Check, before any work, that the optional packages that settings need are installed (make extras)."""

from importlib.util import find_spec

from stages.recipe.schema import SettingsError

LOGGING = ("tensorboard", "wandb")  # values of log_to; each is also the name of its package


def check_logging(settings: object, where: str) -> None:
    """Raise SettingsError if `log_to` of a section names a package that is not installed."""
    missing = [name for name in LOGGING if name in getattr(settings, "log_to", ()) and find_spec(name) is None]
    if missing:
        raise SettingsError(f"{where}: log_to asks for {missing[0]}, which is not installed: make extras (or "
                            f"pip install {' '.join(missing)})")
