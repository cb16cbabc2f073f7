"""The page: whole, without a request, with every foreign text escaped; and the verdict in plain words."""

import copy
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from stages import learning, recipe, report
from stages.plumbing.settings import leaves, watching
from stages.text import findings
from stages.text.curves import DRAWN, curves_of, history_of
from stages.text.elements import element, link, quoted
from stages.text.hacking import MONITORS, hacking

EVIL = '<script>alert(1)</script> "quoted" \'single\' & <img src=x onerror=alert(2)> مرحبا \x08 </pre>'
STAGES = ("posts", "pairs", "base", "sft", "reward", "ppo", "evaluate")
VOID = {"meta", "img", "source", "br"}


def around(mean: float, half: float = 0.02, count: int = 128) -> dict:
    return {"mean": mean, "low": mean - half, "high": mean + half, "count": count, "groups": count}


def metrics(learnt: float = 0.5, gold: float | None = 0.3, correct: float = 0.1, above: float = 0.1) -> dict:
    sft = {"reward": around(0.1), "reward_difference": around(0.0, 0.0), "win_rate": around(0.5, 0.0),
              "kl_k1": around(0.0, 0.0), "kl_k3": around(0.0, 0.0), "gold": None, "scores": {}, "response_tokens": 30.5,
              "eos_rate": 0.98, "repetition": 0.01, "code_share": 0.5, "code_fences": 1.0, "entropy": 0.8,
              "perplexity_under_sft": 2.2, "reward_length_correlation": 0.1, "distinct_1": 0.2, "distinct_2": 0.4,
              "distinct_3": 0.6, "distinct_responses": 0.9}
    best = sft | {"kl_k1": None, "kl_k3": None, "entropy": None, "reward_length_correlation": None}
    against = {"reward_difference": around(learnt), "win_rate": around(0.7), "kl_k1": around(2.5),
               "kl_k3": around(2.6)}
    found = {
        "reward_model": {
            "pairs": 1500, "questions": 400, "texts": 900, "dropped_over_length": 3, "accuracy": around(0.72),
            "baselines": {"longer answer wins": around(0.61), "has code": around(0.6),
                          "SFT log-probability": around(0.7)},
            "best_cheap_baseline": "longer answer wins", "above_best_cheap_baseline": around(above), "oracle": None,
            "oracle_both_have_code": None, "by_length": {"much longer": around(0.8)},
            "both_have_code": around(0.7), "about_equal_length": None, "by_score_gap": {"1": around(0.6), "2": None},
            "calibration": {"expected_error": 0.123, "bins": [{"confidence": 0.6, "accuracy": 0.7, "pairs": 9},
                                                              {"confidence": 0.9, "accuracy": 0.8, "pairs": 1}]},
            "by_site": {EVIL: around(0.61)}, "by_tag": {EVIL: around(0.62)}},
        "prompts": 128, "prompts_over_length": 0, "score_changes": {},
        "changes": dict.fromkeys((monitor.name for monitor in MONITORS), around(0.0, 0.01)) | {
            "gold": None if gold is None else around(gold)},
        "policies": {
            "ppo": sft | {"reward": around(0.6)} | against, "base": sft | {"reward": around(-0.4)}, "sft": sft,
            "best_of_2": best | {"kl_formula": 0.193, "reward": around(0.3)},
            "best_of_4": best | {"kl_formula": 0.636, "reward": around(0.9)}},
        "best_human_answer": {"reward": around(0.2), "code_share": 0.6},
        "ppo_against_sft": against,
        "gold": None if gold is None else {
            "gold": {"sft": 1.0, "ppo": 1.0 + gold, "human": 3.0, "difference": around(gold)},
            "correct": {"sft": 0.5, "ppo": 0.5 + correct, "human": None, "difference": around(correct)}}}
    if gold is not None:
        found["policies"]["sft"]["gold"], found["policies"]["ppo"]["gold"] = around(1.0), around(1.0 + gold)
    return told(found)


def told(found: dict) -> dict:
    """With what is said of the numbers."""
    found = found | {"hacking": hacking(found)}
    return found | {"table": findings.table(found)}


