"""Which workloads are measured, the most telling first."""

import re
from collections.abc import Iterator
from dataclasses import replace

from benchmarks import fused
from benchmarks import workloads as w
from benchmarks.workloads import Workload


SUITES = ("cpu", "gpu", "all")


def build(suite: str, total_bytes: float, pattern: str = "") -> list[Workload]:
    """The workloads of a suite, each about ``total_bytes`` large, whose names match."""
    if suite not in SUITES:
        raise ValueError(f"suite {suite!r} is none of {', '.join(SUITES)}")
    found = [c for c in _all(suite, total_bytes) if re.search(pattern, c.name)]
    names = [c.name for c in found]
    assert len(set(names)) == len(names), names
    return found


def _renamed(workload: Workload, family: str) -> Workload:
    return replace(workload, name=f"{family}/{workload.name.split('/')[1]}")


def _all(suite: str, size: float) -> Iterator[Workload]:
    full = suite == "all"

    def some(*values: int, more: tuple[int, ...] = ()) -> list[int]:
        return sorted({*values, *more} if full else {*values})

    # Bases are constants unless a name says otherwise: that is how most programs have them.
    for p in range(1, 9):
        yield w.constant(w.bk1(p, size))
    for n in some(*range(2, 17), more=(20, 24, 32)):
        yield w.constant(w.chain(n, size))
    for p in range(1, 9):
        yield w.constant(w.interp3d(p, size))
    for n in some(2, 3, 4, 6, 8, 16, 32, more=(5, 7, 12, 15, 20, 24, 31)):
        yield w.bgemm(n, size)
    for p in some(*range(1, 9, 2), more=tuple(range(1, 9))):
        yield w.bk1_grad(p, "ud", size)
    for p in some(1, 2, 3, 5, 8, more=tuple(range(1, 9))):
        yield _renamed(w.bk1(p, size), "bk1-traced")

    for p in some(*range(1, 9), more=(11, 15)):
        yield fused.bk3(p, size)
    for p in some(3, 6, more=tuple(range(1, 9))):
        yield fused.bk3_grad(p, size)
        yield fused.global_diffusion(p, size)
    for k in (2, 3, 4):
        yield fused.corner_force(k, size)

    yield from _fall_back(size)

    for p in some(3, 7, more=tuple(range(1, 9))):
        yield w.constant(w.bk3(p, size))
        yield w.constant(w.bk5(p, size))
    for p in some(2, 3, more=tuple(range(1, 9))):
        yield _renamed(w.constant(w.bk1(p, size, "float32")), "bk1-f32")
    for p in some(3, more=tuple(range(1, 9))):
        yield w.bk1_grad(p, "u", size)
        yield w.bk1_grad(p, "d", size)
    if full:
        for p in (11, 15):
            yield w.constant(w.bk1(p, size))
            yield w.constant(w.bk3(p, size))
            yield w.constant(w.interp3d(p, size))
        for n in (4, 8, 16):
            yield _renamed(w.chain(n, size), "chain-traced")
            yield _renamed(w.bgemm(n, size, "float32"), "bgemm-f32")
            yield _renamed(w.bgemm(n, size, "complex128"), "bgemm-c128")
    if suite != "cpu":
        for m, n in ((8, 8), (16, 16), (17, 31), (32, 32)):
            yield w.bgemv(m, n, size)
        for m, n in ((64, 65536), (16384, 64), (65536, 1000)):
            if 8 * m * n < size:
                yield w.gemv(m, n)


def _fall_back(size: float) -> Iterator[Workload]:
    """Work that XLA does well: here the aim is to lose nothing."""
    n = 1 << max(6, (int((size / 8 / 24) ** 0.5)).bit_length() - 1)

    def per_element(count: int) -> int:
        return w.elements(size, 8 * count)

    yield w.plain("library/matmul", "ij,jk->ik", {"i": n, "j": n, "k": n})
    yield w.plain(
        "library/rows-times-shared", "ei,ij->ej", {"e": per_element(128), "i": 64, "j": 64}
    )
    yield w.plain(
        "library/bgemm-n64",
        "eij,ejk->eik",
        {"e": per_element(3 * 64**2)} | dict.fromkeys("ijk", 64),
    )
    yield w.plain("library/elementwise", "ei,ei->ei", {"e": per_element(3 * 64), "i": 64})
    yield w.plain("library/row-sums", "ei->e", {"e": per_element(65), "i": 64})
    yield w.plain("library/trace", "eii->e", {"e": per_element(64), "i": 8})
    yield w.plain(
        "library/transpose", "eijk->ekji", {"e": per_element(2 * 8**3)} | dict.fromkeys("ijk", 8)
    )
    yield w.plain("library/dot", "i,i->", {"i": per_element(2)})
    yield w.plain("library/outer", "i,j->ij", {"i": n, "j": 2 * n})
    yield _renamed(w.constant(w.bk1(3, 8 * 8 * (2 * 4**3 + 5**3))), "tiny-batch")
