"""The command line, as a person at a terminal meets it."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from fmol.cli.commands import fmol
from fmol.cli.sweep import _Apart, read_grid
from fmol.config import ALGORITHMS
from fmol.problems import PROBLEMS
from fmol.runs import RunError, RunFolder, resume

SMALL = ["--clients", "3", "--samples", "8", "--dimension", "3", "--local-steps", "1"]
QUADRATIC = ["quadratic", *SMALL, "--rounds", "2"]

OWN = """
import os, signal, time
import torch
from fmol import Client, Federation, Objective

calls = 0

def halt(stop):
    if stop == "interrupt":
        raise KeyboardInterrupt
    if stop == "terminate":
        os.kill(os.getpid(), signal.SIGTERM)
    if stop == "fail":
        raise RuntimeError("the loss failed")

def federation(samples: int = 6, stop: str = "", at: int = 4, hot: bool = False) -> Federation:
    global calls
    calls = 0
    if stop == "type":
        raise TypeError("of my own")
    if at == 0:
        halt(stop)

    def error(out, y):
        global calls
        calls += 1
        if stop and calls == at:
            halt(stop)
        if stop == "slow":
            time.sleep(0.05)
        return (out[:, 0] - y) ** 2

    torch.manual_seed(0)
    x = torch.randn(samples, 2)
    return Federation(
        torch.nn.Linear(2, 1), [Objective("a", error)], [Client("c", (x, x.sum(1)), "a")]
    )
"""


@pytest.fixture(autouse=True)
def _a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FMOL_DATA", raising=False)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", None)):
            del sys.modules[name]


def invoke(*arguments: str, code: int = 0, **options: Any) -> Result:
    result = CliRunner().invoke(fmol, arguments, prog_name="fmol", **options)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output
    return result


def run_into(out: str, *arguments: str, code: int = 0) -> Result:
    return invoke("run", *(arguments or QUADRATIC), "--out", out, code=code)


def config_of(folder: str | Path) -> dict[str, Any]:
    return tomllib.loads(Path(folder, "config.toml").read_text(encoding="utf-8"))


def write(name: str, text: str) -> Path:
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(text), encoding="utf-8")
    return path


def everything_in(folder: str | Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(Path(folder).rglob("*"))
        if path.is_file()
    }


def rounds_in(folder: str | Path) -> int:
    return len(RunFolder(folder).record().reports)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two finished runs, to be copied and not changed."""
    root = tmp_path_factory.mktemp("finished")
    for seed in ("0", "1"):
        run_into(str(root / f"run-{seed}"), *QUADRATIC, "--seed", seed)
    return root


@pytest.fixture
def runs(finished: Path, tmp_path: Path) -> Path:
    """Two finished runs of one's own, `run-0` and `run-1`."""
    shutil.copytree(finished, tmp_path / "kept")
    return tmp_path / "kept"


# ---- run -------------------------------------------------------------------------------------


def test_a_run_leaves_everything_in_its_folder() -> None:
    run_into("here/new")
    files = {path.name for path in Path("here/new").iterdir()}
    assert files >= {
        "config.toml",
        "environment.json",
        "federation.json",
        "metrics.jsonl",
        "checkpoints",
        "model.safetensors",
        "summary.json",
        "report.html",
    }
    assert not [name for name in files if name.endswith(".tmp")]
    assert json.loads(Path("here/new/summary.json").read_text(encoding="utf-8"))["rounds"] == 2
    config = config_of("here/new")
    assert (config["rounds"], config["problem"]["clients"]) == (2, 3)
    assert config["algorithm"] | {"name": "fsmgda", "local_steps": 1} == config["algorithm"]


def test_a_run_ends_with_at_most_ten_lines_and_the_reports_path() -> None:
    result = run_into("new", "multidigits", "--clients", "2", "--samples", "20", "--rounds", "1")
    lines = result.stdout.rstrip("\n").split("\n")
    assert len(lines) <= 10
    assert lines[-1].split() == ["report", str(Path("new/report.html"))]
    assert Path(lines[-1].split()[-1]).is_file()
    assert "left" in result.stdout
    assert "accuracy" in result.stdout


def test_many_objectives_refusals_and_alarms_still_fit_into_ten_lines() -> None:
    arguments = ["--objectives", "12", "--dimension", "12", "--clients", "3", "--rounds", "1"]
    lines = run_into("new", "quadratic", *arguments).stdout.rstrip("\n").split("\n")
    assert len(lines) <= 10
    assert any("lowest" in line and "highest" in line for line in lines)


def test_progress_is_on_stderr_and_results_are_on_stdout() -> None:
    result = run_into("new")
    assert "round" in result.stderr
    assert "FSMGDA: all 2 rounds done" in result.stdout
    assert "building" not in result.stdout


def test_what_was_done_otherwise_than_asked_is_said_at_the_end() -> None:
    lines = run_into("new", *QUADRATIC, "--engine", "auto").stdout.splitlines()
    (note,) = (line for line in lines if line.startswith("note"))
    assert "engine " in note
    assert not any(line.startswith("note") for line in run_into("old").stdout.splitlines())


def test_one_round_and_one_objective_are_told_in_the_singular() -> None:
    assert "FSMGDA: 1 round done" in run_into("new", "quadratic", "--rounds", "1").stdout


def test_quiet_says_nothing(runs: Path) -> None:
    assert invoke("run", *QUADRATIC, "--out", "new", "--quiet").output == ""
    assert invoke("run", "--quiet", *QUADRATIC).output == ""
    assert invoke("resume", "new", "--rounds", "3", "--quiet").output == ""
    assert invoke("report", "new", "--quiet").output == ""
    assert invoke("compare", str(runs), "--quiet").output == ""
    sweep = ["sweep", *QUADRATIC, "--grid", "seed=0", "--out", "s"]
    assert invoke(*sweep, "--quiet").output == ""
    assert Path("s/seed=0/report.html").is_file()


def test_errors_are_said_even_when_quiet() -> None:
    result = invoke("run", "quadratic", "--rounds", "x", "--quiet", code=2)
    assert "`rounds` must be" in result.stderr
    assert result.stdout == ""


def test_a_run_without_out_goes_into_a_new_folder_under_runs() -> None:
    for _ in range(2):
        invoke("run", *QUADRATIC, "--seed", "7")
    found = sorted(path.name for path in Path("runs").iterdir())
    assert len(found) == 2
    assert all(name.startswith("quadratic-fsmgda-seed7-") for name in found)


def test_no_rounds_at_all_is_a_run_too() -> None:
    assert "report" in run_into("new", "quadratic", "--rounds", "0").stdout
    assert rounds_in("new") == 0
    run_into("other", "quadratic", "--rounds", "0", "--algorithm", "alone")


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_algorithm_runs_from_the_command_line(algorithm: str) -> None:
    flags = ["--clients", "2", "--samples", "16", "--rounds", "1", "--algorithm", algorithm]
    flags += ["--heads", "left,right"] if algorithm == "fedals" else []
    run_into("new", "multidigits", *flags)  # It has the dense layers that FedLS is for.
    assert config_of("new")["algorithm"]["name"] == algorithm


def test_an_algorithm_that_the_model_is_not_for_says_so() -> None:
    result = run_into("new", "quadratic", "--rounds", "1", "--algorithm", "fedls", code=1)
    assert "no trainable `nn.Linear`" in result.stderr
    assert "Use FedAvg" in result.stderr


def test_heads_that_are_misspelt_are_said_with_what_was_meant() -> None:
    flags = ["--clients", "2", "--samples", "16", "--rounds", "1", "--algorithm", "fedals"]
    result = run_into("new", "multidigits", *flags, "--heads", "left,rigth", code=1)
    assert "`heads` has `rigth`" in result.stderr
    assert "Did you mean `right`?" in result.stderr


