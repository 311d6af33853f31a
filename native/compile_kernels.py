# SPDX-License-Identifier: Apache-2.0
"""Compiles the CUDA kernels with NVRTC, where a build finds no nvcc: python compile_kernels.py SOURCE FOLDER

One file for every major architecture that this NVRTC knows, FOLDER/offload_cuda_kernels.sm_80.cubin and so on. NVRTC is
that of the package nvidia-cuda-nvrtc, which CUDA builds of torch bring along, or the system's; it needs no GPU. Exits with 2
where there is none.
"""

from __future__ import annotations

import ctypes
import importlib.util
import sys
from ctypes import byref
from pathlib import Path

OPTIONS = ("--std=c++17", "--fmad=false", "--ftz=false", "--prec-div=true", "--prec-sqrt=true")
"""nvcc is given the same. Every operation says its rounding anyway."""


def find_nvrtc() -> ctypes.CDLL | None:
    """The library, or None. The package's before the system's: it is the one that fits torch."""
    spec = importlib.util.find_spec("nvidia")
    folders = [Path(folder) for folder in (spec.submodule_search_locations or [])] if spec is not None else []
    found = [str(path) for folder in folders for path in sorted(folder.glob("*/lib/libnvrtc.so.*"))]
    for name in (*found, "libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"):
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    return None


def compile_source(nvrtc: ctypes.CDLL, source: Path, architecture: str, *options: str) -> tuple[bytes, str]:
    """The code and the compiler's log. "sm_80": machine code, "compute_80": PTX. Raises RuntimeError with the log."""
    program = ctypes.c_void_p()
    _check(nvrtc, nvrtc.nvrtcCreateProgram(byref(program), source.read_bytes(), source.name.encode(), 0, None, None))
    try:
        given = [option.encode() for option in (f"--gpu-architecture={architecture}", *OPTIONS, *options)]
        status = nvrtc.nvrtcCompileProgram(program, len(given), (ctypes.c_char_p * len(given))(*given))
        log = _result(nvrtc, program, "ProgramLog").rstrip(b"\0").decode()
        _check(nvrtc, status, log)
        return _result(nvrtc, program, "CUBIN" if architecture.startswith("sm_") else "PTX"), log
    finally:
        _check(nvrtc, nvrtc.nvrtcDestroyProgram(byref(program)))


def major_architectures(nvrtc: ctypes.CDLL) -> list[str]:
    """The oldest and the first of each major, as nvcc's all-major."""
    count = ctypes.c_int()
    _check(nvrtc, nvrtc.nvrtcGetNumSupportedArchs(byref(count)))
    known = (ctypes.c_int * count.value)()
    _check(nvrtc, nvrtc.nvrtcGetSupportedArchs(known))
    return [f"sm_{one}" for one in sorted(known) if one % 10 == 0 or one == min(known)]


def _result(nvrtc: ctypes.CDLL, program: ctypes.c_void_p, what: str) -> bytes:
    size = ctypes.c_size_t()
    _check(nvrtc, getattr(nvrtc, f"nvrtcGet{what}Size")(program, byref(size)))
    buffer = ctypes.create_string_buffer(size.value)
    _check(nvrtc, getattr(nvrtc, f"nvrtcGet{what}")(program, buffer))
    return buffer.raw


def _check(nvrtc: ctypes.CDLL, status: int, log: str = "") -> None:
    if status != 0:
        nvrtc.nvrtcGetErrorString.restype = ctypes.c_char_p
        raise RuntimeError(f"NVRTC: {nvrtc.nvrtcGetErrorString(status).decode()}\n{log}")


def main(source: str, folder: str) -> int:
    nvrtc = find_nvrtc()
    if nvrtc is None:
        print("offload: no NVRTC either (pip install nvidia-cuda-nvrtc): no CUDA kernels", file=sys.stderr)
        return 2
    for architecture in major_architectures(nvrtc):
        code, _ = compile_source(nvrtc, Path(source), architecture)
        (Path(folder) / f"offload_cuda_kernels.{architecture}.cubin").write_bytes(code)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
