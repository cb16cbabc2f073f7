"""Check the rooms of stages/: who imports whom, what runs at import, and sizes. All of it is read from the source.

The table ROOMS is the rule. docs/design.md explains it.
"""

import ast
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = sorted((ROOT / "stages").rglob("*.py"))
PROGRAMS = ("posts", "pairs", "gather", "base", "sft", "reward", "judge", "merge", "ppo", "dpo", "rloo", "grpo",
            "best_of_n", "expert_iteration", "ilql", "evaluate", "report", "frontier", "pool_seeds",
            "evaluate_reward", "export_reward")
# Programs that train as another one does: with other data and another seed, or by another policy gradient method.
TRAINED_LIKE = {"stages.judge": {"stages.reward"}, "stages.rloo": {"stages.ppo"}, "stages.grpo": {"stages.ppo"}}
TOOLS = ("inspect", "compare", "plan", "demo", "fetch_smollm2", "export_gguf")
PROMPTS = ("stackexchange.pairs", "stackexchange.prompt")
# Room -> rooms or modules that it may import, beside itself.
ROOMS = {
    "recipe": (),
    "render": (),
    "runtime": ("recipe", "render"),
    "model_files": ("runtime",),
    "artifacts": ("recipe", "runtime", "render", "model_files"),
    "command_line": ("recipe", "artifacts", "runtime", "render"),
    "runs": ("recipe", "artifacts", "runtime", "render", "model_files"),
    "stackexchange": ("artifacts", "runtime", "render"),
    "inspection": ("artifacts", "runtime", "render", "model_files"),
    "distributed": ("runtime",),
    "modeling": ("artifacts", "runtime", "render", "distributed", "model_files", *PROMPTS),
    "training": ("artifacts", "runtime", "render", "distributed", *PROMPTS),
    "generation": ("runtime", "render", "distributed", "modeling", *PROMPTS),
    "finetuning": ("runtime", "render", "modeling", *PROMPTS),
    "reward_modeling": ("runtime", "render", "distributed", "modeling", *PROMPTS),
    "rewards": ("recipe.user_functions", "distributed", "modeling", "generation", "reward_modeling", *PROMPTS),
    "rl": ("runtime", "render", "distributed", "modeling", "training", "generation", "reward_modeling", "rewards",
           *PROMPTS),
    "preference": ("runtime", "distributed", "modeling", "training", "reward_modeling", "evaluation.pair_accuracy",
                   "evaluation.statistics", *PROMPTS),
    "rejection_sampling": ("evaluation.statistics", "runtime", "render", "distributed", "modeling", "training",
                           "finetuning", "generation", "reward_modeling", "rewards", *PROMPTS),
    "offline_rl": ("distributed", "modeling", "training", "generation", *PROMPTS),
    "evaluation": ("recipe.user_functions", "recipe.algorithms", "artifacts", "runtime", "render", "distributed",
                   "modeling", "training", "generation", "reward_modeling", "rewards", "stackexchange"),
    "reporting": ("recipe.algorithms", "evaluation.summary", "evaluation.verdict", "evaluation.reward_model_check",
                  "evaluation.tasks.wording", "artifacts", "runtime", "render", "stackexchange.prompt"),
    "cards": ("recipe.algorithms", "artifacts", "runtime", "render", "evaluation.summary", "evaluation.tasks.wording",
              "reporting.headline", *PROMPTS),
    "pooling": ("evaluation.statistics", "evaluation.summary", "evaluation.reward_hacking", "reporting",
                "artifacts", "runtime", "render"),
    "reward_checks": ("runtime", "render", "modeling", "generation", "reward_modeling", "rewards", "evaluation",
                      "reporting", *PROMPTS),
    "kl_frontier": ("evaluation.summary", "pooling", "reporting", "artifacts", "runtime", "render"),
    "planning": ("render", "runtime", "model_files", "stackexchange.pairs", "stackexchange.questions.table",
                 "stackexchange.dump.archives"),
    "chat": ("artifacts", "runtime", "render", "modeling", "generation", "reward_modeling", "evaluation.statistics",
             *PROMPTS),
}
WITHOUT_TORCH = ("recipe", "render", "runtime", "artifacts", "command_line", "model_files", "runs", "stackexchange",
                 "inspection", "reporting", "cards", "pooling", "kl_frontier", "planning")
