"""Who may import whom (DESIGN 2), read from the source, and the sizes that keep it readable."""

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = sorted((ROOT / "stages").rglob("*.py"))
LEARNING = {"torch", "transformers", "peft", "trl", "datasets", "accelerate", "bitsandbytes", "tokenizers",
            "safetensors"}
NOT_STAGES = ("recipe", "inspect", "demo")  # directly in stages/, without a `run`
FOR_ALL = ("stages.runtime.progress", "stages.runtime.artifact",  # a progress bar, a JSON file written whole
           "stages.runtime.process_pool")  # several processes


def imported(tree: ast.AST) -> set[str]:
    """Every imported module; `from stages.stackexchange.questions import scoring` counts as stages.stackexchange.questions.scoring too."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide the layer"
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def of_ours(names: set[str], *allowed: str) -> set[str]:
    """Imports from stages/ that are not `allowed` (a module or what is under it)."""
    inside = {name for name in names if name.split(".")[0] == "stages" and name != "stages"}
    return {name for name in inside if not any(name == ok or name.startswith(ok + ".") for ok in allowed)}


def room(path: Path) -> str:
    inside = path.relative_to(ROOT / "stages").parts
    return inside[0] if len(inside) > 1 else path.stem if path.stem in NOT_STAGES else "stage"


def in_room(name: str) -> list:
    return [pytest.param(path, id=path.stem) for path in SOURCES if room(path) == name and path.stem != "__init__"]


@pytest.mark.parametrize("path", in_room("stage"))
def test_a_stage_uses_recipe_text_and_learning_and_plumbing_for_its_command(path):
    tree = parsed(path)
    last = tree.body[-1]
    assert isinstance(last, ast.If) and ast.unparse(last.test) == "__name__ == '__main__'", "ends in its command"
    assert of_ours(imported(last)) == {"stages.runtime.command", "stages.runtime.command.main"}
    tree.body = tree.body[:-1]
    names = imported(tree) - {"stages.plumbing"}
    assert not of_ours(names, "stages.recipe.recipe", "stages.text", "stages.learning", *FOR_ALL)


@pytest.mark.parametrize("path", in_room("learning"))
def test_learning_takes_numbers_and_tensors_never_a_recipe(path):
    assert not of_ours(imported(parsed(path)) - {"stages.plumbing"}, "stages.learning", "stages.text", *FOR_ALL)


@pytest.mark.parametrize("path", in_room("text"))
def test_text_knows_neither_torch_nor_stages(path):
    names = imported(parsed(path))
    assert not {name for name in names if name.split(".")[0] in LEARNING - {"datasets", "tokenizers"}}
    assert not of_ours(names - {"stages.plumbing"}, "stages.text", *FOR_ALL)


@pytest.mark.parametrize("path", in_room("plumbing"))
def test_plumbing_is_standard_library_and_recipe(path):
    names = imported(parsed(path))
    assert not of_ours(names, "stages.plumbing", "stages.recipe.recipe")
    assert {name.split(".")[0] for name in names} <= set(sys.stdlib_module_names) | {"stages", "yaml"}


def test_recipe_needs_settings_only():
    names = imported(parsed(ROOT / "stages/recipe/recipe.py"))
    assert not of_ours(names, "stages.recipe.schema")
    assert {name.split(".")[0] for name in names} <= {"dataclasses", "datetime", "pathlib", "typing", "yaml", "stages"}


def test_inspect_needs_what_reads_artifacts_and_no_learning():
    names = imported(parsed(ROOT / "stages/inspect.py")) - {"stages.plumbing"}
    readers = (f"stages.plumbing.{name}" for name in ("artifact", "lineage", "listing", "record"))
    assert not of_ours(names, "stages.recipe.recipe", "stages.text", *readers)


@pytest.mark.parametrize("path", in_room("web"))
def test_the_page_shows_what_text_and_learning_know(path):
    assert not of_ours(imported(parsed(path)) - {"stages.plumbing"}, "stages.web", "stages.text", "stages.learning",
                       *FOR_ALL)


def test_only_the_demo_knows_the_page_and_only_the_page_knows_gradio():
    using = {path: imported(parsed(path)) for path in SOURCES if room(path) != "web"}
    assert {path.stem for path, names in using.items() if {"stages.web", "stages.chat.page"} & names} == {"demo"}
    assert not [path for path, names in using.items() if "gradio" in names]
    needs = using[ROOT / "stages/demo.py"] - {"stages.plumbing"}
    assert not of_ours(needs, "stages.recipe.recipe", "stages.text", "stages.learning", "stages.web",
                       "stages.runtime.artifact", "stages.recipe.schema")
    before = ast.Module([node for node in parsed(ROOT / "stages/demo.py").body if isinstance(node, ast.ImportFrom)], [])
    assert not of_ours(imported(before), "stages.recipe.recipe", "stages.plumbing"), "--help needs neither torch nor gradio"


def test_the_snakefile_needs_recipe_and_plumbing_only():
    lines = [line for line in (ROOT / "Snakefile").read_text().splitlines() if line.startswith(("import ", "from "))]
    names = imported(ast.parse("\n".join(lines)))
    assert not of_ours(names, "stages.recipe.recipe", "stages.plumbing") - {"stages.plumbing"}
    assert {name.split(".")[0] for name in names} == {"os", "sys", "pathlib", "snakemake", "stages"}


def test_rules_hold_no_logic():
    for path in [ROOT / "Snakefile", *(ROOT / "workflow/rules").glob("*.smk")]:
        words = path.read_text()
        assert not [word for word in ("run:", "script:", "lambda", "def ") if f"    {word}" in words], path


def test_every_file_says_what_it_is():
    for path in SOURCES:
        assert ast.get_docstring(parsed(path)), path


def test_no_drawer_for_odds_and_ends():
    drawers = {"utils", "util", "common", "helpers", "helper", "misc", "core"}
    assert not [path for path in [*SOURCES, *(ROOT / "workflow").rglob("*")] if path.stem in drawers]


def test_sizes():
    """As the admired codebases at their tail: 90 % of files under 250 lines, 90 % of functions under 40."""
    lengths = [len(path.read_text().splitlines()) for path in SOURCES]
    assert sum(length < 250 for length in lengths) >= 0.9 * len(lengths)
    functions = [node.end_lineno - node.lineno + 1 for path in SOURCES for node in ast.walk(parsed(path))
                 if isinstance(node, ast.FunctionDef)]
    assert sum(length < 40 for length in functions) >= 0.9 * len(functions)
