"""A run as a config file says it: the problem, the algorithm and how to train, checked as a whole.

A file and the flags of a command line are two spellings of the same thing: a flag is a key of the file,
and its text a value. Everything that is wrong is said at once.
"""

from __future__ import annotations

import importlib.util
import json
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass
from functools import cached_property
from numbers import Integral, Real
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import torch

from fmol.algorithms import (
    FMGDA,
    FSMGDA,
    MGD,
    SMGD,
    Adam,
    Alone,
    FedALS,
    FedAvg,
    FedLS,
    Momentum,
    Plain,
)
from fmol.algorithms.steps import ServerStep
from fmol.engines import ALL_CUDA, Compile, EngineName, resolve_device
from fmol.errors import MisuseError
from fmol.federation import Federation
from fmol.options import (
    Choices,
    Count,
    Option,
    OptionsError,
    Range,
    certain_problems,
    check_options,
    explain_options,
    kinds_in,
    list_options,
    nearest,
    parse_text,
    read_options,
)
from fmol.participation import Everyone, Fraction, Number, Participation, Stratified
from fmol.precision import Precision, check_precision
from fmol.problems import PROBLEMS, ProblemError, find_problem, problem_file
from fmol.rounds import Algorithm
from fmol.rules import (
    Capped,
    Fixed,
    MinNorm,
    NearPrior,
    Rule,
    Smoothed,
    SmoothTchebycheff,
    TorchJD,
    UpGrad,
)
from fmol.schedules import Cosine, InverseSqrt, StepDecay, Warmup

__all__ = [
    "ALGORITHMS",
    "CHOICES",
    "Config",
    "ConfigError",
    "RunOptions",
    "Source",
    "find_source",
    "plain_value",
    "read_config",
    "read_file",
    "recommended_options",
    "toml_value",
]

ALGORITHMS: Mapping[str, type] = {
    "fsmgda": FSMGDA,
    "fmgda": FMGDA,
    "fedavg": FedAvg,
    "fedls": FedLS,
    "fedals": FedALS,
    "smgd": SMGD,
    "mgd": MGD,
    "alone": Alone,
}
"""What an algorithm is called in files and flags; the first is the default."""

CHOICES: Choices = {
    Callable[[int], float]: {
        "cosine": Cosine,
        "step-decay": StepDecay,
        "inverse-sqrt": InverseSqrt,
        "warmup": Warmup,
    },
    Rule: {
        "min-norm": MinNorm,
        "upgrad": UpGrad,
        "capped": Capped,
        "near-prior": NearPrior,
        "fixed": Fixed,
        "tchebycheff": SmoothTchebycheff,
        "smoothed": Smoothed,
        "torchjd": TorchJD,
    },
    ServerStep: {"plain": Plain, "momentum": Momentum, "adam": Adam},
    Participation: {
        "everyone": Everyone,
        "fraction": Fraction,
        "number": Number,
        "stratified": Stratified,
    },
}
"""What can be named where an option is more than a value: `{name = "cosine", start = 0.1, …}`."""

