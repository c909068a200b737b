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

__all__ = ["CACHE_VARIABLE", "Library", "find_compiler", "is_kept", "load_library"]

logger = logging.getLogger("fmol")

CACHE_VARIABLE = "FMOL_CACHE"
"""The environment variable that names a folder for compiled kernels, in place of `~/.cache/fmol`."""
COMPILERS = ("g++", "c++")
"""GCC first: GCC's OpenMP runs torch's own threads, and what clang makes cannot be linked with it."""
FLAGS = ("-std=c++17", "-O3", "-march=native", "-ffp-contract=fast", "-fno-math-errno", "-fPIC")
RUNTIMES = ("libgomp*.so*", "libiomp5*.so*", "libomp*.so*")
"""How what runs torch's own threads is called. A second one would keep threads of its own."""
SECONDS = 120
"""How long a compilation may take."""

Library = tuple[str, tuple[tuple[str, str | int], ...]]
"""A text among the kernels, and the names with a meaning that stand before it."""


def load_library(library: Library) -> ctypes.CDLL:
    """The compiled text. Raises RuntimeError or OSError where it cannot be had."""
    if find_compiler() is None:
        raise OSError(f"there is no C++ compiler: none of {', '.join(COMPILERS)} is found")
    path = _place(library)
    if is_kept(library):
        try:
            return ctypes.CDLL(str(path))
        except OSError as error:  # Half a file, or one for another system.
            logger.info("`%s` is compiled anew: %s", path, error)
    logger.info("compiling %s", library)
    with tempfile.TemporaryDirectory(prefix="fmol-") as folder:
        compiled = _compile(library, Path(folder))
        kernels = ctypes.CDLL(str(compiled))  # Before it is kept: it may lack something.
        try:
            if path is None:
                raise OSError("there is no home folder")
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            _check_owner(path.parent)
            write_whole(path, compiled.read_bytes())
            path.chmod(0o700)
        except OSError as error:
            logger.info("compiled kernels are not kept for the next process: %s", error)
        return kernels


def is_kept(library: Library) -> bool:
    """Whether it has been compiled on this machine before, and lies where only we could put it."""
    try:
        path = _place(library)
        if path is None or not path.is_file():
            return False
        _check_owner(path.parent)
        _check_owner(path)
    except (OSError, RuntimeError) as error:
        logger.info("compiled kernels are not looked for: %s", error)
        return False
    return True


def _check_owner(path: Path) -> None:
    """What others could have written is not loaded."""
    if os.name != "posix":
        return
    found = path.stat()
    if found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise OSError(f"`{path}` is not ours alone to write")


def _compile(library: Library, folder: Path) -> Path:
    compiler = find_compiler()
    assert compiler is not None  # It was asked for before.
    (folder / "kernel.cpp").write_text(_text(library))
    _run(compiler, *FLAGS, "-fopenmp", "-c", "kernel.cpp", "-o", "kernel.o", folder=folder)
    runtime = _runtime()
    threads = "-fopenmp" if runtime is None else runtime
    _run(compiler, "-shared", "kernel.o", threads, "-o", "kernel.so", folder=folder)
    return folder / "kernel.so"


def _run(*command: str | Path, folder: Path | None = None) -> str:
    try:
        done = subprocess.run(
            [str(part) for part in command],
            cwd=folder,
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


def _place(library: Library) -> Path | None:
    """Where it is kept: told by its text, by what the compiler makes of this machine, and by torch.

    None where there is no such folder. Raises RuntimeError where the compiler does not work at all.
    """
    kind = "\n".join((_text(library), _native(), str(_runtime()), torch.__version__, *FLAGS))
    named = os.environ.get(CACHE_VARIABLE)
    try:
        root = Path(named) if named else Path.home() / ".cache" / "fmol"
    except RuntimeError:  # A user without a home.
        return None
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
