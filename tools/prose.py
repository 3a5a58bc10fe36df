#!/usr/bin/env python3
"""Checks the language of documentation and of comments: tools/prose.py [FILE ...]

Without files it checks README.md, CONTRIBUTING.md, ARCHITECTURE.md, all pages of docs, the descriptions in docs/openapi.json, and the
comments of all Rust files. A file is Markdown, or by the end of its name

.txt   plain text
.json  a description of an API: its summaries and descriptions are checked
.tsv   lines of a name, a tab, and a text, such as an option and its help
.rs    a Rust file: its comments are checked

Code blocks and code within a line are not checked, except for the length of lines in Markdown and plain text.

Prints FILE:LINE: and what to change, for

- a line of prose with more than 100 columns,
- a word of WORDS, with what to write instead,
- a sentence or heading that begins with a word of OPENINGS: its subject is a pronoun, and the reader must guess the noun,
- a sentence of more than 40 words,
- the name of a test with more than 60 characters.

The exit status is 1 if there is any.
"""

import json
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).parent.parent
PAGES = ["README.md", "CONTRIBUTING.md", "ARCHITECTURE.md"]
# The words of other people.
EXCLUDED = {"docs/sources.md"}

MAX_COLUMNS = 100
MAX_WORDS = 40

# Regular expressions of words, and what to write instead.
WORDS = {
    r"g(?:o|oes|oing) on|went on": "continues, resumes",
    r"who(?:ever|mever)|whatever|whichever": "name the noun; conditions with 'if'",
    r"nobody|somebody": "'no client', 'another process': name who",
    r"likewise": "'also', or say it again",
    r"(?:is|are|was|were|be|been|being) (?:told|said)": "reports, shows, prints, logs; or name who says it",
    r"tells? of": "reports, shows",
    r"says? so": "say what is printed, and where",
    r"so (?:long|many|much)": "name the quantity",
    r"as long as": "while, until",
    r"sees? to|seen to": "manages",
    r"becomes? of": "say what happens",
    r"there (?:is|are) none": "'no ... exists'",
    r"what there (?:is|are)": "name it",
    r"beside": "next to, at the same time as",
    r"daemon": "server",
    r"lets? go|letting go": "releases, closes",
    r"hears?|heard": "is notified, receives",
    r"but for": "except",
    r"in vain": "without success",
    r"afar|far away": "remote",
    r"those who|he who|who has|who have": "name the noun",
    r"keepsake|estate|heirs?|unkept": "saved state, handover state, successor, transient",
    r"has to do with": "say how",
    r"of use": "useful",
    r"at all times": "always",
    r"by and by": "gradually",
    r"thereof|thereby|hereby|wherein": "name the noun",
    r"os error": "only the cause",
    r"is wanted|are wanted": "is needed, or who requests it",
    r"it is (?:that|there)": "name the noun",
    r"ones?'s? own": "name whose",
}

# Words with which no sentence begins.
OPENINGS = {
    "It": "name the noun",
    "Its": "name the noun",
    "They": "name the noun",
    "Their": "name the noun",
    "This": "name the noun ('This option ...' is fine)",
    "That": "name the noun",
    "These": "name the noun ('These files ...' is fine)",
    "Those": "name the noun",
    "One": "name the noun",
    "Who": "name the noun",
    "Whose": "name the noun",
    "What": "name the noun, or ask a question",
    "Such": "name the noun",
    "Nothing": "'No ...'",
    "Nor": "a sentence of its own",
    "So": "'Therefore', or leave it out",
    "There": "name the noun",
    "Of": "begin with the subject",
}
# After these openings a noun may follow.
WITH_NOUN = {"This", "These"}
VERB = re.compile(r"(?:is|are|was|has|have|does|do|can|may|must|will|would|holds?|needs?|makes?|means?|takes?|gives?|also|in|at|by)\b")

FENCE = re.compile(r"^\s*(```|~~~)")
CODE = re.compile(r"`[^`]*`")
LINK = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")
HTML = re.compile(r"<[^>]+>")
# Where a sentence ends.
END = re.compile(r"(?<=[.!?])[)\"*_]*\s+|:\s+(?=[A-Z])")
BEGIN = re.compile(r"^[\W_]*(\w+)\s+(\w+)?")


class Paragraph:
    """Lines of prose that belong together; a table's cells are separate ones."""

    def __init__(self, line, text):
        self.line, self.text = line, text


def paragraphs(text, is_markdown):
    """Yields the paragraphs of a text, and None with its number for each line that is too long."""
    lines, begin, is_code = [], 0, False
    for number, line in enumerate(text.splitlines(), 1):
        if is_markdown and FENCE.match(line):
            is_code = not is_code
            line = ""
        elif is_code or (is_markdown and line.startswith("    ") and not lines):
            continue
        is_table = is_markdown and line.lstrip().startswith("|")
        if len(line) > MAX_COLUMNS and not is_table and " " in LINK.sub(r"\1", line)[:MAX_COLUMNS]:
            yield number, None
        is_new = not line.strip() or is_table or re.match(r"\s*(?:[-*#>]|\d+\.)\s", line) or line.startswith("#")
        if is_new and lines:
            yield begin, " ".join(lines)
            lines = []
        if is_table:
            for cell in line.strip().strip("|").split("|"):
                yield number, cell
        elif line.strip():
            if not lines:
                begin = number
            lines.append(line.strip())
    if lines:
        yield begin, " ".join(lines)