TABLES = ("problem", "algorithm")
PREFIX = "problem_"
"""Before the flag of a problem's option whose own name is taken: `--problem-seed`."""
TAKEN = frozenset(
    {*TABLES, "out", "quiet", "grid", "jobs", "anyway", "help"}
    | {"points", "method", "reference", "seeds", "measure"}
)
"""Flags that are no options of anything."""


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """How a run goes, whatever is trained and by which algorithm."""

    rounds: Annotated[int, Range(least=0)] = 40
    """How many rounds to train."""
    seed: Annotated[int, Range(least=0)] = 0
    """What batches, cohorts and everything else random in training are drawn from."""
    engine: EngineName = "sequential"
    """How clients compute: one after the other, all lanes side by side, the faster of the two, or as
    nodes of a Flower simulation."""
    device: str = "auto"
    """A device as torch names it; auto is the first CUDA device, or the CPU where there is none, and
    cuda:all divides the lanes among all of them."""
    precision: Precision = "fp32"
    """How finely local steps compute products: in full, or rounded, which is faster on a GPU."""
    compile: Compile = "auto"
    """When steps that are taken side by side are compiled: if it pays in this run, always, or never. On
    a CPU it takes a C++ compiler, and whether it pays is found out by the engine auto."""
    lanes_in_flight: Literal["auto"] | Count = "auto"
    """How many lanes the vectorized engine steps at a time; auto is as many as fit into memory."""
    flower_backend: Literal["thread", "ray"] = "thread"
    """Where the engine flower runs its clients: in this process, or in processes that Ray starts."""
    participation: Participation = field(default_factory=Everyone)
    """Who takes part in a round: everyone, or a fraction, number or stratified with its options."""
    evaluate: Literal["all", "cohort"] | Count | None = None
    """Over whom losses are reported: all clients, the cohort, or that many; none is by their number."""
    evaluate_every: Count = 1
    """Losses are measured in every so many rounds."""
    stop_at: float | Mapping[str, float] | None = None
    """Ends the run once every loss, or each one named, is at or below this."""
    true_gradients_every: Count | None = None
    """Measures stationarity with true gradients every so many rounds; costs a pass over all data."""
    checkpoint_every: Count | None = None
    """Rounds between checkpoints; none is every 10 rounds and at least every minute."""
    threads: Count | None = None
    """How many threads torch uses; none is its own choice. One is often fastest for small models."""
    data_dir: str | None = None
    """The folder with data sets; none looks where FMOL_DATA says."""
    tensorboard: bool = False
    """Also writes TensorBoard's event files into the run folder."""
    mlflow: str | None = None
    """Also sends the metrics to this MLflow tracking URI."""

    def __post_init__(self) -> None:
        check_options(self)

    def joint_problems(self) -> list[str]:
        """What is wrong with the device, and with what is asked of it."""
        found = _device_problems(self.device)
        if found:
            return found
        if self.device == ALL_CUDA and self.engine in ("sequential", "flower"):
            found.append(
                f"`device` is {ALL_CUDA}, and the {self.engine} engine computes on one device. Set "
                "`engine` to vectorized or auto."
            )
        if self.engine == "flower" and importlib.util.find_spec("flwr") is None:
            found.append(
                '`engine` is flower, which needs flwr. Install it with: pip install "fmol[flower]".'
            )
        try:
            check_precision(self.precision, resolve_device(self.device))
        except ValueError as error:
            found.append(str(error))
        return found


def _device_problems(device: str) -> list[str]:
    if device == "auto":
        return []
    device = "cuda" if device == ALL_CUDA else device
    try:
        named = torch.device(device)
    except RuntimeError:
        return [f"`device` must be auto, cpu, cuda or another that torch knows, got {device!r}."]
    if named.type != "cuda":
        return []
    # Counted, not asked for: a sweep that starts other processes needs no memory of its own there.
    there = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if (named.index or 0) < there:
        return []
    seen = f"only {there} of them" if there else "none"
    return [f"`device` is {device!r} but torch sees {seen}. Use 'cpu' or 'auto'."]


class ConfigError(MisuseError):
    """All that is wrong with a config, a sentence each in `problems`."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        head = "1 thing is" if len(problems) == 1 else f"{len(problems)} things are"
        super().__init__("\n".join([f"{head} wrong with the configuration:", *problems]))


@dataclass(frozen=True)
class Config:
    """A run, complete: every option has its value."""

    problem: str
    """The name of a built-in problem, or `module:name` of one's own."""
    problem_options: Any
    """The problem's dataclass; `build(data_dir)` gives the federation."""
    algorithm: str
    algorithm_options: Algorithm
    run: RunOptions
    notes: tuple[str, ...] = ()
    """What was not taken as given, in words."""
    problem_file: Path | None = None
    """The file that the problem is in, where it is named by one."""

    def build(self) -> Federation:
        """The federation to train."""
        built = self.problem_options.build(self.run.data_dir)
        if not isinstance(built, Federation):
            raise ConfigError(
                [
                    f"`{self.problem}` gave a {type(built).__name__} where a Federation was "
                    "expected. Return fmol.Federation(…) from it."
                ]
            )
        return built

    @cached_property
    def tables(self) -> dict[str, Any]:
        """Every option as a config file has it: run options, and a table for problem and algorithm."""
        return {
            **_values(self.run),
            "problem": {"name": self.problem, **_values(self.problem_options)},
            "algorithm": {"name": self.algorithm, **_values(self.algorithm_options)},
        }

    def to_toml(self) -> str:
        """The config as a file that explains itself, and that reads back as the same config."""
        lines = _toml_lines(_values(self.run), explain_options(RunOptions))
        for table, name, options in (
            ("problem", self.problem, self.problem_options),
            ("algorithm", self.algorithm, self.algorithm_options),
        ):
            lines += ["", f"[{table}]", f"name = {toml_value(name)}"]
            lines += _toml_lines(_values(options), explain_options(type(options)))
        return "\n".join(lines) + "\n"


