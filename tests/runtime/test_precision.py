"""Precisions whose matrix products a processor would emulate are computed in fp32, and a line says so."""

import json
from pathlib import Path

import pytest
import torch

from stages.command_line import command
from stages.recipe.sections.evaluate import Evaluate
from stages.recipe.sections.models import Base, Merge, Scratch
from stages.recipe.sections.sft import Sft
from stages.runtime import environment


@pytest.fixture
def without_bf16(monkeypatch):
    monkeypatch.setattr(environment, "has_bf16_products", lambda: False)


@pytest.mark.parametrize("wanted", ["mixed", "bf16"])
def test_emulated_products_are_computed_in_fp32(wanted, without_bf16, capsys):
    config = Sft(precision=wanted)

    fitted = environment.fit_precision(config)

    assert fitted == Sft(precision="fp32")
    line, = capsys.readouterr().err.splitlines()
    assert f"precision {wanted} is computed in fp32" in line


@pytest.mark.parametrize("config", [Sft(precision="fp32"), Sft(precision="int8"), Evaluate(precision="fp32"),
                                    Merge(dtype="bf16"), None])
def test_other_settings_stay(config, without_bf16, capsys):
    assert environment.fit_precision(config) is config
    assert not capsys.readouterr().err


def test_the_checks_of_a_merge_are_fitted_and_its_dtype_is_not(without_bf16):
    assert environment.fit_precision(Merge(dtype="bf16", check_precision="bf16")) == Merge(
        dtype="bf16", check_precision="fp32")


def test_a_setting_of_a_nested_section_is_fitted(without_bf16, capsys):
    fitted = environment.fit_precision(Base(model="scratch", scratch=Scratch(precision="mixed")))
    assert fitted == Base(model="scratch", scratch=Scratch(precision="fp32"))
    assert "scratch.precision mixed is computed in fp32" in capsys.readouterr().err


def test_a_processor_with_the_products_computes_what_the_recipe_says(monkeypatch):
    monkeypatch.setattr(environment, "has_bf16_products", lambda: True)
    config = Sft(precision="bf16")
    assert environment.fit_precision(config) is config


@pytest.mark.parametrize("capability", environment.BF16_PRODUCTS)
def test_products_are_known_by_the_processors_capabilities(capability, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx2": True, capability: False})
    assert not environment.has_bf16_products()
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx2": True, capability: True})
    assert environment.has_bf16_products()


def test_a_stage_computes_in_fp32_and_its_request_stays_the_recipes(tmp_path, without_bf16):
    seen = []

    def run(config: Sft, out: Path) -> dict[str, float]:
        seen.append(config.precision)
        (out / "result").write_text("")
        return {}

    command.make(run, Sft(precision="bf16"), tmp_path / "out", {})

    assert seen == ["fp32"]
    assert json.loads((tmp_path / "out" / "manifest.json").read_text())["config"]["precision"] == "bf16"
