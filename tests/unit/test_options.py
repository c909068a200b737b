"""Options are checked by what their fields say, wherever they come from."""

from __future__ import annotations

import importlib
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, make_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fmol import FSMGDA, FedAvg
from fmol.config import CHOICES, RunOptions
from fmol.options import (
    Count,
    NotNegative,
    OptionsError,
    Positive,
    Range,
    check_options,
    expected,
    explain_options,
    fits,
    list_options,
    nearest,
    parse_text,
    read_options,
)
from fmol.participation import Everyone, Fraction, Number, Participation, Stratified
from fmol.problems.quadratic import Quadratic
from fmol.rules import Fixed, MinNorm, Rule
from fmol.schedules import Cosine, InverseSqrt, Schedule, StepDecay, Warmup

HUGE = 10**400


@dataclass(frozen=True, kw_only=True)
class Dish:
    """One option of every kind."""

    plates: Count = 1
    """How many
    plates there are."""
    heat: NotNegative = 0.5
    """How hot it is."""
    share: Annotated[float, Range(least=0, below=1)] = 0.5
    salt: Positive | None = None
    hot: bool = False
    label: str = "dish"
    style: Literal["raw", "fried"] = "raw"
    level: Literal[1, 2] = 1
    parts: Mapping[str, float] = field(default_factory=dict)
    names: tuple[str, ...] = ()
    sizes: tuple[int, ...] = ()
    grid: tuple[int, str] = (1, "x")
    steps: list[int] = field(default_factory=list)
    patterns: str | Sequence[str] | None = None
    book: Path = Path("book")
    rate: Schedule = 0.1
    rule: Rule = field(default_factory=MinNorm)
    who: Participation = field(default_factory=Everyone)

    def __post_init__(self) -> None:
        check_options(self)

    def joint_problems(self) -> list[str]:
        """Two plates of raw fish are one too many; nonsense where heat is not a number."""
        problems = []
        if self.plates > 1 and self.style == "raw":
            problems.append(f"`plates` must be 1 where `style` is raw, got {self.plates}.")
        if math.sqrt(self.heat) > 10:
            problems.append(f"`heat` is too much for one `label`, got {self.heat}.")
        return problems


@dataclass(frozen=True)
class Needy:
    needed: int
    also: Literal["a", "b"]


def problems_of(owner: type, **values: Any) -> tuple[str, ...]:
    with pytest.raises(OptionsError) as caught:
        read_options(owner, values, CHOICES)
    return caught.value.problems


def only_problem(owner: type = Dish, **values: Any) -> str:
    problems = problems_of(owner, **values)
    assert len(problems) == 1, problems
    return problems[0]


# ---- values of every kind --------------------------------------------------------------------

GOOD: list[tuple[str, Any, Any]] = [
    ("plates", 1, 1),
    ("plates", np.int64(1), 1),
    ("heat", 3, 3),
    ("heat", np.float32(0.5), 0.5),
    ("share", 0, 0),
    ("salt", "none", None),
    ("salt", 2.5, 2.5),
    ("hot", True, True),
    ("label", "none", "none"),
    ("label", "", ""),
    ("style", "fried", "fried"),
    ("level", 2, 2),
    ("parts", {"ä b": 1, "inf": 0.5}, {"ä b": 1, "inf": 0.5}),
    ("parts", {"name": 1.0}, {"name": 1.0}),
    ("names", ["a", "b"], ("a", "b")),
    ("sizes", [], ()),
    ("grid", [3, "y"], (3, "y")),
    ("steps", [1, 2], [1, 2]),
    ("patterns", ["a*", "b"], ("a*", "b")),
    ("patterns", "a*", "a*"),
    ("patterns", "none", None),
    ("book", "a/b", Path("a/b")),
    ("rate", 0, 0),
    ("rate", {"name": "cosine", "start": 0.1, "rounds": 4}, Cosine(0.1, 4)),
    ("rate", {"name": "step-decay", "start": 1, "every": 2}, StepDecay(1, 2)),
    ("rate", {"name": "inverse-sqrt", "start": 1.0}, InverseSqrt(1.0)),
    (
        "rate",
        {"name": "warmup", "rounds": 2, "then": {"name": "inverse-sqrt", "start": 1.0}},
        Warmup(InverseSqrt(1.0), 2),
    ),
    ("rule", "min-norm", MinNorm()),
    ("rule", {"name": "fixed", "weights": {"a": 1}}, Fixed({"a": 1})),
    ("who", "everyone", Everyone()),
    ("who", {"name": "everyone", "available": "none"}, Everyone()),
    ("who", {"name": "everyone", "available": {"c": 0.5}}, Everyone({"c": 0.5})),
    ("who", {"name": "fraction", "share": 0.5}, Fraction(0.5)),
    ("who", {"name": "number", "count": 3}, Number(3)),
    ("who", {"name": "stratified", "count": 3}, Stratified(3)),
]


