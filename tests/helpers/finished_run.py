"""Small finished artifacts for the report, with every kind of number that it shows."""

import base64
import copy
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from stages import report
from stages.evaluation import summary
from stages.evaluation.reward_hacking import MONITORS, detect_reward_hacking
from stages.recipe import recipe, schema
from stages.recipe.sections import evaluate
from stages.reporting import figures

DOT = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR4nGNgAAAAAgABSK+kcQAAAABJRU5ErkJggg==")
EVIL = '<script>alert(1)</script> "quoted" \'single\' & <img src=x onerror=alert(2)> مرحبا \x08 </pre>'
STAGES = ("posts", "pairs", "base", "sft", "sft-merged", "reward", "ppo", "evaluate")


def around(mean: float, half: float = 0.02, count: int = 128) -> dict:
    return {"mean": mean, "low": mean - half, "high": mean + half, "count": count, "groups": count}


def metrics(learnt: float = 0.5, gold: float | None = 0.3, correct: float = 0.1, above: float = 0.1,
            at_best: dict | None = None) -> dict:
    """at_best: the differences that `differences` takes; None: those at the sampling temperature, everywhere."""
    sft = {"temperature": 1.0, "judge": None, "gold_scores": {},
              "reward": around(0.1), "reward_difference": around(0.0, 0.0), "win_rate": around(0.5, 0.0),
              "kl_k1": around(0.0, 0.0), "kl_k3": around(0.0, 0.0), "gold": None, "scores": {}, "response_tokens": 30.5,
              "eos_rate": 0.98, "repetition": 0.01, "code_share": 0.5, "code_fences": 1.0, "entropy": 0.8,
              "perplexity_under_sft": 2.2, "reward_length_correlation": 0.1, "distinct_1": 0.2, "distinct_2": 0.4,
              "distinct_3": 0.6, "distinct_responses": 0.9}
    best = sft | {"kl_k1": None, "kl_k3": None, "entropy": None, "reward_length_correlation": None}
    against = {"reward_difference": around(learnt), "win_rate": around(0.7), "kl_k1": around(2.5),
               "kl_k3": around(2.6)}
    numbers = {
        "reward_model": {
            "pairs": 1500, "questions": 400, "texts": 900, "dropped_over_length": 3, "accuracy": around(0.72),
            "baselines": {"longer answer wins": around(0.61), "has code": around(0.6),
                          "SFT log-probability": around(0.62)},
            "best_cheap_baseline": "SFT log-probability", "above_best_cheap_baseline": around(above), "oracle": None,
            "oracle_both_have_code": None, "by_length": {"much longer": around(0.8)},
            "both_have_code": around(0.7), "better_is_later": around(0.65),
            "by_score_gap": {"1": around(0.6), "2": None},
            "calibration": {"expected_error": 0.123, "bins": [{"confidence": 0.6, "accuracy": 0.7, "pairs": 9},
                                                              {"confidence": 0.9, "accuracy": 0.8, "pairs": 1}]},
            "by_site": {EVIL: around(0.61)}, "by_tag": {EVIL: around(0.62)}},
        "prompts": 128, "prompts_over_length": 0,
        "policies": {
            "ppo": sft | {"reward": around(0.6)} | against, "base": sft | {"reward": around(-0.4)}, "sft": sft,
            "best_of_2": best | {"kl_formula": 0.193, "reward": around(0.3)},
            "best_of_4": best | {"kl_formula": 0.636, "reward": around(0.9)}},
        "best_human_answer": {"reward": around(0.2), "code_share": 0.6},
        "comparisons": {"ppo": against | {
            "score_changes": {},
            "changes": dict.fromkeys((monitor.name for monitor in MONITORS), around(0.0, 0.01)) | {
                "gold": None if gold is None else around(gold)},
            "gold": None if gold is None else {
                "gold": {"sft": 1.0, "policy": 1.0 + gold, "human": 3.0, "difference": around(gold)},
                "correct": {"sft": 0.5, "policy": 0.5 + correct, "human": None, "difference": around(correct)}}}}}
    against = differences(learnt, gold, correct) if at_best is None else at_best
    numbers |= {"judge": {"accuracy": around(0.7)} if against["sft_best"]["judge"] else None,
                "at_best": {"ppo": against}, "temperature_selection": {"prompts": 64, "curves": {
                    name: [{"temperature": t, "reward": 0.5 - abs(t - best), "gold": gold, "eos_rate": 1.0}
                           for t in (1.0, 0.3, 0.1, 0.0)] for name, best in (("sft", 0.1), ("ppo", 0.3))}}}
    _add_best_policies(numbers, gold is not None)
    if gold is not None:
        numbers["policies"]["sft"]["gold"], numbers["policies"]["ppo"]["gold"] = around(1.0), around(1.0 + gold)
    return with_summary(numbers)


