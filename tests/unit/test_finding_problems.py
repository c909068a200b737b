"""A problem is found by its name, or one's own where one says it is."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, Literal

import pytest

from fmol import Federation
from fmol.config import ConfigError, find_source, read_config
from fmol.options import OptionsError, explain_options, list_options, read_options
from fmol.problems import PROBLEMS, ProblemError, find_problem

OWN = """
from __future__ import annotations
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal
import torch
from fmol import Client, Federation, Objective
if TYPE_CHECKING:
    from nowhere import Unseen

def make(samples=6):
    x = torch.ones(samples, 2)
    error = lambda out, y: (out[:, 0] - y) ** 2
    return Federation(torch.nn.Linear(2, 1), [Objective("a", error)], [Client("c", (x, x.sum(1)), "a")])

federation = make()
model = torch.nn.Sequential(torch.nn.Linear(2, 1))
seen = []

def typed(samples: int = 6, kind: Literal["x", "y"] = "x", lr: float | None = None) -> Federation:
    seen.append((samples, kind, lr))
    return make(samples)

def untyped(needed, names=("a", "b"), depth=None, hot=False, samples=6):
    seen.append((needed, names, depth, hot))
    return make(samples)

def with_data(samples: int = 6, data_dir=None):
    seen.append(data_dir)
    return make(samples)

def with_lists(sizes=[1, 2], shares={"a": 0.5}):
    seen.append((sizes, shares))
    sizes.append(3)
    return make()

def with_path(where: Path = Path("here")):
    seen.append(where)
    return make()

def half_seen(samples: int = 6) -> Unseen:
    return make(samples)

def positional(samples, /):
    return make(samples)

def anything(**options):
    return make()

def named(name="x"):
    return make()

bound = partial(typed, 9)
preset = partial(typed, samples=9)

@dataclass(frozen=True)
class Bowl:
    samples: int = 6
    \"\"\"How many samples there are.\"\"\"

    def build(self, data_dir=None):
        return make(self.samples)

@dataclass(frozen=True)
class Named:
    name: str = "x"

    def build(self, data_dir=None):
        return make()

@dataclass
class Builds_nothing:
    samples: int = 6

class Plain:
    pass