@pytest.mark.parametrize(("name", "value", "read"), GOOD, ids=str)
def test_a_value_that_fits_is_taken_as_it_is(name: str, value: Any, read: Any) -> None:
    taken = getattr(read_options(Dish, {name: value}, CHOICES), name)
    assert taken == read
    assert type(taken) is type(read) or isinstance(value, np.generic)


BAD: list[tuple[str, Any, str]] = [
    ("plates", 0, "a whole number of at least 1, got 0"),
    ("plates", 1.0, "a whole number"),
    ("plates", True, "a whole number"),
    ("plates", "3", "got '3'"),
    ("plates", "none", "a whole number"),
    ("plates", HUGE, "a whole number"),
    ("heat", math.nan, "a finite number of at least 0, got nan"),
    ("heat", math.inf, "got inf"),
    ("heat", -0.1, "got -0.1"),
    ("heat", False, "got False"),
    ("heat", np.float64("nan"), "a finite number"),
    ("heat", HUGE, "a finite number"),
    ("share", 1, "of at least 0 and below 1"),
    ("salt", 0, "a finite number above 0"),
    ("hot", 1, "true or false"),
    ("hot", "true", "true or false"),
    ("label", 3, "text, got 3"),
    ("style", "fryed", "Did you mean 'fried'?"),
    ("style", 3, "one of ['raw', 'fried'], got 3"),
    ("level", 1.0, "one of [1, 2]"),
    ("level", True, "one of [1, 2]"),
    ("parts", {"a": "b"}, "a mapping from text to a finite number"),
    ("parts", [1], "a mapping"),
    ("names", [1], "a list, each text, got [1]"),
    ("names", "ab", "a list"),
    ("sizes", [1, 2.5], "a list, each a whole number"),
    ("grid", [1], "a list"),
    ("grid", ["x", 1], "a list"),
    ("steps", {"a": 1}, "a list"),
    ("patterns", 3, "text or a list, each text"),
    ("book", 3, "a path"),
    ("rate", -1, "of at least 0 or one of ['cosine'"),
    ("rate", "cosin", "Did you mean 'cosine'?"),
    ("rate", {"start": 1}, "one of ['cosine'"),
    ("rule", 5, "'torchjd'] with its own options, got 5"),
    ("rule", "minnorm", "Did you mean 'min-norm'?"),
    ("who", 5, "one of ['everyone'"),
    ("who", {"share": 0.5}, "one of ['everyone'"),
    ("who", "evryone", "Did you mean 'everyone'?"),
]


@pytest.mark.parametrize(("name", "value", "said"), BAD, ids=lambda each: str(each)[:30])
def test_a_value_that_does_not_fit_is_named_with_what_would(
    name: str, value: Any, said: str
) -> None:
    text = only_problem(**{name: value})
    assert text.startswith(f"`{name}` must be ")
    assert said in text


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({"name": "cosin", "start": 1}, "`name` must be one of ['cosine'"),
        ({"name": []}, "`name` must be one of"),
        ({"name": "cosine", "start": 0.1}, "`rounds` must be given: a whole number."),
        ({"name": "cosine", "start": 0.1, "rounds": 0}, "`rounds` of a schedule must be positive"),
        ({"name": "cosine", "start": 0.1, "rounds": 2, "ende": 1}, "Did you mean `end`?"),
        ({"name": "warmup", "rounds": 2, "then": {"name": "cosine"}}, "in `then`: `start` must be"),
    ],
    ids=str,
)
def test_what_is_wrong_inside_a_named_choice_says_where(value: Any, said: str) -> None:
    assert all(text.startswith("in `rate`: ") for text in problems_of(Dish, rate=value))
    assert any(said in text for text in problems_of(Dish, rate=value))


