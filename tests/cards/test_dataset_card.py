"""Test the data cards: the Hub reads them, their folder loads, every sum is exact, and names are escaped."""

import json
import re
import socket

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from huggingface_hub import DatasetCard, DatasetCardData

from stages.cards.dataset_card import render_pairs_card, render_posts_card
from stages.render.markdown_tables import add_funnel_sum, clean_name, escape_cell, format_histogram, top_rows
from stages.stackexchange.pairs import table as pairs_table
from stages.stackexchange.questions import table as questions_table

TEXTS, ANSWER = pairs_table.TEXTS, questions_table.ANSWER
POSTS, PAIRS = questions_table.SCHEMA, pairs_table.SCHEMA

POSTS_CONFIG = {"min_answers": 2, "max_bad_rows_share": 0.01, "tags": ["homebrew", "lager"], "asked_from": None}
POSTS_METRICS = {
    "questions": 1500, "answers": 4000, "rows_read": 6000, "rows_set_aside": 7, "bytes_read": 12_345_678,
    "accepted_answers_not_in_the_file": 3, "dropped": {"other post types": 400, "too few answers": 93},
    "dropped_questions": {"too few answers": 60, "without one of the tags": 5, "orphans": 0},
    "sites": {"beer.stackexchange.com": {"questions": 1000, "answers": 3000},
              "coffee.stackexchange.com": {"questions": 500, "answers": 1000}},
    "licenses": {"CC BY-SA 3.0": 1500, "CC BY-SA 4.0": 4000}, "scores": {"-1": 500, "0": 1500, "2": 2000},
    "question_characters": {64: 1000, 256: 500}, "answer_characters": {"0": 1, "1024": 3999},
    "years": {"2014": 1499, "unknown": 1}}
PAIRS_CONFIG = {"max_pairs_per_question": 10, "seed": 42}
PAIRS_METRICS = {
    "pairs": 3000, "questions": 900, "pairs_drawn": 3100, "conversions": 3500,
    "pairs_by_split": {"finetune": 1000, "reward": 1000, "rl": 700, "evaluation": 300},
    "questions_by_split": {"finetune": 300, "reward": 300, "rl": 200, "evaluation": 100},
    "posts_in": 5500, "posts_out": 3400, "dropped_questions": {"all scores equal": 600},
    "dropped_posts": {"in no pair": 2000, "not converted": 100}, "dropped_pairs": {"answers equal": 100},
    "posts_not_converted": {"nested too deep": 100},
    "sites": {"beer.stackexchange.com": {"questions": 900, "pairs": 3000}},
    "licenses": {"CC BY-SA 4.0": 3400}, "score_gaps": {"1": 2000, 3: 1000}, "scores": {0: 3000, 1: 400},
    "question_characters": {"64": 900}, "answer_characters": {"128": 2500}}
CARDS = [pytest.param(render_posts_card, POSTS_CONFIG, POSTS_METRICS, id="posts"),
         pytest.param(render_pairs_card, PAIRS_CONFIG, PAIRS_METRICS, id="pairs")]
HOSTILE = "<script>alert('x')</script>|a|\n---\n# head [l](http://e.vil) ![i](x) `code`"
MARKED = "**b** _u_ ~~s~~ $x$ &lt; &#60;i> <b \\ \u202e\x00"


def sums(text: str) -> dict[str, list[int]]:
    """For each table with a sum, by its heads: what each column adds up to beyond the last line (all 0 when exact)."""
    sums_by_table = {}
    for block in text.split("\n\n"):
        if "| **sum** |" not in block:
            continue
        heads, _, *rows = [[part.strip() for part in line.strip("| ").split(" | ")] for line in block.splitlines()]
        assert rows[-1][0] == "**sum**"
        columns = [c for c in range(1, len(rows[-1])) if re.fullmatch(r"-?[\d,]+", rows[-1][c])]
        numbers = [[int(row[c].replace(",", "")) for c in columns] for row in rows]
        sums_by_table[" | ".join(heads)] = [sum(column[:-1]) - column[-1] for column in zip(*numbers, strict=True)]
    return sums_by_table


