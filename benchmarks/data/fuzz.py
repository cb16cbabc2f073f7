"""Fuzz the code that reads untrusted bytes, the HTML of posts and the dumps, guided by coverage.

    python -m benchmarks.data.fuzz markdown --seconds 900
    python -m benchmarks.data.fuzz dump --seconds 900 --corpus /tmp/dumps

A crash is any exception that the code does not document, an input that takes over 5 s, or more than 2 GB of memory.
libFuzzer writes the input beside the corpus, and the exit status is not 0. Needs `pip install atheris`.
"""

import argparse
import re
import sys
import tempfile
from collections.abc import Callable
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path

TIMEOUT_SECONDS, MEMORY_MB, LONGEST = 5, 2048, 60_000
ROWS = '<row Id="1" PostTypeId="1" AcceptedAnswerId="2" Score="3" Title="t" Body="&lt;p&gt;a&lt;/p&gt;" ' \
       'CreationDate="2020-01-01T00:00:00.000" OwnerUserId="7" Tags="&lt;a&gt;" ContentLicense="CC BY-SA 4.0" />\n' \
       '<row Id="2" PostTypeId="2" ParentId="1" Score="-1" Body="b" CreationDate="2020-01-01T00:00:00.000" />\n' \
       '<row Id="3" PostTypeId="2" ParentId="1" Score="5" Body="c&amp;#xA;" CreationDate="2020-01-01T00:00:00.000" />\n'


def markdown_target() -> Callable[[bytes], None]:
    """Make the target that converts HTML in both styles."""
    from stages.stackexchange.markdown.convert import NotConvertedError, make_converter
    converters = {style: make_converter(style) for style in ("published", "clean")}

    def target(data: bytes) -> None:
        text = data.decode("utf-8", "surrogateescape")  # lone surrogates too
        for style, convert in converters.items():
            try:
                markdown = convert(text, "html")
                markdown.encode()
                assert style == "published" or "\0" not in markdown, "a mark of code was not replaced"
            except NotConvertedError as error:
                if re.search("RecursionError|MemoryError", str(error)):  # the limits must prevent these
                    raise
    return target


def dump_target() -> Callable[[bytes], None]:
    """Make the target that runs the posts stage on a Posts.xml."""
    from stages import posts
    from stages.recipe.sections.data import Posts
    config = Posts(max_bad_rows_share=1.0)

    def target(data: bytes) -> None:
        with tempfile.TemporaryDirectory() as folder:
            dump, out = Path(folder) / "Posts.xml", Path(folder) / "out"
            dump.write_bytes(data)
            out.mkdir()
            try:
                with redirect_stderr(StringIO()):  # progress bars
                    posts.run(config, out, dump=[str(dump)])
            except ValueError as error:
                if not str(error) or "\n" in str(error):  # the message must be one line
                    raise
    return target


def markdown_seeds() -> list[bytes]:
    """Return the HTML of the Markdown tests."""
    from tests.stackexchange.test_markdown import GOLDEN, HOSTILE, ODD
    shapes = [shape[1] for shape in GOLDEN] + [*HOSTILE.values(), *ODD.values()]
    return [markup.encode("utf-8", "replace")[:2000] for markup in shapes]


def dump_seeds() -> list[bytes]:
    """Return valid and broken dumps."""
    head, whole = '<?xml version="1.0" encoding="utf-8"?>\n', f"<posts>\n{ROWS}</posts>\n"
    texts = [head + whole, "\ufeff" + head + whole, whole.replace('"', "'"), whole.replace("\n", "\r\n"), head, "",
             head + whole[:-40], head + "<!DOCTYPE posts [<!ENTITY a 'b'>]>" + whole, "<html><body>no</body></html>",
             head + whole.replace("posts>", "users>"), whole.replace("b", "&#xD800;"), whole.replace('"2"', '"1"')]
    return [text.encode() for text in texts]


TARGETS = {"markdown": (markdown_target, markdown_seeds, "stages.stackexchange bs4 markdownify html"),
           "dump": (dump_target, dump_seeds, "stages")}
WORDS = {
    "markdown": """<p> </p> <b> <pre class= <code> </code> </pre> <ul> <ol start= <li> <blockquote> <table> <tr> <td>
        colspan= <th> <thead> <tbody> <a href= <img alt= src= <br> <h1> <kbd> <sub> <dl> <dt> <dd> <!-- --> <![CDATA[
        ]]> <!DOCTYPE <? &lt; &amp; &#32; ``` <script> <del> title= spoiler lang-""",
    "dump": """<row <posts> </posts> Id= PostTypeId= ParentId= Score= Body= Title= Tags= AcceptedAnswerId= &lt; &amp;
        &#x <!DOCTYPE <!ENTITY <![CDATA[ ]]> <!-- --> <?xml encoding= CreationDate= OwnerUserId= ContentLicense="""}


def main() -> None:
    """Parse the command line and fuzz."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", choices=TARGETS)
    parser.add_argument("--seconds", type=int, default=900)
    parser.add_argument("--corpus", type=Path, help="folder for interesting inputs (default: a new one in /tmp)")
    args = parser.parse_args()
    try:
        import atheris
    except ImportError:
        sys.exit("benchmarks.data.fuzz needs atheris: pip install atheris")
    build, seeds, packages = TARGETS[args.target]
    with atheris.instrument_imports(include=packages.split()):  # before the seeds import any of them
        target = build()
    corpus = args.corpus or Path(tempfile.mkdtemp(prefix=f"fuzz_{args.target}_"))
    corpus.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(seeds()):
        (corpus / f"seed-{number:03}").write_bytes(seed)
    words = corpus.with_name(corpus.name + ".words")
    words.write_text("".join(f'"{word}"\n' for word in WORDS[args.target].split()))
    print(f"corpus: {corpus}", flush=True)
    atheris.Setup([sys.argv[0], str(corpus), f"-max_total_time={args.seconds}", f"-timeout={TIMEOUT_SECONDS}",
                   f"-rss_limit_mb={MEMORY_MB}", f"-max_len={LONGEST}", f"-dict={words}",
                   f"-artifact_prefix={corpus}.", "-print_final_stats=1"], target)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
