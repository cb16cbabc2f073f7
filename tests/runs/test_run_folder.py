"""A run's folder: named by recipe and dump, never shared by two dumps, never outside results/."""

import errno
import json
import os
import re
from pathlib import Path

import pytest
import yaml

from stages.recipe import checks
from stages.recipe.recipe import load_recipe
from stages.recipe.schema import SettingsError
from stages.runs import run_folder, snakemake_words
from stages.runs.dump_paths import dump_label, list_dump_files, normalize_source
from stages.runs.run_folder import (
    check_name,
    format_summary,
    introduce_default_recipe,
    resolve_recipe,
    start_run,
)
from tests.helpers.base_files import WEIGHTS, write_base


@pytest.fixture(autouse=True)
def site(tmp_path, monkeypatch):
    """A project with one recipe and its own small dump."""
    monkeypatch.chdir(tmp_path)
    for folder in ("configs", "data", "one", "two"):
        (tmp_path / folder).mkdir()
    (tmp_path / "configs/demo.yaml").write_text("name: demo\ndump: [data/demo.7z]\n")
    (tmp_path / "configs/sites.yaml").write_text("name: sites\nbase: {model: scratch}\n")
    (tmp_path / "configs/smollm2.yaml").write_text("name: smollm2\nbase: {model: data/models/smollm2}\n")
    for file in ("data/demo.7z", "one/beer.7z", "two/beer.7z"):
        (tmp_path / file).write_text("")
    yield tmp_path
    while run_folder._open_locks:
        run_folder._open_locks.pop().close()


def test_the_recipe_names_the_folder_and_a_dump_adds_its_own():
    assert resolve_recipe({}).name == "demo"
    assert resolve_recipe({}).dump == ("data/demo.7z",)
    given = resolve_recipe({"dump": "one/beer.7z"})
    assert given.name.startswith("sites-beer-") and given.dump == ("one/beer.7z",)
    assert resolve_recipe({"dump": ["two/beer.7z", "data/demo.7z"]}).name.startswith("sites-demo+beer-")
    assert resolve_recipe({"dump": "one/beer.7z", "name": "mine"}).name == "mine"
    assert resolve_recipe({"name": 2024}).name == "2024"  # Snakemake hands over a number


def test_the_bundled_sites_recipe_is_for_its_own_dump_and_another_dump_is_introduced(site):
    def says(config, files=()):
        return introduce_default_recipe(config, files, resolve_recipe(config, files))

    for config in ({}, {"dump": "data/demo.7z"}, {"dump": [str(site / "data/demo.7z")]}):
        assert resolve_recipe(config).name.startswith("demo") and says(config) == ""
    assert says({"dump": "one/beer.7z", "recipe": "sites"}) == ""
    assert says({"dump": "one/beer.7z"}, ["configs/demo.yaml"]) == ""
    for line in ("configs/sites.yaml is taken", "What to expect:", "What it costs:", "'base={model:"):
        assert line in says({"dump": "one/beer.7z"})
    assert says({"dump": "one/beer.7z"}).splitlines()[0].endswith(" then takes it: make smollm2 (93 MB, once).")
    for base in ("scratch", {"model": "scratch"}):
        assert "make smollm2" not in says({"dump": "one/beer.7z", "base": base})


def test_a_dump_without_a_recipe_takes_the_real_base_that_is_there(site):
    def chosen(**config):
        config |= {"dump": "one/beer.7z"}
        recipe = resolve_recipe(config)
        return recipe.name.partition("-")[0], introduce_default_recipe(config, (), recipe)

    for base in ("owner/name", {"model": "owner/name"}):
        name, words = chosen(base=base)
        assert name == "smollm2" and "the base owner/name" in words and "from scratch" not in words
    write_base(site / "data/models/smollm2")
    name, words = chosen()
    assert name == "smollm2" and words.startswith("No recipe is named: configs/smollm2.yaml is taken")
    assert "make smollm2" not in words and chosen(base="scratch")[0] == "sites"
    assert resolve_recipe({"dump": "data/demo.7z"}).name.startswith("demo")


@pytest.mark.parametrize(("file", "content", "says"), [
    ("config.json", None, "config.json is missing"), ("config.json", b"{", "config.json cannot be read"),
    ("config.json", b"{}", "names no model_type"), ("model.safetensors", None, "has no .safetensors weights"),
    ("model.safetensors", WEIGHTS[:-1], "is not whole: it has 72 of 73 bytes"), ("model.safetensors", b"x", "cut off"),
    ("tokenizer.json", None, "has no tokenizer"), ("adapter_config.json", b"{}", "is an adapter")])
