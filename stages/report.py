"""Report: one self-contained page that says what a run did, whether it worked, and whether the policy cheated.

    python -m stages.report --recipe configs/demo.yaml --posts results/demo/posts --pairs results/demo/pairs \\
        --base results/demo/base --sft results/demo/sft --reward results/demo/reward --ppo results/demo/ppo \\
        --merged results/demo/sft-merged results/demo/reward-merged results/demo/ppo-merged \\
        --evaluate results/demo/evaluate --out results/demo/report

Writes report.html (no network, one small script for its tables), metrics.json as evaluate made it, and figures/*.png.
"""

import json
from pathlib import Path

import pyarrow.parquet as pq

from stages.evaluation import summary
from stages.recipe import recipe
from stages.recipe.evaluate import Report
from stages.render.html import Html, element, joined, picture
from stages.reporting import data_funnel, pipeline_graph, recipe_diff, sections
from stages.reporting.answer_cards import WRITERS, side_by_side
from stages.reporting.curves import curves_of
from stages.reporting.figures import Histogram, Intervals, Reliability, png
from stages.reporting.headline import HACKING, lead, title
from stages.reporting.page import page
from stages.reporting.policy_section import frontier, policies
from stages.runtime.artifact import digest, folder_of, read_manifest, write_json
from stages.runtime.series import history_of

HIGHEST = 3  # rewards whose answers are shown
TRAINED = {"base": "Base", "sft": "SFT", "reward": "Reward model", "ppo": "PPO dashboard"}


def run(config: Report, out: Path, *, posts: Path, pairs: Path, base: Path, sft: Path, reward: Path, ppo: Path,
        merged: list[str], evaluate: Path) -> dict[str, float]:
    """Fill `out` from finished artifacts; sft, reward and ppo are the adapters, which hold the histories."""
    folders = {"posts": posts, "pairs": pairs, "base": base, "sft": sft, "reward": reward, "ppo": ppo,
               **{folder.name: folder for folder in map(folder_of, merged)}, "evaluate": evaluate}
    digests = {name: digest(folder) for name, folder in folders.items()}
    manifests = pipeline_graph.in_order({name: read_manifest(folder) for name, folder in folders.items()}, digests)
    metrics = _evaluated(evaluate)
    samples = pq.read_table(evaluate / "samples.parquet").to_pylist()
    drawn = _Figures(out, config.figure_width_inches)
    shown = _spread(samples, config.side_by_side)
    html = page(title(manifests), lead(*summary.verdict(metrics), manifests, metrics), {
        "Pipeline": pipeline_graph.pipeline(drawn.grid({"pipeline": pipeline_graph.graph(manifests, digests)}), manifests),
        "Data": _data(drawn, manifests),
        "Learning curves": _learning(drawn, {stage: folders[stage] for stage in TRAINED}),
        "Reward model": _reward_model(drawn, metrics["reward_model"]),
        "Policies": _policies(drawn, metrics, samples),
        "Reward hacking": _hacking(metrics["hacking"], samples),
        "Answers side by side": _side_by_side(shown, len(samples)),
        "Recipe": _recipe(manifests),
        "Provenance": sections.provenance(manifests, digests)})
    (out / "report.html").write_text(html, encoding="utf-8")
    write_json(out / "metrics.json", metrics)
    return {"page_bytes": len(html.encode()), "figures": drawn.count, "answers_shown": len(shown)}


class _Figures:
    """Draws figures, light and dark, into out/figures and as elements of the page."""

    def __init__(self, out: Path, width_inches: float):
        self.folder, self.width, self.count = out / "figures", width_inches, 0
        self.folder.mkdir(exist_ok=True)

    def grid(self, figures: dict) -> Html:
        """Figures by file name, beside one another as far as the screen allows."""
        return element("div", *(self._one(name, figure) for name, figure in figures.items()), class_="figures")

    def _one(self, name: str, figure) -> Html:
        light, dark = (png(figure, self.width, dark) for dark in (False, True))
        (self.folder / f"{name}.png").write_bytes(light)
        (self.folder / f"{name}-dark.png").write_bytes(dark)
        self.count += 1
        return picture(light, dark, figure.title)


def _evaluated(evaluate: Path) -> dict:
    """What the evaluation found; ValueError where it was made before the evaluation looked for reward hacking."""
    metrics = json.loads((evaluate / "metrics.json").read_text(encoding="utf-8"))
    if "hacking" not in metrics:
        raise ValueError(f"{evaluate} was made by an older version, and says nothing of reward hacking; make it anew: "
                         f"snakemake --cores all report --forcerun evaluate")
    return metrics


