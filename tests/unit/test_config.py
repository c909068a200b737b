"""A config is read and checked as a whole, and written so that it reads back the same."""

from __future__ import annotations

import itertools
import math
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fmol.cli.flags import _options
from fmol.config import (
    ALGORITHMS,
    CHOICES,
    Config,
    ConfigError,
    RunOptions,
    find_source,
    plain_value,
    read_config,
    read_file,
    recommended_options,
    toml_value,
)
from fmol.options import OptionsError, explain_options, list_options
from fmol.participation import Everyone, Fraction, Number, Stratified
from fmol.problems import PROBLEMS, find_problem
from fmol.rules import Fixed, MinNorm
from fmol.schedules import Cosine, InverseSqrt, Warmup

PAIRS = [(problem, algorithm) for problem in PROBLEMS for algorithm in ALGORITHMS]
ODD = [
    "a b",
    "Ö",
    "🙂",
    "</script>",
    'q"q',
    "back\\slash",
    "tab\t",
    "nul\x00",
    "del\x7f",
    "",
    "name",
]


def read_back(config: Config) -> Config:
    return read_config(tomllib.loads(config.to_toml()))


def problems_of(tables: dict[str, Any] | None = None, /, **flags: str) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        read_config(tables, flags)
    return caught.value.problems


def only_problem(tables: dict[str, Any] | None = None, /, **flags: str) -> str:
    problems = problems_of(tables, **flags)
    assert len(problems) == 1, problems
    return problems[0]


# ---- written and read back -------------------------------------------------------------------


@pytest.mark.parametrize(("problem", "algorithm"), PAIRS)
def test_a_config_reads_back_as_it_was_written(problem: str, algorithm: str) -> None:
    config = read_config({}, {"problem": problem, "algorithm": algorithm})
    assert read_back(config) == config
    assert read_back(config).tables == tomllib.loads(config.to_toml()) == config.tables


OPTIONS: list[dict[str, Any]] = [
    {"participation": {"name": "fraction", "share": 0.5, "available": 0.9}},
    {"participation": {"name": "number", "count": 3, "available": dict.fromkeys(ODD, 0.5)}},
    {"participation": {"name": "stratified", "count": 4, "per_objective": 2}},
    {"stop_at": 1e-300},
    {"stop_at": dict.fromkeys(ODD, 0.1)},
    {"evaluate": 7},
    {"evaluate": "cohort"},
    {"tensorboard": True, "mlflow": "file:///a=b,c"},
    {"data_dir": "".join(ODD)},
    {"algorithm": {"name": "fsmgda", "local_lr": {"name": "cosine", "start": 1e22, "rounds": 3}}},
    {
        "algorithm": {
            "name": "fsmgda",
            "server_lr": {
                "name": "warmup",
                "rounds": 3,
                "then": {"name": "inverse-sqrt", "start": 0.1},
            },
            "local_epochs": 2,
            "clip_norm": 1,
            "shared": ["trunk.*", "</script>"],
        }
    },
    {"algorithm": {"name": "fmgda", "rule": {"name": "fixed", "weights": dict.fromkeys(ODD, 0.1)}}},
    {"algorithm": {"name": "mgd", "rule": "min-norm", "normalize": "none"}},
    {"algorithm": {"name": "fedavg", "weights": dict.fromkeys(ODD, 1), "server_lr": "none"}},
    {"problem": {"name": "celeba", "attributes": ["Smiling", "Young"]}},
    {"problem": {"name": "adult", "sex_as_input": True}},
]


@pytest.mark.parametrize("tables", OPTIONS, ids=str)
def test_options_of_every_kind_read_back_as_they_were_written(tables: dict[str, Any]) -> None:
    config = read_config({"problem": "quadratic", **tables})
    assert read_back(config) == config


def test_named_choices_become_what_they_name() -> None:
    config = read_config({"problem": "quadratic", **OPTIONS[10]})
    options: Any = config.algorithm_options
    assert options.server_lr == Warmup(InverseSqrt(0.1), 3)
    assert options.shared == ("trunk.*", "</script>")
    assert (options.local_steps, options.local_epochs) == (None, 2)
    assert read_config({"problem": "quadratic"}).run.participation == Everyone()


