import jax.numpy as jnp
import numpy as np
import pytest

import jaxmagma as jm
from fem_demo import operators
from fem_demo.basis import ReferenceElement
from fem_demo.mesh import COARSE_MESHES, BoxMesh, coarse_mesh
from fem_demo.spaces import number, to_nodes


COUNTS = {
    "segment01": (2, 1.0),
    "square01_quad": (4, 1.0),
    "cube01_hex": (8, 1.0),
    "rectangle01_quad": (21, 21.0),
    "box01_hex": (16, 63.0),
    "square_gresho": (4, 1.0),
    "rt2D": (4, 1.0),
}


def test_every_mesh_is_checked() -> None:
    assert set(COUNTS) == set(COARSE_MESHES)


@pytest.mark.parametrize("name", COUNTS)
def test_element_counts_and_volumes(name: str) -> None:
    elements, volume = COUNTS[name]
    mesh = coarse_mesh(name + ".mesh")
    for level in range(3):
        fine = mesh.refined(level)
        assert fine.element_count == elements * 2 ** (level * mesh.dim)
        assert fine.volume == pytest.approx(volume, rel=1e-15)


@pytest.mark.parametrize("name", COUNTS)
@pytest.mark.parametrize("order", [1, 2, 3])
def test_volume_by_quadrature(name: str, order: int) -> None:
    mesh = coarse_mesh(name)
    element = ReferenceElement(mesh.dim, order)
    positions = jnp.asarray(mesh.positions(element.nodes))
    jacobian = np.moveaxis(np.asarray(operators.gradient(element, positions)), (1, 0), (-2, -1))
    volume = (np.linalg.det(jacobian) * element.weights).sum()
    assert volume == pytest.approx(mesh.volume, rel=1e-14)


def test_positions_run_x_fastest() -> None:
    mesh = BoxMesh("box", ((0.0, 1.0, 3.0), (0.0, 10.0)))
    x, y = mesh.positions(np.array([0.0, 0.5, 1.0]))
    np.testing.assert_array_equal(x[:, 0, :], [[0, 0.5, 1], [1, 2, 3]])
    np.testing.assert_array_equal(y[:, :, 0], [[0, 5, 10], [0, 5, 10]])


@pytest.mark.parametrize(
    ("name", "order", "refine", "count"),
    [("square01_quad", 2, 3, 33 * 33), ("cube01_hex", 3, 0, 7**3), ("box01_hex", 1, 1, 9 * 25)],
)
def test_numbering(name: str, order: int, refine: int, count: int) -> None:
    mesh = coarse_mesh(name).refined(refine)
    element = ReferenceElement(mesh.dim, order)
    numbering = number(mesh, element)
    assert numbering.node_count == count
    nodes = np.asarray(numbering.nodes)
    # A node has one position, whichever element says so.
    positions = mesh.positions(element.nodes)
    x = jnp.asarray(to_nodes(nodes, positions, count))
    restrict = jm.fuse(lambda field: field, in_axes=numbering.gather)
    assemble = jm.fuse(lambda field: field, out_axes=numbering.scatter)
    np.testing.assert_array_equal(np.moveaxis(restrict(x.ravel()), 1, 0), positions)
    # assemble is the transpose of restrict: <assemble(a), b> = <a, restrict(b)>.
    rng = np.random.default_rng(7)
    a = jnp.asarray(rng.random((len(nodes), mesh.dim, *nodes.shape[1:])))
    b = jnp.asarray(rng.random(mesh.dim * count))
    np.testing.assert_allclose(jnp.sum(assemble(a) * b), jnp.sum(a * restrict(b)), rtol=1e-13)
    # Component c is held where, and only where, a node is on a wall normal to axis c.
    for c in range(mesh.dim):
        on_wall = np.isin(np.asarray(x)[c], (mesh.planes[c][0], mesh.planes[c][-1]))
        np.testing.assert_array_equal(np.asarray(numbering.free)[c] == 0, on_wall)
