"""How a run goes, whatever is trained: its options, and what is wrong with its device."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

import torch

from fmol.engines import ALL_CUDA, Compile, EngineName, resolve_device
from fmol.options import Count, Range, check_options
from fmol.participation import Everyone, Participation
from fmol.precision import Precision, check_precision

__all__ = ["RunOptions"]


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
