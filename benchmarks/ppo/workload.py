"""Define the workload of the PPO benchmark (shapes, prompts, models, tokenizer) and the clock.

It runs in each peer's environment: it imports torch and transformers (4.57 to 5.23) where needed, and no code of ours.
"""

import argparse
import importlib.metadata
import json
import os
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

PAD, EOS, UNKNOWN = 0, 1, 2
NO_EOS = 100_000  # an id that no vocabulary here has: every response has its full length, as in StackLLaMA's script
LEARNING_RATE, KL_COEFFICIENT = 1.41e-5, 0.2
LORA = {"r": 16, "lora_alpha": 32, "lora_dropout": 0.0, "bias": "none", "target_modules": ["q_proj", "v_proj"]}


@dataclass(frozen=True)
class Shape:
    """Sizes of one PPO step: a LLaMA and a batch, prompts and response in tokens. Defaults as in PEERS.md.

    query_heads, key_heads, ffn: 0 derives them from the width.
    """

    width: int = 256
    layers: int = 6
    vocabulary: int = 4096
    prompts: tuple[int, int] = (48, 96)
    response: int = 64
    batch: int = 32
    minibatch: int = 8
    epochs: int = 4
    query_heads: int = 0
    key_heads: int = 0
    ffn: int = 0

    def __post_init__(self):
        if self.batch % self.minibatch or self.width % self.heads or not 1 <= self.prompts[0] <= self.prompts[1]:
            raise ValueError(f"{self}: the minibatch is to divide the batch, {self.head_width} the width, "
                             "and the shortest prompt is not to be the longest")

    @property
    def head_width(self) -> int:
        return self.width // self.heads

    @property
    def heads(self) -> int:
        return self.query_heads or self.width // (128 if self.width >= 1024 else 32)

    @property
    def key_width(self) -> int:
        """Return the width of all keys of a token, and of all values."""
        return (self.key_heads or self.heads) * self.head_width

    @property
    def intermediate(self) -> int:
        """Return 8/3 of the width, as LLaMA, rounded up to a multiple of 256, or of 16 for small models."""
        if self.ffn:
            return self.ffn
        multiple = 256 if self.width >= 1024 else 16
        return -(-8 * self.width // (3 * multiple)) * multiple

    @property
    def positions(self) -> int:
        return max(1024, self.prompts[1] + self.response)

    @classmethod
    def from_json(cls, text: str) -> "Shape":
        fields = json.loads(text)
        return cls(**fields | {"prompts": tuple(fields["prompts"])})

    def to_json(self) -> str:
        return json.dumps(asdict(self))


SHAPES = {"small": Shape(),
          "smollm2": Shape(width=576, layers=30, vocabulary=49152, prompts=(48, 96), response=64, batch=16, minibatch=8,
                           epochs=2, query_heads=9, key_heads=3, ffn=1536)}  # SmolLM2-135M


def prompts(shape: Shape, steps: int, seed: int = 7) -> list[list[list[int]]]:
    """Draw the prompts of each step: uniform lengths in the shape's range, and uniform ids without the special ones."""
    rng = random.Random(seed)
    return [[[rng.randrange(3, shape.vocabulary) for _ in range(rng.randint(*shape.prompts))]
             for _ in range(shape.batch)] for _ in range(steps)]


def llama_config(shape: Shape, **options):
    from transformers import LlamaConfig
    return LlamaConfig(
        vocab_size=shape.vocabulary, hidden_size=shape.width, intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers, num_attention_heads=shape.heads,
        num_key_value_heads=shape.key_heads or shape.heads,
        max_position_embeddings=shape.positions, tie_word_embeddings=True, bos_token_id=None, eos_token_id=None,
        pad_token_id=PAD, **options)


def language_model(shape: Shape, seed: int = 0):
    """Build a LLaMA with random weights, fp32."""
    from transformers import LlamaForCausalLM
    return _random_model(LlamaForCausalLM, llama_config(shape), seed)


def reward_model(shape: Shape, seed: int = 1):
    """Build a model of the same shape with a head of one output, fp32."""
    from transformers import LlamaForSequenceClassification
    return _random_model(LlamaForSequenceClassification, llama_config(shape, num_labels=1), seed)


def _random_model(kind, config, seed: int):
    import torch
    torch.manual_seed(seed)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        return kind(config).float()


def word_tokenizer(shape: Shape):
    """Build a tokenizer in which id i is the word "wi", so that decoding and encoding give the same ids."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    words = {"<pad>": PAD, "<eos>": EOS, "<unk>": UNKNOWN} | {f"w{i}": i for i in range(3, shape.vocabulary)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>",
                                   model_max_length=shape.positions)


def set_threads() -> None:
    """Use OMP_NUM_THREADS threads; PEER_F32=medium lets the fp32 products of an unchanged peer use oneDNN."""
    import torch
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    if os.environ.get("PEER_F32"):
        torch.set_float32_matmul_precision(os.environ["PEER_F32"])


class Clock:
    """Measure wall and CPU seconds of each phase of each step, and the cores used by other processes.

    Create it after loading the models: an accelerator's peak memory counts from here.
    """

    def __init__(self):
        import torch
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        self.steps: list[dict] = []
        self.start_step()

    def start_step(self) -> None:
        synchronise()
        self.wall, self.cpu = {}, {}
        self.start = time.perf_counter(), time.process_time(), machine_cpu_seconds()

    def add(self, name: str, wall: float, cpu: float) -> None:
        self.wall[name] = self.wall.get(name, 0.0) + wall
        self.cpu[name] = self.cpu.get(name, 0.0) + cpu

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        synchronise()
        wall, cpu = time.perf_counter(), time.process_time()
        yield
        synchronise()
        self.add(name, time.perf_counter() - wall, time.process_time() - cpu)

    def wrap(self, function: Callable, name: Callable[[tuple], str | None]) -> Callable:
        """Time `function` as the phase that `name` gives for its arguments; None does not time the call."""
        def timed(*arguments, **named):
            phase = name(arguments)
            if phase is None:
                return function(*arguments, **named)
            with self.phase(phase):
                return function(*arguments, **named)
        return timed

    def end_step(self) -> None:
        """End the step, with the seconds outside all phases as "other", and start the next one."""
        synchronise()
        wall, cpu, machine = (now - then for now, then in zip(
            (time.perf_counter(), time.process_time(), machine_cpu_seconds()), self.start, strict=True))
        self.add("other", wall - sum(self.wall.values()), cpu - sum(self.cpu.values()))
        self.steps.append({"wall": wall, "cpu": cpu, "foreign_cores": max(0.0, machine - cpu) / wall,
                           "phases": {name: {"wall": self.wall[name], "cpu": self.cpu[name]} for name in self.wall}})
        self.start_step()


def synchronise() -> None:
    """Wait for the accelerator, if there is one, as its calls return early."""
    import torch
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def machine_cpu_seconds() -> float:
    """Return the CPU seconds used on this machine since it started, over all cores."""
    times = [int(word) for word in Path("/proc/stat").read_text().split(maxsplit=9)[1:9]]
    return (sum(times) - times[3] - times[4]) / os.sysconf("SC_CLK_TCK")


def peak_mb() -> float:
    """Return the peak memory of this process, or of the accelerator if there is one, in 10^6 bytes."""
    import torch
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 1e6
    lines = Path("/proc/self/status").read_text().splitlines()  # ru_maxrss would count the parent's before exec
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) * 1024 / 1e6


def parse_worker_arguments(description: str, kind: type = Shape, **options: tuple) -> argparse.Namespace:
    """Parse a worker's command line: a shape, or workload of another `kind`, steps after one warm-up, output file.

    options: further ones, as name=(type, default).
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--shape", type=kind.from_json, default=kind())
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--out", type=Path, required=True)
    for name, (kind, default) in options.items():
        parser.add_argument(f"--{name}", type=kind, default=default)
    return parser.parse_args()


def write_results(out: Path, clock: Clock, packages: tuple[str, ...], **results) -> None:
    """Write the steps after the warm-up, the peak memory, the versions and other results as JSON."""
    versions = {name: importlib.metadata.version(name) for name in packages}
    record = {"steps": clock.steps[1:], "warm_up": clock.steps[0], "peak_mb": peak_mb(), "versions": versions} | results
    out.write_text(json.dumps(record), encoding="utf-8")