def test_whatever_can_do_the_same_stands_for_a_protocol_but_a_class_does_not() -> None:
    class Mine:
        def cohort(self, *given: Any) -> tuple[str, ...]:
            return ()

    assert fits(Participation, Mine())
    assert not fits(Participation, Mine)
    assert not fits(Participation, object())
    assert fits(Rule, lambda gramian, context: gramian)
    assert not fits(Rule, MinNorm)
    assert fits(Callable[[int], float], lambda t: 0.1)
    with pytest.raises(ValueError, match="`rule` is the class MinNorm itself: make one of it"):
        Dish(rule=MinNorm)  # type: ignore[arg-type]


def test_plain_python_construction_is_checked_alike() -> None:
    with pytest.raises(OptionsError) as caught:
        Dish(plates=0, heat=math.nan, style="fry")  # type: ignore[arg-type]
    assert [text.split()[0] for text in caught.value.problems] == ["`plates`", "`heat`", "`style`"]
    assert str(caught.value).startswith("Dish: `plates` must be")


@pytest.mark.parametrize(
    ("kind", "value", "good"),
    [
        (tuple, (1, "a"), True),
        (tuple, 3, False),
        (list, [1], True),
        (dict, {"a": 1}, True),
        (dict[str, int], {"a": "b"}, False),
        (Any, object(), True),
        (list[Any], ["a", 1], True),
    ],
    ids=str,
)
def test_kinds_without_what_is_in_them_allow_anything_in_them(
    kind: Any, value: Any, good: bool
) -> None:
    assert fits(kind, value) is good
    assert expected(kind)


# ---- all errors at once ----------------------------------------------------------------------


def test_everything_wrong_is_said_at_once() -> None:
    problems = problems_of(Dish, plats=1, heat=-1, style="x", rate={"name": "cosine"}, zzz=0)
    assert len(problems) == 6
    assert problems[0] == "`plats` is not an option of Dish, got 1. Did you mean `plates`?"
    assert problems[-1].startswith("`zzz` is not an option of Dish, got 0. It has `plates`, `heat`")


def test_what_must_be_given_is_asked_for() -> None:
    assert problems_of(Needy) == (
        "`needed` must be given: a whole number.",
        "`also` must be given: one of ['a', 'b'].",
    )


def test_joint_problems_are_said_alongside_others() -> None:
    assert only_problem(plates=2).startswith("`plates` must be 1 where `style` is raw")
    first, second = problems_of(Dish, plates=2, salt=-1)
    assert first.startswith("`salt`")
    assert second.startswith("`plates` must be 1")


def test_joint_problems_that_only_repeat_what_is_wrong_anyway_are_left_out() -> None:
    assert len(problems_of(Dish, plates=-3)) == 1
    assert len(problems_of(Dish, plates=2, style="fryed")) == 1


def test_joint_checks_that_stumble_over_a_wrong_value_do_not_hide_it() -> None:
    assert only_problem(heat=-1.0).startswith("`heat` must be")  # Its root is a ValueError.
    assert only_problem(Quadratic, objectives=1.5).startswith("`objectives` must be a whole number")
    assert only_problem(Quadratic, angle="x").startswith("`angle` must be")


def test_joint_checks_that_are_broken_themselves_show_it() -> None:
    @dataclass(frozen=True)
    class Broken:
        size: int = 0

        def joint_problems(self) -> list[str]:
            raise ValueError("broken itself")

    with pytest.raises(ValueError, match="broken itself"):
        check_options(Broken())


def test_a_value_error_of_the_constructor_becomes_one_of_options() -> None:
    assert problems_of(Fraction, share=2.0) == (
        "`share` must be above 0 and at most 1, got 2.0. Use Number(count) for a fixed number of "
        "clients.",
    )


# ---- what is known of options ----------------------------------------------------------------


