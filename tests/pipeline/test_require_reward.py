"""What the reward stage measures on its held-out pairs, how it reaches PPO, and what PPO refuses to be trained on."""

import json
import subprocess
from pathlib import Path

import pytest
import torch

from stages import merge, reward
from stages.evaluation.pair_accuracy import BAG_OF_WORDS, LONGER_ANSWER, SURFACE, fit_surface_baseline
from stages.evaluation.reward_model_check import check_reward_models
from stages.modeling.load import load_causal
from stages.modeling.tokenizer import load_tokenizer
from stages.recipe.sections.models import Lora, Merge
from stages.recipe.sections.ppo import Ppo
from stages.recipe.sections.reward import Reward
from stages.recipe.sections.rewards import RewardSource
from stages.reward_modeling import dataset
from stages.reward_modeling.lexical_scorer import fit_lexical_scorer
from stages.reward_modeling.scoring_file import SCORING, load_held_out
from stages.rewards.checked_models import load_held_out_accuracies
from stages.runtime.series import read_history
from stages.runtime.stage_lines import print_line
from stages.stackexchange.pairs.table import first_question_keys, question_key, read_pairs
from stages.stackexchange.prompt import answer_ids, prompt_ids
from tests.helpers.library_forks import LibraryForks
from tests.helpers.trained_reward import save_trained_reward

ROOT = Path(__file__).parents[2]
REWARD = Reward(lora=Lora(r=4, dropout=0.0), precision="fp32", batch_pairs=8, microbatch_pairs=8, learning_rate=3e-3,
                validation_share=0.3, save_every_steps=2)
PPO = """
ppo: {precision: fp32, iterations: 1, rollout_prompts: 4, minibatch_prompts: 4, microbatch_prompts: 2, epochs: 1,
      max_response_tokens: 4, validation_prompts: 2}
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with base, pairs, and a reward model that is trained and merged."""
    folder = save_trained_reward(tmp_path_factory.mktemp("judge"), REWARD)
    (folder / "recipe.yaml").write_text(PPO)
    return folder


def split_rows(pairs: Path) -> tuple[list[dict], list[dict]]:
    """Return the rows of the reward split that are trained on, and those held out."""
    keys = first_question_keys(pairs, "reward", REWARD.validation_share, dataset.VALIDATION_QUESTIONS)
    rows = list(read_pairs(pairs, "reward"))
    return [row for row in rows if question_key(row) not in keys], [row for row in rows if question_key(row) in keys]


def share_right(rows: list[dict], score) -> float:
    """The share of pairs whose better answer scores higher, ties one half: one pair after the other."""
    points = 0.0
    for row in rows:
        better, worse = score(row["question"], row["response_j"]), score(row["question"], row["response_k"])
        points += 1.0 if better > worse else 0.5 if better == worse else 0.0
    return points / len(rows)


def test_the_baselines_are_those_of_single_pairs_and_fitted_on_training_questions(made):
    training, held_out = split_rows(made / "pairs")
    (measured,) = load_held_out(made / "reward").values()
    assert measured["pairs"] == len(held_out) > 10
    surface, words = fit_surface_baseline(training), fit_lexical_scorer(training)
    model, tokenizer = load_causal(made / "base"), load_tokenizer(made / "base")

    def log_probability(question: str, answer: str) -> float:
        prompt, response = prompt_ids(tokenizer, question), answer_ids(tokenizer, answer)
        with torch.no_grad():
            logits = model(torch.tensor([prompt + response])).logits[0].double().log_softmax(-1)
        return sum(float(logits[len(prompt) - 1 + i, token]) for i, token in enumerate(response)) / len(response)

    expected = {
        LONGER_ANSWER: lambda _, answer: len(answer), "has code": lambda _, answer: "```" in answer,
        SURFACE: lambda _, answer: surface([answer])[0], BAG_OF_WORDS: lambda _, answer: words([answer])[0],
        reward.START_LOG_PROBABILITY: log_probability}
    assert {name: estimate["mean"] for name, estimate in measured["baselines"].items()} == pytest.approx(
        {name: share_right(held_out, score) for name, score in expected.items()})


def test_the_baselines_are_not_fitted_on_the_held_out_questions(made, monkeypatch):
    seen = []
    monkeypatch.setattr(reward, "score_fitted_baselines", lambda pairs, rows: seen.extend(rows) or {})
    reward.load_data(REWARD, load_tokenizer(made / "base"), made / "base", made / "pairs", "reward")
    training, _ = split_rows(made / "pairs")
    assert {question_key(row) for row in seen} == {question_key(row) for row in training}


def test_the_numbers_are_those_of_the_best_checkpoint_and_stay_with_the_merged_model(made):
    (measured,) = load_held_out(made / "reward").values()
    assert load_held_out(made / "merged") == {made / "merged": measured}
    rows = [row for row in read_history(made / "reward") if "validation_accuracy" in row]
    best = max(rows, key=lambda row: row["validation_accuracy"])
    above = measured["above_best_cheap_baseline"]
    assert measured["accuracy"]["mean"] == best["validation_accuracy"]
    assert [best[f"validation_above_baseline{end}"] for end in ("", "_low", "_high")] == [
        above[end] for end in ("mean", "low", "high")]
    baseline = measured["baselines"][measured["best_cheap_baseline"]]["mean"]
    assert best["validation_best_baseline_accuracy"] == baseline == max(
        estimate["mean"] for estimate in measured["baselines"].values())
    assert above["mean"] == pytest.approx(measured["accuracy"]["mean"] - baseline)


