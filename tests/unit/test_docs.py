"""The pages of the repository: links, README's size and example, generated parts, wording."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gkd.config.check import check_config
from gkd.config.load import load_config
from teacher_server.cli import serve
from tests.mutants.mutant import problems
from tests.mutants.numerics import MUTANTS
from tests.structure import MAP, MAP_PAGE, ROOMS, ROOMS_PAGE, ROOT, package_map, rooms_picture, written
from tests.wording import PLACES, files_of, hits_of

PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")])
_LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]*))?\)")
_FENCE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", _FENCE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_link_leads_to_a_file_and_a_heading() -> None:
    """Fails if a page sends its reader to a file or heading that does not exist."""
    broken, n_links = [], 0
    for page in PAGES:
        for target, anchor in _LINK.findall(_FENCE.sub("", page.read_text())):
            n_links += 1
            file = (page.parent / target).resolve() if target else page
            if not file.exists() or (anchor and file.suffix == ".md" and anchor not in anchors(file)):
                broken.append(f"{page.relative_to(ROOT)}: {target}#{anchor}")
    assert n_links > 40 and not broken


def test_every_named_file_exists() -> None:
    """Fails if a page names a source file that was moved or deleted."""
    named = re.compile(r"`((?:gkd|teacher_server|tests|launch|configs|examples)/[\w/.]+\.(?:py|sh|yaml))`")
    pages = [page for page in PAGES if page.name != "CHANGELOG.md"]
    missing = [f"{p.name}: {f}" for p in pages for f in named.findall(p.read_text()) if not (ROOT / f).exists()]
    assert not missing


def test_the_readme_stays_short() -> None:
    """Fails if the README grows into a manual again."""
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 180 and len(text.split()) <= 1350


def test_the_readme_s_configuration_is_valid(tmp_path: Path) -> None:
    """Fails if a newcomer's first YAML is refused."""
    (example,) = re.findall(r"```yaml\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    file = tmp_path / "mine.yaml"
    file.write_text(example)
    check_config(load_config(file, []))


METHODS = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs" / "methods.md").read_text(), re.DOTALL)


@pytest.mark.parametrize("block", METHODS)
def test_the_settings_of_a_method_are_valid(block: str, tmp_path: Path) -> None:
    """Fails if settings that a user copies from docs/methods.md into a run are refused, or change nothing."""
    run = ROOT / "configs" / "gsm8k_qwen2.5_1.5b.yaml"
    file = tmp_path / "method.yaml"
    file.write_text(block)
    config = load_config([run, file])
    check_config(config)
    assert config != load_config(run)


@pytest.mark.parametrize(
    ("page", "part", "borders"), [(MAP_PAGE, package_map, MAP), (ROOMS_PAGE, rooms_picture, ROOMS)]
)
def test_generated_parts_of_pages_are_current(page: Path, part: Callable[[], str], borders: tuple[str, str]) -> None:
    """Fails if a page shows other packages or imports than there are: run python -m tests.structure --write-map."""
    text = page.read_text()
    assert text == written(text, part(), borders)


def test_the_listed_habits_of_wording_do_not_return() -> None:
    """Fails if a docstring, comment or page has a habit that tests/wording.py lists: see its --list."""
    files = files_of([ROOT / place for place in PLACES])
    assert len(files) > 500 and not [hit for file in files for hit in hits_of(file)]


def test_the_own_pipeline_page_runs() -> None:
    """Fails if the page's Python example is wrong."""
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "own_pipeline.md").read_text(), re.DOTALL)
    exec(compile(example, "own_pipeline.md", "exec"), {})


def test_the_own_pipeline_stays_short() -> None:
    """Fails if the example grows beyond what its page promises, or its settings are invalid."""
    example = ROOT / "examples" / "own_pipeline.py"
    assert len(example.read_text().split('"""', 2)[2].strip().splitlines()) <= 40
    check_config(load_config(example.with_suffix(".yaml"), []))


def test_every_mutant_fits_the_tree() -> None:
    """Fails if code or tests moved away from under a mutant: `python -m tests.mutants` could not run."""
    assert problems(MUTANTS, ROOT) == []


def commands(program: str) -> Iterator[tuple[Path, list[str]]]:
    """Yield the page and the arguments of each command line of a program in the fenced blocks of the pages."""
    for page in PAGES:
        for block in _FENCE.findall(page.read_text()):
            for line in block.replace("\\\n", " ").splitlines():
                if match := re.match(rf"\s*(?:node-\w\$ )?(?:{program}) (.*)", line):
                    yield page, shlex.split(match[1], comments=True)


def test_the_flags_of_the_teacher_server_on_the_pages_exist() -> None:
    """Fails if a command that a page shows ends with "unrecognized arguments"."""
    found = list(commands("bash launch/teacher.sh|gkd teacher|python -m teacher_server"))
    served = [(page, words) for page, words in found if words[0].startswith("-")]
    assert len(served) >= 8
    for page, words in served:
        parsed, unknown = serve.build_parser().parse_known_args(words)
        assert not unknown and (parsed.model or parsed.teacher), (page.name, words)
