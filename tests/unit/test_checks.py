"""What a server lets in."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fmol import Client
from fmol.engines.checks import check_reply, client_records, message_bytes, reply_bytes
from fmol.engines.seam import Ask, Lane, Refusal, Reply
from fmol.layout import Layout

LAYOUT = Layout.of(nn.Linear(3, 1))  # d = 4, float32
X = torch.zeros(4)
INF, NAN = float("inf"), float("nan")
CLIENT = Client("anna", None, ("a", "b"), max_samples=50)
ASK = Ask(
    client="anna",
    round=7,
    x=X,
    lanes=(Lane("a", {"a": 1.0}), Lane("b", {"b": 1.0})),
    evaluate=("a", "b"),
)
MIXED = replace(ASK, lanes=(Lane("mixture", {"a": 0.5, "b": 0.5}),))


def reply(**more: Any) -> Reply:
    """A reply that is all right, but for what is given."""
    fixed: dict[str, Any] = {
        "client": "anna",
        "deltas": {"a": torch.ones(4), "b": torch.full((4,), 2.0)},
        "steps": {"a": 3, "b": 3},
        "losses": {"a": 0.5, "b": 0.25},
        "samples": {"a": 10, "b": 20},
        "held_out": {"a": {"loss": 1.0}, "b": {"loss": 2.0}},
    }
    return Reply(**{**fixed, **more})


def checked(
    answer: Reply, ask: Ask = ASK, client: Client = CLIENT
) -> tuple[Reply, tuple[Refusal, ...]]:
    return check_reply(answer, ask, client, LAYOUT)


def deltas(**wrong: Any) -> dict[str, Tensor]:
    return {"a": torch.ones(4), "b": torch.full((4,), 2.0), **wrong}


def test_a_reply_that_is_all_right_passes_untouched() -> None:
    answer = reply()
    clean, refused = checked(answer)
    assert clean is answer
    assert refused == ()


def not_finite(value: float) -> Tensor:
    return torch.tensor([1.0, value, 1.0, value])


WRONG_FOR_B: Mapping[str, tuple[dict[str, Any], str]] = {
    "a delta with NaN": ({"deltas": deltas(b=not_finite(NAN))}, "2 non-finite of 4"),
    "a delta with infinity": ({"deltas": deltas(b=not_finite(-INF))}, "2 non-finite of 4"),
    "a delta that is too short": (
        {"deltas": deltas(b=torch.ones(3))},
        r"shape \[3\] instead of \[4\]",
    ),
    "a delta that is not flat": ({"deltas": deltas(b=torch.ones(4, 1))}, r"shape \[4, 1\]"),
    "a delta without dimensions": ({"deltas": deltas(b=torch.tensor(1.0))}, r"shape \[\]"),
    "a delta of whole numbers": (
        {"deltas": deltas(b=torch.ones(4).long())},
        "int64 instead of torch.float32",
    ),
    "a complex delta": ({"deltas": deltas(b=torch.ones(4) + 0j)}, "complex64"),
    "a loss that is not a number": ({"losses": {"a": 0.5, "b": NAN}}, "loss at x is nan"),
    "an infinite loss": ({"losses": {"a": 0.5, "b": INF}}, "loss at x is inf"),
    "a negative number of samples": ({"samples": {"a": 10, "b": -1}}, "claims -1 samples"),
    "more samples than it can have": (
        {"samples": {"a": 10, "b": 51}},
        "claims 51 samples .* 50 at most",
    ),
}


@pytest.mark.parametrize("case", WRONG_FOR_B)
def test_what_is_wrong_is_refused_with_round_client_objective_and_reason(case: str) -> None:
    wrong, reason = WRONG_FOR_B[case]
    _, (refusal,) = checked(reply(**wrong))
    assert (refusal.round, refusal.client, refusal.objective) == (7, "anna", "b")
    assert str(refusal).startswith("round 7, client `anna`, objective `b`: it")
    assert re.search(reason, refusal.reason)


@pytest.mark.parametrize("case", WRONG_FOR_B)
def test_what_is_wrong_for_one_objective_is_taken_out_whole_and_the_rest_stays(case: str) -> None:
    clean, _ = checked(reply(**WRONG_FOR_B[case][0]))
    assert torch.equal(clean.deltas["a"], torch.ones(4))
    for part in (clean.deltas, clean.steps, clean.losses, clean.samples, clean.held_out):
        assert set(part) == {"a"}


def test_a_reply_is_not_changed_by_its_check() -> None:
    answer = reply(losses={"a": 0.5, "b": NAN})
    checked(answer)
    assert set(answer.deltas) == {"a", "b"}


def test_an_update_that_nobody_asked_for_is_refused_and_the_rest_stays() -> None:
    clean, (refusal,) = checked(reply(deltas=deltas(z=torch.ones(4))))
    assert (refusal.objective, refusal.reason) == ("z", "it sent an update that nobody asked for")
    assert set(clean.deltas) == set(clean.losses) == {"a", "b"}


def test_a_loss_for_an_objective_the_client_does_not_hold_is_refused_and_the_rest_stays() -> None:
    clean, (refusal,) = checked(reply(losses={"a": 0.5, "b": 0.25, "z": 0.1}))
    assert refusal.objective == "z"
    assert "does not hold" in refusal.reason
    assert clean.losses == {"a": 0.5, "b": 0.25}
    assert set(clean.deltas) == {"a", "b"}


def test_everything_that_is_wrong_is_refused_at_once() -> None:
    answer = reply(deltas=deltas(a=not_finite(NAN), z=torch.ones(4)), losses={"a": 0.5, "b": INF})
    clean, refused = checked(answer)
    assert [refusal.objective for refusal in refused] == ["a", "b", "z"]
    for part in (clean.deltas, clean.steps, clean.losses, clean.samples, clean.held_out):
        assert part == {}


def test_without_a_bound_any_number_of_samples_is_believed() -> None:
    free = replace(CLIENT, max_samples=None)
    assert checked(reply(samples={"a": 10**9, "b": 1}), client=free)[1] == ()
    assert checked(reply(samples={"a": 50, "b": 1}))[1] == ()


def test_a_mixture_goes_when_one_of_its_objectives_does() -> None:
    answer = reply(deltas={"mixture": torch.ones(4)}, steps={"mixture": 1})
    assert checked(answer, MIXED)[1] == ()
    clean, (refusal,) = checked(replace(answer, losses={"a": 0.5, "b": NAN}), MIXED)
    assert refusal.objective == "b"
    assert (clean.deltas, clean.steps) == ({}, {})
    assert "b" not in clean.losses


def test_a_mixture_that_is_not_finite_leaves_the_losses_that_came_with_it() -> None:
    clean, (refusal,) = checked(
        reply(deltas={"mixture": not_finite(NAN)}, steps={"mixture": 1}), MIXED
    )
    assert refusal.objective == "mixture"
    assert clean.deltas == {}
    assert (clean.losses, clean.samples) == (reply().losses, reply().samples)


def test_updates_in_another_floating_precision_are_let_in() -> None:
    for dtype in (torch.float64, torch.bfloat16):
        assert checked(reply(deltas=deltas(a=torch.ones(4, dtype=dtype))))[1] == ()


def test_an_update_that_is_not_finite_in_the_models_precision_is_refused() -> None:
    answer = reply(deltas=deltas(b=torch.full((4,), 1e300, dtype=torch.float64)))
    clean, refused = checked(answer)
    assert [refusal.objective for refusal in refused] == ["b"]
    assert set(clean.deltas) == {"a"}


def test_a_negative_number_of_steps_is_refused() -> None:
    clean, refused = checked(reply(steps={"a": 3, "b": -(10**9)}))
    assert [refusal.objective for refusal in refused] == ["b"]
    assert set(clean.deltas) == {"a"}


@pytest.mark.parametrize(
    "wrong",
    [
        {"held_out": {"a": {"loss": 1.0}, "z": {"accuracy": 1.0}}},
        {"samples": {"a": 10, "b": 20, "z": 5}},
    ],
    ids=["held-out metrics", "samples"],
)
def test_nothing_is_let_in_for_an_objective_the_client_does_not_hold(wrong: dict[str, Any]) -> None:
    clean, refused = checked(reply(**wrong))
    assert [refusal.objective for refusal in refused] == ["z"]
    assert "z" not in {*clean.held_out, *clean.samples}
    assert set(clean.deltas) == {"a", "b"}


@pytest.mark.parametrize("count", [NAN, INF, 2.5])
def test_a_number_of_samples_that_is_no_whole_number_is_refused(count: Any) -> None:
    free = replace(CLIENT, max_samples=None)
    clean, refused = checked(reply(samples={"a": 10, "b": count}), client=free)
    assert [refusal.objective for refusal in refused] == ["b"]
    assert set(clean.deltas) == {"a"}


# --- records and bytes ----------------------------------------------------------------------


def test_a_message_weighs_its_tensors_and_eight_bytes_per_number() -> None:
    assert message_bytes(ASK) == 4 * 4 + 2 * 8
    assert message_bytes(replace(ASK, lanes=())) == 4 * 4
    assert message_bytes(replace(MIXED, x=X.double())) == 4 * 8 + 2 * 8
    with_payload = replace(ASK, payload={"control": torch.zeros(3, 2, dtype=torch.bfloat16)})
    assert message_bytes(with_payload) == message_bytes(ASK) + 12


def test_a_reply_weighs_its_tensors_and_eight_bytes_per_number() -> None:
    assert reply_bytes(reply()) == 2 * 16 + 8 * (2 + 2 + 2 + 2)
    assert reply_bytes(Reply(client="anna")) == 0
    half = Reply(client="anna", deltas={"a": torch.ones(4).bfloat16()}, steps={"a": 1})
    assert reply_bytes(half) == 4 * 2 + 8
    assert reply_bytes(replace(half, extra={"noise": torch.zeros(5)})) == 4 * 2 + 8 + 20


def test_there_is_one_record_per_objective_a_reply_speaks_of() -> None:
    answer = reply(seconds=1.5, losses={"a": 0.5}, held_out={"b": {"accuracy": 0.9}})
    first, second = client_records(answer, bytes_up=100, bytes_down=200)
    assert (first.client, first.objective, first.loss, first.samples) == ("anna", "a", 0.5, 10)
    assert (first.delta_norm, second.delta_norm) == (2.0, 4.0)
    assert (second.objective, second.samples) == ("b", 20)
    assert second.loss != second.loss
    assert (first.held_out, second.held_out) == ({}, {"accuracy": 0.9})
    assert (first.seconds, first.bytes_up, first.bytes_down) == (1.5, 100, 200)


def test_the_length_of_a_delta_is_recorded_without_overflow() -> None:
    huge = reply(deltas=deltas(a=torch.full((4,), 1e30)))
    assert client_records(huge, bytes_up=0, bytes_down=0)[0].delta_norm == pytest.approx(2e30)


def test_a_mixture_has_no_length_of_its_own_per_objective() -> None:
    answer = reply(deltas={"mixture": torch.ones(4)}, steps={"mixture": 1})
    records = client_records(answer, bytes_up=0, bytes_down=0)
    assert [record.objective for record in records] == ["a", "b"]
    assert all(record.delta_norm != record.delta_norm for record in records)
