"""Compute RMSNorm and gated MLPs of a model on a GPU by Liger's Triton kernels, each in one pass over memory.

`replace_layers` gives modules of one model instance a subclass of their class whose forward calls Liger's functions.
Liger's own `apply_liger_kernel_to_...` replaces classes and functions of Transformers for the whole process, also when
it is given an instance, so it is not used. A module is replaced only if its class's forward has the bytecode of a
formula that Liger has, and if values and gradients from random inputs agree. What the kernels do not support (mixed
dtypes, torch.compile) takes the class's own forward.

Rotary embeddings stay torch's: Liger rotates queries and keys in place, unknown to autograd. The backward pass of a
gated MLP writes its gradients over the saved gate, so there can be one only for each forward pass.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from transformers.activations import ACT2FN
from transformers.models.gemma import modeling_gemma
from transformers.models.llama import modeling_llama
from transformers.models.olmo2 import modeling_olmo2
from transformers.models.phi3 import modeling_phi3

from stages.modeling.replaced_layers import liger_package
from stages.modeling.replaced_layers.equivalence import (
    TOLERANCE,
    bytecode,
    random_states,
    relative_difference,
    subclass,
)
from stages.modeling.replaced_layers.liger_package import describe_error, load_functions, supports

TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: TOLERANCE}
ROWS = 3
NARROW, NARROW_ROWS = 256, 1 << 15  # Liger has another kernel for that many rows of such a width
SILU = tuple({type(ACT2FN[name]) for name in ("silu", "swish")})
GELU_TANH = (type(ACT2FN["gelu_pytorch_tanh"]),)


@dataclass(frozen=True)
class NormFormula:
    """An RMSNorm: (offset + weight) * states / RMS.

    epsilon: name of the module's attribute. casting: 'llama' rounds before the product with the weight, 'gemma' after.
    """

    epsilon: str
    offset: float
    casting: str


class LigerNorm:
    """Mixin for an RMSNorm class; `liger_formula` is the family's."""

    liger_formula: NormFormula

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Normalise by the kernel where it supports the tensors, else as the class does."""
        if hidden_states.dtype != self.weight.dtype or not supports(hidden_states, self.weight):
            return super().forward(hidden_states)
        return self.compute(self, hidden_states)

    @classmethod
    def compute(cls, module: nn.Module, states: torch.Tensor) -> torch.Tensor:
        """Call the kernel; the gradient never goes in place of the result's, which a residual may need, too."""
        formula = cls.liger_formula
        return load_functions().rms_norm(
            states, module.weight, getattr(module, formula.epsilon), formula.offset, formula.casting, False)


class LlamaNorm(LigerNorm):
    """LLaMA's, Mistral's, Qwen's, SmolLM's, Granite's and Phi 3's."""

    liger_formula = NormFormula("variance_epsilon", 0.0, "llama")


class OlmoNorm(LigerNorm):
    """OLMo 2's."""

    liger_formula = NormFormula("variance_epsilon", 0.0, "gemma")


class GemmaNorm(LigerNorm):
    """Gemma's, of all versions."""

    liger_formula = NormFormula("eps", 1.0, "gemma")


class LigerMLP:
    """Mixin for a gated MLP class; `liger_product` names Liger's function of gate and up."""

    liger_product: str

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute by the kernel where it supports the tensor, else as the class does."""
        return self.compute(self, x) if supports(x) else super().forward(x)

    @classmethod
    def compute(cls, module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        """Call the kernel between the matrix products."""
        gate, up, activation = cls.project(module, x)
        if gate.dtype != up.dtype or not supports(gate, up):
            return module.down_proj(activation(gate) * up)
        return module.down_proj(getattr(load_functions(), cls.liger_product)(gate, up))

    @staticmethod
    def project(module: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Callable]:
        """Compute gate and up; also return the activation."""
        return module.gate_proj(x), module.up_proj(x), module.act_fn


class SwiGLU(LigerMLP):
    """LLaMA's and most families'."""

    liger_product = "swiglu"


class GeGLU(LigerMLP):
    """Gemma's."""

    liger_product = "geglu"


