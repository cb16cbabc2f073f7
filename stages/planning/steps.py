"""Compute from shapes what a training step allocates and multiplies, beside weights, gradients and optimizer state.

Every layer stores for the backward pass what its operations need; the tests compare the sum with torch's allocator.
Attention is the fused kernel's, as on a GPU. Sizes are of one card.
"""

from typing import Any, NamedTuple

from stages.planning.shapes import ATTENTION_INPUTS, MLP_INPUTS, Shape

FULL, LORA = "full", "lora"
LOGITS_AT_ONCE, MIN_CHUNK_TOKENS = 1 << 26, 128  # of a GPU (modeling/packed/token_logprobs.py)
FP32 = 4


class Batch(NamedTuple):
    """The texts of a forward pass: tokens in all, of a row for attention, with logits, and with a last MLP's output."""

    tokens: int
    row_tokens: int
    rows: int
    logit_tokens: int
    output_tokens: int
    shares_prompts: bool = False

    @classmethod
    def build(cls, tokens: int, row_tokens: int, rows: int, logit_tokens: int, output_tokens: int | None = None,
              shares_prompts: bool = False) -> "Batch":
        """Round up the sizes as modeling/packed/sequences.py does; output_tokens: None: those with logits."""
        outputs = logit_tokens if output_tokens is None else output_tokens
        return cls(_round_up(tokens), -(-row_tokens // 16) * 16, rows, _round_up(logit_tokens), _round_up(outputs),
                   shares_prompts)


class StepCost(NamedTuple):
    """What a step costs, in bytes and floating-point operations.

    stored: by all layers. logits, backward: at most beside it, while logits are computed and in the backward pass.
    """

    stored: int
    logits: int
    backward: int
    flops: int

    @property
    def peak_bytes(self) -> int:
        """Return the peak of the tensors that the step allocates."""
        return self.stored + max(self.logits, self.backward)


class Training(NamedTuple):
    """How a model is trained: whole or by an adapter, in which number format.

    precision: "mixed" is planned with fp32 activations; those of quantised weights are fp32, too.
    """

    tune: str
    precision: str
    rank: int = 0
    dropout: float = 0.0
    targets: tuple[str, ...] = ()
    recomputes: bool = False

    @classmethod
    def read(cls, settings: Any) -> "Training":
        """Return the training of a section of the recipe."""
        lora = getattr(settings, "lora", None)
        tune = getattr(settings, "tune", LORA if lora else FULL)
        adapter = (lora.r, lora.dropout, tuple(lora.target_modules)) if lora and tune == LORA else ()
        return cls(tune, settings.precision, *adapter, recomputes=getattr(settings, "gradient_checkpointing", False))

    @property
    def state_bytes(self) -> int:
        """Return the bytes of a number in a hidden state."""
        return 2 if self.precision == "bf16" else FP32

    def adapted(self, shape: Shape) -> list:
        """List the matrices of a layer that have an adapter."""
        return shape.adapted(self.targets) if self.tune == LORA else []


def step_cost(shape: Shape, training: Training, batch: Batch) -> StepCost:
    """Return the cost of a step: forward and backward."""
    if training.tune == "head":  # nothing under the head has gradients
        return StepCost(0, forward_bytes(shape, training.state_bytes, batch), 0, step_flops(shape, training, batch))
    if training.recomputes:  # Transformers recomputes whole layers
        batch = batch._replace(output_tokens=batch.tokens)
    width, tokens, state_bytes = shape.width, batch.tokens, training.state_bytes
    everywhere, at_outputs = _layer_bytes(shape, training, batch)
    adapted = training.adapted(shape)
    adapts_down = any(matrix.role == "down" for matrix in adapted)  # an adapter's gradients are fp32
    transient = (FP32 if adapts_down else state_bytes) * shape.mlp_width
    transient *= 2 if training.tune == FULL or adapts_down else 3
    states = 6 * width * tokens
    backward = 27 * width * tokens  # of attention and norms in the last layer
    if training.recomputes:  # a layer at a time, whose input is stored already
        stored = shape.layers * width * state_bytes * tokens
        layer = everywhere + at_outputs - state_bytes * width
        backward = max(backward, (layer + transient) * tokens + states)
        if training.tune == FULL and batch.logit_tokens and not shape.output_weights:
            backward += FP32 * shape.embedding_weights  # tied embeddings get a gradient from either end
    else:
        # The last MLP is computed where its output is read.
        stored = shape.layers * everywhere * tokens
        stored += at_outputs * ((shape.layers - 1) * tokens + batch.output_tokens)
        if training.tune == LORA:  # without trained embeddings, no gradient leaves the first layer
            noises = sum(matrix.role in ATTENTION_INPUTS for matrix in adapted) * bool(training.dropout)
            stored -= FP32 * width * (1 + noises) * tokens
        # Of the last MLP, and of the one before it, when the last layer's tensors are gone.
        before = (transient - everywhere) * tokens - at_outputs * batch.output_tokens
        backward = max(backward, transient * batch.output_tokens + states, before + states)
    return StepCost(stored, _logits_bytes(shape, training, batch), backward, step_flops(shape, training, batch))


def _layer_bytes(shape: Shape, training: Training, batch: Batch) -> tuple[int, int]:
    """Return the bytes that a layer stores of each token: in its attention and norms, and in its MLP."""
    state, width = training.state_bytes, shape.width
    norms = FP32 * (2 * width + shape.query_key_norm_width) + (2 * state * width if training.tune == FULL else 0)
    # Rows are padded for the kernel, so that a shared prompt is there once for each.
    kernel = (FP32 * shape.heads + 4 * state * shape.attention_width) * batch.rows * batch.row_tokens // batch.tokens
    gated = any(matrix.role == "gate" for matrix in shape.matrices)
    attention = norms + kernel + 10 * FP32 + batch.shares_prompts * state * shape.attention_width
    attention += _inputs_bytes(shape, training, ATTENTION_INPUTS, width)
    attention += _inputs_bytes(shape, training, ("out",), shape.attention_width)
    mlp = (3 if gated else 2) * state * shape.mlp_width + _inputs_bytes(shape, training, MLP_INPUTS, width)
    return attention, mlp + _inputs_bytes(shape, training, ("down",), shape.mlp_width)


def _inputs_bytes(shape: Shape, training: Training, roles: tuple[str, ...], width: int) -> int:
    """Return the bytes that trained matrices with the same input of a token store of it."""
    if training.tune == FULL:
        return training.state_bytes * width
    count = sum(matrix.role in roles for matrix in training.adapted(shape))
    copies = 2 * count if training.dropout else count if training.state_bytes < FP32 else min(count, 1)
    return FP32 * (width * copies + training.rank * count)  # an adapter computes in fp32


def _logits_bytes(shape: Shape, training: Training, batch: Batch) -> int:
    """Return the bytes of the logits and what goes with them; a trained output layer computes them again."""
    at_once = min(batch.logit_tokens, max(MIN_CHUNK_TOKENS, LOGITS_AT_ONCE // shape.vocabulary))
    halved = training.precision in ("bf16", "mixed")
    copies = 3 if training.tune == FULL else 1.5 if halved else 1
    at_each, at_labels = (6, 12) if training.tune == FULL else (4, 24) if training.state_bytes == FP32 else (5, 8)
    states = (at_each * batch.tokens + at_labels * batch.logit_tokens) * shape.width
    return int(FP32 * copies * shape.vocabulary * at_once) + states


def step_flops(shape: Shape, training: Training, batch: Batch) -> int:
    """Return the operations of a step: forward, gradients of inputs, and of weights where they are trained."""
    mlp = sum(matrix.count for matrix in shape.matrices if matrix.role in (*MLP_INPUTS, "down"))
    # The last MLP is computed where its output is read.
    forward = 2 * (shape.layers * shape.layer_weights * batch.tokens - mlp * (batch.tokens - batch.output_tokens))
    attention = 4 * shape.layers * batch.rows * batch.row_tokens**2 * shape.attention_width
    output = shape.vocabulary * shape.width * batch.logit_tokens
    if training.tune == "head":
        return forward + attention + 2 * output
    adapted = training.adapted(shape)
    adapters = 2 * training.rank * sum(matrix.outputs + matrix.inputs for matrix in adapted)
    adapters *= shape.layers * batch.tokens
    if training.tune == FULL:
        total = 3 * forward + 3.5 * attention + 8 * output
    else:
        total = 2 * forward + 3.5 * attention + 3 * adapters + 4 * output
        if not training.recomputes:  # no gradient leaves the first layer
            first = sum(matrix.count for matrix in shape.matrices if matrix.role in ATTENTION_INPUTS)
            first += training.rank * sum(matrix.inputs for matrix in adapted if matrix.role in ATTENTION_INPUTS)
            total -= 2 * first * batch.tokens
    if training.recomputes:  # up to the last product, which nothing needs but an adapter after it
        last = sum(matrix.count for matrix in shape.matrices if matrix.role == "down" and matrix not in adapted)
        total += forward + attention + adapters - 2 * shape.layers * last * batch.tokens
    return int(total)


def forward_bytes(shape: Shape, state_bytes: int, batch: Batch) -> int:
    """Return the bytes of a forward pass without gradients: the MLP's tensors, or the logits at once if larger."""
    mlp = 4 * state_bytes * shape.mlp_width * batch.tokens
    at_once = min(batch.logit_tokens, max(MIN_CHUNK_TOKENS, LOGITS_AT_ONCE // shape.vocabulary))
    return max(mlp, FP32 * shape.vocabulary * at_once)


def _round_up(count: int) -> int:
    """Round up to a multiple of 1/32 of the octave, and of 16."""
    step = max(16, (1 << max(count - 1, 0).bit_length()) // 64)
    return -(-count // step) * step
