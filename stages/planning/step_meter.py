"""Measure steps of training at two depths: memory and work grow by the same amount with each further layer."""

from collections.abc import Callable
from copy import deepcopy
from typing import Any, NamedTuple

from torch import nn
from transformers import PretrainedConfig

from stages.modeling.families import first_layers
from stages.planning import shapes
from stages.planning.dry_run import StepCost, dry_run
from stages.planning.stage_plan import dequantised_bytes, preset_gradients, stored_memory
from stages.planning.steps import Step
from stages.training.memory_estimate import PlanRow

BuildStep = Callable[[PretrainedConfig, Any, int], Step]


class TrainedModel(NamedTuple):
    """What a training has in memory all the time, the number of all parameters, and those that are trained.

    dequantised_bytes: of the largest quantised matrix, in bf16.
    """

    rows: list[PlanRow]
    parameters: int
    trained: list[nn.Parameter]
    dequantised_bytes: int


class StepMeter:
    """Measure the steps of one recipe on one base, each once, however often a plan needs it.

    What the steps depend on, beside the stage and its rows, is what `find_smallest_change` varies: number format,
    recomputation, critic and sharding. All other settings must stay as they are.
    """

    def __init__(self, config: PretrainedConfig):
        self.config = config
        self._costs: dict[tuple, StepCost] = {}
        self._models: dict[tuple, TrainedModel] = {}

    def measure(self, stage: str, build: BuildStep, settings: Any, rows: int) -> StepCost:
        """Return the cost of a step on `rows` rows; its peak is what comes on top of weights and gradients."""
        precision = "quantised" if settings.precision in shapes.QUANTISED else settings.precision
        key = (stage, rows, precision, getattr(settings, "gradient_checkpointing", False),
               getattr(settings, "value_model", None))
        if key not in self._costs:
            self._costs[key] = measure_step(self._cut(settings), lambda config: build(config, settings, rows))
        return self._costs[key]

    def describe(self, stage: str, build: BuildStep, settings: Any, optimizer: str, processes: int) -> TrainedModel:
        """Return what the training keeps in memory; processes: that share the layers' weights, if so set."""
        sharded_over = processes if getattr(settings, "sharding", "none") == "fsdp" else 1
        key = (stage, settings.precision, getattr(settings, "value_model", None), sharded_over)
        if key not in self._models:
            model, others, _ = build(self._cut(settings), settings, 1)
            count, _ = shapes.count_parameters(model)
            trained = [p for p in model.parameters() if p.requires_grad]
            dequantised = dequantised_bytes(model, settings.precision)
            rows = stored_memory(model, others, precision=settings.precision, optimizer=optimizer,
                                 sharded_over=sharded_over)
            self._models[key] = TrainedModel(rows, count, trained, dequantised)
        return self._models[key]


    def _cut(self, settings: Any) -> PretrainedConfig:
        """Return the configuration with the first layers only, if the section wants no more."""
        config = deepcopy(self.config)
        config.update(first_layers(config, getattr(settings, "layers", None)))
        return config


def measure_step(config: PretrainedConfig, build: Callable[[PretrainedConfig], Step]) -> StepCost:
    """Measure a step at one and at two periods of the layers, and continue the line to all of them."""
    period, layers = shapes.layer_period(config), config.num_hidden_layers
    if layers <= 2 * period:
        return _run(build(config))
    first, second = (_run(build(shapes.with_layers(config, count))) for count in (period, 2 * period))
    steps = (layers - period) / period
    return StepCost(*(round(one + (two - one) * steps) for one, two in zip(first, second, strict=True)))


def _run(step: Step) -> StepCost:
    preset_gradients(step.model)  # as after a first microbatch
    return dry_run(step.run)