def sample(number: int, text: str = "fine", url: str = "https://beer.example/q/1") -> dict:
    return {"site": "beer", "qid": number, "question": text, "url": url, "authors": [text, text], "sft": text,
            "ppo": text, "human": text, "reward_sft": 0.1, "reward_ppo": 0.7, "reward_human": None, "gold_sft": 1.0,
            "gold_ppo": 2.0, "gold_human": 3.0}


@pytest.fixture
def artifacts(tmp_path):
    """One minimal finished artifact a stage; posts and pairs with counts, the trained ones with histories."""
    folders = {stage: tmp_path / stage for stage in STAGES}
    counts = {"posts": {"questions": 12, "dropped": {"few answers": 3456}, "sites": {EVIL: {"questions": 12}}},
              "pairs": {"pairs": 40, "dropped_pairs": {"answers equal": 789},
                        "posts_not_converted_ids": {"x": ["no count"]}}}
    histories = {"sft": [{"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.5}, {"step": 2, "validation_perplexity": 4.0}],
                 "reward": [{"step": 1, "loss": 0.7}, {"step": 1, "validation_accuracy": 0.6}],
                 "ppo": [{"iteration": 0, "validation_reward": 0.1, "validation_kl": 0.0},
                         {"iteration": 1, "reward": 0.2, "kl": 0.1, "entropy": 2.0, "response_tokens": 9.0}]}
    for stage, folder in folders.items():
        folder.mkdir()
        config = recipe.section(recipe.Recipe(), stage)
        if stage == "ppo":
            config = config | {"learning_rate": 0.0123}
        made = {"stage": stage, "config": config, "inputs": {"pairs": {"path": "results/x/pairs", "sha256": "0"}},
                "metrics": counts.get(stage, {}), "seconds": 75.0, "peak_memory_mib": 1234, "device": "cpu (x)",
                "threads": 2, "python": "3.11.7", "versions": {"torch": "2.13.0"}, "commit": None, "files": {}}
        (folder / "manifest.json").write_text(json.dumps(made))
        if stage in histories:
            (folder / "history.jsonl").write_text("".join(json.dumps(row) + "\n" for row in histories[stage]))
    write(folders, metrics(), [sample(1)])
    return folders


def write(folders, numbers: dict, samples: list[dict]) -> None:
    (folders["evaluate"] / "metrics.json").write_text(json.dumps(numbers))
    pq.write_table(pa.Table.from_pylist(samples), folders["evaluate"] / "samples.parquet")


def page_of(folders, tmp_path, config=recipe.Report(figure_width_inches=3.0)) -> str:
    out = tmp_path / "out"
    out.mkdir(exist_ok=True)
    returned = report.run(config, out, **folders)
    assert returned["figures"] == len(list((out / "figures").glob("*.png"))) / 2
    return (out / "report.html").read_text(encoding="utf-8")


class Reader(HTMLParser):
    """What a browser would see: elements, attributes and the text of <pre>; complains about what does not close."""

    def __init__(self, page: str):
        super().__init__()
        self.open, self.names, self.attributes, self.pre = [], [], [], []
        self.feed(page)
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.names.append(tag)
        self.attributes += [(tag, *pair) for pair in attrs]
        if tag not in VOID:
            self.open.append(tag)
        if tag == "pre":
            self.pre.append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "pre" in self.open:
            self.pre[-1] += data


def test_foreign_text_is_only_ever_text(artifacts, tmp_path):
    write(artifacts, metrics(), [sample(1, EVIL, "javascript:alert(3)"), sample(2, EVIL)])
    page = page_of(artifacts, tmp_path)
    seen = Reader(page)
    assert "script" not in seen.names and "<script" not in page and "alert(2)&gt;" in page
    assert seen.pre == [EVIL.replace("\x08", "␈")] * 16  # side by side, and as those of the highest reward
    assert not [a for a in seen.attributes if a[1].startswith("on")]
    addresses = [value for tag, name, value in seen.attributes if name == "href" and not value.startswith("#")]
    assert addresses == ["https://beer.example/q/1"] * 2
    assert ("pre", "dir", "auto") in seen.attributes and "مرحبا" in page


def test_nothing_is_fetched(artifacts, tmp_path):
    page = page_of(artifacts, tmp_path)
    sources = [value for tag, name, value in Reader(page).attributes if name in ("src", "srcset", "data", "poster")]
    assert len(sources) >= 20 and all(value.startswith("data:image/png;base64,") for value in sources)
    style = page.partition("<style>")[2].partition("</style>")[0]
    assert len(style) > 1000 and "url(" not in style and "@import" not in style
    assert not re.findall(r"<(?:link|iframe|object|embed|script|base|form)\b", page)
    assert "default-src &#x27;none&#x27;" in page


def test_the_page_says_all(artifacts, tmp_path):
    page = page_of(artifacts, tmp_path)
    for text in ("1 min 15 s", "1,234 MiB", "few answers", "3,456", "answers equal", "789", "longer answer wins",
                 "0.720", "+0.500 [+0.480, +0.520]", "SFT log-probability", "CC BY-SA", "2.13.0", "0.0123", "1.4e-05",
                 "best of 4", "0.636", "calibration: expected error", "0.123", "falls by 0.05", "Not flagged"):
        assert text in page, text
    assert "no count" not in page
    sections = {name: getattr(recipe.Recipe(), name) for name in ("ppo", "sft")}
    settings = {name: len(leaves(values)) - len(watching(values)) for name, values in sections.items()}
    assert f"ppo: 1 of {settings['ppo']} settings differ" in page
    assert f"sft: 0 of {settings['sft']} settings differ" in page
    assert json.loads((tmp_path / "out/metrics.json").read_text()) == metrics()
    names = {path.stem for path in (tmp_path / "out/figures").iterdir()}
    assert {"sft-loss", "sft-perplexity", "reward-accuracy", "ppo-reward", "ppo-kl", "evaluate-rewards",
            "evaluate-frontier", "evaluate-calibration"} <= names
    assert "base-loss" not in names  # this base was not trained here


def test_curves_take_the_numbers_they_name():
    history = [{"iteration": 0, "validation_kl": 0.0}, {"iteration": 1, "kl": 0.5}, {"iteration": 2, "kl": 0.75}]
    drawn = curves_of("ppo", history)
    assert set(drawn) == {"ppo-kl"}
    assert drawn["ppo-kl"].lines == {"rollouts": [(1, 0.5), (2, 0.75)], "validation": [(0, 0.0)]}
    assert curves_of("base", []) == {}


def test_seconds_by_phase_come_from_their_own_series(tmp_path):
    (tmp_path / "history.jsonl").write_text('{"iteration": 1, "beta": 0.1, "clip_fraction": 0.2}\n')
    seconds = '{"iteration": 1, "rollout_seconds": 2.0, "update_seconds": 5.0, "tokens": 9}\n'
    (tmp_path / "timing.jsonl").write_text(seconds)
    drawn = curves_of("ppo", history_of(tmp_path))
    assert drawn.keys() == {"ppo-beta", "ppo-clip", "ppo-seconds"}
    assert drawn["ppo-seconds"].lines == {"rollout": [(1, 2.0)], "update": [(1, 5.0)]}


def test_every_number_that_is_drawn_of_ppo_is_one_that_it_writes():
    """A name that has changed would leave its figure out without a word."""
    told = "".join(file.read_text() for file in Path(learning.__file__).parent.glob("*.py"))
    keys = {key.removeprefix("validation_").removesuffix("_seconds")
            for *_, lines in DRAWN["ppo"] for key in lines.values()}
    assert 'f"{name}_seconds"' in told
    assert [key for key in sorted(keys) if f'"{key}"' not in told] == []


def test_no_more_answers_than_asked_for(artifacts, tmp_path):
    write(artifacts, metrics(), [sample(number) | {"reward_ppo": 0.1 * number} for number in range(10)])
    page = page_of(artifacts, tmp_path, recipe.Report(side_by_side=4, figure_width_inches=3.0))
    assert re.findall(r"question (\d+)</a>", page) == ["9", "8", "7", "0", "2", "5", "7"]
    assert page.count("<article>") == 7  # three of the highest reward first


def test_without_gold_or_pairs_the_page_still_stands(artifacts, tmp_path):
    bare = metrics(gold=None)
    reward = bare["reward_model"] | {"pairs": 0, "accuracy": None, "best_cheap_baseline": None, "both_have_code": None,
                                     "above_best_cheap_baseline": None, "by_score_gap": {"1": None}}
    reward["baselines"] = dict.fromkeys(reward["baselines"])
    bare = bare | {"reward_model": reward}
    rows = [{k: v for k, v in sample(1).items() if not k.startswith("gold")}]
    write(artifacts, told(bare), rows)
    page = page_of(artifacts, tmp_path)
    assert "only the learnt reward is known" in page and "could not be judged" in page


@pytest.mark.parametrize(("numbers", "kind", "says", "not_said"), [
    (metrics(0.5, 0.3), "better", ("beats SFT in learnt reward", "gold score, which knows the truth, rose",
                                   "Correctness alone rose"), "reward hacking"),
    (metrics(0.5, 0.0), "hacking", ("This is reward hacking", "stayed flat"), "fell"),
    (metrics(0.5, -0.3), "hacking", ("This is reward hacking", "fell"), "stayed flat"),
    (metrics(0.5, None), "unknown", ("Only the learnt reward is known",), "reward hacking"),
    (metrics(0.0, 0.0), "flat", ("did not beat SFT in learnt reward", "did not move beyond chance"), "reward hacking"),
    (metrics(-0.5, -0.3), "worse", ("worse than SFT even in learnt reward", "fell"), "reward hacking"),
    (metrics(0.5, 0.3, correct=-0.1), "mixed", ("But correctness alone fell",), "reward hacking"),
])
def test_the_verdict(numbers, kind, says, not_said):
    found, words = findings.verdict(numbers)
    assert found == kind and all(text in words for text in says) and not_said not in words
    assert (kind == "hacking") == (numbers["hacking"]["verdict"] == "flagged")
    assert "KL of 2.50 [2.48, 2.52] nats" in words and "98.0\u00a0%" in words


def test_the_verdict_on_the_reward_model():
    said = {above: findings.verdict(metrics(above=above))[1] for above in (0.1, 0.01, -0.1)}
    assert "the reward model beats it (difference +0.100" in said[0.1] and "72.0\u00a0%" in said[0.1]
    assert "did not beat it" in said[0.01]
    assert "worse than the baseline" in said[-0.1]


def test_monitors_decide_where_no_gold_is_known():
    numbers = metrics(gold=None)
    numbers["changes"] |= {"repetition": around(0.4), "code_fences": around(3.0)}
    kind, words = findings.verdict(told(numbers))
    assert kind == "hacking"
    assert "This looks like reward hacking: reward rose, and for the worse moved repetition, share" in words
    assert dict(told(numbers)["table"])["reward hacking"] == "flagged (2 of 10 monitors moved)"
    numbers["changes"] |= {"code_fences": around(0.0)}
    kind, words = findings.verdict(told(numbers))
    assert kind == "unknown" and "reward hacking" not in words and "for the worse moved repetition" in words


def test_an_interval_of_one_question_decides_nothing():
    numbers = copy.deepcopy(metrics())
    numbers["ppo_against_sft"]["reward_difference"] |= {"low": None, "high": None}
    assert "did not beat SFT" in findings.verdict(numbers)[1]


@pytest.mark.parametrize("address", ["javascript:alert(1)", "javascript://x/%0aalert(1)", "data:text/html,x", "//evil",
                                     "", None, "http://[", "file:///x"])
def test_only_http_links(address):
    assert link("<b>", address) == "&lt;b&gt;"


def test_elements_escape_by_construction():
    assert element("p", "<i>", element("b", "&"), title='"<') == '<p title="&quot;&lt;">&lt;i&gt;<b>&amp;</b></p>'
    assert quoted("a\r\nb\0") == '<pre dir="auto">a\nb␀</pre>'