@given(st.text())
def test_any_text_reads_back_from_toml(text: str) -> None:
    if not any(0xD800 <= ord(c) <= 0xDFFF for c in text):
        assert tomllib.loads(f"a = {toml_value(text)}") == {"a": text}
        assert tomllib.loads(f"a = {toml_value({text: 1})}") == {"a": {text: 1}}


@given(st.floats(allow_nan=False) | st.integers(-(2**63), 2**63 - 1) | st.booleans())
def test_any_number_reads_back_from_toml(number: float) -> None:
    read = tomllib.loads(f"a = {toml_value(number)}")["a"]
    assert read == number
    assert type(read) is type(number)


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (None, "none"),
        (True, True),
        (np.int64(3), 3),
        (np.float64(0.5), 0.5),
        (np.float32(0.5), 0.5),
        (("a", None), ["a", "none"]),
        ({"a": (1,)}, {"a": [1]}),
        (Path("a/b"), "a/b"),
        (Cosine(0.1, 2), {"name": "cosine", "start": 0.1, "rounds": 2, "end": 0.0}),
        (Fixed({"a": 1.0}), {"name": "fixed", "weights": {"a": 1.0}, "default": "none"}),
        (MinNorm(), {"name": "min-norm"}),
        (Fraction(0.5), {"name": "fraction", "share": 0.5, "available": "none", "attempts": 20}),
    ],
    ids=str,
)
def test_values_become_what_toml_knows(value: Any, plain: Any) -> None:
    found = plain_value(value)
    assert found == plain
    assert type(found) is type(plain)
    assert tomllib.loads(f"a = {toml_value(found)}") == {"a": plain}


def test_the_written_config_explains_every_option() -> None:
    lines = read_config({"problem": "multidigits"}).to_toml().splitlines()
    for line, below in itertools.pairwise(lines):
        if " = " in below and not below.startswith(("#", "name")):
            assert line.startswith("# "), below


def test_choices_hold_every_schedule_rule_and_participation_there_is() -> None:
    from fmol import participation, rules, schedules

    named = {kind for choices in CHOICES.values() for kind in choices.values()}
    assert {Everyone, Fraction, Number, Stratified} <= named
    for module in (participation, rules, schedules):
        for name in module.__all__:
            found = getattr(module, name)
            if isinstance(found, type) and hasattr(found, "__dataclass_fields__"):
                assert found in named or name == "Context"


# ---- what is filled in, and what wins --------------------------------------------------------


def test_what_the_problem_recommends_is_taken_where_nothing_is_said() -> None:
    config = read_config({"problem": "multidigits"})
    options: Any = config.algorithm_options
    assert (config.run.rounds, options.local_steps, options.local_lr) == (40, 20, 0.2)
    tables = {"problem": "multidigits", "rounds": 3, "algorithm": {"local_lr": 0.5}}
    config = read_config(tables, {"server_lr": "0.7"})
    options = config.algorithm_options
    assert (config.run.rounds, options.local_lr, options.server_lr) == (3, 0.5, 0.7)


def test_epochs_that_are_asked_for_are_not_joined_by_recommended_steps() -> None:
    options: Any = read_config({"problem": "multidigits"}, {"local_epochs": "2"}).algorithm_options
    assert (options.local_steps, options.local_epochs) == (None, 2)
    options = read_config({"problem": "multimnist"}, {"local_steps": "2"}).algorithm_options
    assert (options.local_steps, options.local_epochs) == (2, None)


@pytest.mark.parametrize("problem", ["multidigits", "multimnist"])
def test_fedals_is_told_the_digits_heads_and_how_much_to_soften_them(problem: str) -> None:
    config = read_config({"problem": problem, "algorithm": "fedals"})
    options: Any = config.algorithm_options
    assert (options.heads, options.temperature) == ("left,right", 4)
    assert options.local_lr == 0.02  # Its own, as without a problem.
    given: Any = read_config({"problem": problem, "algorithm": "fedals"}, {"temperature": "2"})
    assert (given.algorithm_options.heads, given.algorithm_options.temperature) == ("left,right", 2)


