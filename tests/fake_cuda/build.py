"""Builds the fake device into the environment of the Python that runs this: `sys.prefix/fake_cuda`.

    .venv-cuda/bin/python tests/fake_cuda/build.py

    libfake_cuda.so     the stubs, and a function for each other symbol that torch needs; preloaded
    lib/libcuda.so.1    as good as empty, for whoever opens a library of CUDA by its name: its
    lib/libcublas...    symbols are found in the preloaded one

`tools/set_up.py cuda` runs it.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path

STUBS = Path(__file__).parent / "stubs"
LIBRARY = "libfake_cuda.so"
CUDA_SYMBOL = re.compile(
    "(cu[A-Z]|cuda[A-Z]|__cuda|cublas|cudnn|cufft|cupti|curand|cusolver|cusparse|nccl|nvrtc"
    "|nvshmem|nvJitLink|nvtx|cuobj)"
)
DRIVER_CALL = re.compile(r"\bcu[A-Z]\w+(?=\()")
CUDA_LIBRARY = re.compile(r"NEEDED.*\[(lib(?:cu|nv|nccl)[^]]*)\]")
NOTHING_TO_DO = re.compile(
    "__cudaRegister.*|__cudaUnregisterFatBinary"
    "|cuda(Event|Stream)(Destroy|Query).*|cudaThreadExchangeStreamCaptureMode"
    "|cudaDeviceEnablePeerAccess|cudaFuncSetAttribute|cudaFuncSetCacheConfig|cudaMemcpyToSymbol"
    "|cudaProfiler.*"
    "|cuCtxSetLimit"
    "|cublasDestroy_v2|cublasSet.*|cublasLtMatrixLayoutSetAttribute"
    "|cublasLtMatmulPreferenceSetAttribute"
    "|ncclComm(Destroy|Abort|Finalize|Deregister)|ncclRedOpDestroy"
    "|cupti.*"
)
"""Functions that give nothing back, for which doing nothing is success.

All others that no stub defines say so and fail: then a case fails, and a stub must be written.
"""
MATMUL = re.compile(r"cublas([SD]gemm|Gemm)(?!v)\w*")
"""Their first arguments are the handle, two flags, and rows, columns and inner size."""
VECTORS = re.compile(r"cublas([SD](gemv|dot)\w*|DotEx)")
NOT_SUPPORTED = 801
"""cudaErrorNotSupported; an error in every other library too."""


def main() -> None:
    """Builds everything anew."""
    site = Path(sysconfig.get_path("purelib"))
    torch = [*(site / "torch" / "lib").glob("*.so*"), *(site / "torchao").glob("*.so")]
    folder = Path(sys.prefix) / "fake_cuda"
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "lib").mkdir(parents=True)
    os.chdir(folder)
    headers = [site / "nvidia/cu13/include", site / "triton/backends/nvidia/include"]
    compiler = [
        "g++",
        "-std=c++17",
        "-O1",
        "-fPIC",
        "-Wall",
        *(f"-isystem{each}" for each in headers),
    ]
    for source in sorted(STUBS.glob("*.cpp")):
        call([*compiler, "-c", str(source), "-o", f"{source.stem}.o"])
    objects = sorted(str(path) for path in Path().glob("*.o"))
    # Triton compiles this file when it is first used.
    triton = (site / "triton/backends/nvidia/driver.c").read_text(encoding="utf-8")
    needed = symbols(torch, "--undefined-only") | set(DRIVER_CALL.findall(triton))
    missing = needed - symbols(torch, "--defined-only")
    missing -= {symbol for each in objects for symbol in symbols([Path(each)], "--defined-only")}
    rest = sorted(symbol for symbol in missing if CUDA_SYMBOL.match(symbol))
    Path("rest.c").write_text(write_rest(rest), encoding="utf-8")
    call(["gcc", "-O1", "-fPIC", "-c", "rest.c", "-o", "rest.o"])
    call(["g++", "-shared", *objects, "rest.o", "-ldl", "-o", LIBRARY])
    said = output(["readelf", "-d", *map(str, torch)])
    for name in {"libcuda.so.1", "libnvidia-ml.so.1", *CUDA_LIBRARY.findall(said)}:
        linked = ["-L.", "-Wl,--no-as-needed", "-lfake_cuda", "-Wl,-rpath,$ORIGIN/.."]
        call(["gcc", "-shared", f"-Wl,-soname,{name}", *linked, "-o", f"lib/{name}"])


def write_rest(names: Iterable[str]) -> str:
    """Writes a C function for each symbol that torch or Triton needs and no stub defines."""
    count = "fake_cuda_count_matmul"
    lines = ["#include <stdio.h>", f"long {count}(void*, int, int, int, const char*);"]
    for name in names:
        if NOTHING_TO_DO.fullmatch(name):
            lines.append(f"long {name}(void) {{ return 0; }}")
        elif MATMUL.fullmatch(name):
            arguments = "void* h, int a, int b, int m, int n, int k"
            lines.append(f'long {name}({arguments}) {{ return {count}(h, m, n, k, "{name}"); }}')
        elif VECTORS.fullmatch(name):
            lines.append(f'long {name}(void* h) {{ return {count}(h, 0, 0, 0, "{name}"); }}')
        else:
            text = f'fputs("fake CUDA: no stub for {name}\\n", stderr)'
            lines.append(f"long {name}(void) {{ {text}; return {NOT_SUPPORTED}; }}")
    return "\n".join([*lines, ""])


def symbols(libraries: Iterable[Path], which: str) -> set[str]:
    """Finds the names that libraries or objects define or need."""
    found = set()
    for path in libraries:
        dynamic = [] if path.suffix == ".o" else ["-D"]
        lines = output(["nm", *dynamic, which, str(path)]).splitlines()
        found |= {line.split()[-1].split("@")[0] for line in lines if line}
    return found


def output(command: list[str]) -> str:
    """Gives what a command prints."""
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def call(command: list[str]) -> None:
    """Runs a command."""
    subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