def test_a_folder_that_is_not_empty_is_refused_and_loses_nothing(runs: Path) -> None:
    folder = runs / "run-0"
    before = everything_in(folder)
    result = run_into(str(folder), code=2)
    assert "is not empty" in result.stderr
    assert f"fmol resume {folder}" in result.stderr
    assert everything_in(folder) == before
    write("mine/thesis.txt", "a year's work")
    assert "is not empty" in run_into("mine", code=2).stderr
    assert everything_in("mine") == {"thesis.txt": b"a year's work"}


def test_an_empty_folder_is_as_good_as_a_new_one() -> None:
    Path("new").mkdir()
    run_into("new")


def test_a_file_in_the_folders_place_is_said_and_kept() -> None:
    write("new", "mine")
    assert "'new' is a file" in run_into("new", code=2).stderr
    assert Path("new").read_text(encoding="utf-8") == "mine"


# ---- flags -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        ["quadratic", "--rounds", "1", "--clients", "2", "--local-steps", "3"],
        ["quadratic", "--rounds=1", "--clients=2", "--local-steps=3"],
        ["--rounds", "1", "--clients=2", "--local-steps", "3", "quadratic"],
        ["--rounds=1", "quadratic", "--clients", "2", "--local-steps=3"],
    ],
    ids=" ".join,
)
def test_flags_may_be_written_either_way_and_anywhere(arguments: list[str]) -> None:
    run_into("new", *arguments)
    config = config_of("new")
    assert config["rounds"] == 1
    assert config["problem"]["clients"] == 2
    assert config["algorithm"]["local_steps"] == 3


def test_boolean_flags_are_given_or_denied() -> None:
    write("own_flags.py", OWN)
    for flag, value in (("--hot", True), ("--no-hot", False)):
        run_into(f"new{value}", "own_flags:federation", flag, "--rounds", "1")
        assert config_of(f"new{value}")["problem"]["hot"] is value


def test_schedules_participations_and_mappings_are_flags_too() -> None:
    run_into(
        "new",
        *QUADRATIC,
        *("--server-lr", "cosine,start=0.1,rounds=4"),
        *("--participation", "fraction,share=0.5"),
        *("--stop-at", "f1=1e-9,f2=1e-9"),
        *("--problem-seed", "3"),
    )
    config = config_of("new")
    assert config["algorithm"]["server_lr"]["name"] == "cosine"
    assert config["participation"]["share"] == 0.5
    assert config["stop_at"] == {"f1": 1e-9, "f2": 1e-9}
    assert (config["seed"], config["problem"]["seed"]) == (0, 3)


def test_everything_wrong_is_said_at_once_with_exit_code_2() -> None:
    result = invoke(
        *("run", "quadratic", "--roundz", "3", "--clients", "0", "--local-lr=fast"),
        *("--out", "new", "--assignment", "one_each", "--true-gradients-every", "-1"),
        code=2,
    )
    assert "5 things are wrong" in result.stderr
    for said in (
        "`--roundz` is not an option",
        "Did you mean `--rounds`?",
        "[problem] `clients` must be a whole number of at least 1, got 0.",
        "[algorithm] `local_lr` must be",
        "[problem] `assignment` must be one of",
        "Did you mean 'one-each'?",
        "`true_gradients_every` must be",
    ):
        assert said in result.stderr
    assert not Path("new").exists()
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["quadratc"], "Did you mean `quadratic`?"),
        (["quadratic", "--algorithm", "fedavgg"], "Did you mean `fedavg`?"),
        (["--verbose", "quadratic"], "`--verbose` is not an option"),
        (["quadratic", "--rounds"], "--rounds"),
        ([], "PROBLEM"),
        (["quadratic", "multidigits"], "unexpected extra argument"),
        (["no_such_module_here:federation"], "there is no module `no_such_module_here`"),
        (["own.py"], "Did you mean `own.py:federation`?"),
        (["quadratic", "--participation", "5"], "`participation` must be one of"),
        (["quadratic", "--rounds", "9" * 400], "`rounds` must be a whole number"),
    ],
    ids=lambda each: " ".join(each)[:30] if isinstance(each, list) else "",
)
def test_misuse_is_said_with_exit_code_2(arguments: list[str], said: str) -> None:
    result = invoke("run", *arguments, code=2)
    assert said in result.stderr
    assert not Path("runs").exists()


def test_a_device_that_is_not_there_is_said_with_what_else_is_wrong() -> None:
    result = invoke("run", "quadratic", "--device", "warp:1", "--clients", "0", code=2)
    assert "2 things are wrong" in result.stderr
    assert "that torch knows, got 'warp:1'" in result.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["--mlflow", "sqlite:///x.db", "--tensorboard", "own_find:federation"],
        ["--tensorboard", "own_find:federation", "--mlflow", "sqlite:///x.db"],
        ["--no-tensorboard", "own_find.py:federation"],
        ["--hot", "own_find:federation"],
        ["--stop", "a:b", "own_find:federation"],
        ["--quiet", "own_find:federation", "--stop", "adult"],
        ["--samples", "3", "--", "own_find:federation"],
    ],
    ids=" ".join,
)
def test_the_problem_is_found_among_the_values_of_flags(arguments: list[str]) -> None:
    write("own_find.py", OWN)
    assert "`rounds` must be" in invoke("run", "--rounds=x", *arguments, code=2).stderr
    assert "The problem, own_find" in invoke("run", "--help", *arguments).stdout


def test_what_is_wrong_with_ones_own_module_is_said_whatever_flags_there_are() -> None:
    write("own_broken.py", "1 / 0\n")
    said = invoke("run", "--tensorboard", "own_broken:federation", code=2).stderr
    assert "line 1 of `own_broken.py` raised ZeroDivisionError" in said
    said = invoke("run", "--hot", "no_such_module_here:federation", code=2).stderr
    assert "there is no module `no_such_module_here`" in said


def test_the_value_of_a_flag_is_no_problem() -> None:
    text = invoke("run", "--out", "adult", "--help").stdout
    assert "The problem, multidigits" in text
    assert completions("fmol run --out adult --part") == ["--participation", "--partition"]
    assert "The problem, quadratic" in invoke("run", "--out", "adult", "quadratic", "-h").stdout


def test_help_explains_every_flag_of_what_is_named() -> None:
    text = invoke("run", "multidigits", "--algorithm", "fedavg", "--help").stdout
    for flag in ("--partition", "--local-steps", "--problem-seed", "--device", "--out", "--quiet"):
        assert flag in text
    assert "--normalize" not in text
    assert "--normalize" in invoke("run", "multidigits", "-h").stdout
    assert "--angle" in invoke("run", "quadratic", "--help").stdout
    assert "The algorithm, fedavg" in text
    assert "The problem, multidigits" in text


def test_help_says_for_which_problem_the_values_it_shows_are_recommended() -> None:
    heading = "The algorithm, fsmgda, as recommended for"
    assert f"{heading} multidigits:" in invoke("run", "--help").stdout
    assert f"{heading} quadratic:" in invoke("run", "quadratic", "--help").stdout
    write("own_plain.py", OWN)
    assert "The algorithm, fsmgda:" in invoke("run", "own_plain:federation", "--help").stdout


def test_help_needs_no_problem() -> None:
    for command in ([], *([each] for each in fmol.commands)):
        assert "Usage: fmol" in invoke(*command, "--help").stdout
    assert "fmol, version" in invoke("--version").stdout


# ---- one's own problem, and files ------------------------------------------------------------


@pytest.mark.parametrize("name", ["own_run:federation", "own_run.py:federation"])
def test_ones_own_problem_runs_and_goes_on_like_a_built_in_one(name: str) -> None:
    write("own_run.py", OWN)
    run_into("new", name, "--samples", "4", "--rounds", "1")
    assert config_of("new")["problem"] | {"name": name, "samples": 4} == config_of("new")["problem"]
    assert "--samples" in invoke("run", name, "--help").stdout
    invoke("resume", "new", "--rounds", "2")
    assert rounds_in("new") == 2