@dataclass(frozen=True)
class Source:
    """What a config is made of before it is checked: which problem and algorithm, and what is known
    of their options. A command line shows its flags from this."""

    problem: str
    problem_kind: type
    algorithm: str
    algorithm_kind: type

    def flags(self) -> dict[str, dict[str, Option]]:
        """Table → flag's name → option; a problem's option whose name is taken has a prefix."""
        run = {n: o for n, o in list_options(RunOptions).items() if _settable(o)}
        algorithm = {n: o for n, o in list_options(self.algorithm_kind).items() if _settable(o)}
        problem = {}
        for name, option in list_options(self.problem_kind).items():
            if _settable(option):
                taken = name in run or name in algorithm or name in TAKEN
                problem[PREFIX + name if taken else name] = option
        return {"run": run, "algorithm": algorithm, "problem": problem}


def read_file(path: Path) -> dict[str, Any]:
    """The tables of a TOML file; raises `ConfigError` where it is none."""
    try:
        text = path.read_text(encoding="utf-8-sig")  # Some editors put a mark before the text.
        return tomllib.loads(text)
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError([f"`{path}` cannot be read: {reason}. Name a file that can."]) from error
    except UnicodeDecodeError as error:
        raise ConfigError([f"`{path}` is not text in UTF-8: {error}. Save it as UTF-8."]) from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError([f"`{path}` is not valid TOML: {error}."]) from error


def find_source(
    tables: Mapping[str, Any], flags: Mapping[str, str], known_file: Path | None = None
) -> Source:
    """Which problem and algorithm are meant; raises `ConfigError` where that cannot be told.

    `known_file` is as for `read_config`.
    """
    known_file = None if flags.get("problem") else known_file
    names, kinds, problems, cause = _look_up(tables, flags, known_file)
    if problems:
        raise ConfigError(problems) from cause
    return Source(names["problem"], kinds["problem"], names["algorithm"], kinds["algorithm"])


def _look_up(
    tables: Mapping[str, Any], flags: Mapping[str, str], known_file: Path | None
) -> tuple[dict[str, Any], dict[str, type], list[str], ProblemError | None]:
    """What problem and algorithm are called, what they are as far as that can be told, what is wrong
    with their names, and the error of which that came."""
    problems: list[str] = []
    cause = None
    names: dict[str, Any] = {}
    for table, default in (("problem", None), ("algorithm", next(iter(ALGORITHMS)))):
        given = tables.get(table)
        name = flags.get(table) or (given.get("name") if isinstance(given, Mapping) else given)
        names[table] = name if name is not None else default
        if names[table] is None:
            problems.append(
                '`problem` must be given: `[problem]` with `name = "…"`. Built in are '
                f"{', '.join(PROBLEMS)}."
            )
        elif not isinstance(names[table], str):
            problems.append(f"`{table}` must be a name, got {names[table]!r}.")
    kinds: dict[str, type] = {}
    if isinstance(names["problem"], str):
        try:
            kinds["problem"] = find_problem(names["problem"], known_file)
        except ProblemError as error:
            problems.append(str(error))
            cause = error
    if isinstance(names["algorithm"], str):
        chosen = names["algorithm"].lower()
        if chosen in ALGORITHMS:
            names["algorithm"], kinds["algorithm"] = chosen, ALGORITHMS[chosen]
        else:
            hint = nearest(chosen, ALGORITHMS)
            problems.append(
                f"`algorithm` must be one of {list(ALGORITHMS)}, got {names['algorithm']!r}."
                + (f" Did you mean `{hint}`?" if hint else "")
            )
    return names, kinds, problems, cause


