"""CUDA kernels compiled when they are first needed, by the compiler that comes with torch (NVRTC)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

__all__ = ["CudaKernel", "compile_kernel"]


class CudaKernel:
    """A kernel on one device; called with a grid, a block and its arguments."""

    def __init__(self, function: ctypes.c_void_p, device: torch.device) -> None:
        self._function, self._device = function, device

    def __call__(
        self, grid: tuple[int, int], threads: int, arguments: Sequence[Tensor | int]
    ) -> None:
        """Starts it on its device's current stream. Tensors go as addresses: it knows how they lie."""
        values = [
            ctypes.c_void_p(a.data_ptr()) if isinstance(a, Tensor) else ctypes.c_int(a)
            for a in arguments
        ]
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(v) for v in values))
        stream = ctypes.c_void_p(torch.cuda.current_stream(self._device).cuda_stream)
        with torch.cuda.device(self._device):
            _check(
                _driver().cuLaunchKernel(
                    self._function, *grid, 1, threads, 1, 1, 0, stream, pointers, None
                )
            )


def compile_kernel(source: str, name: str, device: torch.device) -> CudaKernel:
    """The kernel `name` of a text in CUDA C++, for a device.

    Raises RuntimeError with what the compiler says, and OSError where there is no compiler.
    """
    with torch.cuda.device(device):
        torch.cuda.current_stream().synchronize()  # There is a context after it.
        major, minor = torch.cuda.get_device_capability(device)
        binary = _compile(source, f"sm_{major}{minor}")
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        _check(_driver().cuModuleLoadData(ctypes.byref(module), binary))
        _check(_driver().cuModuleGetFunction(ctypes.byref(function), module, name.encode()))
    return CudaKernel(function, device)


def _compile(source: str, architecture: str) -> bytes:
    library = _compiler()
    program = ctypes.c_void_p()
    options = [f"--gpu-architecture={architecture}".encode(), b"--std=c++17"]
    given = (ctypes.c_char_p * len(options))(*options)
    created = library.nvrtcCreateProgram(
        ctypes.byref(program), source.encode(), b"fmol.cu", 0, None, None
    )
    if created:
        raise RuntimeError(f"NVRTC could not begin: error {created}.")
    try:
        failed = library.nvrtcCompileProgram(program, len(options), given)
        if failed:
            said = _fetch(library.nvrtcGetProgramLogSize, library.nvrtcGetProgramLog, program)
            raise RuntimeError(
                f"a kernel could not be compiled: {said.decode(errors='replace').strip(chr(0))}"
            )
        return _fetch(library.nvrtcGetCUBINSize, library.nvrtcGetCUBIN, program)
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def _fetch(
    size_of: ctypes._NamedFuncPointer, get: ctypes._NamedFuncPointer, program: ctypes.c_void_p
) -> bytes:
    size = ctypes.c_size_t()
    size_of(program, ctypes.byref(size))
    text = ctypes.create_string_buffer(size.value)
    get(program, text)
    return text.raw


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


@cache
def _compiler() -> ctypes.CDLL:
    """NVRTC of torch's CUDA version: as the system finds it, or from among torch's own packages."""
    version = (torch.version.cuda or "0").split(".")[0]
    name = f"libnvrtc.so.{version}"
    try:
        return ctypes.CDLL(name)
    except OSError:
        packages = Path(torch.__file__).parent.parent / "nvidia"
        for found in sorted(packages.glob(f"*/lib/{name}*")):
            return ctypes.CDLL(str(found))
        raise


def _check(result: int) -> None:
    if result:
        said = ctypes.c_char_p()
        _driver().cuGetErrorString(result, ctypes.byref(said))
        raise RuntimeError(f"CUDA error {result}: {(said.value or b'unknown').decode()}")
