"""Runs generated CUDA kernels on the CPU, to check their numbers where there is no GPU.

The source is compiled as C++ with ``cuda_emulator.h`` in place of what CUDA provides, together with
the code that computes launch parameters on a GPU.  Slow, and blind to races; but strides, layouts,
barriers, ragged blocks and sums are the real ones.  ``JAXMAGMA_SANITIZE`` names checks of the C++
compiler that are to watch, if Python has loaded their library.
"""

import ctypes
import functools
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxmagma.lowering.kernel import Kernel
from jaxmagma.programs.program import ElementProgram


Array = np.ndarray[Any, Any]

ROOT = Path(__file__).resolve().parent.parent

# What the emulator calls; a kernel may have no sums to finish.
_CALLS = """
extern "C" void call_kernel(const int64_t* batch, void* const* p, const int* lengths) {{
  kernel(*reinterpret_cast<const {batch}*>(batch){arguments});
}}
extern "C" void call_finish(void* partial, void* sum, int64_t values, int64_t chunks,
                            int64_t size) {{
  {finish}
}}
"""


def compiler() -> str | None:
    return shutil.which("g++") or shutil.which("clang++")


def _options() -> list[str]:
    checks = os.environ.get("JAXMAGMA_SANITIZE")
    sanitize = [f"-fsanitize={checks}", "-fno-sanitize-recover=all", "-g1"] if checks else []
    return ["-std=c++17", "-fPIC", "-O0", "-w", f"-I{ROOT / 'cuda'}", *sanitize]


@functools.cache
def _common() -> tempfile.TemporaryDirectory[str]:
    """What all kernels share, compiled: it would take most of the time of each."""
    made = tempfile.TemporaryDirectory()
    header = f"{made.name}/cuda_emulator.h"
    shutil.copy(ROOT / "tests" / "cuda_emulator.h", header)
    sources = [str(ROOT / x) for x in ("tests/cuda_emulator.cc", "cuda/launch.cc")]
    command = [str(compiler()), *_options()]
    subprocess.run([*command, "-x", "c++-header", header, "-o", f"{header}.gch"], check=True)
    subprocess.run([*command, "-r", *sources, "-o", f"{made.name}/emulator.o"], check=True)
    return made


def _compile(source: str, folder: Path, name: str) -> ctypes.CDLL:
    source = source.replace("extern __shared__ __align__(16) unsigned char memory[];", "")
    file, library = folder / f"{name}.cc", folder / f"{name}.so"
    file.write_text(f'#include "cuda_emulator.h"\n{source}')
    common = _common().name
    command = [str(compiler()), f"-I{common}", *_options(), "-shared"]
    subprocess.run([*command, file, f"{common}/emulator.o", "-o", library], check=True)
    return ctypes.CDLL(str(library))


def build(headers: Sequence[str], main: str, folder: Path, name: str) -> ctypes.CDLL:
    """The library ``name`` of the functions ``main``, which launch kernels of ``cuda/headers``."""
    source = "".join((ROOT / "cuda" / x).read_text() for x in headers)
    for x in headers:
        source = source.replace(f'#include "{x}"\n', "")
    return _compile(source + main, folder, name)


@functools.lru_cache(maxsize=256)
def _build(source: str, name: str, folder: Path) -> ctypes.CDLL:
    """Once for each kernel, whatever arrays it is run on."""
    found = re.search(r"\nkernel\(const (Batch<.*?>) batch(.*?)\) \{", source, re.DOTALL)
    assert found is not None
    batch, rest = found.groups()
    parameters = rest.split(",\n")[1:]
    types = [x.split("*")[0].replace("const", "").strip() for x in parameters if "*" in x]
    arguments = "".join(f", static_cast<{t}*>(p[{n}])" for n, t in enumerate(types))
    arguments += "".join(f", lengths[{n}]" for n in range(len(parameters) - len(types)))
    finish = ""
    if "finish(" in source:
        sums = ", ".join(f"static_cast<{types[0]}*>({x})" for x in ("partial", "sum"))
        finish = f"finish({sums}, values, chunks, size);"
    calls = _CALLS.format(batch=batch, arguments=arguments, finish=finish)
    return _compile(source + calls, folder, name)


def run(
    kernel: Kernel, program: ElementProgram, arguments: Sequence[Array], folder: Path
) -> list[Array]:
    """The results of the call ``kernel`` of ``program``; ``folder`` keeps what is compiled."""
    library = _build(kernel.source, kernel.attributes["name"], folder)
    extents = program.batch_extents([x.shape for x in arguments])
    shapes = program.output_shapes(extents)
    results = [np.full(shape, np.nan, program.dtype) for shape in shapes]
    scratch = [np.full(shape, np.nan, dtype) for shape, dtype in kernel.workspace]
    buffers = [*(np.ascontiguousarray(x) for x in arguments), *results, *scratch]

    attributes = kernel.attributes
    for symbol in ("bank", "table"):
        values = attributes[symbol][1:].tobytes()
        if values:
            memory = (ctypes.c_char * len(values)).in_dll(library, symbol)
            memory[:] = values
    copies = attributes["copies"][1:].reshape(-1, 3)
    for argument, offset, size in copies:
        memory = (ctypes.c_char * int(offset + size)).in_dll(library, "bank")
        memory[offset : offset + size] = buffers[argument].tobytes()

    count = len(buffers)
    dims = [np.array(x.shape, np.int64) for x in buffers]
    lists = [np.ascontiguousarray(attributes[x]) for x in ("order", "pointers", "sums")]
    ranks = np.array([x.ndim for x in buffers], np.int64)
    itemsizes = np.array([x.itemsize for x in buffers], np.int64)
    library.run_kernel.restype = ctypes.c_char_p
    error = library.run_kernel(
        *(ctypes.c_void_p(x.ctypes.data) for x in lists),
        ctypes.c_int64(attributes["elements"]),
        ctypes.c_int64(attributes["threads"]),
        ctypes.c_int64(attributes["resident"]),
        (ctypes.c_void_p * count)(*(x.ctypes.data for x in buffers)),
        (ctypes.c_void_p * count)(*(x.ctypes.data for x in dims)),
        ctypes.c_void_p(ranks.ctypes.data),
        ctypes.c_void_p(itemsizes.ctypes.data),
        ctypes.c_int64(count),
    )
    assert error is None, error
    return results
