"""The documentation is run: its code, its outputs, and everything it names."""

from __future__ import annotations

import ast
import contextlib
import io
import math
import re
import tomllib
from pathlib import Path

import pytest

from fmol.config import ConfigError, read_config

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "fmol"
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e-?\d+)?")


def blocks(page: Path) -> list[tuple[str, str]]:
    """The fenced blocks of a page: (language, text)."""
    return BLOCK.findall(page.read_text(encoding="utf-8"))


def agree(shown: str, printed: str) -> bool:
    """The same words, and numbers within 5 %: the last digits belong to the machine."""
    if NUMBER.sub("#", shown).split() != NUMBER.sub("#", printed).split():
        return False
    pairs = zip(NUMBER.findall(shown), NUMBER.findall(printed), strict=True)
    return all(math.isclose(float(a), float(b), rel_tol=0.05, abs_tol=2e-3) for a, b in pairs)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_code_of_a_page_runs_in_order_and_prints_what_is_shown(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """```python blocks share one namespace; a ```text block right after one is what it prints."""
    if page.name == "flower.md":
        pytest.importorskip("flwr", reason='needs flwr: pip install "fmol[flower]"')
    monkeypatch.chdir(tmp_path)  # A page may write a report where its reader works.
    namespace: dict[str, object] = {"__name__": page.stem}
    printed: str | None = None
    for language, text in blocks(page):
        if language == "python":
            output = io.StringIO()
            with contextlib.redirect_stdout(output):
                exec(compile(text, page.name, "exec", dont_inherit=True), namespace)
            printed = output.getvalue()
        elif language == "text" and printed is not None:
            assert agree(text, printed), (
                f"{page.name} shows\n{text}\nand the code prints\n{printed}"
            )
            printed = None
        else:
            printed = None


def source(path: str) -> Path | None:
    """The file a page means: relative to the package, or to the repository."""
    return next((root / path for root in (PACKAGE, ROOT) if (root / path).is_file()), None)


def defined(path: Path) -> set[str]:
    """Everything a file defines, at whatever depth: functions, classes, assigned names."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_file_a_page_names_exists_and_defines_what_is_said_of_it(page: Path) -> None:
    """`file.py`: `name`, `name` is a promise, in tables and in sentences."""
    prose = BLOCK.sub("", page.read_text(encoding="utf-8"))
    for path in re.findall(r"`([\w./]+\.py)`", prose):
        assert source(path) is not None, f"{page.name} names {path}, which does not exist"
    for path, names in re.findall(r"`([\w./]+\.py)`: ((?:`\w+`(?:, )?)+)", prose):
        file = source(path)
        assert file is not None
        for name in re.findall(r"`(\w+)`", names):
            assert name in defined(file), f"{page.name} says {path} defines {name}"
    for path in re.findall(r"\]\((?!https?:)([^)#]+)", prose):
        assert (page.parent / path).exists(), f"{page.name} links to {path}, which does not exist"


def test_the_algorithm_page_maps_its_symbols_to_code() -> None:
    page = (ROOT / "docs" / "algorithm.md").read_text(encoding="utf-8")
    assert len(re.findall(r"`[\w./]+\.py`: `\w+`", page)) >= 20


def test_the_reductions_are_shown_by_the_tests_that_are_named() -> None:
    page = (ROOT / "docs" / "algorithm.md").read_text(encoding="utf-8")
    tests = {name for file in (ROOT / "tests").rglob("test_*.py") for name in defined(file)}
    named = set(re.findall(r"`(test_\w+)`", page))
    assert len(named) >= 8
    assert named <= tests


def quotes() -> list[tuple[str, str, list[str]]]:
    """(file, function, quoted lines) of the line-by-line mapping in docs/algorithm.md."""
    found: list[tuple[str, str, list[str]]] = []
    for language, text in blocks(ROOT / "docs" / "algorithm.md"):
        if language != "py":
            continue
        for line in text.splitlines():
            if line.startswith("# "):
                path, function = line.removeprefix("# ").split(": ")
                found.append((path, function, []))
            else:
                found[-1][2].append(line.strip())
    return found


@pytest.mark.parametrize(("path", "function", "lines"), quotes())
def test_what_the_algorithm_page_quotes_stands_in_the_code(
    path: str, function: str, lines: list[str]
) -> None:
    file = source(path)
    assert file is not None
    text = file.read_text(encoding="utf-8")
    bodies = [
        ast.get_source_segment(text, node) or ""
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == function
    ]
    assert bodies, f"{path} has no {function}"
    assert lines
    for line in lines:
        assert any(line in map(str.strip, body.splitlines()) for body in bodies), (
            f"docs/algorithm.md quotes `{line}`, which is not in {function} of {path}"
        )


def test_every_line_of_the_algorithm_is_mapped() -> None:
    page = (ROOT / "docs" / "algorithm.md").read_text(encoding="utf-8")
    mapped = re.findall(r"^\*\*Line (\d)\..*?^```py$", page, re.MULTILINE | re.DOTALL)
    assert mapped == list("1234567")


def test_the_table_of_modules_is_the_list_of_modules() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| `([\w/]+\.py)` \|", page, re.MULTILINE)
    files = {
        str(file.relative_to(PACKAGE))
        for file in PACKAGE.rglob("*.py")
        if file.name != "__init__.py"
    }
    assert sorted(listed) == sorted(files)


def test_a_first_model_of_your_own_takes_less_than_thirty_lines() -> None:
    python = [text for language, text in blocks(ROOT / "docs" / "your-own-problem.md") if language]
    assert len(python[0].splitlines()) < 30


def test_the_config_file_that_is_shown_is_one_and_its_errors_are_those_that_are_given() -> None:
    page = ROOT / "docs" / "command-line.md"
    (shown,) = (text for language, text in blocks(page) if language == "toml")
    (errors,) = (text for language, text in blocks(page) if language == "text")
    assert read_config(tomllib.loads(shown)).run.rounds == 60
    wrong = shown.replace("rounds", "rouns", 1).replace("left-shards", "left-shard")
    wrong = re.sub(r"local_lr = .*", "local_lr = -0.1", wrong)
    with pytest.raises(ConfigError) as caught:
        read_config(tomllib.loads(wrong))
    assert f"error: {caught.value}\n" == errors


def test_the_errors_that_are_explained_are_those_that_are_raised() -> None:
    """Each message in the table of common errors, by its longest part without names and numbers."""
    page = (ROOT / "docs" / "your-own-problem.md").read_text(encoding="utf-8")
    code = "\n".join(file.read_text(encoding="utf-8") for file in PACKAGE.rglob("*.py"))
    code = re.sub(r"[`\"]\s*\n\s*f?[\"`]", "", code).replace("`", "")  # One string over two lines.
    messages = re.findall(r"^\| `+(.+?)`+ \|", page.split("## Common errors")[1], re.MULTILINE)
    assert len(messages) >= 8
    for message in messages:
        parts = re.split(r"`[^`]*`|\d+|\[.*?\]|\"[^\"]*\"|\bBatchNorm1d\b", message)
        longest = max(parts, key=len).strip(" :")
        if "mat1" not in message:  # This one is torch's own.
            assert longest in code, f"nothing in fmol says `{longest}`"
