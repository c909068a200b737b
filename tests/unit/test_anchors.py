"""FedALS: what holds a client's layers near what they do, and what softens its losses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fmol import Client, FedALS, Federation, Objective, fit
from fmol.anchors import anchored_layers, anchors_of, pull_back
from fmol.config import read_config
from fmol.engines import SequentialEngine, make_engine
from fmol.engines.seam import Ask, Lane, LocalConfig, Site
from fmol.engines.vectorized import VectorizedEngine
from fmol.local import descend


def net() -> nn.Module:
    torch.manual_seed(0)
    trunk = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 5), nn.Tanh())
    return nn.Sequential(trunk, nn.Linear(5, 3))


def problem(model: nn.Module | None = None, clients: int = 3) -> Federation:
    generator = torch.Generator().manual_seed(1)

    def data(size: int) -> tuple[Tensor, Tensor]:
        images = torch.randn(size, 1, 4, 4, generator=generator)
        return images, torch.randint(3, (size,), generator=generator)

    sites = [Client(f"c{i}", data(6 + i), ("class",)) for i in range(clients)]
    return Federation(net() if model is None else model, [Objective("class", entropy)], sites)


def entropy(out: Tensor, y: Tensor) -> Tensor:
    return functional.cross_entropy(out, y, reduction="none")


def anchored(**options: Any) -> FedALS:
    told = {"local_epochs": 3, "batch_size": 4, "heads": "1", "temperature": 3.0}
    return FedALS(**{**told, **options})


def site_of(federation: Federation) -> tuple[Site, Tensor]:
    engine = make_engine(SequentialEngine, federation, seed=0, device=torch.device("cpu"))
    x = federation.layout.flatten(dict(federation.model.named_parameters()))
    assert isinstance(engine, SequentialEngine)
    return engine._site("c0"), x


def ask_of(x: Tensor, **local: Any) -> Ask:
    told = LocalConfig(**{"lr": 0.1, "steps": 4, "trained": "0.2.*", **local})
    return Ask(client="c0", round=0, x=x, lanes=(Lane("s", {"class": 1.0}),), local=told)


def test_an_anchor_is_the_gradient_of_what_the_change_of_a_layers_outputs_costs() -> None:
    site, x = site_of(problem())
    ask = ask_of(x, anchor=0.7)
    assert ask.local is not None
    (layer,) = layers = anchored_layers(site, ask.local)
    assert layer.name == "0.2"
    anchors = anchors_of(ask, site)
    moved = torch.randn(x.shape, generator=torch.Generator().manual_seed(2))
    found = torch.zeros_like(x)
    pull_back(found, moved, layers, anchors)
    site.model.load(x)
    inputs = site.model.module.get_submodule("0")[:2](site.samples.span(0, 6)[0]).detach()  # type: ignore[index]
    change = layer.read(moved).requires_grad_()
    given = torch.cat([inputs, torch.ones(6, 1)], dim=1) @ change.T
    (0.7 * given.square().mean()).backward()
    wanted = torch.zeros_like(x)
    assert change.grad is not None
    layer.write(wanted, change.grad)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)


def test_with_heads_that_are_softened_a_lane_descends_the_loss_at_a_temperature() -> None:
    federation = problem()
    site, x = site_of(federation)
    soft = descend(
        ask_of(x, softened="1.*", temperature=3.0), Lane("s", {"class": 1.0}), site
    ).delta

    def at_temperature(out: Tensor, y: Tensor) -> Tensor:
        return 3.0 * functional.cross_entropy(out / 3.0, y, reduction="none")

    clients = [federation.client(name) for name in federation.population.ids()]
    other = Federation(federation.model, [Objective("class", at_temperature)], clients)
    plain, _ = site_of(other)
    wanted = descend(ask_of(x), Lane("s", {"class": 1.0}), plain).delta
    torch.testing.assert_close(soft, wanted, rtol=1e-4, atol=1e-6)
    assert wanted.norm() > 0


def test_the_larger_the_anchor_the_less_a_layer_moves() -> None:
    site, x = site_of(problem())
    lengths = [
        float(
            descend(
                ask_of(x, anchor=anchor, steps=40), Lane("s", {"class": 1.0}), site
            ).delta.norm()
        )
        for anchor in (0.0, 1.0, 10.0)
    ]
    assert lengths[0] > lengths[1] > lengths[2] > 0


def test_only_hidden_layers_move_after_the_first_round() -> None:
    federation = problem()
    one = fit(federation, anchored(), rounds=1).model
    two = fit(federation, anchored(), rounds=2).model
    for name, parameter in two.named_parameters():
        assert torch.equal(parameter, one.get_parameter(name)) == (not name.startswith("0.2."))
        assert not torch.equal(one.get_parameter(name), federation.model.get_parameter(name)), name


def test_reported_losses_are_those_of_the_model_as_it_is() -> None:
    federation = problem()
    soft = fit(federation, anchored(), rounds=2)
    model, data = soft.model, [federation.client(f"c{i}").data for i in range(3)]
    wanted = torch.stack([entropy(model(x), y).mean() for x, y in data]).mean()
    torch.testing.assert_close(soft.losses[-1, 0].float(), wanted, rtol=1e-5, atol=1e-6)


def test_steps_are_longer_after_the_first_round() -> None:
    reports = fit(problem(), anchored(pace=3.0, local_lr=0.01, server_lr=0.02), rounds=2).reports
    assert [(r.local_lr, r.server_lr) for r in reports] == [
        (0.01, 0.02),
        (pytest.approx(0.03), pytest.approx(0.06)),
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_engines_agree(dtype: torch.dtype) -> None:
    federation = problem(net().to(dtype))
    clients = [federation.client(name) for name in federation.population.ids()]
    wide = [Client(c.id, (c.data[0].to(dtype), c.data[1]), c.objectives) for c in clients]
    federation = Federation(federation.model, federation.objectives, wide)
    one = fit(federation, anchored(), rounds=3)
    other = fit(federation, anchored(), rounds=3, engine=VectorizedEngine)
    torch.testing.assert_close(one.losses, other.losses, rtol=1e-4, atol=1e-5)
    assert not [note for report in other.reports for note in report.notes if "one by one" in note]


@pytest.mark.parametrize(
    ("heads", "said"),
    [
        ("", "none of the model's dense layers, `0.2`, `1`. Name"),
        ("*", "all of .* or use FedLS"),
        ("1, 0.3", "`heads` has `0.3`, which is none of .* Did you mean `0.2`"),
        ("1,outputs", "`heads` has `outputs`, .* Name one of them"),
    ],
)
def test_heads_that_are_unknown_or_none_or_all_of_the_layers_are_refused(
    heads: str, said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        fit(problem(), anchored(heads=heads), rounds=1)


def test_an_anchor_is_a_mean_over_all_rows_that_a_layer_is_called_on() -> None:
    """Ten times the same inputs for every sample are no stronger an anchor."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(6, 4, generator=generator)
    y = torch.randint(3, (6,), generator=generator)

    class OverRows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.hidden, self.head = nn.Linear(4, 5), nn.Linear(5, 3)

        def forward(self, inputs: Tensor) -> Tensor:
            rows = torch.tanh(self.hidden(inputs))
            out: Tensor = self.head(rows if rows.dim() == 2 else rows.mean(1))
            return out

    found = []
    for data in (x, x[:, None].expand(-1, 10, -1).contiguous()):
        client = Client("c0", (data, y), ("class",))
        site, at = site_of(Federation(OverRows(), [Objective("class", entropy)], [client]))
        found.append(anchors_of(ask_of(at, trained="hidden.*", anchor=0.7), site)[0])
    torch.testing.assert_close(found[0], found[1])


def test_its_steps_are_its_own_whatever_a_problem_recommends() -> None:
    told = {"problem": "multidigits", "algorithm": {"name": "fedals", "heads": "left,right"}}
    algorithm = read_config(told).algorithm_options
    assert isinstance(algorithm, FedALS)
    assert (algorithm.local_lr, algorithm.server_lr, algorithm.local_momentum) == (0.02, None, 0.9)