def test_a_base_that_cannot_be_loaded_is_refused_before_the_first_stage(site, file, content, says):
    folder = write_base(site / "model")
    config = {"dump": "one/beer.7z", "base": {"model": "model"}}
    resolve_recipe(config)
    (folder / file).unlink(missing_ok=True) if content is None else (folder / file).write_bytes(content)
    with pytest.raises(SettingsError, match=f"^base: model: .*{re.escape(says)}"):
        resolve_recipe(config)
    resolve_recipe(config, runs_here=False)  # the folder may be another machine's


def test_a_gguf_file_that_cannot_be_converted_is_refused_before_the_first_stage(site):
    (site / "model.gguf").write_bytes(b"GGUF" + bytes(8))
    for name, says in (("model.gguf", "model.gguf is cut off"), ("gone.gguf", "there is no file 'gone.gguf'")):
        with pytest.raises(SettingsError, match=says):
            resolve_recipe({"dump": "one/beer.7z", "base": {"model": name}})


def test_two_dumps_of_one_name_do_not_share_a_folder():
    one, two = (resolve_recipe({"dump": f"{folder}/beer.7z"}).name for folder in ("one", "two"))
    assert one != two
    assert resolve_recipe({"dump": "owner/beer"}).name not in (one, two)


def test_one_place_has_one_name_however_it_is_written(site):
    spellings = ["one/beer.7z", "./one/beer.7z", "two/../one/beer.7z", str(site / "one/beer.7z")]
    assert len({resolve_recipe({"dump": spelling}).name for spelling in spellings}) == 1
    assert {resolve_recipe({"dump": spelling}).dump for spelling in spellings} == {("one/beer.7z",)}
    both = resolve_recipe({"dump": ["one/beer.7z", "two/beer.7z"]})
    assert both == resolve_recipe({"dump": ["two/beer.7z", "one/beer.7z"]})


def test_another_dump_in_a_named_folder_is_refused():
    start_run(resolve_recipe({"dump": "one/beer.7z", "name": "mine"}))
    assert resolve_recipe({"dump": "one/beer.7z", "name": "mine", "seed": 3}).sft.seed == 3
    with pytest.raises(SettingsError, match=r"results/mine holds a run on another dump \(one/beer.7z\)"):
        resolve_recipe({"dump": "two/beer.7z", "name": "mine"})


def test_a_recipe_whose_dump_was_edited_is_refused_too(site):
    start_run(resolve_recipe({}))
    (site / "configs/demo.yaml").write_text("name: demo\ndump: [one/beer.7z]\n")
    with pytest.raises(SettingsError, match="holds a run on another dump"):
        resolve_recipe({})


@pytest.mark.parametrize("name", ["", ".", "..", "../up", "a/b", "-n", ".hidden", "a b", "a;b", "$(x)", "ü", "a\n",
                                  "x" * 151])
def test_names_that_could_leave_results_or_the_shells_quotes_are_refused(name):
    with pytest.raises(SettingsError, match="cannot name a folder"):
        check_name(name)


def test_any_dump_gives_a_name_that_passes(site):
    odd = site / "it's a \"dump\" $x; né"
    odd.mkdir()
    (odd / "Posts.xml").write_text("")
    given = resolve_recipe({"dump": str(odd)})
    assert given.dump == (odd.name,)
    assert check_name(given.name) == given.name
    assert len(dump_label(tuple(f"site-{i}.stackexchange.com.7z" for i in range(180)))) < 120


@pytest.mark.parametrize(("dump", "says"), [
    ("nowhere.7z", "there is no 'nowhere.7z'"),
    ("/nowhere/x", "there is no '/nowhere/x'"),
    ("nowhere/beer.7z", "there is no 'nowhere/beer.7z'"),
])
def test_a_dump_that_is_not_there_is_said_at_once(dump, says):
    with pytest.raises(SettingsError, match=says):
        resolve_recipe({"dump": dump})


@pytest.mark.parametrize("dump", ["README.md", "papers", ["one/beer.7z", "README.md"]])
def test_a_file_or_folder_that_is_no_dump_is_refused_before_the_run(site, dump):
    (site / "papers").mkdir()
    for file in ("README.md", "papers/a.pdf", "papers/Users.xml"):
        (site / file).write_text("")
    with pytest.raises(SettingsError, match=r"'(README\.md|papers)' is no dump: give a Posts.xml"):
        resolve_recipe({"dump": dump})