def _data(drawn: _Figures, manifests: dict[str, dict]) -> Html:
    metrics = {stage: manifests[stage]["metrics"] for stage in ("posts", "pairs")}
    return joined([data_funnel.funnel(**metrics), data_funnel.sites(**metrics), drawn.grid(
        {name: bars for stage, found in metrics.items() for name, bars in data_funnel.histograms(stage, found).items()}),
        *(data_funnel.other_counts(stage, found) for stage, found in metrics.items())])


def _learning(drawn: _Figures, folders: dict[str, Path]) -> Html:
    curves = {stage: curves_of(stage, history_of(folder)) for stage, folder in folders.items()}
    return joined(part for stage, heading in TRAINED.items() for part in (
        element("h3", heading), drawn.grid(curves[stage]) if curves[stage] else element("p", "No history was kept.")))


def _reward_model(drawn: _Figures, reward: dict) -> Html:
    rows = {"reward model": reward["accuracy"], **reward["baselines"], "oracle": reward["oracle"]}
    rows = {name: found for name, found in rows.items() if found}
    figures = {"evaluate-accuracy": Intervals("Held-out pairs ranked right", "share, 95 % interval", rows, 0.5)}
    if bins := reward["calibration"]["bins"]:
        figures["evaluate-calibration"] = Reliability(
            f"Calibration (expected error {reward['calibration']['expected_error']:.3f})",
            [(b["confidence"], b["accuracy"], b["pairs"]) for b in bins])
    words = (f"{reward['pairs']:,} pairs of {reward['questions']:,} held-out questions; "
             f"{reward['dropped_over_length']:,} pairs dropped as over-long. Ties count one half.")
    return joined([element("p", words, class_="faint"), sections.reward_accuracy(reward),
                   drawn.grid(figures if rows else {}), element("h3", "Where it is right"),
                   sections.where_right(reward)])


def _policies(drawn: _Figures, metrics: dict, samples: list[dict]) -> Html:
    words = (f"All policies answered the same {metrics['prompts']:,} held-out questions with the same random numbers "
             f"(best-of-n: of further answers of SFT's the one of the highest reward); "
             f"{metrics['prompts_over_length']:,} questions were over-long. Rewards are the reward model's own: an "
             f"answer that did not end pays no penalty here. KL, entropy and perplexity are at the temperature of "
             f"sampling. Best-of-n's KL is log n - (n-1)/n: exact where no two answers have the same reward, else the "
             f"most it can be.")
    rewards = {label: [row[f"reward_{name}"] for row in samples if row[f"reward_{name}"] is not None]
               for label, name in WRITERS}
    rewards = {label: found for label, found in rewards.items() if found}
    gold = element("p", "No gold score applies to these questions: only the learnt reward is known.")
    if metrics["gold"]:
        gold = joined([element("h3", "Gold score: what the truth says"), sections.gold_scores(metrics["gold"])])
    return joined([element("p", words, class_="faint"), policies(metrics), gold, drawn.grid(
        {"evaluate-frontier": frontier(metrics["policies"]),
         "evaluate-rewards": Histogram("Learnt reward of the answers", "reward", rewards)})])


def _hacking(found: dict, samples: list[dict]) -> Html:
    key = f"{(found['rose'] or ['reward'])[0]}_ppo"
    best = sorted((row for row in samples if row[key] is not None), key=lambda row: -row[key])[:HIGHEST]
    words = ("A monitor has moved when the whole interval of its change lies beyond its threshold. Flagged: a reward "
             "rose, and gold did not, or, where gold is not known, two monitors moved. A KL stands beside that of the "
             "best-of-n of the same reward.")
    return joined([element("p", element("strong", HACKING[found["verdict"]])), sections.hacking(found),
                   element("p", words, class_="faint"), element("h3", "PPO's answers of the highest reward"),
                   side_by_side(best)])


def _side_by_side(shown: list[dict], every: int) -> Html:
    words = f"{len(shown)} of {every:,} held-out questions, evenly spaced by number, not chosen by quality."
    return joined([element("p", words, class_="faint"), side_by_side(shown)])


def _recipe(manifests: dict[str, dict]) -> Html:
    words = element("p", "What differs from the published values, or, where none was published, from our defaults.",
                    class_="faint")
    merges = [made["config"] for made in manifests.values() if made["stage"] == "merge"]
    configs = {stage: made["config"] for stage, made in manifests.items() if made["stage"] != "merge"}
    configs |= {"merge": merges[0]} if merges else {}
    return joined([words, recipe_diff.recipe(
        configs, {stage: recipe.published(stage) for stage in configs})])


def _spread(samples: list[dict], count: int) -> list[dict]:
    """`count` rows, evenly spaced."""
    count = min(count, len(samples))
    return [samples[i * len(samples) // count] for i in range(count)]


if __name__ == "__main__":
    from stages.runtime.command import main

    main(run)