@pytest.mark.parametrize(("card", "config", "metrics"), CARDS)
def test_the_hubs_client_reads_the_front_matter(card, config, metrics):
    parsed = DatasetCard(card(config, metrics))
    assert isinstance(parsed.data, DatasetCardData)
    assert parsed.data.task_categories == ["question-answering", "text-generation"]
    assert parsed.data.size_categories == ["1K<n<10K"]
    assert parsed.text.lstrip().startswith("# Stack Exchange")
    assert DatasetCard(str(parsed)).data.to_dict() == parsed.data.to_dict()


@pytest.mark.parametrize(("names", "front"), [
    (["CC BY-SA 4.0"], {"license": "cc-by-sa-4.0"}),
    (["CC BY-SA 4.0", "cc-by-sa-4.0"], {"license": "cc-by-sa-4.0"}),
    (["CC BY-SA 4.0", "CC BY-SA 3.0"], {"license": ["cc-by-sa-3.0", "cc-by-sa-4.0"]}),
    (["CC BY-SA 4.0", "CC BY-SA 2.5"], {"license": "other", "license_name": "cc-by-sa-2.5-and-cc-by-sa-4.0",
                                        "license_link": "https://stackoverflow.com/help/licensing"}),
    (["Mine: all\n---\nx"], {"license": "other", "license_name": "mine-all-x"}),
    ([""], {"license": "unknown"}),
    ([], {})])
def test_licences_are_the_hubs_own_or_other(names, front):
    data = DatasetCard(render_posts_card({}, {"licenses": dict.fromkeys(names, 1)})).data.to_dict()
    assert {key: value for key, value in data.items() if key.startswith("license")} == front


@pytest.mark.parametrize(("rows", "category"), [
    (0, "n<1K"), (999, "n<1K"), (1000, "1K<n<10K"), (31_300_000, "10M<n<100M"), (10**12 - 1, "100B<n<1T"),
    (10**12, "n>1T")])
def test_size_categories(rows, category):
    assert DatasetCard(render_posts_card({}, {"questions": rows})).data.size_categories == [category]


@pytest.fixture
def load(tmp_path, monkeypatch):
    """load_dataset(folder), with any use of the network an error."""
    def refused(*_):
        raise AssertionError("the network was used")
    monkeypatch.setattr(socket.socket, "connect", refused)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    return lambda folder: datasets.load_dataset(str(folder), cache_dir=str(tmp_path / "cache"))