class Phi3SwiGLU(LigerMLP):
    """Phi 3's, one matrix for gate and up."""

    liger_product = "swiglu"

    @staticmethod
    def project(module: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Callable]:
        """Compute gate and up by their one matrix; also return the activation."""
        gate, up = module.gate_up_proj(x).chunk(2, dim=-1)
        return gate, up, module.activation_fn


# Class of Transformers -> attribute of an activation and its types, and the mixin for the same formula.
FORMULAS = {
    modeling_llama.LlamaRMSNorm: [(None, (), LlamaNorm)],
    modeling_olmo2.Olmo2RMSNorm: [(None, (), OlmoNorm)],
    modeling_gemma.GemmaRMSNorm: [(None, (), GemmaNorm)],
    modeling_llama.LlamaMLP: [("act_fn", SILU, SwiGLU), ("act_fn", GELU_TANH, GeGLU)],
    modeling_phi3.Phi3MLP: [("activation_fn", SILU, Phi3SwiGLU)],
}


def replace_layers(model: nn.Module) -> None:
    """Let the model's norms and gated MLPs compute by the kernels, where these are equivalent."""
    subclasses: dict[type, type] = {}
    dtype = model.get_input_embeddings().weight.dtype
    for module in model.modules():
        kind = type(module)
        if kind not in subclasses:
            mixin = _matching_mixin(module)
            subclasses[kind] = subclass(kind, mixin) if mixin and _agrees(module, mixin, dtype) else kind
        module.__class__ = subclasses[kind]
    replaced = {kind.__name__ for kind, other in subclasses.items() if other is not kind}
    liger_package.REPLACED.update(replaced)
    if not replaced:
        liger_package.log(f"no layer of this {model.config.model_type} model computes with them")


def _matching_mixin(module: nn.Module) -> type | None:
    """Return the mixin with the formula of the module, if Liger has it."""
    for kind, formulas in FORMULAS.items():
        if _methods(type(module)) == _methods(kind):
            return next((mixin for name, activations, mixin in formulas
                         if name is None or isinstance(getattr(module, name), activations)), None)
    return None


def _methods(kind: type) -> tuple:
    """Return the bytecode of a class's forward, and of what Gemma's calls."""
    return bytecode(kind.forward), bytecode(getattr(kind, "_norm", None))


def _agrees(module: nn.Module, mixin: type, dtype: torch.dtype) -> bool:
    """Check whether both compute the same from random inputs; a line says so if not."""
    weight = next(module.parameters())
    is_norm = issubclass(mixin, LigerNorm)
    width = len(weight) if is_norm else _input_width(module)
    dtype = weight.dtype if is_norm else dtype
    name, own = type(module).__name__, type(module).forward
    for rows in (ROWS, NARROW_ROWS) if is_norm and width <= NARROW else (ROWS,):
        states = random_states(1, rows, width).to(weight.device, dtype)
        try:
            expected, actual = (_with_gradients(module, compute, states) for compute in (own, mixin.compute))
        except Exception as error:  # Triton compiles the kernel at its first call: a compiler may be missing
            liger_package.log(f"{name} computes with torch: Liger's kernel failed: {describe_error(error)}")
            return False
        differences = [relative_difference(*pair) for pair in zip(expected, actual, strict=True)]
        if not all(difference <= TOLERANCES.get(dtype, 0) for difference in differences):  # also if one is NaN
            liger_package.log(f"{name} computes with torch: Liger's kernel differs, in its values or gradients by "
                              f"{', '.join(f'{difference:.2g}' for difference in differences)} of the largest")
            return False
    return True


def _input_width(module: nn.Module) -> int:
    return (module.gate_proj if hasattr(module, "gate_proj") else module.gate_up_proj).in_features


def _with_gradients(module: nn.Module, compute: Callable, states: torch.Tensor) -> list[torch.Tensor]:
    """Compute the result, and the gradients of the inputs and of a norm's weight."""
    with torch.enable_grad():
        inputs = [states.detach().clone().requires_grad_()]
        out = compute(module, inputs[0])
        if isinstance(getattr(module, "weight", None), nn.Parameter):
            inputs.append(module.weight)
        grads = torch.autograd.grad(out, inputs, random_states(*out.shape).to(out))
    return [x.detach().float() for x in (out, *grads)]
