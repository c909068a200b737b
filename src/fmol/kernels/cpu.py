"""C++ kernels compiled when they are first needed, by the system's compiler, and kept on disk."""

from __future__ import annotations

import ctypes
import logging
import os
import shutil
import subprocess
import tempfile
from functools import cache
from hashlib import sha256
from importlib.resources import files
from pathlib import Path

import torch

from fmol.files import write_whole

__all__ = ["CACHE_VARIABLE", "Library", "find_compiler", "is_at_hand", "load_library"]

logger = logging.getLogger("fmol")

CACHE_VARIABLE = "FMOL_CACHE"
"""The environment variable that names a folder for compiled kernels, in place of `~/.cache/fmol`."""
COMPILERS = ("c++", "g++", "clang++")
FLAGS = ("-std=c++17", "-O3", "-march=native", "-ffp-contract=fast", "-fno-math-errno", "-fPIC")
RUNTIMES = ("libgomp*.so*", "libiomp5*.so*", "libomp*.so*")
"""How what runs torch's own threads is called. A second one would keep threads of its own."""
SECONDS = 120
"""How long a compilation may take."""

Library = tuple[str, tuple[tuple[str, str | int], ...]]
"""A text among the kernels, and the names with a meaning that stand before it."""


@cache
def load_library(library: Library) -> ctypes.CDLL:
    """The compiled text. Raises RuntimeError or OSError where it cannot be had."""
    path = _place(library)
    if path.exists():
        return ctypes.CDLL(str(path))
    logger.info("compiling %s", library)
    with tempfile.TemporaryDirectory(prefix="fmol-") as folder:
        compiled = _compile(library, Path(folder))
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            write_whole(path, compiled.read_bytes())
        except OSError as error:
            logger.info("compiled kernels are not kept for the next process: %s", error)
            return ctypes.CDLL(str(compiled))
    return ctypes.CDLL(str(path))


def is_at_hand(library: Library) -> bool:
    """Whether it has been compiled on this machine before, or cannot be compiled at all."""
    return find_compiler() is None or _place(library).exists()


def _compile(library: Library, folder: Path) -> Path:
    compiler = find_compiler()
    if compiler is None:
        raise OSError(f"there is no C++ compiler: none of {', '.join(COMPILERS)} is found")
    source, loose, whole = (folder / f"kernel.{end}" for end in ("cpp", "o", "so"))
    source.write_text(_text(library))
    _run(compiler, *FLAGS, "-fopenmp", "-c", source, "-o", loose)
    runtime = _runtime()
    threads = ["-fopenmp"] if runtime is None else [runtime]
    _run(compiler, "-shared", loose, *threads, "-o", whole)
    return whole


def _run(*command: str | Path) -> str:
    try:
        done = subprocess.run(
            [str(part) for part in command],
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"`{command[0]}` took more than {SECONDS} s") from error
    if done.returncode:
        said = done.stderr.strip().splitlines()
        reason = next((line for line in said if "error" in line), said[-1] if said else "nothing")
        raise RuntimeError(f"`{command[0]}` ended with {done.returncode} and said: {reason[:200]}")
    return done.stdout


def _text(library: Library) -> str:
    name, meanings = library
    defines = "".join(f"#define {key} {value}\n" for key, value in meanings)
    return defines + files("fmol.kernels").joinpath(name).read_text()


def _place(library: Library) -> Path:
    """Where it is kept: told by its text, by what the compiler makes of this machine, and by torch."""
    kind = "\n".join((_text(library), _native(), str(_runtime()), torch.__version__, *FLAGS))
    named = os.environ.get(CACHE_VARIABLE)
    root = Path(named) if named else Path.home() / ".cache" / "fmol"
    name = f"{Path(library[0]).stem}-{sha256(kind.encode()).hexdigest()[:24]}.so"
    return root / "kernels" / name


@cache
def find_compiler() -> str | None:
    """The system's C++ compiler, or the one that `CXX` names; None where there is none."""
    names = (os.environ.get("CXX"), *COMPILERS)
    return next((found for name in names if name and (found := shutil.which(name))), None)


@cache
def _native() -> str:
    """What the compiler says of itself and of this machine's processor."""
    compiler = find_compiler()
    if compiler is None:
        return ""
    return _run(compiler, "-march=native", "-dM", "-E", "-x", "c++", os.devnull)


@cache
def _runtime() -> Path | None:
    """What runs torch's threads, from among torch's own libraries."""
    folder = Path(torch.__file__).parent / "lib"
    return next((path for name in RUNTIMES for path in sorted(folder.glob(name))), None)