def test_a_problem_that_recommends_nothing_gets_ten_local_steps() -> None:
    assert recommended_options(type("Own", (), {})) == {"local_steps": 10}


@pytest.mark.parametrize(("problem", "algorithm"), PAIRS)
def test_recommendations_are_options_that_exist(problem: str, algorithm: str) -> None:
    every = set(list_options(RunOptions))
    for kind in ALGORITHMS.values():
        every |= set(list_options(kind))
    assert set(recommended_options(find_problem(problem))) <= every


def test_flags_win_over_the_file() -> None:
    tables = {
        "rounds": 3,
        "seed": 1,
        "problem": {"name": "quadratic", "clients": 4, "seed": 5},
        "algorithm": {"name": "fedavg", "local_steps": 7},
    }
    flags = {"rounds": "9", "clients": "6", "local_steps": "8", "problem_seed": "2"}
    config = read_config(tables, flags)
    assert (config.run.rounds, config.run.seed) == (9, 1)
    assert (config.problem_options.clients, config.problem_options.seed) == (6, 2)
    assert config.algorithm == "fedavg"
    assert getattr(config.algorithm_options, "local_steps") == 8  # noqa: B009
    assert config.notes == ()


def test_another_algorithm_than_the_files_drops_foreign_options_and_says_so() -> None:
    tables = {
        "problem": "quadratic",
        "algorithm": {"name": "fsmgda", "local_steps": 7, "normalize": "l2", "reuse_rounds": 3},
    }
    config = read_config(tables, {"algorithm": "fedavg"})
    assert getattr(config.algorithm_options, "local_steps") == 7  # noqa: B009
    assert config.notes == (
        "`normalize` of the file is no option of fedavg: left out.",
        "`reuse_rounds` of the file is no option of fedavg: left out.",
    )
    assert read_config(tables, {"algorithm": "fsmgda"}).notes == ()
    tables["algorithm"] = {"name": "fedavg", "normalize": "l2"}
    assert only_problem(tables, algorithm="fedavg").startswith("[algorithm] `normalize` is not")


def test_another_problem_than_the_files_drops_its_options_and_says_so() -> None:
    tables = {"problem": {"name": "quadratic", "clients": 3}}
    config = read_config(tables, {"problem": "multidigits"})
    assert config.problem_options.clients != 3
    assert config.notes == ("[problem] of the file is not of multidigits: left out.",)


def test_names_of_algorithms_are_the_same_in_any_case() -> None:
    assert read_config({"problem": "quadratic", "algorithm": "FedAvg"}).algorithm == "fedavg"


# ---- flags -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("problem", "algorithm"), PAIRS)
def test_every_option_is_reached_by_exactly_one_flag(problem: str, algorithm: str) -> None:
    source = find_source({}, {"problem": problem, "algorithm": algorithm})
    flags = source.flags()
    names = Counter(name for options in flags.values() for name in options)
    assert all(count == 1 for count in names.values())
    kinds = {
        "run": RunOptions,
        "algorithm": source.algorithm_kind,
        "problem": source.problem_kind,
    }
    for table, kind in kinds.items():
        reached = [option.name for option in flags[table].values()]
        assert reached == [name for name in list_options(kind) if name != "transforms"]
    prefixed = {name for name in names if name.startswith("problem_")}
    assert prefixed <= {"problem_seed"}
    spelt = Counter(opt for made in _options(source) for opt in (*made.opts, *made.secondary_opts))
    assert all(count == 1 for count in spelt.values())


@pytest.mark.parametrize(
    "kind", [RunOptions, *ALGORITHMS.values(), *map(find_problem, PROBLEMS)], ids=str
)
def test_every_option_has_a_line_of_help(kind: type) -> None:
    texts = explain_options(kind)
    for name in list_options(kind):
        assert texts.get(name), name
        assert "\n" not in texts[name]