def write(path, schema, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    kinds = {pa.int64(): 7, pa.string(): "text", TEXTS: ["a", "b"], pa.list_(ANSWER): [{"id": 1, "votes": None}]}
    row = {field.name: kinds[field.type] for field in schema}
    pq.write_table(pa.Table.from_pylist([row] * rows, schema=schema), path)


def write_beside(folder, card):
    (folder / "README.md").write_text(card, encoding="utf-8")
    (folder / "quarantine.jsonl").write_text('{"source": "x", "offset": 1}\n')
    for name in ("manifest.json", "request.json"):
        (folder / name).write_text(json.dumps({"stage": "x"}))


def test_a_posts_folder_loads_as_it_is(tmp_path, load):
    folder = tmp_path / "posts"
    for number, rows in enumerate((3, 2)):
        write(folder / f"part-{number:05d}.parquet", POSTS, rows)
    write_beside(folder, render_posts_card(POSTS_CONFIG, POSTS_METRICS))
    splits = load(folder)
    assert {name: len(rows) for name, rows in splits.items()} == {"train": 5}
    assert set(splits["train"].column_names) == set(POSTS.names)
    assert splits["train"][0]["answers"][0]["id"] == 1


@pytest.mark.parametrize("empty", [None, "without a file", "with an empty file"])
def test_a_pairs_folder_loads_as_it_is(tmp_path, load, empty):
    folder, counts = tmp_path / "pairs", {"finetune": 4, "reward": 3, "rl": 2, "evaluation": 0 if empty else 1}
    for split, rows in counts.items():
        if rows or empty != "without a file":
            write(folder / split / "part-00000.parquet", PAIRS, rows)
    write(folder / "finetune/part-00001.parquet", PAIRS, 2)
    write_beside(folder, render_pairs_card(PAIRS_CONFIG, PAIRS_METRICS | {"pairs_by_split": counts}))
    splits = load(folder)
    expected = {"finetune": 6, "reward": 3, "rl": 2} | ({} if empty else {"evaluation": 1})
    assert {name: len(rows) for name, rows in splits.items()} == expected
    assert set(splits["rl"].column_names) == set(PAIRS.names)


def test_every_column_is_explained():
    posts, pairs = render_posts_card({}, {}), render_pairs_card({}, {})
    assert not [name for name in POSTS.names if f"`{name}`" not in posts]
    assert not [field.name for field in ANSWER if f"`answers.{field.name}`" not in posts]
    assert not [name for name in PAIRS.names if f"`{name}`" not in pairs]


@pytest.mark.parametrize(("card", "config", "metrics"), CARDS)
def test_every_sum_is_exact(card, config, metrics):
    text = card(config, metrics)
    table_sums = sums(text)
    assert len(table_sums) >= 8 and not any(map(any, table_sums.values())), table_sums
    assert "not accounted for" not in text and "orphans" not in text


def test_the_funnels_end_in_what_came_in():
    assert "| **sum** | 6,000 |" in render_posts_card({}, POSTS_METRICS)
    pairs = render_pairs_card({}, PAIRS_METRICS)
    for total in ("5,500", "3,100", "1,500"):
        assert f"| **sum** | {total} |" in pairs


@pytest.mark.parametrize("rows_read", [6010, 5990])
def test_rows_that_no_reason_explains_are_said(rows_read):
    text = render_posts_card({}, POSTS_METRICS | {"rows_read": rows_read})
    assert f"| *not accounted for* | {rows_read - 6000} |" in text and f"| **sum** | {rows_read:,} |" in text
    assert not any(map(any, sums(text).values()))


def test_settings_stand_in_the_card():
    text = render_posts_card(POSTS_CONFIG, POSTS_METRICS)
    assert "| min_answers | 2 |" in text and "| tags | homebrew, lager |" in text and "at least 2 answers" in text
    assert "| asked_from | (none) |" in text and "| max_bad_rows_share | 0.01 |" in text
    assert "at most 10 are drawn" in render_pairs_card(PAIRS_CONFIG, {})


def test_the_fifty_largest_sites_and_the_rest_in_one_line():
    sites = {f"s{number:03d}.example": {"questions": number, "answers": 2 * number} for number in range(1, 181)}
    text = render_posts_card({}, {"sites": sites})
    assert text.count(".example |") == 50 and "s131.example" in text and "s130.example" not in text
    assert f"| 130 more sites | {sum(range(131)):,} | {2 * sum(range(131)):,} |" in text
    assert not any(map(any, sums(text).values()))


@pytest.mark.parametrize("card", [render_posts_card, render_pairs_card])
def test_no_metrics_no_sections(card):
    text = card({}, {})
    assert re.findall("^## (.*)", text, re.MULTILINE)[1:] == [
        "How it was made", "Licence and attribution", "Known limits"]
    assert "None" not in text and "sum" not in text and "\n\n\n" not in text
    assert "size_categories" not in text and "license:" not in text
    assert DatasetCard(text).data.configs


def hostile_metrics() -> dict:
    """Both stages' metrics, with HOSTILE and MARKED wherever a name can come from the data."""
    named = {"dropped", "dropped_questions", "dropped_posts", "dropped_pairs", "posts_not_converted", "licenses",
             "scores", "score_gaps", "question_characters", "years"}
    names = {name: {HOSTILE: 1, MARKED: 1, "7": 2} for name in named}
    names["licenses"] |= {"<CC>|BY][SA 4.0": 1}  # reads as a known one
    return POSTS_METRICS | PAIRS_METRICS | names | {"sites": {HOSTILE: {"questions": 1, "answers": 1, "pairs": 1}}}


@pytest.mark.parametrize("card", [render_posts_card, render_pairs_card])
def test_hostile_names_are_inert_in_source(card):
    kind, plain_text = card({}, POSTS_METRICS | PAIRS_METRICS), card({HOSTILE: HOSTILE}, hostile_metrics())
    front, body = re.fullmatch(r"---\n(.*?)\n---\n(.*)", plain_text, re.DOTALL).groups()
    values = yaml.safe_load(front)
    assert values["configs"] == yaml.safe_load(kind.split("---")[1])["configs"]
    assert values["pretty_name"].endswith(clean_name(HOSTILE)) and "\n" not in values["pretty_name"]
    assert DatasetCard(plain_text).data.to_dict() == values
    assert "\u202e" not in plain_text and "\x00" not in plain_text
    assert not re.findall(r"<(?!https://stackoverflow)", body) and "e.vil)" not in body.replace("&#58;//e.vil)", "")
    for block in body.split("\n\n"):
        if block.startswith("|"):
            assert len({line.count("|") for line in block.splitlines()}) == 1, block


@pytest.mark.parametrize("card", [render_posts_card, render_pairs_card])
def test_hostile_names_are_inert_when_rendered(card):
    markdown = pytest.importorskip("markdown_it").MarkdownIt("commonmark", {"html": True}).enable(
        ["table", "strikethrough"])
    page = markdown.render(card({HOSTILE: HOSTILE}, hostile_metrics()).split("\n---\n", 1)[1])
    assert set(re.findall(r"<(\w+)", page)) <= {
        "h1", "h2", "p", "pre", "code", "table", "thead", "tbody", "tr", "th", "td", "strong", "em", "ul", "li", "a"}
    assert set(re.findall(r'href="([^"]*)">([^<]*)<', page)) == {
        ("https://stackoverflow.com/help/licensing", "https://stackoverflow.com/help/licensing"),
        ("https://creativecommons.org/licenses/by-sa/4.0/", "&lt;CC&gt;|BY][SA 4.0")}
    assert set(re.findall("<(?:strong|em|code)>([^<]*)<", page)) <= {
        "sum", "not accounted for", *re.findall("`([^`\n]+)`", card({}, POSTS_METRICS | PAIRS_METRICS))}
    assert "<td>&lt;script&gt;alert('x')&lt;/script&gt;|a| --- # head [l](http://e.vil) ![i](x) `code`</td>" in page
    assert "**b** _u_ ~~s~~ $x$ &amp;lt; &amp;#60;i&gt; &lt;b \\</td>" in page


@pytest.mark.parametrize(("name", "inert"), [
    ("a|b", "a&#124;b"), ("two\nlines\tand  more", "two lines and more"), ("<b>", "&#60;b&#62;"), ("", "(none)"),
    ("stackoverflow.com", "stackoverflow.com"), ("other_name", "other_name"), ("_u_", "&#95;u&#95;"),
    ("a__b", "a&#95;&#95;b"), ("ünï", "ünï"), ("\\", "&#92;"), ("x" * 99, "x" * 79 + "…")])
def test_cells(name, inert):
    assert escape_cell(name) == inert


def test_a_histogram_has_no_hidden_gap_and_takes_keys_as_text():
    assert format_histogram({"64": 3, 0: 1, "512": 4}, ["characters", "posts"], binned=True).splitlines()[2:] == [
        "| 0 | 1 | 12.5 % | █████ |", "| 1 | 0 | 0.0 % |  |", *[
            f"| {low}–{2 * low - 1} | 0 | 0.0 % |  |" for low in (2, 4, 8, 16, 32)],
        "| 64–127 | 3 | 37.5 % | ███████████████ |", "| 128–255 | 0 | 0.0 % |  |", "| 256–511 | 0 | 0.0 % |  |",
        "| 512–1,023 | 4 | 50.0 % | ████████████████████ |", "| **sum** | 8 | 100 % |  |"]
    rows = format_histogram({"2": 1, "-1": 9999, 2: 1}, ["score", "answers"]).splitlines()[2:]
    assert [row.split(" | ")[0] for row in rows] == ["| -1", "| 0", "| 1", "| 2", "| **sum**"]
    assert rows[3] == "| 2 | 2 | under 0.1 % | ▏ |"


def test_a_histogram_of_nothing_is_nothing_and_one_of_anything_is_short():
    assert format_histogram({}, ["a", "b"]) == format_histogram({"3": 0}, ["a", "b"]) == ""
    text = format_histogram(dict.fromkeys(range(0, 10**6, 10**3), 1), ["value", "posts"])
    assert "| 961 more | 961 |" in text and "| **sum** | 1,000 |" in text and len(text.splitlines()) == 43


def test_largest_and_funnel_by_hand():
    assert top_rows([("b", 1, 1), ("a", 1, 1), ("c", 5, 0)], limit=1) == [("c", 5, 0), ("2 more", 2, 2)]
    assert add_funnel_sum([("kept", 2)], 5) == [("kept", 2), ("*not accounted for*", 3), ("**sum**", 5)]
    assert add_funnel_sum([]) == add_funnel_sum([], 0) == []