def read_config(
    tables: Mapping[str, Any] | None = None,
    flags: Mapping[str, str] | None = None,
    known_file: Path | None = None,
) -> Config:
    """The config that a file's `tables` and a command line's `flags` make; flags win.

    Flags are by option name, with underscores, `problem` and `algorithm` among them. What is given
    nowhere is what the problem recommends, else the option's own default. `known_file` is where the
    problem's own file was found before, if it is named by one: whatever the working folder, it is
    looked for there first. Raises `ConfigError` with all that is wrong.

    >>> config = read_config({"problem": "multidigits", "rounds": 5}, {"local_steps": "3"})
    >>> config.run.rounds, config.algorithm, config.algorithm_options.local_steps
    (5, 'fsmgda', 3)
    """
    tables, flags = dict(tables or {}), dict(flags or {})
    given: dict[str, dict[str, Any]] = {
        "run": {name: value for name, value in tables.items() if name not in TABLES},
        "problem": _table(tables, "problem"),
        "algorithm": _table(tables, "algorithm"),
    }
    known_file = None if flags.get("problem") else known_file  # A flag's is another.
    names, kinds, problems, cause = _look_up(tables, flags, known_file)
    if problems:
        for table in TABLES:  # What a file says of another than the flag's may be left out.
            if flags.get(table) and _table_name(tables, table) not in (None, names[table]):
                given[table] = {}
        raise ConfigError([*problems, *_other_problems(given, flags, names, kinds)]) from cause
    source = Source(names["problem"], kinds["problem"], names["algorithm"], kinds["algorithm"])
    notes = []
    if flags.get("algorithm") and _table_name(tables, "algorithm") not in (
        None,
        source.algorithm,
    ):
        notes += _drop_foreign(given["algorithm"], source)
    if flags.get("problem") and _table_name(tables, "problem") not in (None, source.problem):
        if given["problem"]:
            notes.append(f"[problem] of the file is not of {source.problem}: left out.")
        given["problem"] = {}
    known = source.flags()
    for name, text in flags.items():
        if name in TABLES:
            continue
        place = next((table for table in known if name in known[table]), None)
        if place is None:
            everything = [each for options in known.values() for each in options]
            owners = f"problem {source.problem} or of algorithm {source.algorithm}"
            problems.append(_unknown_flag(name, text, everything, owners))
        else:
            option = known[place][name]
            given[place][option.name] = parse_text(option.kind, text)
    problems += _take_out_misplaced(
        given,
        {
            "run": list_options(RunOptions),
            "problem": list_options(source.problem_kind),
            "algorithm": list_options(source.algorithm_kind),
        },
    )
    notes += _settle_steps(given["algorithm"], flags)
    _recommend(given, source)
    read: dict[str, Any] = {}
    for table, kind, called in (
        ("run", RunOptions, "the run"),
        ("problem", source.problem_kind, f"problem {source.problem}"),
        ("algorithm", source.algorithm_kind, f"algorithm {source.algorithm}"),
    ):
        try:
            read[table] = read_options(kind, given[table], CHOICES, called=called)
        except OptionsError as error:
            mark = "" if table == "run" else f"[{table}] "
            problems += [f"{mark}{text}" for text in error.problems]
    if problems:
        raise ConfigError(problems)
    return Config(
        source.problem,
        read["problem"],
        source.algorithm,
        read["algorithm"],
        read["run"],
        tuple(notes),
        problem_file(source.problem, known_file),
    )


