"""Step sizes that change from round to round."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from fmol import FSMGDA, fit
from fmol.schedules import Cosine, InverseSqrt, StepDecay, Warmup, at
from support import federation


def test_a_number_is_the_same_in_every_round() -> None:
    assert [at(0.1, t, "local_lr") for t in (0, 1, 1000)] == [0.1] * 3


def test_a_callable_is_asked_with_the_round() -> None:
    assert [at(lambda t: 1.0 / (t + 2), t, "local_lr") for t in range(3)] == [1 / 2, 1 / 3, 1 / 4]


@pytest.mark.parametrize("value", [np.float64(0.5), np.float32(0.5), torch.tensor(0.5), 1])
def test_whatever_number_a_schedule_gives_a_plain_float_comes_out(value: Any) -> None:
    result = at(lambda _: value, 0, "local_lr")
    assert type(result) is float
    assert result == float(value)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1e-9])
def test_a_step_size_that_cannot_be_used_names_its_option_round_and_value(value: float) -> None:
    with pytest.raises(ValueError, match=r"`server_lr` is .* in round 7") as error:
        at(lambda t: value if t == 7 else 0.1, 7, "server_lr")
    assert repr(value) in str(error.value)


def test_a_step_size_of_zero_is_allowed() -> None:
    assert at(0.0, 0, "local_lr") == 0.0


def test_a_cosine_starts_at_start_is_halfway_in_the_middle_and_stays_at_the_end() -> None:
    cosine = Cosine(0.5, rounds=10, end=0.1)
    assert cosine(0) == 0.5
    assert cosine(5) == pytest.approx(0.3)
    assert cosine(2) == pytest.approx(0.1 + 0.4 * (1 + math.cos(0.2 * math.pi)) / 2)
    assert [cosine(t) for t in (10, 11, 500)] == pytest.approx([0.1] * 3)
    values = [cosine(t) for t in range(11)]
    assert values == sorted(values, reverse=True)


def test_a_step_decay_falls_by_its_factor_at_every_step_and_nowhere_else() -> None:
    decay = StepDecay(0.8, every=3, factor=0.5)
    assert [decay(t) for t in range(7)] == [0.8, 0.8, 0.8, 0.4, 0.4, 0.4, 0.2]


def test_an_inverse_square_root_falls_like_one() -> None:
    schedule = InverseSqrt(0.3, scale=4.0)
    assert schedule(0) == 0.3
    assert schedule(12) == pytest.approx(0.15)  # √(1 + 12/4) = 2
    assert schedule(4 * 10**6) / schedule(16 * 10**6) == pytest.approx(2.0, rel=1e-6)


def test_a_warmup_rises_in_equal_steps_that_are_never_zero() -> None:
    assert [Warmup(0.4, rounds=4)(t) for t in range(6)] == pytest.approx(
        [0.1, 0.2, 0.3, 0.4, 0.4, 0.4]
    )


def test_a_warmup_follows_the_schedule_it_leads_to() -> None:
    then = Cosine(1.0, rounds=8)
    warmup = Warmup(then, rounds=2)
    assert warmup(0) == pytest.approx(0.5 * then(0))
    assert [warmup(t) for t in range(1, 10)] == [then(t) for t in range(1, 10)]


@pytest.mark.parametrize(
    "make",
    [
        lambda: Cosine(0.1, rounds=0),
        lambda: StepDecay(0.1, every=0),
        lambda: Warmup(0.1, rounds=0),
        lambda: InverseSqrt(0.1, scale=0.0),
    ],
    ids=["Cosine", "StepDecay", "Warmup", "InverseSqrt"],
)
def test_a_schedule_over_no_rounds_is_refused_in_words(make: Callable[[], Any]) -> None:
    with pytest.raises(ValueError, match=r"`(rounds|every|scale)`"):
        make()(1)


def test_schedules_are_equal_and_print_when_their_settings_are() -> None:
    assert Cosine(0.1, rounds=3) == Cosine(0.1, 3, 0.0) != Cosine(0.1, rounds=4)
    assert repr(StepDecay(0.1, every=5)) == "StepDecay(start=0.1, every=5, factor=0.1)"


def test_both_sides_of_a_run_follow_their_schedules() -> None:
    local, server = StepDecay(0.2, every=1, factor=0.5), Warmup(0.3, rounds=3)
    result = fit(
        federation([("a", "b")] * 2, names=("a", "b"), sizes=[3, 3]),
        FSMGDA(local_steps=2, batch_size=2, local_lr=local, server_lr=server),
        rounds=3,
    )
    assert [r.local_lr for r in result.reports] == [0.2, 0.1, 0.05]
    assert [r.server_lr for r in result.reports] == pytest.approx([0.1, 0.2, 0.3])


def test_a_schedule_that_goes_wrong_in_a_later_round_stops_the_run_there() -> None:
    with pytest.raises(ValueError, match="`local_lr` is nan in round 1"):
        fit(
            federation([("a", "b")], names=("a", "b"), sizes=[3]),
            FSMGDA(local_steps=1, local_lr=lambda t: 0.1 if t == 0 else float("nan")),
            rounds=3,
        )
