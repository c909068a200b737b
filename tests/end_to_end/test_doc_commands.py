"""The documentation's commands are ones that fmol takes, and the problems' pages tell the truth."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Literal, get_args, get_origin

import click
import pytest

from fmol.cli.commands import fmol
from fmol.cli.flags import ConfigCommand
from fmol.cli.sweep import read_grid
from fmol.config import ALGORITHMS, find_source, read_config, recommended_options
from fmol.options import kinds_in, list_options
from fmol.problems import PROBLEMS, find_problem

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FOLDER = ROOT / "docs" / "problems"
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FLAG = re.compile(r"(?<![\w-])--[a-z][\w-]*")


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def commands(page: Path) -> list[str]:
    """The `fmol …` lines of a page's console blocks."""
    lines = [
        line.removeprefix("$ ")
        for language, block in BLOCK.findall(text_of(page))
        if language == "console"
        for line in block.replace("\\\n", " ").splitlines()
    ]
    return [line for line in lines if line.startswith("fmol ")]


COMMANDS = [(page, line) for page in PAGES for line in commands(page)]


@pytest.mark.parametrize(
    ("page", "line"), COMMANDS, ids=[f"{page.stem}:{line}" for page, line in COMMANDS]
)
def test_a_command_of_the_documentation_is_one_that_fmol_takes(page: Path, line: str) -> None:
    """Parsed as on a terminal, then checked as a whole: only the training is left out."""
    name, *arguments = shlex.split(line, comments=True)[1:]
    context = fmol.commands[name].make_context(name, arguments)
    if name not in ("run", "sweep"):
        return
    problem = str(context.params["problem"])
    if problem not in PROBLEMS:
        # One's own, or a file: a page that does not make it cannot be checked.
        assert problem.endswith(".toml") or ":" in problem
        return
    flags = {**ConfigCommand.flags(context), "problem": problem}
    grids = context.params.get("grid", ())
    for values in read_grid({}, grids) if name == "sweep" else [{}]:
        read_config({}, {**flags, **values})


def test_there_are_commands_to_check() -> None:
    checked = {page.name for page, line in COMMANDS if line.startswith(("fmol run", "fmol sweep"))}
    assert {"command-line.md", *(f"{name}.md" for name in PROBLEMS)} <= checked


def test_every_problem_has_a_page_and_every_page_a_problem() -> None:
    pages = {page.stem for page in FOLDER.glob("*.md")} - {"README"}
    assert pages == set(PROBLEMS)
    assert (
        set(re.findall(r"^\| \[[\w-]+\]\(([\w-]+)\.md\)", text_of(FOLDER / "README.md"), re.M))
        == pages
    )


def flags_of(problem: str) -> set[str]:
    """All that may follow a command on `problem`, whatever the algorithm."""
    found = {
        name
        for command in fmol.commands.values()
        for parameter in command.params
        if isinstance(parameter, click.Option)
        for name in (*parameter.opts, *parameter.secondary_opts)
    }
    for algorithm in ALGORITHMS:
        tables = find_source({}, {"problem": problem, "algorithm": algorithm}).flags().values()
        found |= {"--" + name.replace("_", "-") for table in tables for name in table}
    return found


@pytest.mark.parametrize("name", [*PROBLEMS, "README"])
def test_a_problems_page_names_flags_that_exist(name: str) -> None:
    known = set().union(*map(flags_of, PROBLEMS if name == "README" else [name]))
    named = set(FLAG.findall(text_of(FOLDER / f"{name}.md")))
    assert named
    assert named <= known


@pytest.mark.parametrize("name", PROBLEMS)
def test_a_problems_page_names_each_way_to_make_clients(name: str) -> None:
    """Every value of `partition`, `assignment` and `group`, where the problem has them."""
    page = text_of(FOLDER / f"{name}.md")
    for option in list_options(find_problem(name)).values():
        if option.name in ("partition", "assignment", "group"):
            for kind in kinds_in(option.kind):
                choices = get_args(kind) if get_origin(kind) is Literal else ()
                for choice in choices:
                    assert re.search(rf"`(--[\w-]+ )?{re.escape(choice)}\b", page), choice


@pytest.mark.parametrize("name", PROBLEMS)
def test_a_problems_page_tells_the_settings_it_recommends(name: str) -> None:
    settings = recommended_options(find_problem(name))
    assert settings["local_lr"] == settings["server_lr"]
    steps = f"{settings['local_steps']} steps" if "local_steps" in settings else "one local epoch"
    page = " ".join(text_of(FOLDER / f"{name}.md").split())
    said = page[page.index("Recommended: ") :][:200]
    assert f"Recommended: {settings['rounds']} rounds of {steps}" in said
    assert f"batch {settings['batch_size']}" in said
    assert re.search(rf"both step sizes {re.escape(format(settings['local_lr'], 'g'))}\b", said)


def test_the_script_for_what_clients_have_prints_a_mean_per_objective(tmp_path: Path) -> None:
    script = next(
        text for language, text in BLOCK.findall(text_of(FOLDER / "README.md")) if language == "py"
    )
    (tmp_path / "own.py").write_text(script, encoding="utf-8")
    small = "--clients 5 --samples 8 --rounds 1 --local-steps 1 --device cpu --quiet"
    line = ["run", "multidigits", *small.split(), "--out", str(tmp_path / "run")]
    fmol.main(line, standalone_mode=False)
    done = subprocess.run(
        [sys.executable, "own.py", "run"], cwd=tmp_path, check=True, capture_output=True, text=True
    )
    assert re.search(r"left accuracy 0\.\d{3}  right loss \d", done.stdout)