def test_options_of_ones_own_problem_give_way_to_flags_that_are_taken(
    tmp_path: Path,
) -> None:
    path = tmp_path / "own_words.py"
    path.write_text("def federation(out=1, rounds=2, jobs=3, fine=4): ...", encoding="utf-8")
    source = find_source({}, {"problem": f"{path}:federation"})
    assert list(source.flags()["problem"]) == [
        "problem_out",
        "problem_rounds",
        "problem_jobs",
        "fine",
    ]


def test_what_only_python_can_give_is_neither_a_flag_nor_written(tmp_path: Path) -> None:
    path = tmp_path / "own_thing.py"
    text = "class Thing: ...\ndef federation(thing=Thing(), things: list[Thing] = [], size=3): ..."
    path.write_text(text, encoding="utf-8")
    config = read_config({}, {"problem": f"{path}:federation"})
    assert config.tables["problem"] == {"name": f"{path}:federation", "size": 3}
    assert read_back(config).tables == config.tables
    assert "transforms" not in config.tables["algorithm"]


# ---- what is wrong ---------------------------------------------------------------------------


def test_everything_wrong_is_said_at_once() -> None:
    tables = {
        "rounds": -1,
        "sede": 3,
        "problem": {"name": "quadratic", "clients": 0, "anlge": 3},
        "algorithm": {"local_steps": 2.5, "nonsense": 1},
    }
    problems = problems_of(tables, server_lr="fast", lokal_lr="0.1", device="3")
    text = "\n".join(problems)
    for said in [
        "`rounds` must be a whole number of at least 0, got -1.",
        "`sede` is not an option of the run, got 3. Did you mean `seed`?",
        "[problem] `clients` must be a whole number of at least 1, got 0.",
        "[problem] `anlge` is not an option of problem quadratic, got 3. Did you mean `angle`?",
        "[algorithm] `local_steps` must be a whole number of at least 1, got 2.5.",
        "[algorithm] `nonsense` is not an option of algorithm fsmgda, got 1.",
        "[algorithm] `server_lr` must be a finite number of at least 0",
        "`--lokal-lr` is not an option of the run, of problem quadratic or of algorithm fsmgda, got "
        "'0.1'. Did you mean `--local-lr`?",
        "`device` must be auto, cpu, cuda or another that torch knows, got '3'.",
    ]:
        assert said in text
    assert len(problems) == 9


