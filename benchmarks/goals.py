"""What the library sets out to reach, and what others reach: the numbers that results are held to.

A share is of the speed of a copy ("copy"), of the roofline ("roofline"), or of the speed of the
same case with constant bases ("constant").
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from benchmarks.record import Result, geometric_mean


@dataclass(frozen=True)
class Goal:
    """The least share that every case must reach whose name matches, its number in ``sizes``."""

    family: str  # a regular expression
    sizes: range
    share: float
    of: str

    def __str__(self) -> str:
        return f"{self.share:.0%} of {self.of}"

    def covers(self, case: str) -> bool:
        family, _, size = case.partition("/")
        digits = re.fullmatch(r"[pn]?(\d+).*", size)
        return (
            re.fullmatch(self.family, family) is not None
            and digits is not None
            and int(digits[1]) in self.sizes
        )


ON_GPU = (
    Goal("chain", range(2, 17), 0.95, "copy"),
    Goal("chain", range(17, 33), 0.80, "roofline"),
    Goal("chain-rectangular", range(2, 12), 0.90, "copy"),
    Goal("interp3d", range(1, 9), 0.90, "copy"),
    Goal("bk1", range(1, 9), 0.92, "copy"),
    Goal("bk1", range(9, 16), 0.75, "roofline"),
    Goal("bk[35]", range(1, 9), 0.90, "copy"),
    Goal("bk[35]", range(9, 16), 0.75, "roofline"),
    Goal("bgemm(-nt|-tn|-tt)?(-f32|-c64|-c128)?", range(2, 33), 0.90, "roofline"),
    Goal("(chain|bk1|bk3)-grad(-all)?", range(1, 33), 0.80, "roofline"),
    Goal("(chain|interp3d|bk1|bk3|bk5)-traced", range(1, 33), 0.95, "constant"),
    # However they are spelled.
    Goal(
        "(elasticity|solid|convection|euler|diffusion-of-geometry)(:.*)?",
        range(1, 5),
        0.45,
        "roofline",
    ),
    Goal("solid-tangent", range(1, 5), 0.40, "roofline"),
)

CPU_FAMILIES = ("chain", "interp3d", "bk1", "bk3")  # compared with jnp.einsum
CPU_LEAST_SPEEDUP = 3.0
CPU_MEAN_SPEEDUP = 10.0
CPU_IN_CACHE_FLOPS = 30e9  # on one core, bk1 from p = 3

LIBCEED_MEAN_SPEEDUP = 2.5

FIRST_CALL_SECONDS = {"cold": 1.5, "cached": 0.05}


@dataclass(frozen=True)
class Verdict:
    """A case held to its goal."""

    goal: str
    reached: str
    met: bool


def judge(result: Result, others: Mapping[str, Result]) -> Verdict | None:
    """Of a case that has a goal; ``others`` are the results so far, by case."""
    if result.platform == "cpu":
        return _judge_on_cpu(result)
    goal = next((g for g in ON_GPU if g.covers(result.case)), None)
    if goal is None:
        return None
    if goal.of == "constant":
        twin = others.get(result.case.replace("-traced", ""))
        if twin is None:
            return None
        share = result.bandwidth / twin.bandwidth
    else:
        share = result.of_copy if goal.of == "copy" else result.of_roofline
    return Verdict(str(goal), f"{share:.1%}", share >= goal.share)


def short(results: Mapping[str, Result]) -> list[str]:
    """The cases that do not reach their goal."""
    judged = ((name, judge(result, results)) for name, result in results.items())
    return [name for name, verdict in judged if verdict is not None and not verdict.met]


def _judge_on_cpu(result: Result) -> Verdict | None:
    family, _, size = result.case.partition("/")
    rate, speedup = result.flops_per_second, result.speedup("jnp")
    if family == "bk1-in-cache" and int(size[1:]) >= 3 and result.cores == 1:
        goal = CPU_IN_CACHE_FLOPS
        return Verdict(f"{goal / 1e9:.0f} GFLOP/s", f"{rate / 1e9:.1f} GFLOP/s", rate >= goal)
    if family in CPU_FAMILIES and speedup is not None:
        goal = CPU_LEAST_SPEEDUP
        return Verdict(f"{goal:.0f}x jnp.einsum", f"{speedup:.1f}x", speedup >= goal)
    return None


# ---- What others reach -----------------------------------------------------------------------

# Effective GB/s of libCEED's fastest backend, /gpu/cuda/gen, float64, on one NVIDIA H200, measured
# on 2026-11-21 with arrays of about 1.5 GB, the same counting of bytes.
LIBCEED_DEVICE = "H200"
LIBCEED = {
    "bk1": {
        1: 1249,
        2: 1779,
        3: 1967,
        4: 1781,
        5: 1643,
        6: 1693,
        7: 1265,
        8: 1221,
        11: 1012,
        15: 528,
    },
    "bk3": {
        1: 1623,
        2: 2670,
        3: 2344,
        4: 1471,
        5: 1753,
        6: 1745,
        7: 1226,
        8: 1541,
        11: 1057,
        15: 592,
    },
}


def over_libceed(results: Mapping[str, Result]) -> dict[str, float]:
    """How many times faster each case of libCEED's table is here, on the same device."""
    found = {}
    for kernel, table in LIBCEED.items():
        for p, gigabytes in table.items():
            ours = results.get(f"{kernel}/p{p}")
            if ours is not None and LIBCEED_DEVICE in ours.device:
                found[ours.case] = ours.bandwidth / (gigabytes * 1e9)
    return found


def overall(results: Mapping[str, Result]) -> list[str]:
    """Sentences about all results together."""
    said = []
    on_cpu = any(r.platform == "cpu" for r in results.values())
    ratios = over_libceed(results)
    if ratios:
        complete = len(ratios) == sum(map(len, LIBCEED.values()))
        said.append(
            f"{geometric_mean(ratios.values()):.2f}x libCEED's /gpu/cuda/gen, geometric mean of "
            f"{len(ratios)} cases{'' if complete else ' of 20'} (goal {LIBCEED_MEAN_SPEEDUP:g}x)"
        )
    for peer, words in (("jnp", "jnp.einsum"), ("vmap", "jax.vmap")):
        faster = {name: r.speedup(peer) for name, r in results.items()}
        known = {name: x for name, x in faster.items() if x is not None}
        judged = [x for name, x in known.items() if name.split("/")[0] in CPU_FAMILIES]
        if judged:
            goal = f" (goal {CPU_MEAN_SPEEDUP:g}x)" if on_cpu and peer == "jnp" else ""
            said.append(
                f"{geometric_mean(judged):.1f}x {words}, geometric mean of {len(judged)} cases of "
                f"{', '.join(CPU_FAMILIES)}{goal}; the least {min(judged):.1f}x"
            )
    return said
