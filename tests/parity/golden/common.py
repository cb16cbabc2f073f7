"""What the scripts here share: the inputs, drawn from a fixed seed, and how a file of values is written.

Numpy only, so that every peer's environment can import it.
"""

import hashlib
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


UPDATE = {
    "vocabulary": 64,
    "width": 32,
    "hidden": 48,
    "layers": 2,
    "heads": 4,
    "r": 4,
    "alpha": 8,
    "batch": 6,
    "minibatch": 2,
    "epochs": 2,
    "order_seed": 7,
    "learning_rate": 3e-3,
    "adam_epsilon": 1e-8,
    "clip": 0.05,
    "value_clip": 0.05,
    "value_coefficient": 0.5,
    "beta": 0.2,
    "gamma": 0.98,
    "lam": 0.93,
    "target": 1.0,
    "horizon": 100,
}


def update_weights(seed: int = 20260803) -> dict:
    """Name to float32 array of a whole policy: a LLaMA, LoRA on q_proj and v_proj with B not 0, a value head.

    Names are Hugging Face's and PEFT's, without the wrappers' prefixes and PEFT's "default" and "base_layer".
    """
    u, draw = UPDATE, np.random.default_rng(seed).normal
    width, hidden = u["width"], u["hidden"]
    norm = lambda: 1 + draw(0.0, 0.1, width)  # noqa: E731
    weights = {"model.embed_tokens.weight": draw(0.0, 1.0, (u["vocabulary"], width)), "model.norm.weight": norm()}
    weights["lm_head.weight"] = draw(0.0, 0.3, (u["vocabulary"], width))
    for i in range(u["layers"]):
        layer = f"model.layers.{i}"
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            weights[f"{layer}.self_attn.{name}.weight"] = draw(0.0, 0.25, (width, width))
        for name in ("q_proj", "v_proj"):
            weights[f"{layer}.self_attn.{name}.lora_A.weight"] = draw(0.0, 0.2, (u["r"], width))
            weights[f"{layer}.self_attn.{name}.lora_B.weight"] = draw(0.0, 0.1, (width, u["r"]))
        for name in ("gate_proj", "up_proj"):
            weights[f"{layer}.mlp.{name}.weight"] = draw(0.0, 0.2, (hidden, width))
        weights[f"{layer}.mlp.down_proj.weight"] = draw(0.0, 0.2, (width, hidden))
        weights[f"{layer}.input_layernorm.weight"] = norm()
        weights[f"{layer}.post_attention_layernorm.weight"] = norm()
    weights |= {"value_head.weight": draw(0.0, 0.2, (1, width)), "value_head.bias": draw(0.0, 0.2, 1)}
    return {name: value.astype(np.float32) for name, value in weights.items()}


def update_rollout(seed: int = 20260804) -> dict:
    """Ragged prompts and responses of that policy's ids, and a score each. Id 0 is the pad, 1 ends a text."""
    generator = np.random.default_rng(seed)
    draw = lambda length: generator.integers(2, UPDATE["vocabulary"], length).tolist()  # noqa: E731
    return {
        "prompts": [draw(length) for length in (5, 2, 7, 3, 4, 6)],
        "responses": [draw(length - 1) + [1] for length in (6, 9, 2, 8, 5, 1)],
        "scores": generator.normal(0.3, 1.5, UPDATE["batch"]).astype(np.float32).tolist(),
    }


def digest(arrays: dict) -> str:
    """SHA-256 of named arrays: a test says so when another numpy draws other weights."""
    actual = hashlib.sha256()
    for name in sorted(arrays):
        actual.update(name.encode() + arrays[name].tobytes())
    return actual.hexdigest()


def base_name(name: str) -> str:
    """A parameter's name as in `update_weights`, from either library's."""
    for prefix in ("pretrained_model.base_model.model.", "model.base_model.model."):
        name = name.removeprefix(prefix)
    name = name.replace("v_head.summary", "value_head")
    return name.replace(".base_layer", "").replace(".default", "")


def plain(value):
    """Arrays and tensors to nested lists, through dictionaries and lists."""
    if isinstance(value, dict):
        return {key: plain(one) for key, one in value.items()}
    if isinstance(value, list):
        return [plain(one) for one in value]
    if getattr(value, "dtype", None) == np.float32:
        return np.vectorize(lambda x: float(str(x)), otypes=[float])(value).tolist()  # the shortest that reads back
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