@pytest.mark.parametrize("name", ["{a}", "<a>", "a>b"])
def test_hub_ids_and_what_snakemake_takes_for_a_variable(site, name):
    assert normalize_source("lvwerra/stack-exchange-paired") == "lvwerra/stack-exchange-paired"
    (site / name).mkdir()
    with pytest.raises(SettingsError, match=f"variables: rename '{name}'"):
        normalize_source(name)


def test_a_dump_that_looks_like_a_flag_keeps_its_folder(site):
    (site / "-x.xml").write_text("")
    recipe = resolve_recipe({"dump": "-x.xml"})
    assert recipe.dump == ("./-x.xml",) and list_dump_files(recipe.dump) == ["-x.xml"]


def test_the_home_of_nobody_is_one_line():
    with pytest.raises(SettingsError, match="there is no home folder for '~nobody-of-that-name'"):
        resolve_recipe({"dump": "~nobody-of-that-name"})


def test_a_configfile_is_the_recipe(site):
    (site / "configs/other.yaml").write_text("name: other\ndump: [one/beer.7z]\nppo: {learning_rate: 0.5}\n")
    other = site / "configs/other.yaml"
    assert resolve_recipe({}, [other]) == resolve_recipe({"recipe": "configs/other.yaml"})
    assert resolve_recipe({}, [other]).ppo.learning_rate == 0.5
    assert resolve_recipe({"ppo": {"learning_rate": "0.25"}}, [other]).ppo.learning_rate == 0.25
    for config, files in (({"recipe": "demo"}, [other]), ({}, [other, other])):
        with pytest.raises(SettingsError, match="a run has one recipe, and --configfile FILE means"):
            resolve_recipe(config, files)


def test_a_recipe_is_found_by_its_name(site):
    (site / "configs/other.yaml").write_text("dump: [one/beer.7z]\n")
    (site / "other").mkdir()  # a folder of that name is no recipe
    assert resolve_recipe({"recipe": "other"}) == resolve_recipe({"recipe": "configs/other.yaml"})
    with pytest.raises(SettingsError, match=r"no recipe at othr; there are: configs/demo.yaml, configs/other.yaml, "
                                            "configs/sites.yaml, configs/smollm2.yaml; did you mean 'other'"):
        resolve_recipe({"recipe": "othr"})


@pytest.mark.parametrize(("recipe", "says"), [
    ("configs", "configs is a folder"), (7, "no recipe at 7; there are: configs/binary.yaml"),
    (["a"], r"recipe must be a file .* not \['a'\]"), ({"a": 1}, "recipe must be a file"), (True, "must be a file"),
    (None, "must be a file"), ("x" * 5000, "no recipe at x"), ("binary", "configs/binary.yaml is not YAML"),
    ("deep", "configs/deep.yaml is nested too deeply"), ("number", "configs/number.yaml must map names to values"),
    ("zero", "configs/zero.yaml must map names"), ("day", "configs/day.yaml is not YAML: day is out of range")])
def test_a_recipe_that_is_none_is_one_line(site, recipe, says):
    for name, content in (("binary", b"\xff\x00\x80"), ("deep", b"a: " + b"[" * 2000), ("number", b"7"),
                          ("zero", b"0"), ("day", b"posts: 2015-02-31")):
        (site / f"configs/{name}.yaml").write_bytes(content)
    with pytest.raises(SettingsError, match=says) as refused:
        resolve_recipe({"recipe": recipe})
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("content", [b"\xff\x00", b"[", b"7", b"- a", b"dump: 7", b"a: " + b"[" * 2000, b""])
def test_a_damaged_record_of_a_run_is_one_line(site, content):
    path = site / "results/demo/recipe.yaml"
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    with pytest.raises(SettingsError, match=r"results/demo/recipe.yaml .*move it away, and it is written again"):
        resolve_recipe({})


def test_no_dump_at_all_says_how_to_give_one(site):
    (site / "configs/demo.yaml").write_text("name: demo\n")
    with pytest.raises(SettingsError, match="names no dump: give one with --config dump="):
        resolve_recipe({})


def test_unknown_config_keys():
    with pytest.raises(SettingsError, match="--config: unknown key 'rcipe'; did you mean 'recipe'"):
        resolve_recipe({"rcipe": "x"})
    with pytest.raises(SettingsError, match="--config: unknown key 'liger_kernels': it was removed; leave it out"):
        resolve_recipe({"liger_kernels": "auto"})
    with pytest.raises(SettingsError, match="--config: ppo: unknown key 'lr'"):
        resolve_recipe({"ppo": {"lr": "1"}})


