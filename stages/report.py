"""Report: write one self-contained page on what a run did, whether it worked, and whether a policy cheated.

    python -m stages.report --recipe configs/demo.yaml --posts results/demo/posts --pairs results/demo/pairs \\
        --base results/demo/base --sft results/demo/sft --reward results/demo/reward --policy ppo=results/demo/ppo \\
        --merged results/demo/sft-merged results/demo/reward-merged results/demo/ppo-merged \\
        --evaluate results/demo/evaluate --out results/demo/report

Give --policy NAME=FOLDER once for each policy, if any, with the folder of its training. Of policies that were trained
on your own prompts, there are no posts, pairs, SFT and reward model: leave these out. Writes report.html (no network,
one small script for its tables), metrics.json as evaluate wrote it, figures/*.png and *.svg, curves.csv (every number
that a training logged), and cards/NAME/README.md: the model card of each merged model that was evaluated, with the
evaluation's numbers.
"""

from stages.command_line.start import main

if __name__ == "__main__":  # before the imports below: parsing must not wait for torch
    main(__file__)

import json
from pathlib import Path

import pyarrow.parquet as pq

from stages.artifacts.artifact import artifact_folder, digest, read_manifest
from stages.artifacts.lineage import find_origin, section_name
from stages.artifacts.manifest import list_input_sources
from stages.cards.evaluated_card import render_evaluated_card
from stages.cards.sections import CARD
from stages.evaluation import summary
from stages.evaluation.tasks.wording import SFT, find_wording, start_model
from stages.recipe import recipe
from stages.recipe.sections.evaluate import Report
from stages.render.html import Html, element, fold, join_html, table
from stages.reporting import policy_section, sections
from stages.reporting.answer_cards import list_writers, render_answer_cards, render_first_look, select_first_curves
from stages.reporting.curves import COLUMNS, HEADINGS, build_curves, format_csv, list_points, split_constant
from stages.reporting.document import render_page
from stages.reporting.figures import Curves, FigureFolder, Histogram
from stages.reporting.headline import HACKING_VERDICTS, build_verdicts, describe_origin, page_title
from stages.reporting.healthy_bands import measure_evaluation, measure_training, render_outside
from stages.reward_modeling.scoring_file import read_no_model
from stages.runtime.files import check_free_space, used_bytes, write_json, write_text
from stages.runtime.series import read_history
from stages.stackexchange.pairs.table import space_evenly

TOP_ANSWERS = 3  # answers of the highest reward that are shown of each policy
FIGURES_BYTES = 1 << 20  # of a stage, as files and within the page: 0.4 MiB in the runs so far
EVALUATION_FACTOR = 4  # texts in the page to the evaluation's compressed tables
FOLDED = ("All at one temperature", "Reward model", "Learning curves", "Data", "Pipeline", "Recipe", "Provenance")
OPENED = 5  # questions whose answers are shown without a click
GGUF_PAGE = "../gguf/gguf.html"  # of stages.export_gguf, in the run's folder


def run(config: Report, out: Path, *, posts: Path | None = None, pairs: Path | None = None, base: Path,
        sft: Path | None = None, reward: Path | None = None, policy: dict[str, Path] | None = None, merged: list[str],
        evaluate: Path, judge: Path | None = None) -> dict[str, float]:
    """Fill `out` from finished artifacts; sft, reward, judge and policy: the trained adapters, with their histories.

    posts, pairs, sft, reward: None for policies that were trained on a user's own prompts.
    """
    policy = policy or {}
    summary.check_policy_names(policy)
    data, models = {"posts": posts, "pairs": pairs}, {"sft": sft, "reward": reward}
    _check_inputs(evaluate, data | models)
    trained = {"base": base, **_given(models | {"judge": judge}), **policy}
    folders = {**_given(data), **trained,
               **{folder.name: folder for folder in map(artifact_folder, merged)}, "evaluate": evaluate}
    check_free_space("the report", out, len(folders) * FIGURES_BYTES + EVALUATION_FACTOR * used_bytes(evaluate))
    digests = {name: digest(folder) for name, folder in folders.items()}
    manifests = {name: read_manifest(folder) for name, folder in folders.items()}
    manifests = sections.sort_by_ancestry(manifests, digests)
    metrics = _read_metrics(evaluate)
    histories = {name: read_history(folder) for name, folder in trained.items()}
    samples = pq.read_table(evaluate / "samples.parquet").to_pylist()
    figures = FigureFolder(out / "figures")
    examples = space_evenly(samples, config.side_by_side)
    origin = find_origin(base, None)
    verdicts = build_verdicts(metrics, manifests, list(policy), origin.describe_base() if origin.provenance else "")
    curves = {name: build_curves(name, manifests[name]["stage"], history, find_wording(metrics["policies"]).start)
              for name, history in histories.items()}
    first_curves = select_first_curves(metrics, curves)
    html = render_page(page_title(manifests), verdicts, join_html([_short_table(metrics), _export_words()]), {
        "Answers side by side": _side_by_side(examples, len(samples), metrics),
        "Outside the healthy band": _outside_bands(manifests, metrics, histories),
        "Policies": _policies(figures, metrics),
        "Reward hacking": _hacking(metrics, samples),
        "All at one temperature": _one_temperature(figures, metrics, samples),
        **({"Reward model": sections.render_reward_model(figures, metrics["reward_model"])} if posts else {}),
        "Learning curves": _learning_curves(figures, curves, trained, first_curves),
        **({"Data": sections.render_funnel(*(manifests[stage]["metrics"] for stage in data))} if posts else {}),
        "Pipeline": sections.render_pipeline(figures, manifests),
        "Recipe": _recipe(manifests),
        "Provenance": sections.render_provenance(manifests, digests)},
        origin=describe_origin(evaluate, manifests["evaluate"]), folded=FOLDED,
        first_look=render_first_look(figures, metrics, samples, first_curves))
    (out / "report.html").write_text(html, encoding="utf-8")
    write_json(out / "metrics.json", metrics)
    write_text(out / "curves.csv", format_csv(COLUMNS, list_points(histories)))
    _write_cards(out / "cards", [artifact_folder(folder) for folder in merged], digests, manifests, metrics)
    return {"page_bytes": len(html.encode()), "figures": figures.count, "answers_shown": len(examples)}


