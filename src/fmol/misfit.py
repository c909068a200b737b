"""Data that a model cannot take, told from what its layers want and what they got."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fmol.data import Samples, tree_leaves
from fmol.errors import FmolError, MisfitError
from fmol.layout import FlatModel

__all__ = ["check_fit"]

TRIED = 2
"""Samples on which a model that has failed is tried again."""

WIDTHS: tuple[tuple[type[nn.Module], str, str], ...] = (
    (nn.Linear, "in_features", "features"),
    (nn.RNNBase, "input_size", "features"),
    (nn.LayerNorm, "normalized_shape", "features"),
    (nn.GroupNorm, "num_channels", "channels"),
    (nn.modules.batchnorm._BatchNorm, "num_features", "channels"),
    (nn.modules.conv._ConvNd, "in_channels", "channels"),
)
"""Layers that say how wide their inputs must be: where they say it, and what it counts."""


def check_fit(error: Exception, model: FlatModel, samples: Samples, owner: str) -> None:
    """Raises `MisfitError` where the samples of `owner` are why the model raised `error`.

    That is said only where a layer was given what contradicts its own width or dtype; of any other
    error nothing is known, and it is left to speak for itself.
    """
    # What fmol says is clear already, and memory is not a matter of widths.
    if not isinstance(error, RuntimeError) or isinstance(error, FmolError | torch.OutOfMemoryError):
        return
    why = _find_misfit(model, samples)
    if why:
        raise MisfitError(
            f"the model cannot take {owner}, {_shapes(samples)}: {why}. Give inputs as the model takes "
            "them, or mend the model."
        ) from error


def _find_misfit(model: FlatModel, samples: Samples) -> str:
    """Which layer got what it cannot take, in words; empty where none did."""
    entered: list[tuple[str, nn.Module, Any]] = []

    def note(name: str, module: nn.Module, arguments: Any, named: Any) -> None:
        entered.append((name, module, (arguments, named)))

    hooks = [
        module.register_forward_pre_hook(partial(note, name), with_kwargs=True)
        for name, module in model.module.named_modules()
    ]
    try:
        inputs, _ = samples.span(0, min(TRIED, len(samples)))
        with model.mode(training=False), torch.no_grad():
            model(inputs)
        return ""
    except Exception:  # noqa: BLE001 - which error it is was seen already; here it matters where.
        if not entered:
            return ""
    finally:
        for hook in hooks:
            hook.remove()
    name, module, given = entered[-1]
    tensors = tree_leaves(given)
    why = _contradiction(module, tensors[0]) if tensors else ""
    kind = type(module).__name__
    return f"its layer `{name}` ({kind}) {why}" if why and name else f"{kind} {why}" if why else ""


def _contradiction(module: nn.Module, tensor: Tensor) -> str:
    """What a layer wants that the tensor it was given is not, in words; empty where it is."""
    for kind, attribute, unit in WIDTHS:
        if isinstance(module, kind):
            said = getattr(module, attribute)
            wanted = said[-1] if isinstance(said, tuple) else said
            got = _width(module, tensor, unit, wanted)
            if got != wanted:
                seen = got if got is not None else f"samples of shape {list(tensor.shape[1:])}"
                return f"wants {wanted} {unit} and got {seen}"
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor) or isinstance(module, nn.Embedding | nn.EmbeddingBag):
        return ""
    return "" if weight.dtype == tensor.dtype else f"wants {weight.dtype} and got {tensor.dtype}"


def _width(module: nn.Module, tensor: Tensor, unit: str, wanted: int) -> int | None:
    """How many features or channels a tensor has; None where it has no dimension of them."""
    dimensions = 2
    if isinstance(module, nn.modules.conv._ConvNd):
        dimensions = len(module.kernel_size) + 2
        if tensor.dim() > dimensions:
            return None
    # Torch takes what has one dimension less for a single sample.
    if tensor.dim() < dimensions:
        single = tensor.dim() == dimensions - 1 and tensor.shape[0] == wanted
        return wanted if single else None
    return tensor.shape[-1 if unit == "features" else 1]


def _shapes(samples: Samples) -> str:
    inputs, _ = samples.span(0, 1)
    shapes = [str([len(samples), *leaf.shape[1:]]) for leaf in tree_leaves(inputs)]
    return f"inputs of shape {' and '.join(shapes)}"