def differences(reward: float = 0.5, gold: float | None = 0.3, correct: float = 0.1, judge: float | None = None
                ) -> dict:
    """An entry of at_best, with the same differences to everything that is cheaper than the policy."""
    one = {"reward": around(reward), "judge": None if judge is None else around(judge),
           "gold": {} if gold is None else {"gold": around(gold), "correct": around(correct)}}
    return {name: copy.deepcopy(one) | {"samples_per_answer": n} for name, n in (
        ("sft_greedy", 1), ("sft_best", 1), ("best_of_2", 2), ("best_of_4", 4), ("best_of_4_best", 4))}


def _add_best_policies(numbers: dict, with_gold: bool) -> None:
    """Add the policies at their best temperatures, and the gold scores of all."""
    policies = numbers["policies"]
    for name, source, temperature in (("sft_greedy", "sft", 0.0), ("sft_best", "sft", 0.1), ("ppo_best", "ppo", 0.3),
                                      ("best_of_4_best", "best_of_4", 0.1)):
        policies[name] = policies[source] | {"temperature": temperature, "kl_k1": None, "kl_k3": None}
    for policy in policies.values():
        policy["gold_scores"] = {"gold": 1.25, "correct": 0.5} if with_gold else {}
        policy["judge"] = around(1.5) if numbers["judge"] else None


def with_summary(numbers: dict) -> dict:
    """Add the verdicts on reward hacking and the short table."""
    numbers = numbers | {"hacking": {name: detect_reward_hacking(numbers, name) for name in numbers["comparisons"]}}
    return numbers | {"table": summary.short_table(numbers)}


def sample(number: int, text: str = "fine", url: str = "https://beer.example/q/1") -> dict:
    return {"site": "beer", "qid": number, "question": text, "url": url, "authors": [text, text], "sft": text,
            "ppo": text, "human": text, "reward_sft": 0.1, "reward_ppo": 0.7, "reward_human": None, "gold_sft": 1.0,
            "gold_ppo": 2.0, "gold_human": 3.0} | {
                f"{kind}{name}_best": value for name in ("sft", "ppo")
                for kind, value in (("", text), ("reward_", 0.9), ("gold_", 2.5))}


def artifacts(place: Path) -> dict[str, Path | list[str]]:
    """One minimal finished artifact a stage; posts and pairs with counts, the trained ones with histories."""
    folders = {stage: place / stage for stage in STAGES}
    counts = {"posts": {"questions": 12, "dropped": {"few answers": 3456}, "sites": {EVIL: {"questions": 12}}},
              "pairs": {"pairs": 40, "dropped_pairs": {"answers equal": 789},
                        "posts_not_converted_ids": {"x": ["no count"]}}}
    histories = {"sft": [{"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.5}, {"step": 2, "validation_perplexity": 4.0}],
                 "reward": [{"step": 1, "loss": 0.7}, {"step": 1, "validation_accuracy": 0.6}],
                 "ppo": [{"iteration": 0, "validation_reward": 0.1, "validation_kl": 0.0},
                         {"iteration": 1, "reward": 0.2, "kl": 0.1, "entropy": 2.0, "response_tokens": 9.0}]}
    for stage, folder in folders.items():
        folder.mkdir()
        stage = "merge" if stage.endswith("-merged") else stage
        config = schema.result_settings(getattr(recipe.Recipe(), stage))
        if stage == "ppo":
            config = config | {"learning_rate": 0.0123}
        made = {"stage": stage, "config": config, "inputs": {"pairs": {"path": "results/x/pairs", "sha256": "0"}},
                "metrics": counts.get(stage, {}), "seconds": 75.0, "peak_memory_mib": 1234, "device": "cpu (x)",
                "threads": 2, "python": "3.11.7", "versions": {"torch": "2.13.0"}, "commit": None, "files": {}}
        (folder / "manifest.json").write_text(json.dumps(made))
        if stage in histories:
            (folder / "history.jsonl").write_text("".join(json.dumps(row) + "\n" for row in histories[stage]))
    folders |= {"merged": [str(folders.pop("sft-merged") / "manifest.json")], "policy": {"ppo": folders.pop("ppo")}}
    write(folders, metrics(), [sample(1)])
    return folders


def write(folders, numbers: dict, samples: list[dict]) -> None:
    (folders["evaluate"] / "metrics.json").write_text(json.dumps(numbers))
    pq.write_table(pa.Table.from_pylist(samples), folders["evaluate"] / "samples.parquet")


def draw_dots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have every figure of a page be a dot: drawing is most of what a page costs, and other tests draw each kind."""
    monkeypatch.setattr(figures, "draw_pictures", lambda _: figures.Pictures(DOT, DOT, b"<svg/>"))


def page_of(folders, tmp_path, config=evaluate.Report()) -> str:
    out = tmp_path / "out"
    out.mkdir(exist_ok=True)
    returned = report.run(config, out, **folders)
    assert returned["figures"] == len(list((out / "figures").glob("*.png"))) / 2
    assert {path.stem for path in (out / "figures").glob("*.svg")} == {
        path.stem.removesuffix("-dark") for path in (out / "figures").glob("*.png")}
    return (out / "report.html").read_text(encoding="utf-8")


