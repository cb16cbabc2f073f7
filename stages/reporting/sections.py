"""The report's sections, each a function of facts that are already there: metrics and manifests."""

from stages.evaluation.summary import format_estimate
from stages.render.html import Html, element, join_html, table
from stages.reporting.pipeline_graph import sources


def reward_accuracy(reward: dict) -> Html:
    """Share of held-out pairs ranked right: the reward model, its baselines, and where it holds."""
    rows = [["reward model", *_estimate_cells(reward["accuracy"])]]
    rows += [[f"baseline: {name}", *_estimate_cells(found)] for name, found in reward["baselines"].items()]
    if reward["best_cheap_baseline"]:
        rows.append([f"reward model minus “{reward['best_cheap_baseline']}”",
                     *_estimate_cells(reward["above_best_cheap_baseline"], signed=True)])
    if reward["oracle"]:
        rows.append(["an oracle that knows the truth (ceiling)", *_estimate_cells(reward["oracle"])])
    rows += [["reward model, both answers have code", *_estimate_cells(reward["both_have_code"])]]
    if reward["oracle_both_have_code"]:
        rows.append(["the oracle, both answers have code", *_estimate_cells(reward["oracle_both_have_code"])])
    rows += [["calibration: expected error", f"{reward['calibration']['expected_error']:.3f}", "–",
              f"{reward['pairs']:,}"]]
    return table(["pairs ranked right", "share", "95 % interval", "pairs"], rows)


def where_right(reward: dict) -> Html:
    """The same share among pairs of one kind: by length, score gap, site and tag."""
    kinds = {"better answer in length": "by_length", "scores apart": "by_score_gap", "site": "by_site",
             "tag": "by_tag"}
    rows = [[join_html([f"{kind}: ", element("bdi", name)]), *_estimate_cells(found)]
            for kind, key in kinds.items() for name, found in reward[key].items()]
    return table(["pairs of which kind", "share ranked right", "95 % interval", "pairs"], rows)


def hacking(found: dict) -> Html:
    """The monitors, and which of them moved for the worse beyond their thresholds."""
    rows = [[row["label"], f"{row['sft']:z{row['form']}}", f"{row['ppo']:z{row['form']}}",
             format_estimate(row["change"], row["form"], signed=True),
             f"{row['worse']} by {row['threshold']:{row['form']}}", "moved" if row["moved"] else "no"]
            for row in found["monitors"]]
    return table(["monitor", "SFT", "PPO", "change, 95 % interval", "for the worse: more than", "moved"], rows)


def gold_scores(found: dict) -> Html:
    """What the scorer that knows the truth says."""
    rows = [[name, *("–" if numbers[side] is None else f"{numbers[side]:.3f}" for side in ("sft", "ppo", "human")),
             format_estimate(numbers["difference"], signed=True)] for name, numbers in found.items()]
    return table(["score", "SFT", "PPO", "best human answer", "PPO minus SFT, paired"], rows)


def provenance(manifests: dict[str, dict], digests: dict[str, str]) -> Html:
    """What made each artifact, the digest that names its whole ancestry, and where that begins."""
    rows = [[stage, element("code", digests[stage]), element("code", made["commit"] or "unknown"),
             ", ".join(sorted(_short(source["path"]) for source in sources(made)))]
            for stage, made in manifests.items()]
    outside = {source["path"]: source["sha256"] for made in manifests.values() for source in sources(made)
               if source["sha256"] not in digests.values()}
    first = [[path, element("code", sha256 or "of a hub: see the recipe's revision")]
             for path, sha256 in outside.items()]
    return join_html([
        table(["artifact", "sha256 of its manifest", "commit", "made from"], rows, class_="digests"),
        table(["made of what lies outside this page", "sha256"], first, class_="digests") if first else "",
        element("p", _versions(manifests), class_="faint")])


def _versions(manifests: dict[str, dict]) -> str:
    versions = sorted({(name, version) for made in manifests.values() for name, version in made["versions"].items()})
    python = ", ".join(sorted({made["python"] for made in manifests.values()}))
    return f"Python {python}; " + ", ".join(f"{name} {version}" for name, version in versions)


def _short(path: str) -> str:
    return path.removesuffix("/manifest.json").rstrip("/").rsplit("/", 1)[-1]


def _estimate_cells(found: dict | None, signed: bool = False) -> list[str]:
    if found is None:
        return ["–", "–", "0"]
    form = "+z.3f" if signed else "z.3f"
    interval = "–" if found["low"] is None else f"{found['low']:{form}} to {found['high']:{form}}"
    return [f"{found['mean']:{form}}", interval, f"{found['count']:,}"]
