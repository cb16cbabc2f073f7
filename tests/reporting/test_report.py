"""The page: whole, without a request, with every foreign text escaped; and the verdict in plain words."""

import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import pytest

import stages
from stages.evaluation import summary
from stages.evaluation.reward_model_check import reward_model_verdict
from stages.recipe import recipe
from stages.recipe.schema import flatten, list_without_effect
from stages.recipe.sections import evaluate
from stages.render.html import element, link, pre_text
from stages.reporting import headline
from stages.reporting.answer_cards import choose_example, render_attribution
from stages.reporting.curves import CURVES, build_curves, split_constant
from stages.reporting.document import FOLDER, content_security_policy
from stages.reporting.figures import Curves, draw_pictures
from stages.reporting.sections import render_funnel, sort_by_ancestry
from stages.reward_modeling.scoring_file import write_no_model
from stages.runtime.series import read_history
from tests.helpers import finished_run
from tests.helpers.finished_run import EVIL, metrics, page_of, sample, with_summary, write

SCRIPT = (FOLDER / "page.js").read_text()
VOID = {"meta", "img", "source", "br"}


@pytest.fixture
def artifacts(tmp_path):
    return finished_run.artifacts(tmp_path)


@pytest.fixture
def dots(monkeypatch):
    finished_run.draw_dots(monkeypatch)


@pytest.fixture(scope="module")
def drawn(tmp_path_factory) -> tuple[str, Path]:
    """The page with its figures, and its folder."""
    place = tmp_path_factory.mktemp("drawn")
    return page_of(finished_run.artifacts(place), place), place / "out"


