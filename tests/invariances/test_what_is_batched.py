"""Models, losses and data that are not alike for all clients: side by side they come out as alone."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fmol import FSMGDA, Client, Federation, Objective, Result, fit
from fmol.participation import Number
from fmol.rules import Fixed

DOUBLE = torch.float64
NAMES = ("a", "b")


def square(column: int) -> Callable[[Any, Tensor], Tensor]:
    return lambda out, y: (out[:, column] - y[:, column]) ** 2


def reals(n: int, generator: torch.Generator, client: int) -> Tensor:
    return torch.randn(n, 5, generator=generator, dtype=DOUBLE)


def tokens(n: int, generator: torch.Generator, client: int) -> Tensor:
    """The first client has no padding."""
    return torch.randint(int(client == 0), 7, (n, 6), generator=generator)


def trained(
    engine: str,
    model: nn.Module,
    losses: Sequence[Any] = (square(0), square(1)),
    *,
    inputs: Callable[[int, torch.Generator, int], Tensor] = reals,
    sizes: Sequence[int] = (14, 10, 7),
    holders: Sequence[tuple[str, ...]] | None = None,
    metrics: Any = None,
    **options: Any,
) -> Result:
    torch.manual_seed(0)
    clients = []
    for i, n in enumerate(sizes):
        generator = torch.Generator().manual_seed(i)
        x = inputs(n, generator, i)
        y = torch.randn(n, 2, generator=generator, dtype=DOUBLE)
        held = NAMES[: len(losses)] if holders is None else holders[i]
        clients.append(Client(f"c{i}", (x, y), held, held_out=(x, y) if metrics else None))
    objectives = [
        Objective(name, loss, metrics=metrics or {})
        for name, loss in zip(NAMES, losses, strict=False)
    ]
    for module in model.modules():
        reset: Any = getattr(module, "reset_parameters", None)
        if reset is not None:
            reset()
    federation = Federation(model.double(), objectives, clients)
    rule = Fixed({objective.name: 0.5 for objective in objectives})
    algorithm = FSMGDA(local_steps=4, batch_size=4, rule=rule)
    return fit(federation, algorithm, rounds=3, engine=engine, **options)


def both(model: Callable[[], nn.Module], *arguments: Any, **named: Any) -> Result:
    """Of both engines, which must agree; the vectorized one's."""
    alone, together = (
        trained(engine, model(), *arguments, **named) for engine in ("sequential", "vectorized")
    )
    apart = (alone.state.x - together.state.x).norm() / alone.state.x.norm()
    assert float(apart) < 1e-12
    torch.testing.assert_close(together.losses, alone.losses, rtol=1e-9, atol=1e-12)
    for one, other in zip(alone.reports, together.reports, strict=True):
        for mine, theirs in zip(one.clients, other.clients, strict=True):
            assert (mine.client, mine.objective) == (theirs.client, theirs.objective)
            assert mine.held_out == pytest.approx(theirs.held_out, rel=1e-9)
    return together


def linear() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 2))


