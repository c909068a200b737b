"""What is there: versions, devices, extras, data."""

from __future__ import annotations

import importlib.util
import inspect
import os
import platform
from collections.abc import Iterator
from dataclasses import MISSING
from importlib import metadata
from pathlib import Path

import torch

from fmol import __version__
from fmol.kernels.cpu import find_compiler
from fmol.options import expected, explain_options, list_options
from fmol.problems import PROBLEMS, find_problem
from fmol.problems.loading import DATA_VARIABLE, find_data

__all__ = ["check_up", "list_problems"]

EXTRAS = {
    "cli": ("click", "safetensors"),
    "digits": ("sklearn",),
    "celeba": ("PIL",),
    "pandas": ("pandas",),
    "figures": ("matplotlib",),
    "tensorboard": ("tensorboard",),
    "mlflow": ("mlflow",),
    "torchjd": ("torchjd", "qpsolvers", "quadprog"),
    "moocore": ("moocore",),
    "flower": ("flwr", "ray"),
}
"""Extra → the modules it brings."""


def check_up(data_dir: Path | None) -> Iterator[str]:
    """What is installed and found, a line each."""
    yield f"fmol     {__version__}"
    yield f"python   {platform.python_version()} on {platform.system()} {platform.machine()}"
    yield f"torch    {torch.__version__}, numpy {metadata.version('numpy')}"
    yield f"cpu      {os.cpu_count()} cores, torch uses {torch.get_num_threads()} threads"
    if torch.cuda.is_available():
        for i in range(torch.cuda.device_count()):
            free, total = torch.cuda.mem_get_info(i)
            name = torch.cuda.get_device_name(i)
            yield f"cuda:{i}   {name}, {free / 2**30:.0f} of {total / 2**30:.0f} GiB free"
    else:
        yield "cuda     no device that torch can use"
    yield f"c++      {find_compiler() or 'no compiler, so no kernels of our own on a CPU'}"
    yield "extras"
    for extra, modules in EXTRAS.items():
        missing = [each for each in modules if importlib.util.find_spec(each) is None]
        found = f'missing: pip install "fmol[{extra}]"' if missing else "installed"
        yield f"  {extra:12} {found}"
    where = data_dir or os.environ.get(DATA_VARIABLE)
    yield (
        f"data     looked for in {where}"
        if where
        else (f"data     no folder named: give `--data-dir` or set {DATA_VARIABLE}")
    )
    for name in PROBLEMS:
        yield f"  {name:12} {_data(name, data_dir)}"


def list_problems(name: str | None, data_dir: Path | None) -> Iterator[str]:
    """The built-in problems, a line or two each; or the options of the one called `name`."""
    if name is None:
        for each in PROBLEMS:
            first = (inspect.getdoc(find_problem(each)) or "").split("\n")[0]
            yield f"{each:12} {first}"
            yield f"{'':12} data: {_data(each, data_dir)}"
        yield ""
        yield "fmol problems NAME shows a problem's options, fmol run NAME --help all flags."
        return
    kind = find_problem(name)
    yield inspect.getdoc(kind) or name
    yield ""
    texts = explain_options(kind)
    for option in list_options(kind).values():
        default = "must be given" if option.default is MISSING else f"default {option.default!r}"
        yield f"{option.name}: {expected(option.kind)}, {default}"
        yield f"    {texts.get(option.name, '')}"
    yield ""
    yield f"data: {_data(name, data_dir)}"


def _data(name: str, data_dir: Path | None) -> str:
    sets = getattr(find_problem(name), "data_sets", ())
    if not sets:
        return "none needed"
    try:
        found = [place for each in sets if (place := find_data(each, data_dir)) is not None]
    except FileNotFoundError as error:
        return str(error)
    if found:
        return f"found in {found[0]}"
    return f"{sets[0].folder}/ not found; elsewhere: {sets[0].otherwise}"
