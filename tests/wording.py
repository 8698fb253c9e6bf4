"""Count habits of wording that make texts hard to read: `python -m tests.wording [--list] [--root DIR] [PLACE ...]`.

Checked are docstrings, comments and Markdown. The list is an aid: it finds words that were used for want of the field's
term ("beside" for during, "under way" for in flight), not bad sentences. CONTRIBUTING.md has the rules.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PLACES = ("gkd", "teacher_server", "tests", "launch", "examples", "docs", "README.md", "CONTRIBUTING.md")

WORDS = {
    "a process is no person": r"nobody|somebody|whoever|whomever|whom|(?<!those )who(?![-:=])",
    "anew": r"anew",
    "under way": r"under way",
    "at the most": r"at the most",
    "is no X": r"(?<!there )(?:is|are|was|were) no (?!longer|more )\w+",
    "says": r"says|said|is told|are told|is asked|are asked",
    "beside": r"beside",
    "code with a mind": r"wants|knows|bears",
    "to the bit": r"to the bit",
    "for people, by hand, all the same, so many": r"for people|by hand|all the same|so many",
}
_HABITS = {name: re.compile(rf"\b(?:{words})\b", re.IGNORECASE) for name, words in WORDS.items()}
_OPENING = re.compile(r"(What|Of|Which|Who|Whether)\b|[^.\n]*\?")
# A comment behind code that needs the code to be a sentence ("of each worker"), and the folders that have none.
_HEADLESS = re.compile(r"#+ (?:of|by|as|also|those|that|until)\b")
_WITHOUT_HEADLESS = re.compile(
    r"(?:teacher_server|launch|gkd/(?:actor|cluster|config|data|hf|metrics|pipeline|preflight|reward|rollout|run"
    r"|teacher))/"
)
# A text without a match of this has no hit. Most files have none, and it is faster than to read their tokens.
_SUSPECT = re.compile(
    rf"\b(?:{'|'.join(WORDS.values())})\b|\"\"\"(?:{_OPENING.pattern})|#+ (?:of|by|as|also|those|that|until)\b",
    re.IGNORECASE,
)
_CODE = re.compile(r"```.*?```|`[^`\n]*`|\"[^\"\n]*\"", re.DOTALL)  # code and quotations are not our wording


class Hit(NamedTuple):
    file: str
    line: int
    habit: str
    text: str


def python_texts(source: str) -> Iterator[tuple[int, str, bool]]:
    """Yield (line, text, is a docstring) of each docstring and comment."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            doc = ast.get_docstring(node)
            if doc:
                yield node.body[0].lineno, doc, True
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string, False


def headless_comments(source: str, file: str) -> Iterator[Hit]:
    """Yield the comments behind code that begin with a preposition or a pronoun whose noun is missing."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and _HEADLESS.match(token.string) and token.line[: token.start[1]].strip():
            yield Hit(file, token.start[0], "comment without its noun", token.string)


def hits_in(text: str, line: int, file: str, *, is_docstring: bool = False) -> Iterator[Hit]:
    """Yield the habits found in one text."""
    plain = _CODE.sub(lambda code: re.sub(r"[^\n]", " ", code[0]), text)
    if is_docstring and _OPENING.match(plain):
        yield Hit(file, line, "docstring without a verb", text.splitlines()[0])
    for habit, pattern in _HABITS.items():
        for match in pattern.finditer(plain):
            number = plain.count("\n", 0, match.start())
            yield Hit(file, line + number, habit, text.splitlines()[number].strip())


def hits_of(path: Path, root: Path = ROOT) -> list[Hit]:
    """Return the habits found in a Python or Markdown file."""
    name, source = path.relative_to(root).as_posix(), path.read_text()
    if path.suffix == ".md":
        return list(hits_in(source, 1, name))
    if not _SUSPECT.search(source):
        return []
    hits = [h for line, text, doc in python_texts(source) for h in hits_in(text, line, name, is_docstring=doc)]
    return [*hits, *headless_comments(source, name)] if _WITHOUT_HEADLESS.match(name) else hits


def files_of(places: list[Path]) -> list[Path]:
    """Return the checked files of files and folders."""
    return [
        file
        for place in places
        for file in (sorted(place.rglob("*")) if place.is_dir() else [place])
        if file.suffix in (".py", ".md") and "results" not in file.parts and file != Path(__file__)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("places", nargs="*", help="files or folders; default: everything")
    parser.add_argument("--root", type=Path, default=ROOT, help="another checkout")
    parser.add_argument("--list", action="store_true", help="print every line")
    args = parser.parse_args()
    root = args.root.resolve()
    files = files_of([root / place for place in args.places or PLACES if (root / place).exists()])
    hits = [hit for file in files for hit in hits_of(file, root)]
    if args.list:
        for hit in hits:
            print(f"{hit.file}:{hit.line}: {hit.habit}: {hit.text}")
    for what, counts in (
        ("habit", Counter(hit.habit for hit in hits)),
        ("folder", Counter("/".join(hit.file.split("/")[:2]) for hit in hits)),
    ):
        print(f"by {what}: " + (", ".join(f"{name} {n}" for name, n in counts.most_common()) or "none"))
    print(f"{len(hits)} in {len({hit.file for hit in hits})} of {len(files)} files")


if __name__ == "__main__":
    main()
