"""Types, settings and checks that several sections share; the work units of a step."""

from dataclasses import dataclass, fields
from typing import Any, Literal

from stages.recipe.ranges import POSITIVE
from stages.recipe.schema import setting

Precision = Literal["fp32", "mixed", "bf16", "int8", "nf4"]
CpuKernels = Literal["auto", "off"]
Sharding = Literal["none", "fsdp"]
QUANTISED = ("int8", "nf4")
MICROBATCH = "microbatch_"
UNLIMITED = 1 << 30  # batches of forward passes
LogTo = tuple[Literal["terminal", "jsonl", "tensorboard", "wandb"], ...]


@dataclass(frozen=True)
class Training:
    """What every training has beside its own settings; `list_fields` lists it last."""

    save_every_minutes: float | None = setting(
        30.0, "minutes after a checkpoint until another one is saved, without an evaluation; null: never; the result "
        "is the same bit for bit [ours]", within=POSITIVE, affects_result=False)
    cpu_kernels: CpuKernels = setting(
        "auto", "'auto': compute with this project's C++ kernels on a CPU, if there is a C++ compiler; 'off': with "
        "torch only; results differ by rounding [ours]")
    log_to: LogTo = setting(
        ("terminal", "jsonl"), "where metrics and samples go during training: terminal, jsonl (the artifact's own "
        "files), tensorboard, wandb (offline unless WANDB_MODE is set) [ours]", affects_result=False)

    sharding = "none"  # no setting


@dataclass(frozen=True)
class ShardedTraining(Training):
    """A training that can split its models over processes."""

    sharding: Sharding = setting(
        "none", "'fsdp': each of several processes stores a share of the layers' weights (FSDP2, ZeRO stage 3), for "
        "models that do not fit one card; results differ by rounding [ours]")


def check_training(section: Any, trains_whole: bool | None = None) -> None:
    """Check the settings that all sections of trainings have; ValueError for the first that cannot be.

    trains_whole: all weights of a model are trained, not adapters only; None: as `tune` says.
    """
    check_log_to(section.log_to)
    if section.tune == "full" and section.precision in QUANTISED:
        raise ValueError(f"tune 'full' needs trainable weights, and {section.precision} is quantised: set "
                         f"precision to fp32, mixed or bf16")
    if section.sharding != "none":
        _check_sharding(section, section.tune == "full" if trains_whole is None else trains_whole)
    part, whole = find_batch_settings(section)
    check_divides(getattr(section, part), getattr(section, whole), part, whole)


def _check_sharding(section: Any, trains_whole: bool) -> None:
    """Raise ValueError for what cannot be combined with sharding 'fsdp'."""
    if section.precision in QUANTISED:
        raise ValueError(f"sharding 'fsdp' cannot split {section.precision} weights, which stay whole in each process: "
                         f"set sharding to none, or precision to bf16")
    optimizer = getattr(section, "optimizer", "adamw")
    if trains_whole and optimizer not in ("adam", "adamw"):
        raise ValueError(f"optimizer {optimizer} needs whole tensors, and sharding 'fsdp' splits those that are "
                         f"trained: set optimizer to adamw, or sharding to none")


def check_divides(part: int, whole: int, part_name: str, whole_name: str) -> None:
    """Raise ValueError unless `whole` is a multiple of `part`."""
    if part < 1 or whole % part:
        raise ValueError(f"{whole_name} ({whole}) must be a multiple of {part_name} ({part})")


def check_log_to(log_to: LogTo) -> None:
    """Raise ValueError unless log_to has jsonl and nothing twice."""
    if "jsonl" not in log_to or len(set(log_to)) < len(log_to):
        raise ValueError(f"log_to must name jsonl, whose files are part of the artifact, and nothing twice, not "
                         f"{', '.join(log_to) or 'nothing'}")


def find_batch_settings(section: Any) -> tuple[str, str] | None:
    """Return the names of the rows of a forward pass and of an optimizer step: microbatch_pairs, batch_pairs.

    None if the section's stage only evaluates or samples.
    """
    microbatch = next((field.name for field in fields(section) if field.name.startswith(MICROBATCH)), None)
    if microbatch is None:
        return None
    item = microbatch.removeprefix(MICROBATCH)
    return microbatch, next(name for name in (f"minibatch_{item}", f"batch_{item}") if hasattr(section, name))


def count_units(section: Any) -> int:
    """Count the work units of a step, which processes share (stages/distributed/units.py): its microbatches, each once
    for the policy and once for a critic that is no head (`Policy.separate_roles`).

    UNLIMITED if the section's stage only evaluates or samples.
    """
    if hasattr(section, "scratch"):
        trained = section.scratch
        return trained.batch_sequences // trained.microbatch_sequences if section.model == "scratch" else 1
    names = find_batch_settings(section)
    if names is None or getattr(section, "tune", None) == "head":
        return UNLIMITED
    part, whole = names
    has_critic_apart = getattr(section, "value_model", "head") != "head" and section.sharding == "none"
    return getattr(section, whole) // getattr(section, part) * (1 + has_critic_apart)