class Bag(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(7, 4, **options), nn.Linear(4, 2)

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(self.words(ids).mean(1))  # type: ignore[no-any-return]


def test_padding_is_not_trained_whoever_has_it() -> None:
    result = both(lambda: Bag(padding_idx=0), inputs=tokens)
    assert result.reports[0].notes == ()
    words: Any = result.model.get_submodule("words").weight
    assert not bool(words[0].any())


def test_embeddings_with_other_gradients_are_computed_one_by_one() -> None:
    result = both(lambda: Bag(scale_grad_by_freq=True), inputs=tokens)
    assert any("one by one" in note for note in result.reports[0].notes)


def contrast(out: Tensor, y: Tensor) -> Tensor:
    return functional.cross_entropy(out @ out.T, torch.arange(len(out)), reduction="none")


@pytest.mark.parametrize(
    "loss",
    [
        lambda out, y: (out[:, 0] - y[:, 0]) ** 2 * 4 / len(out),
        lambda out, y: (out[:, 0] - y[:, 0]) ** 2 / (1 + y[:, 0].var(unbiased=False)),
        contrast,
    ],
    ids=["by its size", "by its variance", "contrast"],
)
@pytest.mark.parametrize("sizes", [(14, 10, 7), (8, 8, 8), (9, 1, 5)])
def test_losses_of_samples_that_depend_on_the_others(loss: Any, sizes: tuple[int, ...]) -> None:
    result = both(linear, (loss, square(1)), sizes=sizes)
    assert any("depends on the others" in note for note in result.reports[0].notes)


def test_metrics_of_samples_that_depend_on_the_others() -> None:
    ranks = {"rank": lambda out, y: (out[:, 0].argsort().argsort() / len(out)).double()}
    both(linear, metrics=ranks)


class OwnError(Exception):
    """What a user's own code may raise."""


def test_metrics_that_fail_on_a_few_samples_are_asked_client_by_client() -> None:
    """As precision does without a positive among them."""

    def failing(out: Tensor, y: Tensor) -> Tensor:
        if len(out) < 5:
            raise OwnError("too few")
        return out[:, 0]

    def dividing(out: Tensor, y: Tensor) -> Tensor:
        return out[:, 0] * (1 / (len(out) // 5))

    result = both(linear, metrics={"failing": failing, "dividing": dividing})
    assert result.reports[0].notes == ()


def test_losses_that_fail_on_a_few_samples_are_computed_one_by_one() -> None:
    def failing(out: Tensor, y: Tensor) -> Tensor:
        if len(out) == 8:
            raise OwnError("just as many as are tried")
        return (out[:, 0] - y[:, 0]) ** 2

    result = both(linear, (failing, square(1)))
    assert "(OwnError: just as many as are tried)" in result.reports[0].notes[0]


@pytest.mark.parametrize("engine", ["sequential", "vectorized", "auto"])
def test_losses_and_metrics_that_fail_at_a_client_do_so_with_its_name(engine: str) -> None:
    def failing(out: Tensor, y: Tensor) -> Tensor:
        if len(out) in (7, 8):  # The last client has seven, and eight are tried.
            raise OwnError("seven of them")
        return out[:, 0]

    told: list[dict[str, Any]] = [{"metrics": {"failing": failing}}, {"losses": (failing,)}]
    for options in told:
        with pytest.raises(OwnError, match="seven") as error:
            trained(engine, linear(), **options)
        assert "client `c2`" in "".join(error.value.__notes__)


def test_a_loss_that_cannot_be_batched_at_a_client_that_was_not_looked_at() -> None:
    def above(out: Tensor, y: Tensor) -> Tensor:
        return ((out[:, 1] - y[:, 1])[y[:, 1] > -5] ** 2).mean()

    both(linear, (square(0), above), holders=[("a",), ("a", "b"), ("b",)])
    both(linear, (square(0), above), holders=[("a",), ("a",), ("b",)], participation=Number(1))


class TrainingAlone(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(x - x.mean(0)) if self.training else self.out(x)  # type: ignore[no-any-return]


class Always(TrainingAlone):
    def forward(self, x: Tensor) -> Tensor:
        return self.out(x - 0.5 * x.mean(0))  # type: ignore[no-any-return]


@pytest.mark.parametrize("model", [TrainingAlone, Always])
@pytest.mark.parametrize("sizes", [(14, 10, 7), (1, 10, 7)])
def test_models_that_mix_their_batch_are_computed_one_by_one(
    model: type[nn.Module], sizes: tuple[int, ...]
) -> None:
    result = both(model, sizes=sizes)
    assert any("one by one" in note for note in result.reports[0].notes)


def test_dropout_alone_is_no_mixing() -> None:
    result = trained("vectorized", nn.Sequential(nn.Linear(5, 6), nn.Dropout(0.5), nn.Linear(6, 2)))
    assert not any("one by one" in note for note in result.reports[0].notes)

    class Functional(TrainingAlone):
        def forward(self, x: Tensor) -> Tensor:
            return self.out(functional.dropout(x, 0.5, self.training))  # type: ignore[no-any-return]

    result = trained("vectorized", Functional())
    assert not any("one by one" in note for note in result.reports[0].notes)


class Counting(nn.Module):
    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(5, 2)
        self.register_buffer("seen", torch.zeros((), dtype=DOUBLE))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen += 1
        return self.out(x) / (1 + self.seen)  # type: ignore[no-any-return]


@pytest.mark.parametrize("engine", ["sequential", "vectorized", "auto"])
def test_what_is_written_in_training_alone_is_refused(engine: str) -> None:
    with pytest.raises(ValueError, match="changes its buffer `seen`"):
        trained(engine, Counting())


@pytest.mark.parametrize("engine", ["vectorized", "auto"])
def test_data_stay_what_they_are_when_a_model_writes_to_its_batch(engine: str) -> None:
    class Shifting(TrainingAlone):
        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                x -= 0.5
            return self.out(x)  # type: ignore[no-any-return]

    x, y = torch.randn(12, 5, dtype=DOUBLE), torch.randn(12, 2, dtype=DOUBLE)
    before = x.clone()
    clients = [Client("c", (x, y), ("a",)), Client("d", (x.clone(), y), ("a",))]
    federation = Federation(Shifting().double(), [Objective("a", square(0))], clients)
    fit(federation, FSMGDA(local_steps=2, batch_size=4), rounds=2, engine=engine)
    assert torch.equal(x, before)


@dataclass
class Outputs:
    logits: Tensor


class Named(dict[str, Tensor]):
    @property
    def logits(self) -> Tensor:
        return self["logits"]


@pytest.mark.parametrize("kind", [Outputs, Named])
@pytest.mark.parametrize("n", [20, 1500])
def test_outputs_that_are_no_plain_nest_of_tensors(kind: Any, n: int) -> None:
    class Wrapped(TrainingAlone):
        def forward(self, x: Tensor) -> Any:
            return kind(logits=self.out(x))

    def each(out: Any, y: Tensor) -> Tensor:
        return (out.logits[:, 0] - y[:, 0]) ** 2  # type: ignore[no-any-return]

    result = both(Wrapped, (each,), sizes=(n, 10))
    assert f"returns a `{kind.__name__}`" in result.reports[0].notes[0]


class Rates(nn.Module):
    """The second head is a rate, which overflows where inputs are large."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.a, self.b = nn.Linear(5, 4), nn.Linear(4, 1), nn.Linear(5, 1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        hidden = torch.tanh(self.trunk(x))
        return {"a": self.a(hidden)[:, 0], "b": torch.exp(self.b(x))[:, 0]}


@pytest.mark.parametrize("broken", [1, 3])
def test_heads_that_a_lane_does_not_use_do_not_break_it(broken: int) -> None:
    def outlier(n: int, generator: torch.Generator, client: int) -> Tensor:
        x = reals(n, generator, client)
        if (
            1 <= client <= broken
        ):  # Of either sign, so that the head overflows whatever its weights are.
            x[-1] = 1e5
            x[-2] = -1e5
        return x

    losses = (
        lambda out, y: (out["a"] - y[:, 0]) ** 2,
        lambda out, y: out["b"] - y[:, 1] * torch.log(out["b"]),
    )
    holders = [("a", "b"), *[("a",)] * 4]
    result = both(Rates, losses, inputs=outlier, holders=holders, sizes=(14, 10, 7, 9, 8))
    assert not any(report.refused for report in result.reports)
    (note,) = result.reports[0].notes
    assert note.startswith(f"{broken} lane")
    assert "computed again alone" in note
    assert ("as long as one after the other" in note) == (broken == 3)


def test_one_client_without_numbers_does_not_make_all_others_slow() -> None:
    def broken_first(n: int, generator: torch.Generator, client: int) -> Tensor:
        x = reals(n, generator, client)
        return x.fill_(torch.nan) if client == 0 else x

    result = trained("vectorized", linear(), (square(0),), inputs=broken_first, sizes=[8] * 5)
    assert not any("one by one" in note for note in result.reports[0].notes)
    assert {refusal.client for refusal in result.reports[0].refused} == {"c0"}


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_what_fails_at_a_client_says_where(engine: str) -> None:
    classes = [torch.zeros(10, dtype=torch.int64) for _ in range(4)]
    classes[2][3] = 7
    clients = [
        Client(f"c{i}", (torch.randn(10, 5), each), ("a",)) for i, each in enumerate(classes)
    ]

    def loss(out: Tensor, y: Tensor) -> Tensor:
        return functional.cross_entropy(out, y, reduction="none")

    federation = Federation(nn.Linear(5, 3), [Objective("a", loss)], clients)
    with pytest.raises(IndexError) as error:
        fit(federation, FSMGDA(local_steps=2, batch_size=10), rounds=1, engine=engine)
    assert "client `c2`" in "".join(error.value.__notes__)


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(4, 6, 3, padding="same"), nn.Conv2d(4, 6, (3, 5), padding="same", dilation=(1, 2)),
        nn.Conv2d(4, 6, 3, padding="valid"),
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("error:There is a performance drop")
def test_convolutions_with_their_padding_in_words_and_means_of_all_pixels(layer: nn.Module) -> None:
    def images(n: int, generator: torch.Generator, client: int) -> Tensor:
        return torch.randn(n, 4, 9, 9, generator=generator, dtype=DOUBLE)

    def model() -> nn.Module:
        return nn.Sequential(
            copy.deepcopy(layer), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 2)
        )

    result = both(model, inputs=images)
    assert result.reports[0].notes == ()


def test_a_chunk_that_fails_side_by_side_is_computed_one_by_one() -> None:
    """A transposed convolution at one pixel of one sample, which torch cannot batch."""

    def model() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(4, 6, 5, stride=2), nn.ReLU(), nn.MaxPool2d(2), nn.ConvTranspose2d(6, 8, 2),
            nn.Flatten(), nn.Linear(32, 2),
        )  # fmt: skip

    def images(n: int, generator: torch.Generator, client: int) -> Tensor:
        return torch.randn(n, 4, 9, 9, generator=generator, dtype=DOUBLE)

    result = both(model, inputs=images, sizes=(9, 9, 9))
    assert any("side by side they failed" in note for note in result.reports[0].notes)


def test_lanes_that_cannot_be_weighed_are_computed_one_by_one() -> None:
    """What fails side by side only with as many samples as a batch has."""

    def fussy(out: Tensor, y: Tensor) -> Tensor:
        if torch._C._functorch.is_batchedtensor(out) and len(out) == 4:
            raise OwnError("four of them")
        return (out[:, 0] - y[:, 0]) ** 2

    result = both(linear, (fussy, square(1)))
    assert "side by side they failed (OwnError: four of them)" in result.reports[0].notes[0]