@pytest.mark.parametrize("command", ["run", "sweep", "problems", "front"])
@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("import a_package_that_is_missing", "raised ModuleNotFoundError: No module named"),
        ("raise ValueError('something of mine')", "raised ValueError: something of mine. Mend it"),
        ("def federation(:", "has a syntax error: invalid syntax. Mend it"),
    ],
)
def test_ones_own_file_that_fails_is_said_in_a_sentence_with_its_line(
    command: str, text: str, said: str
) -> None:
    write("own_fails.py", f"\n{text}\n")
    grid = ["--grid", "seed=0"] if command == "sweep" else []
    for name in ("own_fails.py:federation", "own_fails:federation"):
        result = invoke(command, name, *grid, code=2)
        assert "Traceback" not in result.stderr
        assert "cannot be imported: line 2 of `own_fails.py` " in result.stderr
        assert said in result.stderr


def test_a_file_says_what_to_run_and_flags_win() -> None:
    write(
        "my.toml",
        """
        rounds = 5
        seed = 3
        [problem]
        name = "quadratic"
        clients = 2
        samples = 4
        [algorithm]
        name = "fsmgda"
        local_steps = 2
        normalize = "l2"
        [sweep]
        seed = [0, 1]
        """,
    )
    run_into("new", "my.toml", "--rounds", "1", "--clients", "4")
    config = config_of("new")
    assert (config["rounds"], config["seed"]) == (1, 3)
    assert (config["problem"]["clients"], config["problem"]["samples"]) == (4, 4)
    assert config["algorithm"]["normalize"] == "l2"
    run_into("other", "my.toml", "--rounds=1", "--algorithm", "fedavg")
    environment = json.loads(Path("other/environment.json").read_text(encoding="utf-8"))
    assert environment["notes"] == ["`normalize` of the file is no option of fedavg: left out."]


def test_the_config_of_a_run_runs_again_to_the_same_model(runs: Path) -> None:
    run_into("again", str(runs / "run-0" / "config.toml"))
    assert everything_in("again")["config.toml"] == everything_in(runs / "run-0")["config.toml"]
    model = "model.safetensors"
    assert Path("again", model).read_bytes() == (runs / "run-0" / model).read_bytes()


def test_a_file_that_is_wrong_says_what_and_one_that_is_missing_too() -> None:
    write("my.toml", "rounds = 1\nlocal_steps = 2\n[problm]\nname = 'quadratic'\n")
    assert "`problem` must be given" in invoke("run", "my.toml", code=2).stderr
    write("my.toml", "problem = 'quadratic'\nlocal_steps = 2\n[algoritm]\nname = 'fedavg'\n")
    said = invoke("run", "my.toml", "--rounds=x", code=2).stderr
    assert "3 things are wrong" in said
    assert "put it into [algorithm]" in said
    assert "Did you mean `[algorithm]`?" in said
    write("my.toml", "rounds = = 1")
    assert "is not valid TOML" in invoke("run", "my.toml", code=2).stderr
    assert "there is no file `no.toml`" in invoke("run", "no.toml", code=2).stderr
    assert "there is no file `no.toml`" in invoke("sweep", "no.toml", code=2).stderr


# ---- exit codes ------------------------------------------------------------------------------


def test_data_that_are_not_there_are_misuse() -> None:
    result = run_into("new", "adult", "--data-dir", "nowhere", code=2)
    assert "error: the data folder `nowhere` does not exist" in result.stderr
    assert not Path("new").exists()


def test_data_that_are_damaged_or_may_not_be_read_are_misuse(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from fmol.problems.adult import Adult

    found = Adult.data_sets[0]
    files = [write(f"data/{found.folder}/{file}", "") for file in found.files]
    result = run_into("new", "adult", "--data-dir", "data", code=2)
    assert "Fetch the file anew" in result.stderr

    def refused(path: Path, *_: Any, **__: Any) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "open", refused)
    result = run_into("new", "adult", "--data-dir", "data", code=2)
    assert f"error: `{files[0]}` cannot be read: Permission denied." in result.stderr
    assert "Traceback" not in result.stderr


def test_a_file_that_ones_own_code_misses_is_shown_where() -> None:
    write("own_reads.py", "def federation():\n    return open('missing.csv')\n")
    result = run_into("new", "own_reads:federation", code=1)
    assert "Traceback" in result.stderr
    assert "own_reads.py" in result.stderr
    assert "missing.csv" in result.stderr


@pytest.mark.parametrize("engine", ["sequential", "vectorized", "flower"])
def test_data_that_the_model_cannot_take_are_said_in_a_sentence(engine: str) -> None:
    write("own_width.py", OWN.replace("x = torch.randn(samples, 2)", "x = torch.ones(samples, 3)"))
    result = run_into("new", "own_width:federation", "--engine", engine, "--rounds", "1", code=1)
    assert result.stderr.splitlines()[-1].startswith("error: ")
    assert (
        "cannot take `data` of client `c`, inputs of shape [6, 3]: Linear wants 2" in result.stderr
    )
    assert "Traceback" not in result.stderr
    assert not Path("new").exists()


@pytest.mark.parametrize("name", ["environment.json", "federation.json", "metrics.jsonl"])
def test_a_file_of_a_run_that_cannot_be_read_is_misuse(runs: Path, name: str) -> None:
    path = runs / "run-0" / name
    path.unlink()
    path.mkdir()  # As one may not read it either.
    result = invoke("report", str(runs / "run-0"), code=2)
    assert result.stderr.startswith("error: `")
    assert name in result.stderr
    assert "Traceback" not in result.stderr


def test_a_file_of_a_run_that_is_damaged_is_a_failure(runs: Path) -> None:
    write(str(runs / "run-0" / "federation.json"), "{")
    result = invoke("report", str(runs / "run-0"), code=1)
    assert "federation.json` cannot be read" in result.stderr


def test_a_folder_that_is_taken_is_misuse_whoever_is_to_write_there() -> None:
    write("rates/points.json", "{}")
    assert "is not what was written there" in invoke("rates", "--small", code=2).stderr
    write("my-app/mine.txt", "a year's work")
    assert "nothing is overwritten" in invoke("new-flower-app", "my-app", code=2).stderr


# ---- stopping and resuming -------------------------------------------------------------------


@pytest.mark.parametrize(("stop", "code"), [("interrupt", 130), ("terminate", 143)])
def test_a_run_that_is_stopped_says_how_to_go_on_and_does(stop: str, code: int) -> None:
    write("own_stop.py", OWN)
    arguments = ["own_stop.py:federation", "--local-steps", "1", "--rounds", "6"]
    result = run_into("new", *arguments, "--stop", stop, "--at", "6", code=code)
    assert "See what there is with: fmol report new. Go on with: fmol resume new" in result.stderr
    assert 0 < rounds_in("new") < 6
    assert not Path("new/summary.json").exists()
    text = Path("own_stop.py").read_text(encoding="utf-8").replace("if stop and", "if False and")
    write("own_stop.py", text)
    forget(Path("own_stop.py"))
    invoke("resume", "new")
    assert rounds_in("new") == 6
    run_into("whole", *arguments)
    model = "model.safetensors"
    assert Path("new", model).read_bytes() == Path("whole", model).read_bytes()


@pytest.mark.parametrize(("stop", "code"), [("interrupt", 130), ("terminate", 143)])
@pytest.mark.parametrize("at", ["0", "1"])
def test_a_run_that_is_stopped_before_its_first_round_says_no_more(
    stop: str, code: int, at: str
) -> None:
    write("own_early.py", OWN)
    arguments = ["own_early.py:federation", "--rounds", "2", "--stop", stop, "--at", at]
    result = run_into("new", *arguments, code=code)
    assert result.stderr.splitlines()[-1] == "stopped"
    assert not Path("new").exists()
    before = signal.getsignal(signal.SIGTERM)
    assert before is signal.SIG_DFL


