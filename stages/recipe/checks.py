"""Types, settings and checks that several sections share."""

from typing import Literal

from stages.recipe.schema import setting

Precision = Literal["fp32", "mixed", "bf16", "int8", "nf4"]
CpuKernels = Literal["auto", "off"]
LogTo = tuple[Literal["terminal", "jsonl", "tensorboard", "wandb"], ...]


def check_divides(part: int, whole: int, part_name: str, whole_name: str) -> None:
    """Raise ValueError unless `whole` is a multiple of `part`."""
    if part < 1 or whole % part:
        raise ValueError(f"{whole_name} ({whole}) must be a multiple of {part_name} ({part})")


def check_full_precision(tune: str, precision: str) -> None:
    """Raise ValueError if quantised weights are to be trained."""
    if tune == "full" and precision in ("int8", "nf4"):
        raise ValueError(f"tune 'full' needs trainable weights, and {precision} is quantised: set "
                         f"precision to fp32, mixed or bf16")


def cpu_kernels_setting():
    """Declare the setting cpu_kernels, the same in every section of a stage that computes with a model."""
    return setting(
        "auto", "'auto': compute with this project's C++ kernels on a CPU, if there is a C++ compiler; 'off': with "
        "torch only; results differ by rounding [ours]")


def log_to_setting():
    """Declare the setting log_to, the same in every training section."""
    return setting(
        ("terminal", "jsonl"), "where metrics and samples go during training: terminal, jsonl (the artifact's own "
        "files), tensorboard, wandb (offline unless WANDB_MODE is set) [ours]", affects_result=False)


def check_log_to(log_to: LogTo) -> None:
    """Raise ValueError unless log_to has jsonl and nothing twice."""
    if "jsonl" not in log_to or len(set(log_to)) < len(log_to):
        raise ValueError(f"log_to must name jsonl, whose files are part of the artifact, and nothing twice, not "
                         f"{', '.join(log_to) or 'nothing'}")
