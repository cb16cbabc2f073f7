"""The command of the demo page: a user's mistake is one line, before models are loaded where it can be."""

import os
import shutil
import socket
from pathlib import Path

import pytest

from stages import demo
from stages.chat.streaming import ChatModels
from stages.modeling import torch_setup
from stages.recipe.recipe import load_recipe
from tests.helpers import demo_run


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return demo_run.save_run(tmp_path_factory.mktemp("runs") / "tiny")


def test_a_missing_run_says_what_to_do_in_one_line(tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    for name, words in (("nothing", "not a folder"), ("file", "not a folder"), ("empty", "no finished pairs")):
        assert demo.main(["--run", str(tmp_path / name)]) == 1
        said = capsys.readouterr().err
        assert said.startswith("demo: error: ") and words in said and "make ppo" in said and said.count("\n") == 1


def test_of_a_run_of_several_seeds_one_is_to_be_chosen(tmp_path, capsys):
    for seed in (0, 10):
        (tmp_path / f"seed-{seed}").mkdir()
        (tmp_path / f"seed-{seed}/recipe.yaml").touch()
    assert demo.main(["--run", str(tmp_path)]) == 1
    assert capsys.readouterr().err.endswith(f"give one of {tmp_path}/seed-0, {tmp_path}/seed-10\n")


@pytest.mark.parametrize("damage", ["gone", "cut"])
def test_damaged_weights_are_one_line(run, tmp_path, capsys, monkeypatch, damage):
    monkeypatch.setattr(torch_setup, "prepare", lambda: None)
    for name, value in demo.OFFLINE_ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    shutil.copytree(run, tmp_path / "run")
    weights = tmp_path / "run/ppo-merged/model.safetensors"
    weights.unlink() if damage == "gone" else os.truncate(weights, 100)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    assert demo.main(["--run", str(tmp_path / "run"), "--port", str(port)]) == 1
    said = capsys.readouterr().err.splitlines()
    assert said[-1].startswith("demo: error: ") and not [line for line in said if "Traceback" in line]


def test_without_gradio_one_line_says_so(run, capsys, monkeypatch):
    monkeypatch.setattr(demo.importlib.util, "find_spec", lambda name: None)
    assert demo.main(["--run", str(run)]) == 1
    said = capsys.readouterr().err
    assert "make extras" in said and said.count("\n") == 1


def test_a_port_that_is_taken_is_said_before_models_are_loaded(run, capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert demo.main(["--run", str(run), "--port", str(taken.getsockname()[1])]) == 1
    said = capsys.readouterr()
    assert "give another --port" in said.err and said.err.count("\n") == 1 and not said.out


@pytest.mark.parametrize("port", ["0", "-1", "70000"])
def test_a_port_that_cannot_be_is_one_line(run, capsys, port):
    assert demo.main(["--run", str(run), "--port", port]) == 1
    said = capsys.readouterr().err
    assert said == f"demo: error: --port must be from 1 to 65535, not {port}\n"


def test_a_port_that_is_no_number_is_one_line(capsys):
    with pytest.raises(SystemExit):
        demo.main(["--port=abc"])  # as `make demo PORT=abc` calls it
    assert capsys.readouterr().err == (
        "demo: error: argument --port: invalid int value: 'abc' (--help lists the options)\n")


def test_a_model_is_named_once_and_is_a_folder(run, capsys):
    args = demo.build_parser().parse_args(["--run", str(run), "--model", f"SFT={run / 'ppo-merged'}"])
    with pytest.raises(ValueError, match="already"):
        ChatModels(run, args.model)
    with pytest.raises(SystemExit):
        demo.build_parser().parse_args(["--model", "base"])
    assert "NAME=FOLDER" in capsys.readouterr().err


def test_only_this_machine_is_served_unless_asked_otherwise():
    assert demo.build_parser().parse_args([]).host == "127.0.0.1"


def test_controls_start_as_the_run_was_evaluated(run):
    published = demo.evaluate_settings(run)
    assert (published.temperature, published.max_response_tokens) == (1.0, 128)
    expected = load_recipe("configs/demo.yaml").evaluate
    (run / "recipe.yaml").write_text(Path("configs/demo.yaml").read_text())
    assert demo.evaluate_settings(run) == expected
    (run / "recipe.yaml").unlink()
