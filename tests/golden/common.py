"""What the scripts here share: the inputs, drawn from a fixed seed, and how a file of values is written.

Numpy only, so that every peer's environment can import it.
"""

import importlib.metadata
import json
import platform
from pathlib import Path

import numpy as np

LENGTHS = [9, 1, 4, 7, 2, 5, 8, 3]
COLUMNS, VOCABULARY = 9, 11
SETTINGS = {
    "beta": 0.15,
    "gamma": 0.98,
    "lam": 0.93,
    "clip": 0.2,
    "value_clip": 0.25,
    "value_coefficient": 0.1,
    "temperature": 0.7,
}


def inputs(seed: int = 20260801) -> dict:
    """Arrays [8, 9] float64, rows of `LENGTHS` tokens; what stands after the end is noise that must not matter."""
    draw = np.random.default_rng(seed).normal
    shape = (len(LENGTHS), COLUMNS)
    old = draw(-2.0, 0.8, shape)
    values = draw(0.2, 0.7, shape)
    return {
        "mask": (np.arange(COLUMNS) < np.array(LENGTHS)[:, None]).astype(float),
        "log_p": old,
        "log_ref": old + draw(-0.1, 0.4, shape),
        "new_log_p": old + draw(0.0, 0.35, shape),
        "values": values,
        "new_values": values + draw(0.0, 0.6, shape),
        "scores": draw(0.5, 1.5, len(LENGTHS)),
    }


def language(seed: int = 20260802) -> dict:
    """A bigram model, logits [V, V] and value [V] of the next token by the last one; prompts and responses."""
    generator = np.random.default_rng(seed)
    rows = [(int(generator.integers(1, 6)), length) for length in LENGTHS]
    return {
        "table": generator.normal(0.0, 1.5, (VOCABULARY, VOCABULARY)),
        "value_weights": generator.normal(0.0, 0.5, VOCABULARY),
        "prompts": [generator.integers(1, VOCABULARY, prompt).tolist() for prompt, _ in rows],
        "responses": [generator.integers(1, VOCABULARY, length).tolist() for _, length in rows],
    }


def plain(value):
    """Arrays and tensors to nested lists, through dictionaries."""
    if isinstance(value, dict):
        return {key: plain(one) for key, one in value.items()}
    return value.tolist() if hasattr(value, "tolist") else value


def write(script: str, packages: tuple[str, ...], content: dict) -> None:
    """`script`.json beside the script: the versions that made it, then `content`; floats in full."""
    versions = {"python": platform.python_version()} | {name: importlib.metadata.version(name) for name in packages}
    path = Path(script).with_suffix(".json")
    lines = []
    for name, value in ({"versions": versions} | plain(content)).items():
        if isinstance(value, dict):
            inner = ",\n".join(f"  {json.dumps(key)}: {json.dumps(one)}" for key, one in value.items())
            lines.append(f"{json.dumps(name)}: {{\n{inner}\n }}")
        else:
            lines.append(f"{json.dumps(name)}: {json.dumps(value)}")
    path.write_text("{\n " + ",\n ".join(lines) + "\n}\n")
    print(f"{path}: {versions}")