@pytest.mark.parametrize(("config", "says"), [
    ({"ppo": "learning_rate=1e-5"}, "not 'learning_rate=1e-5'; write, with the quotes, 'ppo={learning_rate: 1e-5}'"),
    ({"ppo": "epochs:1"}, "not 'epochs:1'; write, with the quotes, 'ppo={epochs: 1}'"),
    ({"ppo_learning_rate": 1e-5}, "'ppo_learning_rate': give it as 'ppo={learning_rate: 1e-05}'"),
    ({"ppo-learning-rate": "x"}, "give it as 'ppo={learning_rate: x}'"),
    ({"max_pairs_per_question": 3}, "give it as 'pairs={max_pairs_per_question: 3}'"),
    ({"learning_rate": 1}, "'sft={learning_rate: 1}' or 'reward={learning_rate: 1}' or 'ppo={learning_rate: 1}'")])
def test_a_value_without_its_section_is_answered_with_the_right_form(config, says):
    with pytest.raises(SettingsError, match=re.escape(says)):
        resolve_recipe(config)


RULES = ["posts", "pairs", "sft", "sft_merged", "reward", "reward_merged", "ppo", "ppo_train", "evaluate", "report"]


@pytest.mark.parametrize(("words", "says"), [
    ("--cores all sft-merged", "'sft-merged'; did you mean 'sft_merged'"), ("-n evalute", "did you mean 'evaluate'"),
    ("--cores 1 ppo --forcerun ppo-train", "'ppo-train'; did you mean 'ppo_train'"),
    ("reward_mergd --cores 1", "did you mean 'reward_merged'"), ("banana", "'banana'; there are: posts, pairs, sft, "),
    ("--cores all train -n", "'train'; there are: posts"), ("-n --config name=x train", "'train'; there are: posts")])
def test_a_target_that_is_nearly_a_rule(words, says):
    with pytest.raises(SettingsError, match=f"there is no target .*{says}"):
        snakemake_words.check_targets(words.split(), RULES)


@pytest.mark.parametrize("words", ["--cores all ppo name=two", "name=two -n", "-n ppo.seed=1", "-c2 ppo -n name=two"])
def test_a_setting_among_the_targets(words):
    with pytest.raises(SettingsError, match="is a setting, not a target: give it after --config"):
        snakemake_words.check_targets(words.split(), RULES)


@pytest.mark.parametrize("words", [
    "--cores all ppo --config name=two dump=x", "-n -C name=two ppo", "--set-threads sft=2 ppo=1",
    "--cores=2 ppo", "-n results/lr=2/sft/manifest.json",
    "--cores all ppo -n", "--cores 1 results/x/sfd/manifest.json", "--jobname evalute", "--config name=repor ppo",
    "--report report.html", "--rerun-triggers mtime code", "--quiet rules progress -n",
    "-q rules", "--cores all ppo --forcerun sft", "-R sft reward", ""])
def test_other_words_of_a_command_are_left_alone(words):
    snakemake_words.check_targets(words.split(), RULES)


def test_overrides_reach_the_recipe_as_their_type():
    assert resolve_recipe({"ppo": {"learning_rate": "2e-5"}}).ppo.learning_rate == 2e-5


def test_the_files_of_a_dump_that_matter(site):
    for file in ("one/Posts.xml", "one/sub.site/posts.XML", "one/Badges.xml", "one/notes.txt", "one/{x}.7z"):
        (site / file).parent.mkdir(exist_ok=True)
        (site / file).write_text("")
    assert list_dump_files(("one", "two/beer.7z", "owner/name")) == [
        "one/Posts.xml", "one/beer.7z", "one/sub.site/posts.XML", "two/beer.7z"]


def test_votes_and_packed_tables_are_among_the_files_of_a_dump(site):
    for file in ("one/x-Posts.7z", "one/x-votes.7z", "one/x-Users.7z", "one/Posts.xml.gz", "one/Votes.xml.zst",
                 "one/y-Votes.xml", "one/PostHistory.xml.gz", "one/y.XML"):
        (site / file).write_text("")
    assert list_dump_files(("one/x-Posts.7z",)) == ["one/x-Posts.7z", "one/x-votes.7z"]
    assert list_dump_files(("one/Posts.xml.gz",)) == ["one/Posts.xml.gz", "one/Votes.xml.zst"]
    assert list_dump_files(("one/x-Posts.7z", "one/x-votes.7z")) == ["one/x-Posts.7z", "one/x-votes.7z"]
    assert list_dump_files(("one/y.XML", "one/beer.7z")) == ["one/y-Votes.xml", "one/y.XML", "one/beer.7z"]
    assert list_dump_files(("one",)) == [f"one/{name}" for name in (
        "Posts.xml.gz", "Votes.xml.zst", "beer.7z", "x-Posts.7z", "x-votes.7z", "y-Votes.xml", "y.XML")]


