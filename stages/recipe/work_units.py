"""Count the work units of a step: how many processes can share it (stages/distributed/units.py)."""

from dataclasses import fields

MICROBATCH = "microbatch_"
UNLIMITED = 1 << 30  # batches of forward passes


def count_units(section: object) -> int:
    """Return the microbatches of an optimizer step of the section's stage; UNLIMITED if it only evaluates or samples.
    """
    if hasattr(section, "scratch"):
        trained = section.scratch
        return trained.batch_sequences // trained.microbatch_sequences if section.model == "scratch" else 1
    if getattr(section, "tune", None) == "head":
        return UNLIMITED
    microbatch = next((field.name for field in fields(section) if field.name.startswith(MICROBATCH)), None)
    if microbatch is None:
        return UNLIMITED
    item = microbatch.removeprefix(MICROBATCH)
    whole = next(name for name in (f"minibatch_{item}", f"batch_{item}") if hasattr(section, name))
    return getattr(section, whole) // getattr(section, microbatch)