def _given(folders: dict[str, Path | None]) -> dict[str, Path]:
    return {name: folder for name, folder in folders.items() if folder}


def _check_inputs(evaluate: Path, of_dump: dict[str, Path | None]) -> None:
    """Raise ValueError for artifacts that an evaluation on a dump needs, or that one on own prompts has not."""
    is_own = "file" in read_manifest(evaluate)["inputs"]
    wrong = [f"--{name}" for name, folder in of_dump.items() if bool(folder) == is_own]
    if wrong:
        raise ValueError(f"{evaluate} evaluates policies that were trained on prompts of your own: leave out "
                         f"{', '.join(wrong)}" if is_own else
                         f"{evaluate} evaluates a run on a dump: give {', '.join(wrong)}, too")


def _write_cards(out: Path, merged: list[Path], digests: dict[str, str], manifests: dict[str, dict], metrics: dict
                 ) -> None:
    """Write the card of each merged model that was evaluated, with the evaluation's numbers."""
    writers = {source["sha256"]: label.removeprefix("policy.")
               for label, source in list_input_sources(manifests["evaluate"]["inputs"]).items()}
    sites = sections.list_sources(manifests)
    for folder in merged:
        card, writer = folder / CARD, writers.get(digests[folder.name])
        if card.is_file() and (writer in ("sft", "reward", "judge") or writer in metrics["comparisons"]):
            (out / folder.name).mkdir(parents=True, exist_ok=True)
            text = render_evaluated_card(card.read_text(encoding="utf-8"), folder.name, writer, metrics, sites)
            write_text(out / folder.name / CARD, text)


def _read_metrics(evaluate: Path) -> dict:
    metrics = json.loads((evaluate / "metrics.json").read_text(encoding="utf-8"))
    if "at_best" not in metrics:
        raise ValueError(f"{evaluate} was made by an older version: it compares at one temperature only. Make it "
                         f"again: snakemake --cores all report --forcerun evaluate")
    return metrics


def _short_table(metrics: dict) -> Html:
    rows = [[cell.replace("->", "→") for cell in row] for row in metrics["table"]]
    head = f"measure, on held-out {find_wording(metrics['policies']).questions}"
    return table([head, "estimate, 95 % interval"], rows, numeric=False)


def _export_words() -> Html:
    """Say how to export the policy, and link to the page that the export writes: there is none before it."""
    return element("p", "For llama.cpp and Ollama: ", element("code", "snakemake --cores all gguf"), ". ",
                   element("a", "Its page", href=GGUF_PAGE), " compares the files with the model.", class_="faint")


def _outside_bands(manifests: dict[str, dict], metrics: dict, histories: dict[str, list[dict]]) -> Html:
    headings = {name: HEADINGS.get(name) or summary.display_name(name) for name in histories}
    training = [number for name, history in histories.items()
                for number in measure_training(headings[name], manifests[name]["metrics"], history)]
    return render_outside([*training, *measure_evaluation(metrics)], find_wording(metrics["policies"]).start)


