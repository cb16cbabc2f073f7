"""Packages that only some settings need (make extras), and the refusal, before any work, where they are missing."""

from importlib.util import find_spec

from stages.recipe.schema import SettingsError

LOGGING = ("tensorboard", "wandb")  # in log_to, each named as its package


def check_logging(settings: object, where: str) -> None:
    """SettingsError, one line, when `settings` log to something that is not installed here."""
    missing = [name for name in LOGGING if name in getattr(settings, "log_to", ()) and find_spec(name) is None]
    if missing:
        raise SettingsError(f"{where}: log_to asks for {missing[0]}, which is not installed: make extras (or "
                            f"pip install {' '.join(missing)})")
