"""Local steps that stay near `x_t` in what they do, not in where they are.

A client that takes many steps on its own samples moves its dense layers far, and much of that is not
needed by any of them. With an anchor `c` it descends, beside its loss,

    c/H · mean_n ‖(W − W_t) a_n‖²

for every dense layer that moves, with `H` outputs and weights `W` `[H, width]`, over the inputs `a_n`
that its samples have there at `x_t`: the change of what the layer gives. The gradient of it is
`2c/H (W − W_t) C` with the second moments `C` of these inputs, which stay at the client. (FedProx, in
the metric of a client's own inputs.)
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from fmol.dense import Dense, dense_layers, second_moments
from fmol.engines.seam import Ask, LocalConfig, Site
from fmol.layout import Layout
from fmol.precision import full_precision

__all__ = ["anchored_layers", "anchors_of", "pull_back", "softening"]


def anchored_layers(site: Site, local: LocalConfig) -> tuple[Dense, ...]:
    """The dense layers that move, where they are held by an anchor; none else."""
    if not local.anchor:
        return ()
    model = site.model
    layers = dense_layers(model.module, model.layout)
    moving = model.layout.moving(local.trained, model.x)
    return tuple(each for each in layers if moving is None or bool(each.read(moving).all()))


def anchors_of(ask: Ask, site: Site) -> tuple[Tensor, ...]:
    """What the change of each anchored layer is multiplied by, `2c/H C` `[width, width]`."""
    assert ask.local is not None
    layers = anchored_layers(site, ask.local)
    if not layers:
        return ()
    names, widths = zip(*((each.name, each.width) for each in layers), strict=True)
    with site.model.mode(training=False), full_precision():
        moments = second_moments(site, ask.x, names, widths)
    strength = 2 * ask.local.anchor
    return tuple(
        (strength / (layer.outputs * count) * each).to(site.model.x)
        for layer, (each, count) in zip(layers, moments, strict=True)
    )


def pull_back(
    direction: Tensor, moved: Tensor, layers: Sequence[Dense], anchors: Sequence[Tensor]
) -> None:
    """Adds to directions `[…, d]` what `anchors` `[…, width, width]` make of how far parameters have
    `moved` `[…, d]`."""
    for layer, anchor in zip(layers, anchors, strict=True):
        layer.add(direction, layer.read(moved) @ anchor)


def softening(local: LocalConfig, layout: Layout, like: Tensor) -> Tensor | None:
    """What parameters are multiplied by while a lane descends, `[d]`; None where none is."""
    if not local.softened or local.temperature == 1.0:
        return None
    held = layout.matching(local.softened.split(",")).to(like)
    return 1 - held * (1 - 1 / local.temperature)
