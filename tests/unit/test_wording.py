"""Tests compare types, keys, numbers and identifiers of errors; test_messages.py alone compares words."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import gkd.errors
import teacher_server.errors

OWN = {"KeysError", "ProtocolError", *vars(gkd.errors), *vars(teacher_server.errors)}
WORDS = re.compile(r"(?:[a-z]|(?<=[a-z])'(?=[a-z])|\.\*| )+")


def compared_words(source: str) -> Iterator[str]:
    """Yield the literals of plain words that a test compares with the message of an error of the project."""
    for node in ast.walk(ast.parse(source)):
        text: ast.AST | None = None
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.raises" and node.args:
            if OWN & {name.id for name in ast.walk(node.args[0]) if isinstance(name, ast.Name)}:
                text = next((keyword.value for keyword in node.keywords if keyword.arg == "match"), None)
        elif isinstance(node, ast.Compare) and re.fullmatch(
            r"str\(\w*(error|\.value)\)", ast.unparse(node.comparators[0])
        ):
            text = node.left
        if isinstance(text, ast.Constant) and WORDS.fullmatch(str(text.value)):
            yield str(text.value)


def test_no_test_compares_the_words_of_an_error() -> None:
    """Fails if a test depends on the wording of a message: a better wording would then break it."""
    found = "with pytest.raises(KeysError, match='no .* file'): assert 'two words' in str(caught.value)"
    assert list(compared_words(found)) == ["no .* file", "two words"]
    assert not list(compared_words("with pytest.raises((KeysError, OSError), match=\"'signal' of a.b\"): f()"))
    tests = Path(__file__).parents[1].rglob("*.py")
    assert not {path.name: words for path in tests if (words := list(compared_words(path.read_text())))}