def _other_problems(
    given: dict[str, dict[str, Any]],
    flags: Mapping[str, str],
    names: Mapping[str, Any],
    kinds: Mapping[str, type],
) -> list[str]:
    """What else is certainly wrong, where it cannot be told which problem or algorithm is meant.

    What is not an option of the one that is meant may be one of another: only what is wrong with each
    that may be meant is said.
    """
    meant: dict[str, Sequence[type]] = {
        "run": [RunOptions],
        "problem": [kinds["problem"]] if "problem" in kinds else _near_problems(names["problem"]),
        "algorithm": [kinds["algorithm"]] if "algorithm" in kinds else [*ALGORITHMS.values()],
    }
    known = {
        table: {name: option for kind in each for name, option in list_options(kind).items()}
        for table, each in meant.items()
    }
    problems = []
    for name, text in flags.items():
        own = name.removeprefix(PREFIX)
        homes = [(table, name) for table in ("run", "algorithm") if name in known[table]]
        homes += [("problem", own)] if own in known["problem"] else []
        if homes:
            table, key = homes[0]
            given[table][key] = parse_text(known[table][key].kind, text)
        elif name not in TABLES and meant["problem"]:
            everything = [each for options in known.values() for each in options]
            problems.append(_unknown_flag(name, text, everything, "the problem or the algorithm"))
    problems += _take_out_misplaced(given, known, closed=bool(meant["problem"]))
    for table, each in meant.items():
        called = "the run" if table == "run" else f"{table} {names[table]}"
        if table not in ("run", *kinds):
            found = _shared_problems(each, given[table], f"any {table}")
        elif table == "algorithm":  # The problem that is meant may recommend what is not given.
            found = certain_problems(each[0], given[table], CHOICES, called)
        else:
            found = _problems(each[0], given[table], called)
        problems += found if table == "run" else [f"[{table}] {text}" for text in found]
    return problems


def _problems(kind: type, values: Mapping[str, Any], called: str) -> list[str]:
    try:
        read_options(kind, values, CHOICES, called=called)
    except OptionsError as error:
        return list(error.problems)
    return []


def _near_problems(name: Any) -> list[type]:
    """The problems that a name which is none may stand for; none where it may be one's own."""
    near = isinstance(name, str) and ":" not in name and nearest(name, PROBLEMS)
    return [find_problem(each) for each in PROBLEMS] if near else []


def _shared_problems(kinds: Sequence[type], values: Mapping[str, Any], called: str) -> list[str]:
    """What is wrong with a table's values for each of the kinds that it may be of."""
    problems = []
    for name, value in values.items():
        owners = [kind for kind in kinds if name in list_options(kind)]
        found = [certain_problems(kind, {name: value}, CHOICES, called) for kind in owners]
        if kinds and not owners:
            hint = nearest(name, {each: None for kind in kinds for each in list_options(kind)})
            problems.append(
                f"`{name}` is not an option of {called}, got {value!r}."
                + (f" Did you mean `{hint}`?" if hint else "")
            )
        elif found and all(found):
            problems += found[0]
    return problems


def _take_out_misplaced(
    given: Mapping[str, dict[str, Any]],
    known: Mapping[str, Mapping[str, Option]],
    closed: bool = True,
) -> list[str]:
    """Takes out keys of a file that stand in another's table, and tables that are misspelt.

    Unless `closed`, a problem may have more options than are `known`.
    """
    problems = []
    for table, values in given.items():
        if table == "problem" and not closed:
            continue
        for name in [each for each in values if each not in known[table]]:
            homes = [each for each in known if name in known[each]]
            hint = nearest(name, TABLES) if isinstance(values[name], Mapping) else None
            if homes:
                place = "at the top, above all tables" if homes == ["run"] else f"into [{homes[0]}]"
                mark = "" if table == "run" else f"[{table}] "
                problems.append(f"{mark}`{name}` is in the wrong place: put it {place}.")
            elif table == "run" and hint:
                problems.append(f"`[{name}]` is not a table of a config. Did you mean `[{hint}]`?")
            else:
                continue
            del values[name]
    return problems


def _table(tables: Mapping[str, Any], name: str) -> dict[str, Any]:
    table = tables.get(name)
    return {k: v for k, v in table.items() if k != "name"} if isinstance(table, Mapping) else {}


def _table_name(tables: Mapping[str, Any], name: str) -> str | None:
    table = tables.get(name)
    return table.get("name") if isinstance(table, Mapping) else table


def _drop_foreign(options: dict[str, Any], source: Source) -> list[str]:
    """Takes out what a file says for another algorithm than the one asked for; says so."""
    foreign = [name for name in options if name not in list_options(source.algorithm_kind)]
    for name in foreign:
        del options[name]
    return [
        f"`{name}` of the file is no option of {source.algorithm}: left out." for name in foreign
    ]


