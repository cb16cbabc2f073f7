"""Generate the pieces of synthetic posts: sentences, code and blocks, as HTML escaped for an XML attribute.

There are more pieces than a page of Parquet holds, so that files of them compress about as well as text.
"""

import random
from dataclasses import dataclass
from functools import cache
from html import escape
from itertools import accumulate
from string import Template

SENTENCES, PHRASES, CHUNKS, TAGS, RARE_WORDS = 40_000, 8_000, 8_000, 400, 6_000
COMMON = (
    "the to a of is in and it i that this for you with on be not have as are but if can or an from my use "
    "when what at do by so will which there would how your no any all like we one should get has only then "
    "was need some they want just using code more other also work see way same time because does set first "
    "value new file data function type where class error here run know each line number try problem change "
    "call two look without could find before think even"
)
SYLLABLES = "ba ce di for gra hu in jo ker lam men nor op pre qua ris sol ter un ver wim xi yor zed sta tion al"
CODE = [Template(text) for text in (
    'def ${a}_$b($c, limit=$n):\n    for $d in $c:\n        if $d > limit and $d != "$b":\n            return $d\n',
    'const $a = await fetch(`/$b?page=$n`);\nif (!$a.ok && $c) {\n    throw new Error("$d");\n}\n',
    "SELECT $a, COUNT(*) AS $b\nFROM $c t\n  JOIN $d u ON u.id = t.$a\nWHERE t.$b <= $n\nGROUP BY $a;\n",
    "template <typename T>\nvoid $a(std::vector<T>& $b) {\n    for (auto& $c : $b)\n        $c <<= $n;  // $d\n}\n",
    '<div class="$a-$b">\n    <a href="#$c" data-$d="$n">$c &amp; $d</a>\n</div>\n',
    "$a --$b=$n /usr/local/$c | grep -v '$d' > $a.log 2>&1\n",
    "Traceback (most recent call last):\n  File \"$a.py\", line $n, in $b\n    $c.$d()\n"
    "AttributeError: 'NoneType' object has no attribute '$d'\n",
    "public List<$a> $b(Map<String, $c> $d) {\n\treturn $d.keySet().stream()\n\t\t.filter(k -> k.length() > $n)\n}\n",
    '{\n  "$a": {"$b": $n, "$c": ["$d", null]},\n  "${a}_$d": true\n}\n',
    "$a <- subset($b, $c > $n & !is.na($d))\nplot($a$$$d ~ $a$$$c)\n",
)]


@dataclass(frozen=True)
class Block:
    """A block element: `opening`, some pieces of `pool` joined by `between`, `closing`."""

    opening: str
    between: str
    closing: str
    pool: list[str]
    numbers: range


@dataclass(frozen=True)
class Pieces:
    """The pieces of posts; `blocks` repeats each block by its frequency."""

    sentences: list[str]
    phrases: list[str]
    tags: list[str]
    blocks: list[Block]


def attribute(html: str) -> str:
    """Escape as the dumps escape attributes."""
    return escape(html).replace("&#x27;", "'").replace("\n", "&#xA;").replace("\t", "&#x9;")


@cache
def pieces() -> Pieces:
    """Generate the pieces, the same for every seed, once; it takes a second."""
    rng = random.Random("pieces")
    syllables = SYLLABLES.split()
    rare = sorted({"".join(rng.choices(syllables, k=rng.choice((2, 2, 3, 3, 4)))) for _ in range(RARE_WORDS)})
    rng.shuffle(rare)
    words = COMMON.split() + rare
    odds = list(accumulate(1 / (rank + 3) for rank in range(len(words))))  # Zipf's law

    def draw(number: int) -> list[str]:
        return rng.choices(words, cum_weights=odds, k=number)

    sentences = [attribute(_sentence(rng, draw(rng.randint(5, 24)))) for _ in range(SENTENCES)]
    phrases = [" ".join(draw(rng.randint(2, 6))).capitalize() for _ in range(PHRASES)]
    chunks = [attribute(escape(_chunk(rng, rare), quote=False)) for _ in range(CHUNKS)]
    return Pieces(sentences, phrases, rare[:TAGS], _blocks(rng, sentences, phrases, chunks))


def _sentence(rng: random.Random, words: list[str]) -> str:
    """Join words to a sentence; every third has markup or special characters."""
    index, kind = rng.randrange(1, len(words)), rng.random()
    word, first = words[index], words[0]
    if kind < 0.11:
        words[index] = f"<code>{word}_{first}({rng.choice(('', 'x &lt; 1', '&amp;y'))})</code>"
    elif kind < 0.16:
        words[index] = f"<em>{word}</em>"
    elif kind < 0.20:
        words[index] = f"<strong>{word}</strong>"
    elif kind < 0.26:
        words[index] = f'<a href="https://{word}.example/{first}?a={index}&amp;b=1" rel="nofollow">{word}</a>'
    elif kind < 0.29:
        words[index] = f"{word}{rng.choice((' &amp;', ' &lt;-', ' —', ' → é', ' 日本', '&nbsp;&gt;'))}"
    elif kind < 0.30:
        words[index] = f"{word}<br>\n"
    words[0] = first.capitalize()
    return " ".join(words) + rng.choice("....?:!")


def _chunk(rng: random.Random, names: list[str]) -> str:
    drawn = dict(zip("abcd", rng.choices(names, k=4), strict=True))
    return rng.choice(CODE).substitute(drawn, n=rng.randint(0, 999))


def _blocks(rng: random.Random, sentences: list[str], phrases: list[str], chunks: list[str]) -> list[Block]:
    """Return a hundred blocks, with the shares of real posts and stackoverflow.com's share of code."""
    images = [attribute(f'https://i.stack.imgur.com/{rng.randbytes(4).hex()}.png" alt="{phrase}')
              for phrase in phrases[:1000]]
    cells = [f"{left}{attribute('</td><td>')}{right}" for left, right in zip(phrases[::2], phrases[1::2], strict=True)]
    shares = [
        (58, "<p>", " ", "</p>\n\n", sentences, range(1, 6)),
        (18, "<pre><code>", "\n", "</code></pre>\n\n", chunks, range(1, 6)),
        (4, '<pre class="lang-py prettyprint-override"><code>', "\n", "</code></pre>\n", chunks, range(1, 6)),
        (5, "<ul>\n<li>", "</li>\n<li>", "</li>\n</ul>\n\n", sentences, range(2, 7)),
        (3, "<ol>\n<li><p>", "</p></li>\n<li><p>", "</p></li>\n</ol>\n\n", sentences, range(2, 6)),
        (4, "<blockquote>\n  <p>", " ", "</p>\n</blockquote>\n\n", sentences, range(1, 4)),
        (4, "<h2>", " ", "</h2>\n\n", phrases, range(1, 2)),
        (2, '<p><img src="', "", '"></p>\n\n', images, range(1, 2)),
        (1, '<div class="s-table-container"><table>\n<tr><th>a</th><th>b</th></tr>\n<tr><td>',
         "</td></tr>\n<tr><td>", "</td></tr>\n</table></div>\n", cells, range(2, 8)),
        (1, "<hr>\n", "", "\n", [""], range(1, 2)),
    ]
    return [Block(*map(attribute, html), pool, numbers)
            for share, *html, pool, numbers in shares for _ in range(share)]