def test_options_are_listed_with_defaults_and_inherited_ones() -> None:
    listed = list_options(FSMGDA)
    assert listed["batch_size"].default == 64
    assert listed["rule"].default == MinNorm()
    assert listed["local_steps"].flag == "--local-steps"
    assert list_options(Needy)["needed"].default is MISSING


def test_options_explain_themselves_on_one_line() -> None:
    assert explain_options(Dish)["plates"] == "How many plates there are."
    assert "share" not in explain_options(Dish)
    assert explain_options(FSMGDA)["local_steps"].startswith("K gradient steps")
    assert explain_options(type("Made", (), {})) == {}


@pytest.mark.parametrize(
    ("name", "known", "found"),
    [
        ("lokal_steps", ["local_steps", "local_lr"], "local_steps"),
        ("Local-Steps", ["local_steps"], "local_steps"),
        ("local", ["batch_size", "local_steps"], "local_steps"),
        ("zzz", ["local_steps"], None),
        ("", ["local_steps"], None),
    ],
)
def test_the_nearest_name_is_found_where_there_is_one(
    name: str, known: list[str], found: str | None
) -> None:
    assert nearest(name, known) == found


# ---- flags' text -----------------------------------------------------------------------------

TEXTS: list[tuple[Any, str, Any]] = [
    (int, "3", 3),
    (int, " 3 ", 3),
    (int, "1_000", 1000),
    (int, "x", "x"),
    (float, "1e-3", 1e-3),
    (float, ".5", ".5"),
    (float | None, "none", "none"),
    (bool, "true", True),
    (str, "3", "3"),
    (str, "", ""),
    (str | None, "a=b,c", "a=b,c"),
    (str | None, "http://h?x=1", "http://h?x=1"),
    (Path, "runs/seed=0,a", "runs/seed=0,a"),
    (Literal["a", "b"], "a", "a"),
    (Literal[1, 2], "2", 2),
    (Literal["all"] | int | None, "7", 7),
    (Mapping[str, float], "left=0.5,right=1", {"left": 0.5, "right": 1}),
    (Mapping[str, float], '{"a b"=1}', {"a b": 1}),
    (Mapping[str, float], "left=0.5,right", "left=0.5,right"),
    (Mapping[str, float], "left=", {"left": ""}),
    (tuple[str, ...], "a,b", ["a", "b"]),
    (tuple[str, ...], "a", ["a"]),
    (tuple[str, ...], "1, 2", ["1", "2"]),
    (tuple[str, ...], '"a, b", "c"', ["a, b", "c"]),
    (tuple[str, ...], '["a", "b"]', ["a", "b"]),
    (tuple[int, ...], "1,2", [1, 2]),
    (list[float], "0.5,x", [0.5, "x"]),
    (tuple, "1,a", [1, "a"]),
    (str | Sequence[str] | None, "a*", "a*"),
    (str | Sequence[str] | None, "a*,b", ["a*", "b"]),
    (Schedule, "0.1", 0.1),
    (Schedule, "cosine", "cosine"),
    (
        Schedule,
        "cosine,start=0.1,rounds=40",
        {"name": "cosine", "start": 0.1, "rounds": 40},
    ),
    (Schedule, '{name = "cosine", start = 1}', {"name": "cosine", "start": 1}),
    (Participation, "fraction, share=0.5", {"name": "fraction", "share": 0.5}),
    (int, "1\n[other]", "1\n[other]"),
    (int, "9" * 5000, "9" * 5000),
    (int, "[" * 5000, "[" * 5000),
]


@pytest.mark.parametrize(("kind", "text", "value"), TEXTS, ids=lambda each: str(each)[:40])
def test_the_text_of_a_flag_is_read_as_a_file_would_have_it(
    kind: Any, text: str, value: Any
) -> None:
    read = parse_text(kind, text)
    assert read == value
    assert type(read) is type(value)


TEXT = st.text(max_size=30) | st.text(alphabet="=,.-[]{}\"'# \n0123456789aeinf", max_size=20)
FIELDS = [
    (owner, option)
    for owner in (Dish, RunOptions, FSMGDA, FedAvg, Quadratic)
    for option in list_options(owner).values()
]


