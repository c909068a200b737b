"""Options that are known to go wrong together, said before training begins.

None of it is forbidden: on easy problems it may go well. What was measured is in `docs/steps.md`.
"""

from __future__ import annotations

import logging
from typing import Any

from fmol.algorithms.steps import Adam, Momentum

__all__ = ["known_trouble", "warn_of_trouble"]

logger = logging.getLogger("fmol")

MOST_MOMENTUM = 0.5
"""Above it, what is built on the round before is built on one too far behind."""
MOST_ADAM_LR = 0.1
TWICE = 2 - 1e-9
"""How many times the local step size a server that extrapolates should not take, but for rounding."""
LONGEST = 5.0
"""How many times as long two momenta together may make a step."""


def known_trouble(algorithm: Any) -> list[str]:
    """A sentence for each combination of an algorithm's options that is known to go wrong.

    >>> from fmol import FSMGDA
    >>> known_trouble(FSMGDA(local_steps=5))
    []
    >>> known_trouble(FSMGDA(local_steps=5, extrapolate=True, server_step=Momentum(0.9)))[0][:35]
    '`extrapolate` with a momentum of 0.'
    """
    step = getattr(algorithm, "server_step", None)
    before: float = getattr(algorithm, "objective_momentum", 0.0)
    after = step.beta if isinstance(step, Momentum) else 0.0
    after = step.beta1 if isinstance(step, Adam) else after
    keep = max(before, after)
    found = []
    if getattr(algorithm, "drift_correction", "none") == "scaffold":
        if keep > MOST_MOMENTUM:
            found.append(
                f'`drift_correction="scaffold"` with a momentum of {keep:g} at the server is known to '
                "go wrong: control variates are those of the round before, and such steps leave it far "
                f"behind. Take {MOST_MOMENTUM:g} at most."
            )
        if algorithm.local_momentum > MOST_MOMENTUM:
            found.append(
                f'`drift_correction="scaffold"` with a `local_momentum` of '
                f"{algorithm.local_momentum:g} is known to diverge. Take "
                f"{MOST_MOMENTUM:g} at most, or none."
            )
        if algorithm.transforms:
            found.append(
                f'`drift_correction="scaffold"` with {len(algorithm.transforms)} of `transforms`: the '
                "server's control variates follow what arrives, so that what a transform takes away or "
                "adds stays in them. Leave one of the two out, unless they give back what was sent."
            )
    elif getattr(algorithm, "extrapolate", False) and keep > MOST_MOMENTUM:
        found.append(
            f"`extrapolate` with a momentum of {keep:g} is known to be unstable where clients have few "
            f"labels each. Take {MOST_MOMENTUM:g} if losses jump."
        )
    times = _times_local_lr(algorithm)
    if getattr(algorithm, "extrapolate", False) and not isinstance(step, Adam) and times >= TWICE:
        found.append(
            f"`extrapolate` with a `server_lr` of {times:.3g} times `local_lr` is known to diverge "
            "where clients have few labels each: it makes steps longer by itself. Take one for both."
        )
    merges = hasattr(algorithm, "ridge")
    if merges and not isinstance(step, Adam) and times >= TWICE:
        found.append(
            f"{type(algorithm).__name__} with a `server_lr` of {times:.3g} times `local_lr` is known "
            "to diverge: what least squares give is where to go, and not a direction. Take one for "
            "both."
        )
    if isinstance(step, Adam) and _server_lr(algorithm) >= MOST_ADAM_LR:
        found.append(
            f"`server_step` is adam and `server_lr` {_server_lr(algorithm):g}: every parameter moves "
            "by about that in every round, which is known to diverge. Take 0.01."
        )
    longer = 1 / ((1 - before) * (1 - after))
    if isinstance(step, Momentum) and before and after and longer > LONGEST:
        found.append(
            f"`objective_momentum` {before:g} and a momentum of {after:g} after it make steps up to "
            f"{longer:.3g} times as long. Take one of the two."
        )
    return found


def _server_lr(algorithm: Any) -> float:
    """The step size of the first round."""
    lr = algorithm.server_lr if algorithm.server_lr is not None else algorithm.local_lr
    return float(lr(0) if callable(lr) else lr)


def _times_local_lr(algorithm: Any) -> float:
    """How many times the local step size that is, where updates are sums of local steps; else zero."""
    lr = getattr(algorithm, "local_lr", None)
    if lr is None or algorithm.accumulate != "sum":
        return 0.0
    local = float(lr(0) if callable(lr) else lr)
    return _server_lr(algorithm) / local if local > 0 else 0.0


def warn_of_trouble(algorithm: Any) -> None:
    """Tells the logger `fmol` of all that is known to go wrong."""
    for sentence in known_trouble(algorithm):
        logger.warning(sentence)
