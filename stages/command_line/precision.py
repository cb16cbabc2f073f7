"""Compute in fp32 where a CPU multiplies bf16 matrices by emulation, at a fiftieth of its fp32 rate."""

import dataclasses

from stages.recipe import schema
from stages.runtime.environment import has_bf16_products
from stages.runtime.stage_lines import print_line

SETTINGS = ("precision", "check_precision")


def fit_precision(config: object) -> object:
    """Return a section with fp32 in place of 'mixed' and 'bf16' where bf16 is emulated, and print what is replaced.

    The recipe, and with it the request of the artifact, keep the precision that was asked for, as for any other
    rounding of a processor.
    """
    emulated = list_bf16(config) if dataclasses.is_dataclass(config) else {}
    if not emulated or has_bf16_products():
        return config
    for name, precision in emulated.items():
        print_line(f"{name} {precision} is computed in fp32: this processor emulates bf16 products, which takes some "
                   f"50 times as long")
    return to_fp32(config)


def list_bf16(config: object) -> dict[str, str]:
    """Return the precisions of a section, or of a recipe, that multiply in bf16, by their dotted names."""
    return {name: value for name, field, value in schema.list_fields(config)
            if field.name in SETTINGS and value in ("mixed", "bf16")}


def to_fp32(config: object) -> object:
    """Return a section, or a recipe, with fp32 in place of 'mixed' and 'bf16'."""
    return schema.override(config, schema.nest(dict.fromkeys(list_bf16(config), "fp32")), "processor")