@pytest.mark.parametrize(("stop", "code"), [("interrupt", 130), ("terminate", 143)])
def test_a_resume_that_is_stopped_before_a_round_says_that_the_run_is_as_it_was(
    stop: str, code: int
) -> None:
    path = write("own_again.py", OWN)
    run_into("new", "own_again.py:federation", "--rounds", "2")
    before = everything_in("new")
    write("own_again.py", OWN.replace("if at == 0:\n        halt(stop)", f"halt('{stop}')"))
    forget(path)
    result = invoke("resume", "new", "--rounds", "4", code=code)
    said = "stopped before a new round was done; `new` is as it was"
    assert result.stderr.splitlines()[-1] == said
    assert everything_in("new") == before


def test_arguments_that_are_interrupted_while_they_are_read_say_so_too() -> None:
    write("own_import.py", "raise KeyboardInterrupt\n")
    assert invoke("run", "own_import:federation", code=130).stderr == "stopped\n"


@pytest.mark.parametrize("command", ["report", "compare"])
def test_a_report_that_is_stopped_says_no_more(
    runs: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("fmol.cli.commands.results.write_report", interrupted)
    result = invoke(command, str(runs / "run-0"), code=130)
    assert result.stderr == "stopped\n"


def forget(path: Path) -> None:
    sys.modules.pop(str(path.resolve()), None)


def test_a_finished_run_goes_on_to_more_rounds_as_if_it_had_never_ended(runs: Path) -> None:
    folder = runs / "run-0"
    result = invoke("resume", str(folder), "--rounds", "4")
    assert "all 4 rounds done" in result.stdout
    assert rounds_in(folder) == 4
    run_into("whole", *QUADRATIC, "--rounds", "4")
    model = "model.safetensors"
    assert (folder / model).read_bytes() == Path("whole", model).read_bytes()


@pytest.mark.parametrize("end", [[], ["--stop-at", "1e9"]], ids=["its rounds", "its targets"])
def test_a_finished_run_that_is_resumed_to_nothing_new_has_no_note_of_it(end: list[str]) -> None:
    run_into("new", *QUADRATIC, *end)
    before = everything_in("new")
    invoke("resume", "new")
    assert RunFolder("new").record().notes == ()
    kept = ("environment.json", "model.safetensors")
    after = everything_in("new")
    assert [after[name] for name in kept] == [before[name] for name in kept]
    if not end:
        invoke("resume", "new", "--rounds", "3")
        assert RunFolder("new").record().notes == ("Resumed after round 2.",)


def test_a_run_is_not_resumed_to_fewer_rounds_than_are_done(runs: Path) -> None:
    folder = runs / "run-0"
    before = everything_in(folder)
    result = invoke("resume", str(folder), "--rounds", "1", code=2)
    assert "`rounds` is 1, and 2 are done already" in result.stderr
    assert everything_in(folder) == before


def test_a_finished_run_keeps_its_end_where_going_on_cannot_begin(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(*_: Any, **__: Any) -> None:
        raise ImportError("install it")

    monkeypatch.setattr("fmol.runs.training._listeners", missing)
    folder = runs / "run-0"
    metrics = (folder / "metrics.jsonl").read_bytes()
    invoke("resume", str(folder), "--rounds", "4", code=1)
    assert (folder / "metrics.jsonl").read_bytes() == metrics
    assert (folder / "summary.json").is_file()


def test_a_run_without_a_checkpoint_says_that_it_begins_anew(runs: Path) -> None:
    folder = runs / "run-0"
    model = (folder / "model.safetensors").read_bytes()
    for checkpoint in (folder / "checkpoints").glob("*.ckpt"):
        checkpoint.unlink()
    result = invoke("resume", str(folder))
    assert "there is no checkpoint" in result.stderr
    assert "begins at round 0" in result.stderr
    assert (folder / "model.safetensors").read_bytes() == model


@pytest.mark.parametrize("command", ["compare", "report"])
def test_a_place_that_cannot_be_written_is_named_in_a_sentence(runs: Path, command: str) -> None:
    taken = runs / "run-0" / "config.toml"
    result = invoke(command, str(runs / "run-0"), "--out", str(taken / "page.html"), code=1)
    assert result.stderr.startswith("error: `")
    assert "config.toml" in result.stderr
    assert "name another place" in result.stderr
    assert "Traceback" not in result.stderr


def test_resuming_a_finished_run_without_more_rounds_changes_no_result(runs: Path) -> None:
    folder = runs / "run-0"
    before = everything_in(folder)
    result = invoke("resume", str(folder))
    assert "all 2 rounds are done already" in result.stderr
    after = everything_in(folder)
    for name in ("config.toml", "model.safetensors"):
        assert after[name] == before[name]
    # The last line holds how long measuring took.
    name = "metrics.jsonl"
    assert after[name].splitlines()[:-1] == before[name].splitlines()[:-1]


@pytest.mark.parametrize(
    ("flags", "key"),
    [
        (["--seed", "1"], "`seed` was 0 and is 1"),
        (["--clients=9"], "[problem] `clients` was 3 and is 9"),
        (["--problem-seed", "9"], "[problem] `seed` was 0 and is 9"),
        (["--local-steps", "5", "--rounds", "9"], "[algorithm] `local_steps` was 1 and is 5"),
        (["--algorithm", "fedavg"], "`algorithm` was fsmgda and is fedavg"),
    ],
    ids=" ".join,
)
def test_a_flag_that_would_change_results_is_refused_by_its_key(
    runs: Path, flags: list[str], key: str
) -> None:
    folder = runs / "run-0"
    before = everything_in(folder)
    assert key in invoke("resume", str(folder), *flags, code=2).stderr
    assert everything_in(folder) == before


def test_a_run_of_ones_own_file_goes_on_from_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write("project/far/own_any.py", OWN)
    write("elsewhere/far/own_any.py", "raise ValueError('another file of this name')\n")
    monkeypatch.chdir("project")
    run_into("../runs/new", "far/own_any.py:federation", "--rounds", "1", "--samples", "4")
    run_into("../runs/whole", "far/own_any.py:federation", "--rounds", "3", "--samples", "4")
    problem = config_of("../runs/new")["problem"]
    assert problem["name"] == "far/own_any.py:federation"
    environment = json.loads(Path("../runs/new/environment.json").read_text(encoding="utf-8"))
    assert environment["problem_file"] == "../../project/far/own_any.py"
    for place, rounds in (("elsewhere", "2"), ("runs/new", "3")):
        monkeypatch.chdir(tmp_path / place)
        new = os.path.relpath(tmp_path / "runs" / "new")
        result = invoke("resume", new, "--rounds", rounds)
        assert "own_any.py:federation in " in result.stderr
        assert "--samples" in invoke("resume", new, "--help").stdout
    assert config_of(".")["problem"] == problem
    model = "model.safetensors"
    assert Path(model).read_bytes() == Path("../whole", model).read_bytes()


def test_a_run_and_ones_own_file_may_move_together_or_apart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write("project/own_moved.py", OWN)
    monkeypatch.chdir("project")
    run_into("runs/new", "own_moved.py:federation", "--rounds", "1")
    monkeypatch.chdir("..")
    Path("project").rename("moved")
    invoke("resume", "moved/runs/new", "--rounds", "2")
    Path("moved/own_moved.py").rename("own_moved.py")
    result = invoke("resume", "moved/runs/new", "--rounds", "3")
    assert "of this folder: `" in result.stderr
    assert "moved/own_moved.py` is gone" in result.stderr.replace("\\", "/")
    monkeypatch.chdir("moved")  # It is known by now where the file is.
    invoke("resume", "runs/new", "--rounds", "4")
    Path("../own_moved.py").unlink()
    result = invoke("resume", "runs/new", "--rounds", "5", code=2)
    assert "own_moved.py` any more, and no `own_moved.py` here. Put it back" in result.stderr
    assert rounds_in("runs/new") == 4


def test_a_run_folder_that_does_not_know_its_file_goes_on_where_the_file_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As those do that earlier versions have made."""
    write("own_old.py", OWN)
    run_into("new", "own_old.py:federation", "--rounds", "1")
    path = Path("new/environment.json")
    environment = json.loads(path.read_text(encoding="utf-8"))
    del environment["problem_file"]
    path.write_text(json.dumps(environment), encoding="utf-8")
    Path("other").mkdir()
    monkeypatch.chdir("other")
    assert "there is no file `own_old.py`" in invoke("resume", "../new", code=2).stderr
    monkeypatch.chdir("..")
    invoke("resume", "new", "--rounds", "2")
    monkeypatch.chdir("other")
    invoke("resume", "../new", "--rounds", "3")
    assert rounds_in("../new") == 3


def test_another_problem_than_a_runs_own_is_refused_wherever_its_file_is() -> None:
    write("own_first.py", OWN)
    write("own_second.py", OWN)
    run_into("new", "own_first.py:federation", "--rounds", "1")
    with pytest.raises(
        RunError, match=r"was own_first.py:federation and is own_second.py:federation"
    ):
        resume("new", flags={"problem": "own_second.py:federation"})


def test_resuming_what_is_no_run_says_so() -> None:
    assert "there is no folder `nowhere`" in invoke("resume", "nowhere", code=2).stderr
    Path("empty").mkdir()
    assert "is not the folder of a run" in invoke("resume", "empty", code=2).stderr


def test_a_misspelt_flag_of_resume_is_misuse(runs: Path) -> None:
    result = invoke("resume", str(runs / "run-0"), "--ruonds", "4", code=2)
    assert "Did you mean `--rounds`?" in result.stderr


# ---- report and compare ----------------------------------------------------------------------


def test_a_report_is_written_anew_or_elsewhere(runs: Path) -> None:
    folder = runs / "run-0"
    (folder / "report.html").unlink()
    assert str(folder / "report.html") in invoke("report", str(folder)).stdout
    assert (folder / "report.html").is_file()
    invoke("report", str(folder), "--out", "far/away/mine.html")
    assert "<html" in Path("far/away/mine.html").read_text(encoding="utf-8")
    result = invoke("report", str(runs), "--out", "mine.html", code=2)
    assert "there are 2 runs" in result.stderr


def test_several_reports_are_written_at_once(runs: Path) -> None:
    for name in ("run-0", "run-1"):
        (runs / name / "report.html").unlink()
    lines = invoke("report", str(runs / "run-0"), str(runs / "run-1")).stdout.splitlines()
    assert len(lines) == 2
    assert all(Path(line.removeprefix("report: ")).is_file() for line in lines)


def test_a_report_comes_with_figures_and_beside_those_who_train_alone(runs: Path) -> None:
    run_into("alone", *QUADRATIC, "--algorithm", "alone")
    folder = str(runs / "run-0")
    result = invoke("report", folder, "--out", "x.html", "--alone", "alone", "--figures", "f")
    figures = [Path(line.split(": ")[1]) for line in result.stdout.splitlines()[1:]]
    assert figures
    assert {path.suffix for path in figures} == {".png", ".svg"}
    assert all(path.is_file() for path in figures)
    plain = invoke("report", folder, "--out", "y.html")
    assert plain.stdout == f"report: {Path('y.html')}\n"
    assert Path("x.html").read_text("utf-8") != Path("y.html").read_text("utf-8")


def test_the_report_of_what_is_no_run_says_so() -> None:
    assert "there is no folder" in invoke("report", "nowhere", code=2).stderr
    assert "there is no folder" in invoke("compare", "nowhere", code=2).stderr
    assert "RUNS" in invoke("report", code=2).stderr


def cut(lines: list[bytes], at: int) -> list[bytes]:
    return [*lines[:at], lines[at][:50] + b"\n", *lines[at + 1 :]]


def garbled(lines: list[bytes], at: int, by: bytes) -> list[bytes]:
    return [*lines[:at], by + b"\n", *lines[at + 1 :]]


FINAL = "how the trained model stands"


@pytest.mark.parametrize("command", ["report", "compare"])
@pytest.mark.parametrize(
    ("damage", "said", "rounds"),
    [
        (lambda lines: cut(lines, 2), "is damaged in line 3: round 2 is left out.", 6),
        (lambda lines: cut(cut(lines, 0), 2), "in lines 1 and 3: rounds 0 and 2 are left out.", 6),
        (lambda lines: garbled(lines, 1, b"\0" * 40), "in line 2: round 1 is left out.", 6),
        (lambda lines: garbled(lines, 1, b"[]"), "in line 2: round 1 is left out.", 6),
        (lambda lines: garbled(lines, 1, b'{"kind": "x"}'), "in line 2: round 1 is left out.", 6),
        (lambda lines: garbled(lines, 1, lines[3][:-1]), "in lines 3 to 4: rounds 1 to 2 are", 6),
        (
            lambda lines: [*lines[:2], lines[2][:50] + lines[3], *lines[4:]],
            "in line 3: rounds 2 to 3 are left out.",
            6,
        ),
        (lambda lines: cut(lines, 6), f"in line 7: {FINAL} is left out.", 6),
        (lambda lines: [*lines[:6], lines[6][:50]], f"in line 7: {FINAL} is left out.", 6),
        (lambda lines: cut(cut(lines, 6), 5), f"in lines 6 to 7: round 5 and {FINAL} are", 5),
        (
            lambda lines: [b"".join(lines).replace(b"\n", b"\r")],
            f"in line 1: rounds 0 to 5 and {FINAL} are left out.",
            0,
        ),
        (lambda lines: [], f"is not whole: rounds 0 to 5 and {FINAL} are left out.", 0),
        (lambda lines: lines[:4], f"is not whole: rounds 4 to 5 and {FINAL} are left out.", 4),
    ],
)
def test_damaged_metrics_are_said_with_their_lines_and_the_rest_is_shown(
    command: str, damage: Callable[[list[bytes]], list[bytes]], said: str, rounds: int
) -> None:
    run_into("new", "quadratic", *SMALL, "--rounds", "6")
    metrics = Path("new/metrics.jsonl")
    metrics.write_bytes(b"".join(damage(metrics.read_bytes().splitlines(keepends=True))))
    result = invoke(command, "new", "--out", "page.html", "--quiet")
    assert f"`{metrics}` is " in result.stderr
    assert said in result.stderr
    assert result.stderr.endswith("The rest is shown.\n")
    assert len(result.stderr.splitlines()) == 1
    page = Path("page.html").read_text(encoding="utf-8")
    assert said.replace("`", "") in page
    assert f'"done":{rounds}' in page.replace('"done": ', '"done":')


def test_metrics_that_are_gone_are_said_to_be(runs: Path) -> None:
    (runs / "run-0" / "metrics.jsonl").unlink()
    said = invoke("report", str(runs / "run-0")).stderr
    assert "metrics.jsonl` is missing: rounds 0 to 1 and how the trained model stands are" in said
    (runs / "run-0" / "summary.json").unlink()
    said = invoke("report", str(runs / "run-0")).stderr
    assert "metrics.jsonl` is missing: rounds 0 to 1 are left out." in said


@pytest.mark.parametrize("rest", [b"", b'{"ki', b'{"kind": "round", "round": 2, "coh', b"\0" * 90])
def test_a_last_line_that_was_cut_short_by_a_kill_is_no_damage(runs: Path, rest: bytes) -> None:
    folder = runs / "run-0"
    metrics = folder / "metrics.jsonl"
    whole = metrics.read_bytes().splitlines(keepends=True)
    metrics.write_bytes(b"".join(whole[:2]) + rest)
    (folder / "summary.json").unlink()
    assert invoke("report", str(folder)).stderr == ""
    assert rounds_in(folder) == 2
    assert RunFolder(folder).record().final is None


def test_a_record_in_python_is_of_whole_metrics_unless_somebody_is_told(runs: Path) -> None:
    folder = RunFolder(runs / "run-0")
    folder.metrics.write_bytes(b"xx\n" + folder.metrics.read_bytes().split(b"\n", 1)[1])
    with pytest.raises(RunError, match=r"is damaged in line 1: round 0 is left out. `fmol report"):
        folder.record()
    said: list[str] = []
    record = folder.record(say=said.append)
    assert [report.round for report in record.reports] == [1]
    assert (record.rounds, len(said)) == (2, 1)
    assert "round 0 is left out" in record.notes[-1]
    folder.summary.write_text("{", encoding="utf-8")
    assert folder.record(say=said.append).rounds == 2


def test_runs_are_compared_one_by_one_or_by_their_folder(runs: Path) -> None:
    run_into("other", *QUADRATIC, "--algorithm", "fedavg")
    names = [str(runs / "run-0"), str(runs / "run-1"), "other"]
    by_one = invoke("compare", *names)
    by_folder = invoke("compare", str(runs), "other", "--out", "deep/down/c.html")
    table = by_one.stdout.splitlines()[:-1]
    assert table == by_folder.stdout.splitlines()[:-1]
    assert table[0].split()[:3] == ["setting", "runs", "rounds"]
    assert len(table) == 3
    end = table[0].index("runs") + len("runs")
    assert sorted(line[:end].split()[-1] for line in table[1:]) == ["1", "2"]
    assert Path("comparison.html").is_file()
    assert Path("deep/down/c.html").is_file()
    assert by_one.stdout.splitlines()[-1] == "report: comparison.html"


def test_runs_with_other_objectives_are_summed_up_over_their_own() -> None:
    for name, objectives in (("seven", "7"), ("eight", "8")):
        flags = ["--objectives", objectives, "--dimension", "8", "--rounds", "1"]
        run_into(name, "quadratic", *flags, "--clients", "2", "--samples", "4")
    tables = [
        invoke("compare", *names).stdout for names in (("seven", "eight"), ("eight", "seven"))
    ]
    rows = [sorted(line.split() for line in table.splitlines()[1:3]) for table in tables]
    assert rows[0] == rows[1]
    said = "these runs do not share all objectives; mean and highest are over each run's own"
    assert all(said in table.splitlines() for table in tables)
    # And as if each were alone in the table.
    alone = [invoke("compare", name).stdout.splitlines()[1].split() for name in ("seven", "eight")]
    assert {row[3] for row in alone} <= {cell for row in rows[0] for cell in row}
    assert "–" not in " ".join(cell for row in rows[0] for cell in row[:5])


def test_runs_that_share_their_objectives_only_in_part_say_so(runs: Path) -> None:
    write("own_one.py", OWN)
    run_into("other", "own_one:federation", "--rounds", "1")
    said = "these runs do not share all objectives"
    assert said in invoke("compare", str(runs), "other").stdout.splitlines()
    assert said not in invoke("compare", str(runs)).stdout


# ---- sweep -----------------------------------------------------------------------------------


def test_a_sweep_runs_every_combination_and_compares_them() -> None:
    result = invoke(
        *("sweep", *QUADRATIC, "--grid", "seed=0,1", "--grid", "local-steps=1, 2", "--out", "s")
    )
    names = sorted(path.name for path in Path("s").iterdir() if path.is_dir())
    assert names == [
        "seed=0,local_steps=1",
        "seed=0,local_steps=2",
        "seed=1,local_steps=1",
        "seed=1,local_steps=2",
    ]
    for name in names:
        config = config_of(Path("s", name))
        assert f"seed={config['seed']}," in name
        assert f"local_steps={config['algorithm']['local_steps']}" in name
    table = result.stdout.splitlines()
    assert len(table) == 4
    assert table[-1] == f"report: {Path('s/comparison.html')}"
    assert invoke("compare", "s").stdout.splitlines()[:3] == table[:3]


def test_a_sweep_may_stand_in_a_file() -> None:
    write(
        "my.toml",
        """
        rounds = 1
        [problem]
        name = "quadratic"
        clients = 2
        samples = 4
        [sweep]
        seed = [0, 1]
        server_lr = [0.1, {name = "cosine", start = 0.1, rounds = 3}]
        algorithm = ["fedavg"]
        """,
    )
    invoke("sweep", "my.toml", "--out", "s", "--grid", "seed=5", "--quiet")
    found = [config_of(path.parent) for path in Path("s").glob("*/config.toml")]
    assert [config["seed"] for config in found] == [5, 5]
    assert [config["algorithm"]["name"] for config in found] == ["fedavg", "fedavg"]
    rates = [config["algorithm"]["server_lr"] for config in found]
    assert 0.1 in rates
    assert {"name": "cosine", "start": 0.1, "rounds": 3, "end": 0.0} in rates


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ([], "there is nothing to sweep over"),
        (["--grid", "seed"], "`--grid` must be KEY=A,B"),
        (["--grid", "seed="], "`--grid` must be KEY=A,B"),
        (["--grid", "sede=0,1"], "Did you mean `--seed`?"),
        (["--grid", "seed=0,x"], "`seed` must be a whole number"),
        (["--grid", "seed=0", "--jobs", "0"], "--jobs"),
        (["--grid", "seed=[]"], "`--grid` must be KEY=A,B"),
        (["--grid", "engine=[sequential]"], "Put quotes around words"),
        (["--grid", "local_lr=cosine,start=0.1"], "'local_lr=cosine,start=0.1;'"),
        (["--grid", "device=cpu,warp"], "that torch knows, got 'warp'"),
    ],
    ids=" ".join,
)
def test_a_sweep_is_checked_as_a_whole_before_any_run(flags: list[str], said: str) -> None:
    result = invoke("sweep", "quadratic", *flags, "--out", "s", code=2)
    assert said in result.stderr
    assert not Path("s").exists()


def test_a_sweep_started_again_keeps_what_is_finished_and_does_the_rest() -> None:
    sweep = ["sweep", *QUADRATIC, "--out", "s"]
    invoke(*sweep, "--grid", "seed=0,1")
    before = everything_in("s/seed=0")
    shutil.rmtree("s/seed=1")
    result = invoke(*sweep, "--grid", "seed=0,1,2")
    assert "3 runs, 1 of them done already" in result.stderr
    assert everything_in("s/seed=0") == before
    assert sorted(path.parent.name for path in Path("s").glob("*/summary.json")) == [
        "seed=0",
        "seed=1",
        "seed=2",
    ]


def test_a_sweep_started_again_with_more_rounds_goes_on() -> None:
    sweep = ["sweep", *QUADRATIC, "--grid", "seed=0", "--out", "s"]
    invoke(*sweep)
    invoke(*sweep, "--rounds", "3")
    assert rounds_in("s/seed=0") == 3


def test_a_sweep_started_again_with_other_options_is_refused() -> None:
    sweep = ["sweep", *QUADRATIC, "--grid", "seed=0", "--out", "s"]
    invoke(*sweep)
    before = everything_in("s")
    result = invoke(*sweep, "--local-steps", "2", code=2)
    assert "[algorithm] `local_steps` was 1 and is 2" in result.stderr
    assert everything_in("s") == before


def test_a_run_that_fails_does_not_stop_the_others_of_a_sweep() -> None:
    result = invoke(
        *("sweep", *QUADRATIC, "--grid", "server_lr=1e300,0.1", "--rounds", "4", "--out", "s"),
        code=1,
    )
    assert "1 of 2 runs failed: server_lr=1e300." in result.stderr
    assert "server_lr=1e300 failed: round" in result.stderr
    assert Path("s/server_lr=0.1/report.html").is_file()
    assert Path("s/comparison.html").is_file()


def test_a_sweep_of_which_all_runs_fail_says_so() -> None:
    write("own_fail.py", OWN)
    sweep = ["sweep", "own_fail:federation", "--grid", "stop=fail", "--out", "s", "--quiet"]
    result = invoke(*sweep, code=1)
    assert "1 of 1 runs failed: stop=fail." in result.stderr


@pytest.mark.parametrize("jobs", ["1", "2"])
def test_ones_own_code_that_fails_in_one_run_shows_where_and_leaves_the_others(jobs: str) -> None:
    write("own_part.py", OWN)
    sweep = ["sweep", "own_part:federation", "--rounds", "1", "--quiet", "--jobs", jobs]
    result = invoke(*sweep, "--grid", "stop=type,fail,", "--grid", "at=1", "--out", "s", code=1)
    assert "stop=type,at=1 failed: Traceback" in result.stderr
    assert "own_part.py" in result.stderr
    assert "TypeError: of my own" in result.stderr
    assert "RuntimeError: the loss failed" in result.stderr
    assert "2 of 2 runs failed" in result.stderr


def test_values_of_a_key_that_is_given_twice_are_joined() -> None:
    result = invoke("sweep", *QUADRATIC, "--grid", "seed=0,0", "--grid", "seed=1,0", "--out", "s")
    assert sorted(path.parent.name for path in Path("s").glob("*/summary.json")) == [
        "seed=0",
        "seed=1",
    ]
    said = "`seed` is to be 0 more than once: dropped but for the first."
    assert said in result.stderr


@pytest.mark.parametrize(
    ("grid", "values"),
    [
        ("seed=0,1", ["0", "1"]),
        ("seed = 0 ; 1;", ["0", "1"]),
        ("local-lr=cosine,start=0.1,rounds=5;0.1", ["cosine,start=0.1,rounds=5", "0.1"]),
        ("local_lr=cosine,start=0.1,rounds=5;", ["cosine,start=0.1,rounds=5"]),
        ("stop_at=f1=0.5", ["f1=0.5"]),
        ("engine=['sequential', \"vectorized\"]", ["sequential", "vectorized"]),
        (
            'local_lr=[0.1, {name="cosine", start=0.1, rounds=5}]',
            ["0.1", '{name = "cosine", start = 0.1, rounds = 5}'],
        ),
        ("hidden=[[1, 2], [3]]", ["[1, 2]", "[3]"]),
        ("hidden=[1, 2];[3]", ["[1, 2]", "[3]"]),
    ],
)
def test_a_grid_holds_values_of_every_kind(grid: str, values: list[str]) -> None:
    found = [next(iter(each.items())) for each in read_grid({}, [grid])]
    key = grid.partition("=")[0].strip().replace("-", "_")
    assert found == [(key, value) for value in values]


def test_schedules_can_be_swept_over() -> None:
    grid = "server_lr=cosine,start=0.1,rounds=5;cosine,start=0.2,rounds=5;0.1"
    invoke("sweep", *QUADRATIC, "--grid", grid, "--out", "s", "--quiet")
    rates = [
        config_of(each.parent)["algorithm"]["server_lr"] for each in Path("s").glob("*/config.toml")
    ]
    assert sorted(rate["start"] for rate in rates if isinstance(rate, dict)) == [0.1, 0.2]
    assert 0.1 in rates


def test_runs_whose_folders_would_be_called_alike_are_kept_apart() -> None:
    write("own_names.py", OWN)
    sweep = ["sweep", "own_names:federation", "--rounds", "1", "--out", "s", "--quiet"]
    grid = f"stop=a b,a/b,A/b,{'ö' * 300},{'ö' * 301}"
    invoke(*sweep, "--grid", grid)
    names = [path.parent.name for path in Path("s").glob("*/summary.json")]
    assert len(names) == 5
    assert "stop=a-b" in names
    before = everything_in("s")
    del before["comparison.html"]
    invoke(*sweep, "--grid", grid)
    assert {name: everything_in("s")[name] for name in before} == before


def test_a_sweep_in_several_processes_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    write("own_jobs.py", OWN)
    sweep = ["sweep", "own_jobs:federation", "--rounds", "2", "--grid", "seed=0,1"]
    result = invoke(*sweep, "--out", "two", "--jobs", "2")
    assert "seed=1 done" in result.stderr
    invoke(*sweep, "--out", "one")
    assert not list(Path("two").glob("*.toml"))
    for seed in ("seed=0", "seed=1"):
        model = "model.safetensors"
        assert Path("two", seed, model).read_bytes() == Path("one", seed, model).read_bytes()


@pytest.mark.parametrize("stop", ["interrupt", "terminate"])
def test_a_sweep_that_is_stopped_says_which_runs_are_finished_stopped_and_pending(
    stop: str,
) -> None:
    write("own_halt.py", OWN)
    sweep = ["sweep", "own_halt:federation", "--rounds", "3", "--local-steps", "1", "--at", "7"]
    code = {"interrupt": 130, "terminate": 143}[stop]
    grid = ["--grid", f"stop=calm,{stop},x", "--out", "s", "--quiet"]
    result = invoke(*sweep, *grid, code=code)
    assert result.stderr.splitlines() == [
        "stopped",
        "  finished: stop=calm",
        f"  stopped: stop={stop}",
        "  pending: stop=x",
        "Go on with the same command and `--out s`",
    ]


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)], ids=["term", "int"]
)
def test_a_sweep_in_several_processes_stops_those_it_has_started(
    number: signal.Signals, code: int
) -> None:
    write("own_slow.py", OWN)
    sweep = ["sweep", "own_slow:federation", "--rounds", "100000", "--stop", "slow", "--quiet"]
    arguments = [*sweep, "--local-steps=1", "--grid=seed=0,1,2", "--jobs=2", "--out=s"]
    process = subprocess.Popen(
        [sys.executable, "-m", "fmol", *arguments],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        process_group=0,
    )
    logs = [Path("s", f"seed={seed}", "metrics.jsonl") for seed in (0, 1)]
    until = time.monotonic() + 90
    while not all(log.is_file() and log.stat().st_size for log in logs):
        assert process.poll() is None
        assert time.monotonic() < until
        time.sleep(0.05)
    if number == signal.SIGINT:  # As a terminal does.
        os.killpg(process.pid, number)
    else:
        process.send_signal(number)
    _, said = process.communicate(timeout=60)
    assert process.returncode == code
    assert "  stopped: seed=0  seed=1\n  pending: seed=2\n" in said
    for log in logs:
        # Who was stopped has written a checkpoint of its last round, and nothing since.
        checkpoints = sorted(path.name for path in (log.parent / "checkpoints").glob("*.ckpt"))
        lines = len(log.read_bytes().splitlines())
        assert str(lines) in checkpoints[-1]
    time.sleep(0.3)
    assert len(logs[0].read_bytes().splitlines()) == rounds_in("s/seed=0")


def test_a_run_of_a_sweep_that_does_not_stop_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fmol.cli.sweep.GRACE", 0.2)
    stubborn = "import signal, time\nsignal.signal(15, signal.SIG_IGN)\nprint(1, flush=True)\n"
    process = subprocess.Popen(
        [sys.executable, "-c", f"{stubborn}time.sleep(60)"], stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    with process.stdout:
        process.stdout.readline()
    apart = _Apart(2)
    apart.running["stubborn"] = (process, io.BytesIO())
    apart._stop()
    assert process.returncode == -signal.SIGKILL


def test_all_that_is_wrong_with_a_run_in_its_own_process_is_said() -> None:
    write("own_lines.py", OWN)
    sweep = ["sweep", "own_lines:federation", "--rounds", "1", "--grid", "seed=0", "--out", "s"]
    invoke(*sweep, "--quiet")
    Path("s/seed=0/summary.json").unlink()
    # The sweep has the module already; the process that it starts reads this.
    write("own_lines.py", OWN.replace("samples: int = 6", "amount: int = 6, hott: bool = 1"))
    result = invoke(*sweep, "--jobs", "2", "--quiet", code=1)
    assert "seed=0 failed: 1 thing is wrong with the configuration:\n" in result.stderr
    assert "[problem] `samples` is not an option" in result.stderr


# ---- what is there ---------------------------------------------------------------------------


def test_problems_are_listed_with_their_data() -> None:
    text = invoke("problems").stdout
    for name in PROBLEMS:
        assert name in text
    assert "data: none needed" in text
    assert "`build`" not in text
    assert "mnist/ not found" in text


@pytest.mark.parametrize("name", PROBLEMS)
def test_a_problem_shows_its_options(name: str) -> None:
    text = invoke("problems", name).stdout
    assert "default" in text
    assert "data: " in text


def test_a_problem_that_is_not_there_is_misuse() -> None:
    assert "Did you mean `quadratic`?" in invoke("problems", "quadratc", code=2).stderr


def test_the_doctor_says_what_is_installed_and_found() -> None:
    text = invoke("doctor").stdout
    for word in ("fmol ", "python ", "torch ", "cpu ", "cuda", "extras", "FMOL_DATA"):
        assert word in text
    for name in PROBLEMS:
        assert name in text
    assert "does not exist" in invoke("doctor", "--data-dir", "nowhere").stdout


def test_the_doctor_finds_data_in_a_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    from fmol.problems.adult import Adult

    found = Adult.data_sets[0]
    for file in found.files:
        write(f"data/{found.folder}/{file}", "")
    place = f"found in {Path('data', found.folder)}"
    assert place in invoke("doctor", "--data-dir", "data").stdout
    monkeypatch.setenv("FMOL_DATA", "data")
    assert place in invoke("problems").stdout


# ---- completion ------------------------------------------------------------------------------


def completions(line: str) -> list[str]:
    """What bash would be offered for the last word of a line."""
    words = line.split(" ")
    env = {
        "_FMOL_COMPLETE": "bash_complete",
        "COMP_WORDS": line,
        "COMP_CWORD": str(len(words) - 1),
    }
    result = CliRunner().invoke(fmol, [], prog_name="fmol", env=env)
    assert result.stderr == ""
    return [each.partition(",")[2] for each in result.stdout.split()]


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("fmol do", ["doctor"]),
        ("fmol run multi", ["multidigits", "multimnist"]),
        ("fmol sweep quad", ["quadratic"]),
        ("fmol problems ad", ["adult"]),
        ("fmol run multidigits --part", ["--participation", "--partition"]),
        ("fmol run multidigits --partition ", ["iid", "left-shards", "both-shards", "dirichlet"]),
        ("fmol run multidigits --partition=d", ["dirichlet"]),
        ("fmol run quadratic --part", ["--participation"]),
        ("fmol run quadratic --server-lr cos", ["cosine"]),
        ("fmol run quadratic --participation ", ["everyone", "fraction", "number", "stratified"]),
        ("fmol run quadratic --algorithm fed", ["fedavg", "fedls", "fedals"]),
        ("fmol run quadratic --norm", ["--normalize"]),
        ("fmol run quadratic --algorithm fedavg --norm", []),
        ("fmol sweep quadratic --ang", ["--angle"]),
        ("fmol completion ", ["bash", "zsh", "fish"]),
        ("fmol sweep quadratic --grid local_e", ["local_epochs="]),
        ("fmol sweep quadratic --grid local-s", ["local_steps="]),
        ("fmol sweep quadratic --grid alg", ["algorithm="]),
        ("fmol sweep quadratic --grid ang", ["angle="]),
        ("fmol run --out adult --sex", []),
    ],
)
def test_the_shell_is_offered_what_fits(line: str, offered: list[str]) -> None:
    assert completions(line) == offered


@pytest.mark.parametrize("command", ["resume", "report", "compare", "report a --alone"])
def test_the_shell_is_offered_folders_where_runs_are_named(command: str) -> None:
    line = f"fmol {command} ru"
    env = {
        "_FMOL_COMPLETE": "bash_complete",
        "COMP_WORDS": line,
        "COMP_CWORD": str(line.count(" ")),
    }
    assert CliRunner().invoke(fmol, [], prog_name="fmol", env=env).stdout.split() == ["dir,ru"]


def test_a_run_whose_folder_is_called_like_a_problem_is_one_all_the_same() -> None:
    run_into("adult", *QUADRATIC)
    assert "The problem, quadratic" in invoke("resume", "adult", "--help").stdout
    assert "The problem, adult" in invoke("run", "adult", "--help").stdout


def test_the_shell_is_offered_flags_of_a_run_of_a_file_and_of_ones_own(runs: Path) -> None:
    assert completions(f"fmol resume {runs / 'run-0'} --ang") == ["--angle"]
    write("my.toml", "problem = 'quadratic'\nalgorithm = 'fedavg'\n")
    assert completions("fmol run my.toml --ang") == ["--angle"]
    assert completions("fmol run my.toml --norm") == []
    write("own_tab.py", OWN)
    assert completions("fmol run own_tab:federation --samp") == ["--samples"]


def test_the_shell_hears_nothing_of_what_is_broken() -> None:
    write("own_torn.py", "1 / 0\n")
    assert completions("fmol run own_torn:federation --rou") == []
    write("my.toml", "rounds = = 3")
    assert completions("fmol run my.toml --qui") == ["--quiet"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_prints_what_the_shell_evaluates(shell: str) -> None:
    text = invoke("completion", shell).stdout
    assert f"_FMOL_COMPLETE={shell}_complete" in text


def test_a_shell_that_is_not_known_is_misuse() -> None:
    assert "'csh' is not one of" in invoke("completion", "csh", code=2).stderr


# ---- as a process ----------------------------------------------------------------------------


@pytest.fixture
def process() -> Callable[..., subprocess.CompletedProcess[str]]:
    def process(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-W", "error", "-m", "fmol", *arguments],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
            env={**os.environ, "OMP_NUM_THREADS": "1", **env},
        )

    return process


Process = Callable[..., subprocess.CompletedProcess[str]]


def test_a_process_runs_and_says_how_it_was_started(process: Process) -> None:
    done = process("run", *QUADRATIC, "--out", "a folder")
    assert (done.returncode, done.stderr.count("Traceback")) == (0, 0)
    environment = json.loads(Path("a folder/environment.json").read_text(encoding="utf-8"))
    assert environment["command"] == f"fmol run {' '.join(QUADRATIC)} --out 'a folder'"


def test_a_process_that_is_interrupted_ends_with_130_and_goes_on(process: Process) -> None:
    write("own_process.py", OWN)
    arguments = ["own_process:federation", "--local-steps=1", "--rounds=6", "--out=new"]
    done = process("run", *arguments, "--stop=interrupt", "--at=6")
    assert done.returncode == 130
    assert "Traceback" not in done.stderr
    assert "fmol resume new" in done.stderr


def test_a_process_completes_for_the_shell(process: Process) -> None:
    done = process(
        _FMOL_COMPLETE="bash_complete",
        COMP_WORDS="fmol run multidigits --par",
        COMP_CWORD="3",
    )
    assert done.stdout.split() == ["plain,--participation", "plain,--partition"]


def test_a_process_shows_the_error_of_ones_own_code(process: Process) -> None:
    write("own_error.py", OWN)
    done = process("run", "own_error:federation", "--stop=fail", "--rounds=3")
    assert done.returncode == 1
    assert "the loss failed" in done.stderr
    assert "own_error.py" in done.stderr


def test_without_its_packages_the_command_line_says_what_to_install(process: Process) -> None:
    write("click.py", "raise ImportError('no click', name='click')\n")
    done = process("doctor", PYTHONPATH=str(Path.cwd()))
    assert done.returncode == 1
    assert done.stderr.strip().endswith('needs click. Install it with: pip install "fmol[cli]".')