number = 3
"""


@pytest.fixture(autouse=True)
def _own_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Works in a folder of its own, whose modules are forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [each for each in sys.path if each])
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", None)):
            del sys.modules[name]


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    def write(name: str = "own_problem.py", text: str = OWN) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text), encoding="utf-8")
        return path

    return write


def build(name: str, data_dir: str | None = None, **values: Any) -> Federation:
    built = read_options(find_problem(name), values).build(data_dir)
    assert isinstance(built, Federation)
    return built


def samples_of(federation: Federation) -> int:
    return len(federation.client("c").data[0])


def seen() -> Any:
    return sys.modules["own_problem"].seen[-1]


@pytest.mark.parametrize("name", PROBLEMS)
def test_every_built_in_problem_is_a_dataclass_that_builds(name: str) -> None:
    kind = find_problem(name)
    assert is_dataclass(kind)
    assert callable(getattr(kind, "build", None))
    assert kind.__doc__
    read_options(kind, {})


def test_a_federation_is_a_problem_without_options(write: Callable[..., Path]) -> None:
    write()
    assert list_options(find_problem("own_problem:federation")) == {}
    assert build("own_problem:federation") is build("own_problem:federation")


def test_the_arguments_of_a_function_are_its_options(write: Callable[..., Path]) -> None:
    write()
    options = list_options(find_problem("own_problem:typed"))
    assert [(each.name, each.default) for each in options.values()] == [
        ("samples", 6),
        ("kind", "x"),
        ("lr", None),
    ]
    assert options["kind"].kind == Literal["x", "y"]
    assert samples_of(build("own_problem:typed", samples=4, lr=0.5)) == 4
    assert seen() == (4, "x", 0.5)
    with pytest.raises(OptionsError, match=r"`samples` must be a whole number, got 'x'"):
        build("own_problem:typed", samples="x")


def test_arguments_without_types_are_what_their_defaults_are(write: Callable[..., Path]) -> None:
    write()
    build("own_problem:untyped", needed=3)
    assert seen() == (3, ("a", "b"), None, False)
    build("own_problem:untyped", needed="x", names=["u"], depth=2, hot=True)
    assert seen() == ("x", ("u",), 2, True)
    build("own_problem:untyped", needed="x", depth="none")
    assert seen()[2] is None
    with pytest.raises(OptionsError) as caught:
        build("own_problem:untyped", names=3, hot=1)
    assert [text.split("`")[1] for text in caught.value.problems] == ["names", "hot", "needed"]


def test_flags_reach_the_arguments_of_a_function(write: Callable[..., Path]) -> None:
    write()
    flags = {"needed": "3", "names": "u,v", "depth": "2", "hot": "true"}
    read_config({}, {"problem": "own_problem:untyped", **flags}).build()
    assert seen() == (3, ("u", "v"), 2, True)


def test_data_dir_is_no_option_but_is_handed_on(write: Callable[..., Path]) -> None:
    write()
    assert list(list_options(find_problem("own_problem:with_data"))) == ["samples"]
    build("own_problem:with_data", data_dir="there")
    assert seen() == "there"


def test_lists_and_tables_may_be_defaults_and_stay_what_they_are(
    write: Callable[..., Path],
) -> None:
    write()
    config = read_config({}, {"problem": "own_problem:with_lists"})
    assert config.tables["problem"]["sizes"] == [1, 2]
    config.build()
    assert list_options(find_problem("own_problem:with_lists"))["sizes"].default == [1, 2]
    read_config({}, {"problem": "own_problem:with_lists", "sizes": "4,5", "shares": "b=1"}).build()
    assert seen() == ([4, 5, 3], {"b": 1})


def test_a_path_comes_back_from_a_file_as_a_path(write: Callable[..., Path]) -> None:
    write()
    config = read_config({}, {"problem": "own_problem:with_path"})
    assert config.tables["problem"]["where"] == "here"
    read_config(config.tables).build()
    assert seen() == Path("here")


def test_types_that_only_type_checkers_see_do_no_harm(write: Callable[..., Path]) -> None:
    write()
    assert samples_of(build("own_problem:half_seen", samples=3)) == 3


def test_a_partial_function_is_a_function(write: Callable[..., Path]) -> None:
    write()
    assert list(list_options(find_problem("own_problem:bound"))) == ["kind", "lr"]
    assert samples_of(build("own_problem:bound", kind="y")) == 9
    assert samples_of(build("own_problem:preset")) == 9


def test_a_dataclass_that_builds_is_taken_as_it_is(write: Callable[..., Path]) -> None:
    write()
    kind = find_problem("own_problem:Bowl")
    assert explain_options(kind) == {"samples": "How many samples there are."}
    assert samples_of(build("own_problem:Bowl", samples=2)) == 2


@pytest.mark.parametrize(
    ("attribute", "said"),
    [
        ("number", "is a int, where a Federation was expected, a function that returns one"),
        ("Plain", "is a type, where a Federation was expected"),
        ("Builds_nothing", "is a type, where a Federation was expected"),
        ("model", "is a Sequential, where a Federation was expected"),
        ("positional", "takes `samples`, which no option can be made of"),
        ("anything", r"takes `\*\*options`, which no option can be made of"),
        ("named", "has an option `name`"),
        ("Named", "has an option `name`"),
        ("federatoin", "Did you mean `own_problem:federation`?"),
        ("", "has nothing called ``"),
    ],
)
def test_what_is_no_problem_is_said_to_be_none(
    write: Callable[..., Path], attribute: str, said: str
) -> None:
    write()
    with pytest.raises(ProblemError, match=said.replace("?", r"\?")):
        find_problem(f"own_problem:{attribute}")


def test_a_file_is_found_by_its_path_and_sees_what_lies_beside_it(
    write: Callable[..., Path],
) -> None:
    write("far/away/helper_of_own.py", "SAMPLES = 5")
    path = write(
        "far/away/own.py", OWN + "\nfrom helper_of_own import SAMPLES\nhelped = make(SAMPLES)\n"
    )
    assert samples_of(build("far/away/own.py:helped")) == 5
    assert samples_of(build(f"{path}:Bowl", samples=3)) == 3
    assert explain_options(find_problem(f"{path}:Bowl"))["samples"]


def test_a_file_is_run_once_and_takes_no_other_modules_place(write: Callable[..., Path]) -> None:
    import types

    write("types.py", OWN)
    assert find_problem("types.py:Bowl") is find_problem("./types.py:Bowl")
    assert sys.modules["types"] is types


def test_a_module_of_a_package_is_found_from_the_working_folder(
    write: Callable[..., Path],
) -> None:
    write("own_package/__init__.py", "")
    write("own_package/inner.py")
    assert samples_of(build("own_package.inner:federation")) == 6


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("no_such_module:federation", "there is no module `no_such_module`"),
        ("no_such.module:federation", "there is no module `no_such.module`"),
        ("own_problem.inner:federation", "there is no module `own_problem.inner`"),
        ("no/such.py:federation", "there is no file `no/such.py`"),
        (":federation", "there is no module ``"),
        (".own_problem:federation", "there is no module `.own_problem`"),
        ("own_problem.py", "Did you mean `own_problem.py:federation`?"),
        ("multidigit", "Did you mean `multidigits`?"),
        ("river_flow", "Did you mean `river-flow`?"),
        ("", "`problem` must be one of multidigits"),
    ],
)
def test_what_is_nowhere_is_said_to_be_nowhere(
    write: Callable[..., Path], name: str, said: str
) -> None:
    write()
    with pytest.raises(ProblemError) as caught:
        find_problem(name)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("import a_package_that_is_missing", ModuleNotFoundError),
        ("import own", ModuleNotFoundError),  # Begins as the module's own name does.
        ("raise ValueError('from within')", ValueError),
        ("1 / 0", ZeroDivisionError),
        ("import torch; torch.zeros(3) @ torch.zeros(4)", RuntimeError),
        ("raise SystemExit", SystemExit),
        ("def (", SyntaxError),
    ],
)
@pytest.mark.parametrize("name", ["own_broken:federation", "own_broken.py:federation"])
def test_a_module_that_fails_is_said_with_file_and_line_and_its_own_error_is_the_cause(
    write: Callable[..., Path], text: str, error: type[BaseException], name: str
) -> None:
    write("own_broken.py", f"import math\n\n{text}\n")
    for _ in range(2):  # A module that failed is not half there.
        with pytest.raises(ProblemError) as caught:
            find_problem(name)
        assert isinstance(caught.value.__cause__, error)
        said = str(caught.value)
        assert said.startswith(f"`{name.partition(':')[0]}` cannot be imported: ")
        assert "line 3 of `own_broken.py`" in said
        assert "\n" not in said
        with pytest.raises(ConfigError) as in_config:
            find_source({}, {"problem": name})
        assert in_config.value.problems == (said,)
        assert isinstance(in_config.value.__cause__, ProblemError)


def test_an_error_in_what_lies_beside_a_file_is_said_to_be_there(
    write: Callable[..., Path],
) -> None:
    write("far/helper_of_broken.py", "\ndef fail():\n    raise ValueError('two\\nlines.')\n")
    write("far/own.py", "from helper_of_broken import fail\nfail()\n")
    with pytest.raises(
        ProblemError, match=r"line 3 of `far.helper_of_broken.py` raised ValueError"
    ):
        find_problem("far/own.py:federation")
    write("far/helper_of_broken.py", "x = (\n")
    sys.modules.pop("helper_of_broken", None)
    write("far/other.py", "\nimport helper_of_broken\n")
    with pytest.raises(
        ProblemError, match=r"line 1 of `far.helper_of_broken.py` has a syntax error"
    ):
        find_problem("far/other.py:federation")


def test_all_that_fmol_says_of_ones_own_federation_is_passed_on(write: Callable[..., Path]) -> None:
    write(text="import fmol\nfederation = fmol.Federation(None, [], [])\n")
    with pytest.raises(ValueError, match="`model` must be") as direct:
        Federation(None, [], [])  # type: ignore[arg-type]
    with pytest.raises(ProblemError) as caught:
        find_problem("own_problem.py:federation")
    assert " ".join(str(direct.value).split()).rstrip(".") in str(caught.value)
    assert "line 2 of `own_problem.py`" in str(caught.value)


def test_a_file_that_has_no_line_to_blame_is_said_to_be_broken(write: Callable[..., Path]) -> None:
    path = write()
    path.write_bytes(b"x = '\0'\n")
    with pytest.raises(ProblemError, match=r"cannot be imported: .*null bytes"):
        find_problem("own_problem.py:federation")


def test_something_else_than_a_federation_is_refused_when_it_is_built(
    write: Callable[..., Path],
) -> None:
    write(text="def federation():\n    return 3\n")
    with pytest.raises(ConfigError, match="gave a int where a Federation was expected"):
        read_config({}, {"problem": "own_problem:federation"}).build()


@pytest.mark.parametrize("name", PROBLEMS)
def test_a_built_in_problem_says_in_one_line_what_it_is(name: str) -> None:
    first = (find_problem(name).__doc__ or "").split("\n")[0]
    assert first.endswith(".")
    assert len(first) < 90
    assert "`build`" not in first
