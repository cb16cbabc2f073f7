"""Two policies from the evaluation to the page."""

import html
import json
import re
import shutil

import pytest

from stages import evaluate
from stages.recipe.sections.evaluate import Report
from tests.helpers import finished_run, tiny_evaluation


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> str:
    """The page of a run with ppo and, as another stage's policy, dpo."""
    root = tmp_path_factory.mktemp("run")
    folders = finished_run.artifacts(root)
    ppo, dpo = folders["policy"]["ppo"], root / "dpo"
    shutil.copytree(ppo, dpo)
    done = {"stage": "dpo", "metrics": {"best_step": 0, "steps": 3}}
    manifest = json.loads((dpo / "manifest.json").read_text()) | done
    (dpo / "manifest.json").write_text(json.dumps(manifest))
    (dpo / "history.jsonl").write_text('{"step": 1, "loss": 0.7}\n{"step": 2, "loss": 0.6}\n')
    folders["policy"]["dpo"] = dpo
    (root / "models").mkdir()
    inputs = tiny_evaluation.save_inputs(root / "models", tiny_evaluation.make_tokenizer())
    inputs["policy"]["dpo"] = inputs["base"]
    evaluate.run(tiny_evaluation.CONFIG, folders["evaluate"], **inputs)
    return finished_run.page_of(folders, root, Report(side_by_side=2))


def test_each_policy_has_its_verdict_curves_monitors_and_answers(page):
    assert re.findall(r'<div class="verdict (\w+)">\n<strong>([^<]+)</strong>', page)[-1] == ("run", "The run")
    assert len(re.findall(r"Did the policy cheat\?", page)) == 2
    text = html.unescape(re.sub(r"<[^>]+>", "|", page))
    for words in ("|PPO dashboard|", "|DPO dashboard|", "|PPO's answers of the highest reward|",
                  "|DPO's answers of the highest reward|", "|win rate at temperature 1, PPO against SFT|",
                  "|win rate at temperature 1, DPO against SFT|", "|reward, PPO − SFT|",
                  "|reward, DPO − SFT|", "|PPO: ",
                  "|DPO: ", "DPO trained a policy from the SFT model for 3 steps, none of which was better",
                  "ppo: 1 of", "dpo: "):
        assert words in text, words
    assert 'alt="DPO: loss of a pair"' in page and 'alt="PPO: KL to SFT, nats a response"' in page


def test_a_card_has_every_writer(page):
    cards = page.split("Answers side by side</h2>")[1].split("</section>")[0]
    labels = re.findall(r'<div class="answer"><p><b>([^<]+)</b>', cards)
    assert labels == ["SFT at best", "PPO at best", "DPO at best", "SFT", "PPO", "DPO", "Best human"] * 2