def _learning_curves(figures: FigureFolder, curves: dict[str, dict[str, Curves]], trained: dict[str, Path],
                     shown: dict[str, Curves]) -> Html:
    """Render the curves of each artifact, less those `shown` at the top and those that never move."""
    parts = []
    for name, drawn in curves.items():
        moving, constant = split_constant({key: figure for key, figure in drawn.items() if key not in shown})
        missing = read_no_model(trained[name])
        words = f"No model was trained: {missing}." if missing else "" if drawn else "No history was written."
        words = f"Constant: {'; '.join(constant)}." if constant else words
        parts += [element("h3", HEADINGS.get(name) or f"{summary.display_name(name)} dashboard"),
                  figures.draw(moving) if moving else "", element("p", words, class_="faint") if words else ""]
    return join_html(parts)


def _policies(figures: FigureFolder, metrics: dict) -> Html:
    wording = find_wording(metrics["policies"])
    gold = "" if summary.knows_gold(metrics) else element(
        "p", f"No gold score applies to these {wording.questions}: only the {wording.reward} is known.")
    if any(comparison["gold"] for comparison in metrics["comparisons"].values()):
        gold = fold("Gold score: what the truth says",
                    policy_section.render_gold_scores(metrics["comparisons"], start_model(metrics["policies"])))
    return join_html([policy_section.render_at_best(figures, metrics), gold])


def _one_temperature(figures: FigureFolder, metrics: dict, samples: list[dict]) -> Html:
    wording, start = find_wording(metrics["policies"]), start_model(metrics["policies"])
    whose = "the reward model's own" if start == SFT else "the sum of your functions"
    words = (f"All policies answered the same {metrics['prompts']:,} held-out {wording.questions} with the same random "
             f"numbers; best-of-n picks, among further answers of {wording.start}, the one with the highest reward. "
             f"{metrics['prompts_over_length']:,} {wording.questions} were too long. Rewards are {whose}: an "
             f"answer that did not end pays no penalty here. KL, entropy and perplexity are at the sampling "
             f"temperature. The KL of best-of-n is log n - (n-1)/n: exact if no two answers have the same reward, "
             f"otherwise an upper bound.")
    rewards = {label: [row[f"reward_{name}"] for row in samples if row[f"reward_{name}"] is not None]
               for label, name in list_writers(list(metrics["comparisons"]), start=start)}
    rewards = {label: values for label, values in rewards.items() if values}
    return join_html([
        element("p", words, class_="faint"), policy_section.render_policies(metrics), figures.draw(
        {"evaluate-frontier": policy_section.build_frontier(metrics["policies"]),
         "evaluate-rewards": Histogram(f"{summary.capitalise(wording.reward)} of the answers", "reward", rewards)})])


def _hacking(metrics: dict, samples: list[dict]) -> Html:
    start, hacking = start_model(metrics["policies"]), metrics["hacking"]
    without_gold = ("where gold is not known, when a reward rose and two monitors moved. Where neither gold nor a "
                    "reward model that beats chance and the best cheap baseline can tell, there is no judge")
    own = "your reward may ask for what a monitor shows, so that monitors alone flag nothing and say where to look"
    words = (f"A monitor has moved when the whole interval of its change lies beyond its threshold. A policy is "
             f"flagged when a reward rose and gold did not; {without_gold if start == SFT else own}. The policy's KL "
             f"is compared with that of the best-of-n of the same reward.")
    parts = [element("p", words, class_="faint")]
    for policy, verdict in hacking.items():
        name, score = summary.display_name(policy), f"{(verdict['rose'] or ['reward'])[0]}_{policy}"
        best = sorted((row for row in samples if row[score] is not None), key=lambda row: -row[score])[:TOP_ANSWERS]
        parts += [element("p", element("strong", f"{name}: {HACKING_VERDICTS[verdict['verdict']]}")),
                  policy_section.render_monitors(verdict, policy, start),
                  element("h3", f"{name}'s answers of the highest reward"),
                  render_answer_cards(best, [policy], start=start)]
    return join_html(parts)


def _side_by_side(examples: list[dict], total: int, metrics: dict) -> Html:
    start, questions = start_model(metrics["policies"]), find_wording(metrics["policies"]).questions
    at_best = [f"{name}{summary.BEST}" for name in (start, *metrics["at_best"])]
    words = (f"{len(examples)} of {total:,} held-out {questions}, evenly spaced, not chosen by quality. A policy's "
             f"answers are at temperature {metrics['policies'][start]['temperature']:g} and, as “at best”, at its best "
             f"one.")
    return join_html([element("p", words, class_="faint"),
                      render_answer_cards(examples, list(metrics["comparisons"]), at_best, start, OPENED)])


def _recipe(manifests: dict[str, dict]) -> Html:
    stages = {"merge" if manifest["stage"] == "merge" else name: manifest
              for name, manifest in manifests.items()}  # all merges have the same settings
    known = vars(recipe.Recipe())
    defaults = {name: recipe.list_defaults(section) if (section := section_name(manifest["stage"])) in known else []
                for name, manifest in stages.items()}
    return sections.render_recipe({name: manifest["config"] for name, manifest in stages.items()}, defaults)
