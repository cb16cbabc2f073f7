"""TODO docstring."""

from typing import Literal

from stages.recipe.schema import setting

Precision = Literal["fp32", "mixed", "bf16", "int8", "nf4"]
LogTo = tuple[Literal["terminal", "jsonl", "tensorboard", "wandb"], ...]


def check_divides(part: int, whole: int, part_name: str, whole_name: str) -> None:
    if part < 1 or whole % part:
        raise ValueError(f"{whole_name} ({whole}) must be a multiple of {part_name} ({part})")


def check_full_precision(tune: str, precision: str) -> None:
    if tune == "full" and precision in ("int8", "nf4"):
        raise ValueError(f"tune 'full' needs weights that can learn, and {precision} is quantised: set "
                         f"precision to fp32, mixed or bf16")


def check_patience(evaluations: int | None) -> None:
    if evaluations is not None and evaluations < 1:
        raise ValueError(f"patience_evaluations must be 1 or more, or null, not {evaluations}")


def log_to_setting():
    return setting(("terminal", "jsonl"), "where numbers and sample answers go while it trains: terminal, jsonl (the "
              "artifact's own files), tensorboard, wandb (offline unless WANDB_MODE says otherwise) [ours]",
              decides=False)


def check_log_to(log_to: LogTo) -> None:
    if "jsonl" not in log_to or len(set(log_to)) < len(log_to):
        raise ValueError(f"log_to must name jsonl, whose files are part of the artifact, and nothing twice, not "
                         f"{', '.join(log_to) or 'nothing'}")