@pytest.mark.parametrize(
    ("count", "device", "said"),
    [
        (0, "cuda", "`device` is 'cuda' but torch sees none. Use 'cpu' or 'auto'."),
        (0, "cuda:0", "`device` is 'cuda:0' but torch sees none."),
        (2, "cuda:2", "`device` is 'cuda:2' but torch sees only 2 of them."),
        (
            0,
            "warp:1",
            "`device` must be auto, cpu, cuda or another that torch knows, got 'warp:1'.",
        ),
        (0, "", "`device` must be auto"),
        (0, 3, "`device` must be text, got 3."),
    ],
)
def test_a_device_that_is_not_there_is_said_with_the_config(
    monkeypatch: pytest.MonkeyPatch, count: int, device: Any, said: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    assert said in only_problem({"problem": "quadratic", "device": device})
    with pytest.raises(OptionsError, match="`device`"):
        RunOptions(device=device)
    for good in ("auto", "cpu", *(f"cuda:{i}" for i in range(count))):
        assert read_config({"problem": "quadratic", "device": good}).run.device == good


def test_a_file_that_cannot_be_read_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: "):
        read_file(tmp_path)


def test_the_error_counts_what_is_wrong() -> None:
    with pytest.raises(ConfigError, match=r"^1 thing is wrong with the configuration:\n`rounds`"):
        read_config({"problem": "quadratic", "rounds": 0.5})
    with pytest.raises(ConfigError, match=r"^2 things are wrong"):
        read_config({"problem": "quadratic", "rounds": 0.5, "seed": -1})


def test_joint_problems_are_said_with_the_others() -> None:
    tables = {"problem": {"name": "quadratic", "angle": 170, "objectives": 3, "noise": -1}}
    problems = problems_of(tables, local_epochs="1", local_steps="1")
    assert len(problems) == 3
    assert any("`angle` must be at most 120" in text for text in problems)
    assert any("exactly one of `local_steps`" in text for text in problems)


@pytest.mark.parametrize(
    ("tables", "said"),
    [
        ({}, "`problem` must be given"),
        ({"problem": {}}, "`problem` must be given"),
        ({"problem": {"clients": 3}}, "`problem` must be given"),
        ({"problem": 3}, "`problem` must be a name, got 3."),
        ({"problem": []}, "`problem` must be a name, got []."),
        ({"problem": {"name": 3}}, "`problem` must be a name, got 3."),
        ({"problem": "quadratc"}, "Did you mean `quadratic`?"),
        ({"problem": "quadratic", "algorithm": []}, "`algorithm` must be a name, got []."),
        ({"problem": "quadratic", "algorithm": 3}, "`algorithm` must be a name, got 3."),
        ({"problem": "quadratic", "algorithm": {"name": True}}, "`algorithm` must be a name"),
        (
            {"problem": "quadratic", "algorithm": "fsmdga"},
            "`algorithm` must be one of ['fsmgda', 'fmgda', 'fedavg', 'fedls', 'fedals', 'smgd', "
            "'mgd', 'alone'], got 'fsmdga'. Did you mean `fsmgda`?",
        ),
        (
            {"problem": "quadratic", "algoritm": {"local_steps": 3}},
            "`[algoritm]` is not a table of a config. Did you mean `[algorithm]`?",
        ),
        ({"problem": "quadratic", "extras": {"a": 1}}, "`extras` is not an option of the run"),
        (
            {"problem": "quadratic", "local_steps": 3},
            "`local_steps` is in the wrong place: put it into [algorithm].",
        ),
        (
            {"problem": "quadratic", "clients": 3},
            "`clients` is in the wrong place: put it into [problem].",
        ),
        (
            {"problem": "quadratic", "algorithm": {"rounds": 3}},
            "[algorithm] `rounds` is in the wrong place: put it at the top, above all tables.",
        ),
        ({"problem": "quadratic", "evaluate": "everyone"}, "one of ['all', 'cohort']"),
        ({"problem": "quadratic", "stop_at": math.nan}, "`stop_at` must be a finite number"),
        ({"problem": "quadratic", "algorithm": {"transforms": [1]}}, "`transforms`"),
        ({"problem": "quadratic", "engine": "fast"}, "`engine` must be one of ["),
    ],
    ids=str,
)
def test_a_mistake_is_said_with_its_key_and_what_to_do(tables: dict[str, Any], said: str) -> None:
    assert said in only_problem(tables)


def test_a_problem_that_is_not_found_does_not_hide_what_else_is_wrong() -> None:
    tables = {"problem": "quadratc", "algorithm": "fsmdga", "seed": -1}
    problems = problems_of(tables, rounds="x")
    named = {text.split("`")[1] for text in problems}
    assert named == {"problem", "algorithm", "seed", "rounds"}
    assert len(problems) == 4


def test_an_algorithm_that_is_not_known_does_not_hide_what_else_is_wrong() -> None:
    tables = {
        "rouns": 3,
        "local_steps": 2,
        "problem": {"name": "quadratic", "clients": 0, "anlge": 3, "rounds": 4},
        "algorithm": {"name": "fsmdga", "local_lr": -1, "loacl_epochs": 1, "normalize": "loss"},
        "algoritm": {"local_lr": 0.1},
    }
    problems = problems_of(tables, clientz="3", server_lr="fast", problem_seed="x")
    for said in [
        "`algorithm` must be one of [",
        "`--clientz` is not an option of the run, of the problem or the algorithm, got '3'. Did you "
        "mean `--clients`?",
        "`local_steps` is in the wrong place: put it into [algorithm].",
        "`[algoritm]` is not a table of a config. Did you mean `[algorithm]`?",
        "[problem] `rounds` is in the wrong place: put it at the top, above all tables.",
        "`rouns` is not an option of the run, got 3. Did you mean `rounds`?",
        "[problem] `clients` must be a whole number of at least 1, got 0.",
        "[problem] `anlge` is not an option of problem quadratic, got 3. Did you mean `angle`?",
        "[problem] `seed` must be a whole number, got 'x'.",
        "[algorithm] `local_lr` must be a finite number of at least 0 or one of [",
        "[algorithm] `loacl_epochs` is not an option of any algorithm, got 1. Did you mean "
        "`local_epochs`?",
        "[algorithm] `server_lr` must be",
    ]:
        assert any(text.startswith(said) for text in problems), said
    assert len(problems) == 12


def test_a_problem_that_is_misspelt_does_not_hide_what_is_wrong_with_any_of_those_there_are() -> (
    None
):
    tables = {
        "problem": {"name": "quadratc", "clients": 0, "anlge": 3, "width": 3},
        "algorithm": {"local_lr": -1, "nonsense": 1, "local_steps": 1, "local_epochs": 1},
    }
    problems = problems_of(tables, clientz="3")
    for said in [
        "`problem` must be one of ",
        "`--clientz` is not an option",
        "[problem] `clients` must be a whole number of at least 1, got 0.",
        "[problem] `anlge` is not an option of any problem, got 3. Did you mean `angle`?",
        "[algorithm] `local_lr` must be",
        "[algorithm] `nonsense` is not an option of algorithm fsmgda, got 1.",
        "[algorithm] exactly one of `local_steps` and `local_epochs` must be given",
    ]:
        assert any(text.startswith(said) for text in problems), said
    assert len(problems) == 7


def test_of_ones_own_problem_that_is_not_found_nothing_is_said_that_cannot_be_known() -> None:
    for name in ("no_such_module_here:federation", "unlike_any_other"):
        tables = {"problem": {"name": name, "depth": -1}, "algorithm": {"local_epochs": 2}}
        assert len(problems_of(tables, width="3", problem_seed="x")) == 1
    assert len(problems_of({"problem": {"depth": -1}}, width="3")) == 1


def test_what_a_file_says_of_another_algorithm_than_the_flag_is_not_held_against_it() -> None:
    tables = {"problem": "quadratic", "algorithm": {"name": "fsmgda", "nonsense": 1}}
    assert len(problems_of(tables, algorithm="fedavgg")) == 1
    tables = {"problem": {"name": "quadratic", "nonsense": 1}}
    assert len(problems_of(tables, problem="wavse")) == 1


def test_an_option_that_is_right_for_some_algorithm_is_not_said_to_be_wrong() -> None:
    """FedAvg has `weights` and FSMGDA has not; which one is meant is not known."""
    tables = {"problem": "quadratic", "algorithm": {"name": "fedagv", "weights": {"f1": 1.0}}}
    assert "`algorithm` must be" in only_problem(tables)


# ---- files -----------------------------------------------------------------------------------


def test_a_file_that_is_not_toml_says_where_it_is_wrong(tmp_path: Path) -> None:
    path = tmp_path / "own.toml"
    path.write_text("rounds = 3\nseed = = 4\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"own.toml` is not valid TOML: .*line 2"):
        read_file(path)
    path.write_bytes("name = 'ä'".encode("latin-1"))
    with pytest.raises(ConfigError, match="is not text in UTF-8"):
        read_file(path)


def test_a_file_may_begin_with_a_byte_order_mark_and_end_lines_as_windows_does(
    tmp_path: Path,
) -> None:
    path = tmp_path / "own.toml"
    path.write_bytes("\ufeffrounds = 3\r\nproblem = 'quadratic'\r\n".encode())
    assert read_config(read_file(path)).run.rounds == 3


def test_a_flag_for_epochs_takes_the_place_of_the_files_steps_and_says_so() -> None:
    tables = {"problem": "quadratic", "algorithm": {"name": "fsmgda", "local_steps": 3}}
    config = read_config(tables, {"local_epochs": "2"})
    assert config.tables["algorithm"]["local_steps"] == "none"
    assert config.tables["algorithm"]["local_epochs"] == 2
    assert config.notes == ("`local_steps` of the file gives way to `--local-epochs`.",)
    with pytest.raises(ConfigError, match="exactly one of `local_steps` and `local_epochs`"):
        read_config(tables, {"local_epochs": "2", "local_steps": "3"})