def test_without_held_out_pairs_nothing_is_known(made, tmp_path, monkeypatch):
    monkeypatch.setattr(reward, "score_baselines", lambda *_: pytest.fail("there is nothing to score"))
    metrics = reward.run(Reward(**{**vars(REWARD), "validation_share": 0.0}), tmp_path, base=made / "base",
                         pairs=made / "pairs")
    assert load_held_out(tmp_path) == {tmp_path: None} and metrics["validation_pairs"] == 0


def judged(made: Path, out: Path, low: float | None, above: float = 0.05) -> Path:
    """A copy of the merged reward model with other numbers; low None: an older artifact, which has none."""
    subprocess.run(["cp", "-r", made / "merged", out], check=True)
    content = json.loads((out / SCORING).read_text())
    numbers = content.pop("held_out_pairs")
    if low is not None:
        numbers["accuracy"] |= {"mean": low + 0.02, "low": low, "high": low + 0.04}
        numbers["above_best_cheap_baseline"] |= {"mean": above + 0.02, "low": above, "high": above + 0.04}
        content["held_out_pairs"] = numbers
    (out / SCORING).write_text(json.dumps(content))
    return out


def run_ppo(forks: LibraryForks, made: Path, scorer: Path, out: Path, *settings: str) -> subprocess.CompletedProcess:
    return forks.run(["stages.ppo", "--recipe", made / "recipe.yaml", "--policy", made / "base", "--reward", scorer,
                      "--pairs", made / "pairs", "--out", out, *settings])


def test_ppo_refuses_what_is_no_better_than_chance(library_forks, made, tmp_path):
    scorer = judged(made, tmp_path / "scorer", 0.44)
    done = run_ppo(library_forks, made, scorer, tmp_path / "out")
    assert done.returncode == 1 and "Traceback" not in done.stderr and not (tmp_path / "out").exists()
    (error,) = [line for line in done.stderr.splitlines() if line.startswith("ppo: error")]
    for words in (str(scorer), "0.460 [0.440, 0.480]", "no better than chance", "require_reward to none"):
        assert words in error
    assert "check " not in done.stderr, "before any model is loaded"


def test_ppo_goes_on_where_nothing_is_required_and_its_manifest_says_so(library_forks, made, tmp_path):
    scorer = judged(made, tmp_path / "scorer", 0.44)
    done = run_ppo(library_forks, made, scorer, tmp_path / "out", "--require-reward", "none")
    assert done.returncode == 0, done.stderr
    assert "WARNING: " not in done.stderr
    metrics = json.loads((tmp_path / "out/manifest.json").read_text())["metrics"]
    assert "no better than chance" in metrics["reward_model_shortfall"]
    (tmp_path / "card").mkdir()
    merge.run(Merge(dtype="fp32"), tmp_path / "card", base=made / "base", adapter=[str(tmp_path / "out")],
              pairs=made / "pairs")
    assert "no better than chance" in (tmp_path / "card/README.md").read_text()


def check(made: Path, scorer: Path, required: str, **changes) -> list[str]:
    config = Ppo(require_reward=required, **changes)
    measured = load_held_out_accuracies([entry.source for entry in config.rewards], scorer)
    return check_reward_models(measured, config.require_reward, print_line)


def test_a_baseline_is_a_warning_or_an_error(made, tmp_path, capsys):
    scorer = judged(made, tmp_path / "scorer", 0.6, above=-0.1)
    (words,) = check(made, scorer, "chance")
    assert f"WARNING: {scorer}: {words}" in capsys.readouterr().err and "no better than the best cheap" in words
    with pytest.raises(ValueError, match="no better than the best cheap baseline"):
        check(made, scorer, "baseline")
    assert check(made, scorer, "none") == [words] and not capsys.readouterr().err


def test_a_good_judge_and_an_unknown_one(made, tmp_path, capsys):
    good, older = judged(made, tmp_path / "good", 0.6), judged(made, tmp_path / "older", None)
    assert check(made, good, "baseline") == [] and not capsys.readouterr().err
    for required in ("chance", "baseline"):
        (words,) = check(made, older, required)
        (line,) = capsys.readouterr().err.splitlines()
        assert "WARNING" in line and "not known" in line and "not known" in words


def test_further_reward_models_and_members_are_checked_and_functions_are_not(made, tmp_path):
    good, bad = judged(made, tmp_path / "good", 0.6), judged(made, tmp_path / "bad", 0.44)
    with pytest.raises(ValueError, match=r"bad: .*no better than chance"):
        check(made, good, "chance", rewards=(RewardSource(), RewardSource(str(bad))))
    assert check(made, bad, "chance", rewards=(RewardSource("response_tokens"),)) == []
    assert check(made, tmp_path / "nothing here", "baseline", rewards=(RewardSource("lexical"),)) == []
    (good / "member-1").symlink_to(bad)
    with pytest.raises(ValueError, match=r"member-1: .*no better than chance"):
        check(made, good, "chance")