READING = {"environ", "getenv", "glob", "rglob", "iterdir", "read_text", "read_bytes", "open", "exists", "is_file"}
TORCH = {"torch", "transformers", "peft", "trl", "accelerate", "bitsandbytes", "safetensors"}
MODULES = {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in SOURCES}


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imported_modules(tree: ast.AST) -> set[str]:
    """List every imported module; `from stages.rl import policy` counts as stages.rl.policy where that is a module."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "write absolute imports: a relative one hides the room"
            inside = {f"{node.module}.{alias.name}" for alias in node.names} & MODULES.keys()
            names |= inside or {node.module}
    return names


def without_functions(tree: ast.Module) -> ast.Module:
    """Keep what runs when the module is imported (not what is in functions, nor under `if __name__`)."""
    statements = [node for node in tree.body if not isinstance(node, ast.FunctionDef) and not is_main_guard(node)]
    return ast.Module(statements, [])


def is_main_guard(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "__name__ == '__main__'"


def loaded_modules(module: str, loaded: set[str] | None = None) -> set[str]:
    """List every module that importing `module` imports in turn, functions apart."""
    loaded = set() if loaded is None else loaded
    for name in imported_modules(without_functions(parse(MODULES[module]))) - loaded:
        loaded.add(name)
        if name in MODULES:
            loaded_modules(name, loaded)
    return loaded


def room_of(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else ""


def is_below(name: str, *rooms: str) -> bool:
    return any(name == f"stages.{room}" or name.startswith(f"stages.{room}.") for room in rooms)


def modules_in(room: str) -> list[str]:
    return sorted(name for name in MODULES if is_below(name, room))


@pytest.mark.parametrize("module", [name for room in ROOMS for name in modules_in(room)])
def test_a_room_imports_only_the_rooms_below_it(module):
    room = room_of(module)
    ours = {name for name in imported_modules(parse(MODULES[module])) if name.split(".")[0] == "stages"}
    assert not {name for name in ours if not is_below(name, room, *ROOMS[room])}


def test_every_folder_is_a_room_and_every_file_beside_them_a_program():
    assert {path.name for path in (ROOT / "stages").iterdir() if path.is_dir() and any(path.glob("*.py"))} == set(ROOMS)
    assert {path.stem for path in (ROOT / "stages").glob("*.py")} == {*PROGRAMS, *TOOLS, "__init__", "stages"}


def test_the_table_of_rooms_in_the_docs_names_each_once():
    rows = re.findall(r"^\| `(\w+)/` \|", (ROOT / "docs/design.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(rows) == sorted(ROOMS)


def test_no_rooms_import_each_other():
    for room, below in ROOMS.items():
        for other in {name.split(".")[0] for name in below}:
            assert room not in {name.split(".")[0] for name in ROOMS[other]}, f"{room} and {other}"


@pytest.mark.parametrize("module", [f"stages.{name}" for name in (*PROGRAMS, *TOOLS)])
def test_no_program_imports_a_program(module):
    programs = imported_modules(parse(MODULES[module])) & {f"stages.{name}" for name in (*PROGRAMS, *TOOLS)}
    assert programs == TRAINED_LIKE.get(module, set())


@pytest.mark.parametrize("room", WITHOUT_TORCH)
def test_a_room_for_text_loads_no_torch(room):
    for module in modules_in(room):
        assert not {name.split(".")[0] for name in loaded_modules(module)} & TORCH, module


@pytest.mark.parametrize("program", ["sft", "reward", "judge", "dpo", "best_of_n", "expert_iteration", "ilql", "merge",
                                     "evaluate", "demo"])
def test_these_programs_load_no_ppo_code(program):
    assert not {name for name in loaded_modules(f"stages.{program}") if is_below(name, "rl")}


def test_recipe_and_render_are_standard_library_yaml_and_markdown():
    for module in [*modules_in("recipe"), *modules_in("render")]:
        names = {name.split(".")[0] for name in imported_modules(parse(MODULES[module]))}
        others = {"stages", "yaml", "huggingface_hub", "jinja2", "markdown_it"}
        assert names <= set(sys.stdlib_module_names) | others, module


def test_only_the_demo_imports_the_chat_page_and_only_the_chat_page_imports_gradio():
    using = {name: imported_modules(parse(path)) for name, path in MODULES.items() if not is_below(name, "chat")}
    assert {name for name, names in using.items() if any(is_below(n, "chat") for n in names)} <= {"stages.demo"}
    assert not [name for name, names in using.items() if "gradio" in names]


def test_a_room_takes_no_recipe_object():
    """Beside the rooms that are about recipes, only programs take a section."""
    rooms = {name for room in ("recipe", "artifacts", "command_line", "runs") for name in modules_in(room)}
    for module in set(MODULES) - rooms:
        if room_of(module) in ROOMS:
            names = imported_modules(parse(MODULES[module]))
            assert not [name for name in names if is_below(name, "recipe.recipe", "recipe.sections")], module


@pytest.mark.parametrize("module", sorted(MODULES.keys() - {"stages.stages"}))  # which ends a program run by its path
def test_importing_a_module_runs_nothing(module):
    """Only imports, definitions and assignments of names stand at the top level, and none of these reads a file."""
    for node in parse(MODULES[module]).body:
        if isinstance(node, ast.Assign | ast.AnnAssign):
            assert not {n.attr for n in ast.walk(node) if isinstance(n, ast.Attribute)} & READING, ast.unparse(node)
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            assert all(isinstance(part, ast.Name | ast.Tuple) for part in targets), ast.unparse(node)
        elif isinstance(node, ast.Expr):
            assert isinstance(node.value, ast.Constant), ast.unparse(node)
        else:
            definitions = ast.Import | ast.ImportFrom | ast.FunctionDef | ast.ClassDef
            assert isinstance(node, definitions) or is_main_guard(node), ast.unparse(node)


def test_every_file_of_the_kernels_is_compiled_or_part_of_the_digest():
    folder = ROOT / "stages/modeling/cpu_kernels"
    names = {node.value for node in ast.walk(parse(folder / "build.py")) if isinstance(node, ast.Constant)}
    assert {path.name for path in (*folder.glob("*.cpp"), *folder.glob("*.h"))} <= names


def test_the_snakefile_needs_recipe_artifacts_and_runs_only():
    lines = [line for line in (ROOT / "Snakefile").read_text().splitlines() if line.startswith(("import ", "from "))]
    names = imported_modules(ast.parse("\n".join(lines)))
    assert {name.split(".")[0] for name in names} <= {"operator", "os", "sys", "pathlib", "snakemake", "stages"}
    assert all(is_below(name, "recipe", "artifacts", "runs") for name in names if name.startswith("stages"))


def test_rules_hold_no_logic():
    for path in [ROOT / "Snakefile", *(ROOT / "workflow/rules").glob("*.smk")]:
        words = path.read_text()
        assert not [word for word in ("run:", "script:", "lambda", "def ") if f"    {word}" in words], path


def test_every_file_says_what_it_is():
    for path in SOURCES:
        assert ast.get_docstring(parse(path)), path


def test_no_drawer_for_odds_and_ends():
    drawers = {"utils", "util", "common", "helpers", "helper", "misc", "core"}
    assert not [path for path in [*SOURCES, *(ROOT / "workflow").rglob("*")] if path.stem in drawers]


def test_values_are_named_by_what_they_hold():
    """`found` and the like say how a value came about, not what it is."""
    vague = {"found", "kept", "told", "held"}
    for path in [*SOURCES, *(ROOT / "benchmarks").rglob("*.py"), *(ROOT / "tests").rglob("*.py")]:
        names = {node.id for node in ast.walk(parse(path)) if isinstance(node, ast.Name)}
        names |= {node.arg for node in ast.walk(parse(path)) if isinstance(node, ast.arg)}
        is_test = path.is_relative_to(ROOT / "tests")
        assert not names & (vague if is_test else vague | {"asked", "made"}), path


def test_no_folder_of_stages_is_a_warehouse():
    """At most 15 source files in a folder, programs apart, and at most 15 % of the lines."""
    folders = {path.parent for path in SOURCES}
    lines = {folder: sum(len(file.read_text().splitlines()) for file in folder.iterdir()
                         if file.suffix in (".py", ".cpp", ".h", ".js", ".css", ".jinja")) for folder in folders}
    for folder in folders:
        if folder.name != "stages":  # one file a program: test_every_folder_is_a_room lists them
            assert len([file for file in folder.glob("*.py") if file.stem != "__init__"]) <= 15, folder
        assert lines[folder] <= 0.15 * sum(lines.values()), folder


def test_sizes():
    """As the admired codebases at their tail: 90 % of files under 250 lines, 90 % of functions under 40."""
    lengths = [len(path.read_text().splitlines()) for path in SOURCES]
    assert sum(length < 250 for length in lengths) >= 0.9 * len(lengths)
    functions = [node.end_lineno - node.lineno + 1 for path in SOURCES for node in ast.walk(parse(path))
                 if isinstance(node, ast.FunctionDef)]
    assert sum(length < 40 for length in functions) >= 0.9 * len(functions)
