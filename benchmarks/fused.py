"""Functions that no einsum writes: diffusion of a global vector, a hydrodynamic force.

Least traffic and flops are counted as in ``workloads``; the bases are constants.
"""

import jax
import jax.numpy as jnp
import numpy as np

import jaxmagma as jm
from benchmarks.workloads import Array, Function, Workload, bk3, diffusion, elements, tables
from fem_demo import operators
from fem_demo.basis import ReferenceElement
from fem_demo.physics import Material, respond


def global_diffusion(p: int, total_bytes: float, dtype: str = "float64") -> Workload:
    """Diffusion of a global vector on a box of elements: gather, bk3, scatter."""
    n, q, w = p + 1, p + 2, np.dtype(dtype).itemsize
    cells = max(1, round(elements(total_bytes, (2 * p**3 + 6 * q**3) * w + 4 * n**3) ** (1 / 3)))
    nodes = cells * p + 1
    size, e = nodes**3, cells**3
    one = bk3(p, 1, dtype)
    b, g, *_ = tables(one)

    def element(v: Array, d: Array) -> Array:
        return diffusion(jnp.einsum, b, g, v, d, "")

    def ways() -> dict[str, Function]:
        along = np.arange(cells)[:, None] * p + np.arange(n)  # (cells, n)
        x, y, z = (along[c.ravel()] for c in np.meshgrid(*[np.arange(cells)] * 3, indexing="ij"))
        dofs = (x[:, :, None, None] * nodes + y[:, None, :, None]) * nodes + z[:, None, None, :]
        dofs = dofs.astype(np.int32)  # (e, n, n, n)

        def by_vmap(v: Array, d: Array) -> Array:
            index = jnp.asarray(dofs)
            return jnp.zeros_like(v).at[index].add(jax.vmap(element)(v[index], d))

        by_fuse = jm.fuse(element, (jm.gather(dofs), 0), jm.scatter_add(dofs, size))
        return {"jm": by_fuse, "vmap": by_vmap}

    return Workload(
        name=f"bk3-global/p{p}",
        shapes=((size,), (e, 6, q, q, q)),
        shared=(True, False),
        # The vector is read and written once; the indices are traffic that cannot be avoided.
        least_bytes=2 * size * w + e * (6 * q**3 * w + 4 * n**3),
        flops=e * one.flops,
        ways=ways,
        dtype=dtype,
        leading=False,
    )


def corner_force(order: int, total_bytes: float) -> Workload:
    """Hydrodynamics: from position, velocity and energy of an element to the force on its nodes."""
    element = ReferenceElement(3, order)
    n, q = order + 1, 2 * order
    per_element = 8 * (9 * n**3 + order**3 + 10 * q**3)
    e = elements(total_bytes, per_element)
    identity = np.eye(3).reshape(3, 3, 1, 1, 1)
    nodes = np.stack(np.meshgrid(*[np.linspace(0, 1, n)] * 3, indexing="ij")[::-1])

    def force(x: Array, v: Array, energy: Array, mass: Array, inverse: Array) -> Array:
        response = respond(
            Material(mass, jnp.asarray(1.4), identity + 0.01 * inverse, jnp.asarray(0.1)),
            order,
            operators.gradient(element, nodes + 0.01 * x),
            operators.evaluate(operators.energy_tables(element), energy[None])[0],
            operators.gradient(element, v),
        )
        return operators.force(element, response.stress)

    return Workload(
        name=f"corner-force/k{order}",
        shapes=(
            (e, 3, n, n, n),
            (e, 3, n, n, n),
            (e, order, order, order),
            (e, q, q, q),
            (e, 3, 3, q, q, q),
        ),
        shared=(False,) * 5,
        least_bytes=e * per_element,
        # Three components of three contractions each: two gradients, one force; and the points.
        flops=e * (27 * 2 * (q * n**3 + q * q * n * n + q**3 * n) + 600 * q**3),
        element=force,
        fused=True,
        leading=False,
    )