def plain(text):
    """A paragraph without code, addresses of links, and markup. Code counts as a word."""
    text = CODE.sub("CODE", text)
    text = LINK.sub(r"\1", text)
    text = HTML.sub("", text)
    return re.sub(r"^(?:[-*#>]+|\d+\.)\s+", "", text.strip())


def problems(text, is_markdown):
    """Yields a line's number and what is wrong there."""
    for number, paragraph in paragraphs(text, is_markdown):
        if paragraph is None:
            yield number, f"more than {MAX_COLUMNS} columns"
            continue
        prose = plain(paragraph)
        for word, instead in WORDS.items():
            for found in re.finditer(rf"(?<![\w-])(?:{word})(?![\w-])", prose, re.IGNORECASE):
                yield number, f"'{found[0]}': {instead}"
        for sentence in END.split(prose):
            words = len(sentence.split())
            if words > MAX_WORDS:
                yield number, f"a sentence of {words} words: '{sentence[:40]}...'"
            begin = BEGIN.match(sentence)
            if not begin or begin[1] not in OPENINGS:
                continue
            is_question = sentence.rstrip().endswith("?")
            has_noun = begin[1] in WITH_NOUN and begin[2] and not VERB.match(begin[2])
            if not is_question and not has_noun:
                yield number, f"'{sentence[:30]}...' begins with '{begin[1]}': {OPENINGS[begin[1]]}"


def in_json(value, place=""):
    """Yields the place and the text of each summary and description."""
    if isinstance(value, list):
        value = dict(enumerate(value))
    if not isinstance(value, dict):
        return
    for key, inner in value.items():
        if key in ("summary", "description") and isinstance(inner, str):
            yield f"{place}/{key}", inner
        else:
            yield from in_json(inner, f"{place}/{key}")


def texts(file):
    """Yields the texts of a file, each with its name."""
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".json":
        yield from in_json(json.loads(text))
    else:
        yield from (line.split("\t", 1) for line in text.splitlines())


# Comments of Rust; strings and characters, so that "//" in them is no comment.
RUST = re.compile(
    r"""(?P<comment>//[^\n]*)|b?r(?P<hashes>\#*)"(?:.|\n)*?"(?P=hashes)|b?"(?:\\.|[^"\\])*"|b?'(?:\\.[^']*|[^'\\\n])'""", re.DOTALL
)
TEST = re.compile(r"#\[test\]\s*(?:#\[[^\]]*\]\s*)*fn (\w+)")
MAX_TEST_NAME = 60
COMMENT = re.compile(r"(//[/!]?) ?(.*)")


def comments(text):
    """Yields the comments of Rust, each with the number of its first line. Lines of one kind below each other are one comment."""
    found, last = [], None
    for match in RUST.finditer(text):
        if not match["comment"]:
            continue
        number = text.count("\n", 0, match.start()) + 1
        # A comment after code stands alone.
        is_whole = not text[text.rfind("\n", 0, match.start()) + 1 : match.start()].strip()
        kind, words = COMMENT.match(match["comment"]).groups()
        if is_whole and last == (number - 1, kind):
            found[-1][1].append(words)
        else:
            found.append((number, [words]))
        last = (number, kind) if is_whole else None
    for number, lines in found:
        yield number, "\n".join(lines)


def problems_of(file):
    """Yields where something is wrong in a file, and what."""
    if file.suffix == ".rs":
        text = file.read_text(encoding="utf-8")
        for begin, comment in comments(text):
            for number, what in problems(comment, True):
                if "columns" not in what:
                    yield begin + number - 1, what
        for number, line in enumerate(text.splitlines(), 1):
            if line.lstrip().startswith("//") and len(line) > MAX_COLUMNS and " " in line.strip()[3:]:
                yield number, f"more than {MAX_COLUMNS} columns"
        for test in TEST.finditer(text):
            if len(test[1]) > MAX_TEST_NAME:
                yield text.count("\n", 0, test.start(1)) + 1, f"'{test[1]}' has more than {MAX_TEST_NAME} characters"
        return
    if file.suffix in (".json", ".tsv"):
        for name, text in texts(file):
            for paragraph in text.split("\n\n"):
                # Each text is one line: its author does not break it.
                for _, what in problems(" ".join(paragraph.split()), False):
                    if "columns" not in what:
                        yield name, what
        return
    yield from problems(file.read_text(encoding="utf-8"), file.suffix == ".md")


def pages():
    found = [*PAGES, *(str(path.relative_to(ROOT)) for path in sorted(ROOT.glob("docs/**/*.md"))), "docs/openapi.json"]
    rust = (path for folder in ("crates", "tests", "fuzz") for path in sorted((ROOT / folder).rglob("*.rs")))
    return [*(ROOT / page for page in found if page not in EXCLUDED), *(path for path in rust if "target" not in path.parts)]


def main():
    files = [pathlib.Path(name) for name in sys.argv[1:]] or pages()
    count = 0
    for file in files:
        for place, what in problems_of(file):
            count += 1
            print(f"{file}:{place}: {what}")
    sys.exit(1 if count else 0)


if __name__ == "__main__":
    main()
