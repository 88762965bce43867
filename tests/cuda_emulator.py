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
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxmagma.lowering.kernel import Kernel
from jaxmagma.program import ElementProgram


Array = np.ndarray[Any, Any]

ROOT = Path(__file__).resolve().parent.parent

# As if a device had room for two blocks at a time.
_MAIN = """
#include "launch.h"

extern "C" const char* run(const int64_t* order, const int64_t* pointers, const int64_t* sums,
                           int64_t elements, int64_t threads, int64_t resident,
                           void* const* data, const int64_t* const* dims, const int64_t* ranks,
                           const int64_t* itemsizes, int64_t count) {
  using namespace jaxmagma;
  Signature signature;
  signature.elements = elements;
  signature.kept = order[1];
  signature.order.assign(order + 2, order + 1 + order[0]);
  for (int64_t at = 1; at <= pointers[0]; at += 5 + pointers[at + 4]) {
    const int64_t* p = pointers + at;
    signature.pointers.push_back({p[0], p[1], p[2], p[3] != 0, {p + 5, p + 5 + p[4]}});
  }
  for (int64_t at = 1; at <= sums[0]; at += 3) {
    signature.sums.push_back({sums[at], sums[at + 1], sums[at + 2]});
  }
  std::vector<Array> arrays;
  for (int64_t n = 0; n < count; ++n) {
    arrays.push_back({data[n], dims[n], static_cast<size_t>(ranks[n]), itemsizes[n]});
  }
  Launch launch;
  static std::string error;
  signature.resident = resident;
  error = Prepare(signature, arrays, 2, launch);
  if (!error.empty()) return error.c_str();
  void* const* p = launch.pointers.data();
  emulator::Launch(launch.blocks, threads, [&] { CALL });
  FINISH
  return nullptr;
}
"""

_FINISH = """
  for (const auto& sum : signature.sums) {
    const int64_t values = launch.outer * sum.size;
    emulator::Launch((values + kTotals - 1) / kTotals, kTotalThreads, [&] { CALL });
  }
"""


def compiler() -> str | None:
    return shutil.which("g++") or shutil.which("clang++")


def _options() -> list[str]:
    checks = os.environ.get("JAXMAGMA_SANITIZE")
    sanitize = [f"-fsanitize={checks}", "-fno-sanitize-recover=all", "-g1"] if checks else []
    return ["-std=c++17", "-fPIC", "-O0", "-w", f"-I{ROOT / 'cuda'}", *sanitize]


@functools.cache
def _headers(folder: Path) -> Path:
    """The folder of the emulator's header, compiled: it takes half of the time of a kernel."""
    made = folder / "headers"
    made.mkdir()
    header = shutil.copy(ROOT / "tests" / "cuda_emulator.h", made)
    command = [str(compiler()), *_options(), "-x", "c++-header", header, "-o", f"{header}.gch"]
    subprocess.run(command, check=True)
    return made


@functools.cache
def _launch_object(folder: Path) -> Path:
    made = folder / "launch.o"
    source = ROOT / "cuda" / "launch.cc"
    subprocess.run([str(compiler()), *_options(), "-c", source, "-o", made], check=True)
    return made


def _compile(source: str, folder: Path, name: str, *objects: Path) -> ctypes.CDLL:
    source = source.replace("extern __shared__ __align__(16) unsigned char memory[];", "")
    file, library = folder / f"{name}.cc", folder / f"{name}.so"
    file.write_text(f'#include "cuda_emulator.h"\n{source}')
    command = [str(compiler()), f"-I{_headers(folder)}", *_options(), "-shared"]
    subprocess.run([*command, file, *objects, "-o", library], check=True)
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
    pointers = "".join(f", static_cast<{t}*>(p[{n}])" for n, t in enumerate(types))
    lengths = range(len(parameters) - len(types))
    pointers += "".join(f", launch.lengths[{n}]" for n in lengths)
    call = f"kernel(*reinterpret_cast<const {batch}*>(launch.batch.data()){pointers});"
    finish = ""
    if "finish(" in source:
        data = (f"static_cast<{types[0]}*>(data[sum.{x}])" for x in ("workspace", "result"))
        call_finish = f"finish({', '.join(data)}, values, launch.chunks, sum.size);"
        finish = _FINISH.replace("CALL", call_finish)
    main = _MAIN.replace("CALL", call).replace("FINISH", finish)
    return _compile(source + main, folder, name, _launch_object(folder))


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
    library.run.restype = ctypes.c_char_p
    error = library.run(
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