@pytest.mark.parametrize("name", ["x.7z", "x.xml", "x.xml.gz", "X.XML.ZST", "x.parquet"])
def test_a_label_leaves_the_ending_out_and_a_missing_file_is_no_hub_id(name):
    assert dump_label((name,)).lower().startswith("x-")
    with pytest.raises(SettingsError, match="there is no"):
        normalize_source(f"nowhere/{name}")


def test_begin_writes_the_resolved_recipe_only_when_it_changed():
    recipe = resolve_recipe({"dump": "one/beer.7z", "ppo": {"learning_rate": "1e-7"}})
    path = Path("results") / recipe.name / "recipe.yaml"
    start_run(recipe)
    run_folder._open_locks.pop().close()
    assert load_recipe(path) == recipe
    os.utime(path, (1, 1))
    start_run(recipe)
    run_folder._open_locks.pop().close()
    assert path.stat().st_mtime == 1
    start_run(resolve_recipe({"dump": "one/beer.7z"}))
    assert path.stat().st_mtime > 1 and yaml.safe_load(path.read_text())["ppo"]["learning_rate"] == 1.4e-5


def test_two_runs_in_one_folder_at_once_are_refused():
    recipe = resolve_recipe({})
    start_run(recipe)
    with pytest.raises(SettingsError, match="another snakemake is at work in results/demo"):
        start_run(recipe)
    run_folder._open_locks.pop().close()
    start_run(recipe)


def test_a_file_in_the_way_of_the_runs_folder_is_one_line(site):
    (site / "results").mkdir()
    (site / "results/demo").touch()
    with pytest.raises(SettingsError, match="results/demo is no folder, and this run writes into it: move it away"):
        resolve_recipe({})
    assert resolve_recipe({"name": "other"}).name == "other"
    (site / "results/demo").unlink()
    (site / "results").rmdir()
    (site / "results").symlink_to("gone")
    with pytest.raises(SettingsError, match="results is no folder"):
        resolve_recipe({})


def test_results_that_cannot_be_written_are_one_line(monkeypatch):
    def refuse(path, *arguments, **options):
        raise OSError(errno.EROFS, "Read-only file system", str(path))

    recipe = resolve_recipe({})
    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(SettingsError, match=r"results/demo cannot be written \(Read-only file system\)"):
        start_run(recipe)


@pytest.mark.parametrize("dump", [None, "", []])
def test_an_empty_dump_is_not_the_recipes_own(dump):
    with pytest.raises(SettingsError, match="dump= is empty"):
        resolve_recipe({"dump": dump})


def test_the_table_at_the_end_is_the_reports_and_never_an_old_one():
    recipe = resolve_recipe({})
    report, pairs = Path("results/demo/report"), Path("results/demo/pairs")
    for folder in (report, pairs):
        folder.mkdir(parents=True)
        (folder / "manifest.json").write_text("{}")
    (report / "metrics.json").write_text(json.dumps({"table": [["reward accuracy", "0.71"], ["KL", "1.2 nats"]]}))
    os.utime(pairs / "manifest.json", (1, 1))
    text = format_summary(recipe)
    assert "  reward accuracy  0.71\n  KL               1.2 nats\n" in text
    assert text.endswith("results/demo/report/report.html")
    page = Path("results/demo/frontier/page")
    page.mkdir(parents=True)
    for name in ("manifest.json", "frontier.html"):
        (page / name).write_text("{}")
    assert format_summary(recipe) == "Frontier: results/demo/frontier/page/frontier.html"
    for path in (report, page):
        os.utime(path / "manifest.json", (0, 0))
    assert format_summary(recipe) == "Results are in results/demo/"


def test_processes_and_nodes_change_how_and_not_what(tmp_path):
    dump = tmp_path / "site.7z"
    dump.write_bytes(b"")
    config = {"dump": str(dump), "name": "site"}
    assert run_folder.resolve_recipe(config | {"processes": 2, "nodes": 2}) == run_folder.resolve_recipe(config)


def test_an_installed_scheduler_does_not_do_the_work_by_itself(site, monkeypatch):
    (site / "sbatch").touch(mode=0o755)
    monkeypatch.setenv("PATH", str(site))
    monkeypatch.setattr(checks, "_has_gpu", lambda: False)
    config = {"ppo": {"optimizer": "paged_adamw_8bit"}}
    with pytest.raises(SettingsError, match="needs a CUDA GPU to page from, and there is none here"):
        resolve_recipe(config)
    assert resolve_recipe(config, runs_here=False).ppo.optimizer == "paged_adamw_8bit"