def _settle_steps(options: dict[str, Any], flags: Mapping[str, str]) -> list[str]:
    """Lets a flag for one of steps and epochs take the place of the other in a file; says so."""
    pair = ("local_steps", "local_epochs")
    for said, other in (pair, pair[::-1]):
        asked = flags.get(said, "none") != "none" and other not in flags
        if asked and options.get(other, "none") != "none":
            options[other] = "none"
            return [f"`{other}` of the file gives way to `--{said.replace('_', '-')}`."]
    return []


def _unknown_flag(name: str, text: str, known: Sequence[str], owners: str) -> str:
    hint = nearest(name, [*known, "algorithm"])
    flag = "--" + name.replace("_", "-")
    return f"`{flag}` is not an option of the run, of {owners}, got {text!r}. " + (
        f"Did you mean `--{hint.replace('_', '-')}`?" if hint else "`--help` lists them."
    )


def _recommend(given: Mapping[str, dict[str, Any]], source: Source) -> None:
    """Fills in what the problem recommends where nothing was said."""
    recommended = recommended_options(source.problem_kind, source.algorithm_kind)
    if {"local_steps", "local_epochs"} & set(given["algorithm"]):
        recommended = {
            k: v for k, v in recommended.items() if k not in ("local_steps", "local_epochs")
        }
    for table, kind in (("run", RunOptions), ("algorithm", source.algorithm_kind)):
        for name in list_options(kind):
            if name in recommended and name not in given[table]:
                given[table][name] = recommended[name]


def recommended_options(problem: type, algorithm: type = object) -> dict[str, Any]:
    """Options of run and algorithm that suit a problem, where nothing else is said, but for those that
    the algorithm keeps to itself."""
    own: Mapping[str, Any] = getattr(problem, "recommended", {})
    if not {"local_steps", "local_epochs"} & set(own):
        own = {"local_steps": 10, **own}
    kept = getattr(algorithm, "own_options", ())
    return {name: value for name, value in own.items() if name not in kept}


def _settable(option: Option) -> bool:
    """Whether an option can be written down: not one that only Python can give."""
    return any(_writable(kind) for kind in kinds_in(option.kind))


def _writable(kind: Any) -> bool:
    origin = get_origin(kind) or kind
    if origin in (tuple, list, Sequence):
        return all(_writable(each) for each in get_args(kind) if each is not Ellipsis)
    plain = (int, float, bool, str, Path, Literal, Mapping, dict, Any)
    return origin in plain or kind in CHOICES


# ---- TOML ------------------------------------------------------------------------------------


def _values(options: Any) -> dict[str, Any]:
    """Option → value as a config file has it."""
    return {
        name: plain_value(getattr(options, name))
        for name, option in list_options(type(options)).items()
        if _settable(option)
    }


def plain_value(value: Any) -> Any:
    """A value as TOML and JSON know it."""
    if value is None:
        return "none"
    if isinstance(value, tuple | list):
        return [plain_value(each) for each in value]
    if isinstance(value, Mapping):
        return {str(name): plain_value(each) for name, each in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        for named in CHOICES.values():
            for name, kind in named.items():
                if type(value) is kind:
                    return {"name": name, **_values(value)}
    if isinstance(value, bool | str):
        return value
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value)
    return str(value) if isinstance(value, Path) else repr(value)


def _toml_lines(values: Mapping[str, Any], help: Mapping[str, str]) -> list[str]:
    lines = []
    for name, value in values.items():
        lines += [f"# {help[name]}"] if help.get(name) else []
        lines.append(f"{name} = {toml_value(value)}")
    return lines


def toml_value(value: Any) -> str:
    """A value of `plain_value` as TOML writes it."""
    # The standard library reads TOML and does not write it; no library writes the comments that
    # make a config explain itself.
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, Mapping):
        pairs = (f"{_toml_key(name)} = {toml_value(each)}" for name, each in value.items())
        return "{" + ", ".join(pairs) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(toml_value(each) for each in value) + "]"
    return repr(value)


def _toml_key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else toml_value(name)