class Reader(HTMLParser):
    """What a browser would see: elements, attributes and scripts; complains about what does not close."""

    def __init__(self, page: str):
        super().__init__()
        self.open, self.names, self.attributes, self.scripts = [], [], [], []
        self.feed(page)
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.names.append(tag)
        self.attributes += [(tag, *pair) for pair in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "script" in self.open:
            self.scripts.append(data)


def test_foreign_text_is_only_ever_text(artifacts, tmp_path, dots):
    write(artifacts, metrics(), [sample(1, EVIL, "javascript:alert(3)"), sample(2, EVIL)])
    page = page_of(artifacts, tmp_path)
    seen = Reader(page)
    assert seen.names.count("script") == page.count("<script") == 1 and seen.scripts == [SCRIPT]  # ours alone
    assert "alert(2)&gt;" in page
    # The first look, the cards side by side, and those of the highest reward; the parser takes blanks from the end.
    assert page.count(element("p", EVIL.strip())) == 3 + 2 * 6 + 2 * 4
    assert not [a for a in seen.attributes if a[1].startswith("on")]
    addresses = [value for tag, name, value in seen.attributes if name == "href" and not value.startswith("#")]
    question = "https://beer.example/q/1"  # in the first look, too; the other question's is no link
    assert addresses == [question, "../gguf/gguf.html", question, question]
    assert ("div", "dir", "auto") in seen.attributes and "مرحبا" in page


def test_nothing_is_fetched(drawn):
    page, _ = drawn
    sources = [value for tag, name, value in Reader(page).attributes if name in ("src", "srcset", "data", "poster")]
    assert len(sources) >= 20 and all(value.startswith("data:image/png;base64,") for value in sources)
    style = page.partition("<style>")[2].partition("</style>")[0]
    assert len(style) > 1000 and "url(" not in style and "@import" not in style
    assert not re.findall(r"<(?:link|iframe|object|embed|base|form)\b", page)
    policy = content_security_policy(SCRIPT)
    assert ("meta", "content", policy) in Reader(page).attributes
    assert "default-src 'none'" in policy and re.search(r"script-src 'sha256-[\w+/]{43}=';", policy)
    assert not re.findall(r"fetch|XMLHttp|import|src=|https?:|eval|innerHTML", SCRIPT)


def test_the_page_says_all(drawn):
    page, out = drawn
    for text in ("1 min 15 s", "1,234 MiB", "few answers", "3,456", "answers equal", "789", "longer answer wins",
                 "0.720", "+0.500 [+0.480, +0.520]", "SFT log-probability", "CC BY-SA", "2.13.0", "0.0123", "1.4e-05",
                 "best of 4", "0.636", "Each at its best temperature", "PPO beats SFT",
                 "best-of-4 of SFT at temperature 0.1", "PPO at temperature 0.3, minus", "SFT with greedy decoding",
                 "calibration: expected error", "0.123", "falls by 0.05", "Not flagged"):
        assert text in page, text
    assert "no count" not in page
    sections = {name: getattr(recipe.Recipe(), name) for name in ("ppo", "sft")}
    settings = {name: len(flatten(values)) - len(list_without_effect(values)) for name, values in sections.items()}
    assert f"ppo: 1 of {settings['ppo']} settings differ" in page
    assert f"sft: 0 of {settings['sft']} settings differ" in page
    assert json.loads((out / "metrics.json").read_text()) == metrics()
    names = {path.stem for path in (out / "figures").iterdir()}
    assert {"sft-loss", "sft-perplexity", "reward-accuracy", "ppo-reward", "ppo-kl", "evaluate-rewards",
            "evaluate-frontier", "evaluate-calibration", "evaluate-temperature-reward",
            "evaluate-temperature-gold"} <= names
    assert "base-loss" not in names  # this base was not trained here


def test_the_curves_have_every_number_that_a_training_logged(artifacts, tmp_path, dots):
    with open(artifacts["policy"]["ppo"] / "timing.jsonl", "w") as stream:
        stream.write('{"iteration": 1, "rollout_seconds": 2.5, "note": "text", "nothing": null}\n')
    page_of(artifacts, tmp_path)
    assert (tmp_path / "out/curves.csv").read_text() == """stage,step,metric,value
sft,1,loss,2.0
sft,2,loss,1.5
sft,2,validation_perplexity,4.0
reward,1,loss,0.7
reward,1,validation_accuracy,0.6
ppo,0,validation_reward,0.1
ppo,0,validation_kl,0.0
ppo,1,reward,0.2
ppo,1,kl,0.1
ppo,1,entropy,2.0
ppo,1,response_tokens,9.0
ppo,1,rollout_seconds,2.5
"""


def test_a_run_without_a_judge_for_lack_of_pairs_says_so(artifacts, tmp_path, dots):
    judge = tmp_path / "judge"
    shutil.copytree(artifacts["reward"], judge)
    page = page_of(artifacts | {"judge": judge}, tmp_path)
    assert "Judge: training loss" in page and "No model was trained" not in page
    (judge / "history.jsonl").unlink()
    write_no_model(judge, f"too few pairs of {EVIL}")
    (second := tmp_path / "second").mkdir()
    page = page_of(artifacts | {"judge": judge}, second)
    assert "No model was trained: too few pairs of &lt;script" in page and Reader(page).scripts == [SCRIPT]


def made(name: str, seconds: float, *sources: str) -> dict:
    return {"stage": name, "seconds": seconds, "peak_memory_mib": 10, "device": "cpu", "threads": 1, "metrics": {},
            "config": {}, "inputs": {"some": [{"path": f"x/{source}", "sha256": source * 2} for source in sources]}}


def test_artifacts_stand_after_what_they_were_made_from():
    stages = {"c": made("c", 5.0, "a", "b"), "a": made("a", 10.0, "dump"), "b": made("b", 1.0, "a"),
              "d": made("d", 2.5, "a", "c")}
    assert list(sort_by_ancestry(stages, {name: name * 2 for name in stages})) == ["a", "b", "c", "d"]


def test_a_figure_is_small():
    """Browsers show no embedded page over 2 MB, as Snakemake's report holds it: about 32 figures, light and dark."""
    lines = {name: [(x, (x * 37 % 101) / seed) for x in range(40)] for seed, name in enumerate(("a", "b", "c"), 1)}
    drawn = draw_pictures(Curves("Three lines", "step", lines))
    assert max(len(drawn.light), len(drawn.dark)) < 30_000  # the busiest there is; most are half of that
    assert drawn == draw_pictures(Curves("Three lines", "step", lines))


def test_the_funnel_adds_up_or_says_what_is_missing():
    posts = {"rows_read": 100, "rows_set_aside": 1, "dropped": {"few": 29}, "questions": 20, "answers": 45}
    pairs = {"posts_in": 65, "posts_out": 60, "dropped_posts": {"no gap": 5}, "pairs_drawn": 40, "pairs": 40,
             "dropped_pairs": {}, "pairs_by_split": {"rl": 10}}
    rows = [re.findall(r">([^<>]+)<", row) for row in render_funnel(posts, pairs).split("<tr>")[2:]]
    assert rows == [
        ["rows of the dump", "100", "–"], ["dropped: could not be read", "1", "1.0 %"],
        ["dropped: few", "29", "29.0 %"],
        ["dropped: not accounted for", "5", "5.0 %"], ["posts kept: questions and answers", "65", "65.0 %"],
        ["dropped: no gap", "5", "7.7 %"], ["posts in pairs", "60", "92.3 %"], ["pairs drawn", "40", "–"],
        ["pairs", "40", "100.0 %"], ["for rl", "10", "25.0 %"]]


def test_the_top_says_what_was_done_and_whether_it_cheated(drawn):
    top = drawn[0].partition("<nav>")[0]
    for text in ("What was done", "12 questions and 40 pairs", "10 min 00 s", "at most 1,234 MiB on cpu (x)",
                 "Did it work?", "Did the policy cheat?", "the policy never saw, rose, too. 0 of 11 monitors"):
        assert text in top, text
    assert "Flagged as reward hacking. A reward rose; the gold" in headline.describe_hacking(metrics(gold=-0.1), "ppo")
    said = headline.describe_hacking(metrics(gold=-0.1), "ppo")
    assert "did not rise. 1 of 11 monitors moved for the worse (gold)." in said
    assert "only the monitors can tell" in headline.describe_hacking(metrics(gold=None), "ppo")


@pytest.mark.parametrize(("best", "said"), [(0, "the result is the SFT model itself"), (7, "number 7 was the best")])
def test_the_top_says_which_policy_was_kept(best, said):
    names = ("posts", "pairs", "base", "ppo")
    stages = {name: made(name, 1.0) for name in names}
    stages["ppo"]["metrics"] = {"best_iteration": best, "iterations": 9}
    stages["posts"]["metrics"] = {"sites": {"a\u202e\x1bb": {}}}
    assert said in headline.describe_run(stages, ["ppo"])
    assert headline.describe_run(stages, ["ppo"]).startswith("From a b: ")
    assert headline.page_title(stages).startswith("a b: ")


def test_an_older_evaluation_is_refused_in_words(artifacts, tmp_path):
    numbers = metrics()
    del numbers["at_best"]
    write(artifacts, numbers, [sample(1)])
    with pytest.raises(ValueError, match="--forcerun evaluate"):
        page_of(artifacts, tmp_path)


def test_curves_take_the_numbers_they_name():
    history = [{"iteration": 0, "validation_kl": 0.0}, {"iteration": 1, "kl": 0.5}, {"iteration": 2, "kl": 0.75}]
    drawn = build_curves("ppo", "ppo", history)
    assert set(drawn) == {"ppo-kl"}
    assert drawn["ppo-kl"].lines == {"rollouts": [(1, 0.5), (2, 0.75)], "validation": [(0, 0.0)]}
    assert build_curves("base", "base", []) == {}


def test_curves_that_never_move_become_words():
    history = [{"iteration": at, "beta": 0.1, "kl": at, "clip_fraction": 0.0} for at in range(3)]
    moving, constant = split_constant(build_curves("ppo", "ppo", history))
    assert set(moving) == {"ppo-kl"}
    assert constant == ["clipped share of the tokens: update 0", "weight of the KL: beta 0.1"]


def test_greedy_decoding_stands_once_where_it_is_the_best(artifacts, tmp_path, dots):
    numbers = metrics()
    numbers["policies"]["sft_best"]["temperature"] = 0.0
    write(artifacts, with_summary(numbers), [sample(1)])
    page = page_of(artifacts, tmp_path)
    assert re.findall(r"<th scope=\"row\">(?:SFT with greedy decoding|SFT at temp[^<]*)</th>", page) == [
        '<th scope="row">SFT with greedy decoding</th>'] * 3  # the first look, scores, differences
    assert not [label for label, _ in summary.short_table(numbers) if label == "gold, SFT with greedy decoding"]


def test_the_first_look_has_the_short_question_of_the_median_gain():
    rows = [sample(number) | {"reward_ppo_best": gain, "question": "q" * length}
            for number, (gain, length) in enumerate([(3.0, 9), (1.0, 9), (2.0, 9), (9.0, 501)])]
    assert choose_example(rows, "sft", "ppo") == (rows[2], 3)
    assert choose_example(rows[3:], "sft", "ppo") == (rows[3], 1), "a long one where there is no other"
    assert choose_example([], "sft", "ppo") == (None, 0)


def test_posts_bear_authors_and_licences_where_they_are_known():
    known = sample(1) | {"authors": ["A", "B"], "author_urls": ["https://beer.example/u/1", ""],
                         "licenses": ["CC BY-SA 4.0", "unknown"]}
    said = render_attribution(known)
    assert '<a href="https://beer.example/u/1"' in said and "best answer by <bdi>B</bdi>" in said
    assert 'href="https://creativecommons.org/licenses/by-sa/4.0/"' in said and said.endswith(", unknown.</p>")


def test_seconds_by_phase_come_from_their_own_series(tmp_path):
    (tmp_path / "history.jsonl").write_text('{"iteration": 1, "beta": 0.1, "clip_fraction": 0.2}\n')
    seconds = '{"iteration": 1, "rollout_seconds": 2.0, "update_seconds": 5.0, "tokens": 9}\n'
    (tmp_path / "timing.jsonl").write_text(seconds)
    drawn = build_curves("ppo", "ppo", read_history(tmp_path))
    assert drawn.keys() == {"ppo-beta", "ppo-clip", "ppo-seconds"}
    assert drawn["ppo-seconds"].lines == {"rollout": [(1, 2.0)], "update": [(1, 5.0)]}


def test_every_number_that_is_drawn_of_ppo_is_one_that_it_writes():
    """A name that has changed would leave its figure out without a word."""
    source_text = "".join(file.read_text() for file in Path(stages.__file__).parent.rglob("*.py"))
    keys = {key.removeprefix("validation_").removesuffix("_seconds")
            for curve in CURVES["ppo"] for key in curve.lines.values()}
    assert 'f"{name}_seconds"' in source_text
    assert [key for key in sorted(keys) if f'"{key}"' not in source_text] == []


def test_no_more_answers_than_asked_for(artifacts, tmp_path, dots):
    write(artifacts, metrics(), [sample(number) | {"reward_ppo": 0.1 * number} for number in range(10)])
    page = page_of(artifacts, tmp_path, evaluate.Report(side_by_side=4))
    assert re.findall(r"question (\d+)</a>", page) == ["5", "0", "2", "5", "7", "9", "8", "7"]
    assert page.count("<b>PPO</b>") == 7  # four side by side, and three of the highest reward


def test_without_gold_or_pairs_the_page_still_stands(artifacts, tmp_path):
    bare = metrics(gold=None)
    reward = bare["reward_model"] | {"pairs": 0, "accuracy": None, "best_cheap_baseline": None, "both_have_code": None,
                                     "above_best_cheap_baseline": None, "by_score_gap": {"1": None}}
    reward["baselines"] = dict.fromkeys(reward["baselines"])
    bare = bare | {"reward_model": reward}
    rows = [{k: v for k, v in sample(1).items() if not k.startswith("gold")}]
    write(artifacts, with_summary(bare), rows)
    page = page_of(artifacts, tmp_path)
    assert "only the learnt reward is known" in page and "could not be judged" in page


def test_the_verdict_on_the_reward_model():
    said = {above: reward_model_verdict(metrics(above=above)["reward_model"]) for above in (0.1, 0.01, -0.1)}
    assert "the reward model beats it (difference +0.100" in said[0.1] and "72.0\u00a0%" in said[0.1]
    assert "did not beat it" in said[0.01]
    assert "worse than the baseline" in said[-0.1]


@pytest.mark.parametrize("address", ["javascript:alert(1)", "javascript://x/%0aalert(1)", "data:text/html,x", "//evil",
                                     "", None, "http://[", "file:///x"])
def test_only_http_links(address):
    assert link("<b>", address) == "&lt;b&gt;"


def test_elements_escape_by_construction():
    assert element("p", "<i>", element("b", "&"), title='"<') == '<p title="&quot;&lt;">&lt;i&gt;<b>&amp;</b></p>'
    assert pre_text("a\r\nb\0") == '<pre dir="auto">a\nb␀</pre>'
