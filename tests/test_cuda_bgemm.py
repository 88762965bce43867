"""The compiled products of small matrices, run on the CPU by the emulator."""

import ctypes
import itertools
from collections.abc import Callable

import numpy as np
import pytest

from tests import cuda_emulator


TYPES = {
    "float32": "float",
    "float64": "double",
    "complex64": "Complex<float>",
    "complex128": "Complex<double>",
}

# Those on tensor cores, and those of them whose columns are read by two lanes from one bank: an odd
# number of pieces of eight leaves no better rotation. If B is not transposed, and if it is.
TENSOR_SIZES = {"float64": range(19, 49), "complex128": range(13, 49)}
CONFLICTS = {
    True: (19, 21, 22, 23, 33, 34, 35, 37, 38, 39),
    False: (19, 21, 23, 33, 35, 37, 39),
}

_MAIN = """
using namespace jaxmagma;
using T = TYPE;

extern "C" int elements(int size) { return GetBgemm<T>(size).elements; }

extern "C" void run(int size, bool left, bool right, const T* a, const T* b, T* c,
                    long long count) {
  const Bgemm& found = GetBgemm<T>(size);
  const auto kernel = reinterpret_cast<void (*)(const T*, const T*, T*, long long, Transposed)>(
      const_cast<void*>(found.kernel));
  if (found.bytes > static_cast<int>(sizeof(memory))) return;
  emulator::Launch((count + found.elements - 1) / found.elements, found.threads,
                   [&] { kernel(a, b, c, count, Transposed{left, right}); });
}
"""

# What lanes of a warp read of a factor in a layout of the tensor cores, in values.
_TENSOR = """
template <int N, class Axis>
void axis(bool along, int* lanes, int* places) {
  using Shape = TensorShape<T, N>;
  const int by = Shape::template find_rotation<Axis>(along);
  for (int lane = 0; lane < 32; ++lane) lanes[lane] = Shape::template place<Axis>(lane, by, along);
  for (int n = 0; n < 8 * Axis::pieces; ++n) {
    places[n] = Axis::offset(n / 8, by) + Axis::rotate(n % 8, by);
  }
}

template <int... SIZES>
void axis_of(int size, bool rows, bool along, int* lanes, int* places,
             std::integer_sequence<int, SIZES...>) {
  (void)((size == SIZES + 13 &&
          (rows ? axis<SIZES + 13, typename TensorShape<T, SIZES + 13>::Rows>(along, lanes, places)
                : axis<SIZES + 13, typename TensorShape<T, SIZES + 13>::Columns>(along, lanes,
                                                                                 places),
           true)) ||
         ...);
}

extern "C" void axis(int size, bool rows, bool along, int* lanes, int* places) {
  axis_of(size, rows, along, lanes, places, std::make_integer_sequence<int, 36>());
}
"""

HEADERS = ("bgemm_kernels.h", "bgemm_table.h")

Load = Callable[[str], ctypes.CDLL]


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Load:
    if cuda_emulator.compiler() is None:
        pytest.skip("no C++ compiler")
    folder = tmp_path_factory.mktemp("bgemm")
    loaded: dict[str, ctypes.CDLL] = {}

    def load(dtype: str) -> ctypes.CDLL:
        if dtype not in loaded:
            main = _MAIN.replace("TYPE", TYPES[dtype])
            if dtype in TENSOR_SIZES:
                main += _TENSOR
            loaded[dtype] = cuda_emulator.build(HEADERS, main, folder, dtype)
        return loaded[dtype]

    return load


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("n", [*range(1, 34), 39, 40, 47, 48])
def test_products(n: int, dtype: str, load: Load) -> None:
    """Whole chunks and a part of one; then operands that no group of 16 bytes begins with."""
    library = load(dtype)
    chunk = library.elements(n)
    count = 2 * chunk + chunk // 2
    rng = np.random.default_rng(n)
    parts = 2 if dtype.startswith("complex") else 1
    values = rng.uniform(-1, 1, (2, 1 + count * n * n, parts)) @ [1, 1j][:parts]
    # Each with either factor transposed and not; in turn with n, with both or with one of them.
    for first, left, right in itertools.product((0, 1), (False, True), (False, True)):
        if (first + left + right + n) % 2:
            continue
        a, b = (aligned(x.astype(dtype))[first:][: count * n * n] for x in values)
        c = aligned(np.full(1 + count * n * n, np.nan, dtype))[first:][: count * n * n]
        library.run(
            *(n, ctypes.c_bool(left), ctypes.c_bool(right)),
            *(ctypes.c_void_p(x.ctypes.data) for x in (a, b, c)),
            ctypes.c_longlong(count),
        )
        x, y = (z.reshape(count, n, n) for z in (a, b))
        x, y = x.mT if left else x, y.mT if right else y
        tolerance = 100 * float(np.finfo(dtype).eps)
        np.testing.assert_allclose(
            c.reshape(count, n, n), x @ y, rtol=tolerance, atol=tolerance * n
        )


@pytest.mark.parametrize(
    ("dtype", "n"), [(dtype, n) for dtype, sizes in TENSOR_SIZES.items() for n in sizes]
)
@pytest.mark.parametrize("rows", [True, False])
@pytest.mark.parametrize("along", [True, False])
def test_tensor_cores_read_from_all_banks(
    n: int, dtype: str, rows: bool, along: bool, load: Load
) -> None:
    """Lanes that are served together read from different banks; pieces cover their axis."""
    extent = min(n, 16) if rows else n
    lanes, places = np.zeros(32, np.int32), np.full(48, -1, np.int32)
    load(dtype).axis(
        *(n, ctypes.c_bool(rows), ctypes.c_bool(along)),
        *(ctypes.c_void_p(x.ctypes.data) for x in (lanes, places)),
    )
    assert set(places[: (extent + 7) // 8 * 8]) == set(range(extent))
    together = 128 // np.dtype(dtype).itemsize
    busiest = max(np.bincount(x % together).max() for x in lanes.reshape(-1, together))
    conflict = dtype == "float64" and not rows and n in CONFLICTS[along]
    assert busiest == (2 if conflict else 1)


def aligned(x: cuda_emulator.Array) -> cuda_emulator.Array:
    """``x``, beginning where a group of 16 bytes does."""
    buffer = np.empty(x.nbytes + 16, np.uint8)
    first = -buffer.ctypes.data % 16
    result = buffer[first : first + x.nbytes].view(x.dtype)
    result[:] = x
    return result
