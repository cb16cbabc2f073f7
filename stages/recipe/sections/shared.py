"""Types, settings and checks that several sections share."""

from typing import Literal

from stages.recipe.ranges import POSITIVE
from stages.recipe.schema import setting

Precision = Literal["fp32", "mixed", "bf16", "int8", "nf4"]
CpuKernels = Literal["auto", "off"]
Sharding = Literal["none", "fsdp"]
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


def check_sharding(
    sharding: str, precision: str, *, trains_whole: bool, optimizer: str
) -> None:
    """Raise ValueError for what cannot be combined with sharding 'fsdp'.

    trains_whole: all weights of a model are trained, not adapters only.
    """
    if sharding == "none":
        return
    if precision in ("int8", "nf4"):
        raise ValueError(f"sharding 'fsdp' cannot split {precision} weights, which stay whole in each process: set "
                         f"sharding to none, or precision to bf16")
    if trains_whole and optimizer not in ("adam", "adamw"):
        raise ValueError(f"optimizer {optimizer} needs whole tensors, and sharding 'fsdp' splits those that are "
                         f"trained: set optimizer to adamw, or sharding to none")


def sharding_setting():
    """Declare the setting sharding, the same in every section that can split its models over processes."""
    return setting(
        "none", "'fsdp': each of several processes stores a share of the layers' weights (FSDP2, ZeRO stage 3), for "
        "models that do not fit one card; results differ by rounding [ours]")


def cpu_kernels_setting():
    """Declare the setting cpu_kernels, the same in every section of a stage that computes with a model."""
    return setting(
        "auto", "'auto': compute with this project's C++ kernels on a CPU, if there is a C++ compiler; 'off': with "
        "torch only; results differ by rounding [ours]")


def save_every_minutes_setting():
    """Declare the setting save_every_minutes, the same in every section of a stage that saves checkpoints."""
    return setting(
        30.0, "minutes after a checkpoint until another one is saved, without an evaluation; null: never; the result "
        "is the same bit for bit [ours]", within=POSITIVE, affects_result=False)


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