def assert_read_or_refused(owner: type, name: str, value: Any) -> None:
    given = {"local_steps": 1} if owner in (FSMGDA, FedAvg) else {}
    try:
        outcome: Any = read_options(owner, {**given, name: value}, CHOICES)
    except OptionsError as error:
        outcome = error.problems
    assert isinstance(outcome, owner) or len(outcome) > 0


@given(st.sampled_from(FIELDS), TEXT)
def test_any_text_for_any_option_gives_the_option_or_an_options_error(
    chosen: tuple[type, Any], text: str
) -> None:
    owner, option = chosen
    assert_read_or_refused(owner, option.name, parse_text(option.kind, text))


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(st.text(max_size=5) | st.just("name"), inner, max_size=3)
        ),
        max_leaves=6,
    ),
    st.sampled_from(FIELDS),
)
def test_any_value_of_a_file_for_any_option_gives_the_option_or_an_options_error(
    value: Any, chosen: tuple[type, Any]
) -> None:
    owner, option = chosen
    assert_read_or_refused(owner, option.name, value)


# ---- what a file would have, in Python -------------------------------------------------------


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("rule", "upgrad", "got 'upgrad'. Write `UpGrad()` (from fmol.rules)."),
        ("rule", "upgrd", "Write `UpGrad()` (from fmol.rules)."),
        ("rule", "capped,cap=0.6", "Write `Capped(cap=0.6)` (from fmol.rules)."),
        ("rule", {"name": "capped", "cap": 0.6}, "Write `Capped(cap=0.6)` (from fmol.rules)."),
        (
            "rule",
            {"name": "smoothed", "rule": "upgrad", "keep": 0.5},
            "Write `Smoothed(rule=UpGrad(), keep=0.5)` (from fmol.rules).",
        ),
        ("rule", "best", "Give an object of your own, or of MinNorm, UpGrad, "),
        ("rule", {"cap": 0.6}, "Give an object of your own, or of MinNorm, UpGrad, "),
        ("rule", 3, "must be a callable, got 3."),
        ("server_step", "momentum", "Write `Momentum()` (from fmol.algorithms)."),
        ("server_step", "momentum,beta=0.5", "Write `Momentum(beta=0.5)` (from fmol.algorithms)."),
        ("local_lr", "cosine", "Write `Cosine(start=…, rounds=…)` (from fmol.schedules)."),
        ("local_lr", "0.1", "got '0.1'. Write `0.1`."),
        ("local_lr", -1, "got -1."),
        ("normalize", "los", "Did you mean 'loss'?"),
    ],
    ids=str,
)
def test_what_a_config_file_would_have_is_said_as_python_has_it(
    option: str, value: Any, said: str
) -> None:
    with pytest.raises(OptionsError) as caught:
        FSMGDA(local_steps=1, **{option: value})
    assert said in str(caught.value)
    assert str(caught.value).endswith((said, "(from fmol.rules)."))


@pytest.mark.parametrize(
    ("kind", "name", "chosen"),
    [(kind, name, each) for kind, named in CHOICES.items() for name, each in named.items()],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_what_is_to_be_written_for_every_choice_is_where_it_is_said_to_be(
    kind: Any, name: str, chosen: type
) -> None:
    values = {each: 0.5 for each, o in list_options(chosen).items() if o.default is MISSING}
    with pytest.raises(OptionsError) as caught:
        check_options(make_dataclass("Owner", [("it", kind)])({"name": name, **values}))
    found = re.search(r"Write `(.*)` \(from (.*)\)\.$", str(caught.value))
    assert found is not None
    module = importlib.import_module(found[2])
    assert found[1].partition("(")[0] == chosen.__name__
    assert getattr(module, chosen.__name__) is chosen


def test_what_a_file_itself_has_wrong_is_not_said_as_python_has_it() -> None:
    with pytest.raises(OptionsError) as caught:
        read_options(FSMGDA, {"local_steps": 1, "rule": "upgrd"}, CHOICES)
    assert "Did you mean 'upgrad'?" in str(caught.value)
    assert "Write" not in str(caught.value)
