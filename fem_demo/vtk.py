"""A VTK file (.vtu) of the fields on the curved mesh, for ParaView and VisIt.

Elements are written as Lagrange cells of the order of the mesh.  Such a cell interpolates at
*equispaced* points, so the fields are sampled there; the element map, a polynomial of that order,
is represented exactly.  Cells share no points, hence fields may jump between them.

A cell lists its points by the dimension of the face that they lie inside of: corners, edges, faces,
interior; within each face the lowest axis runs fastest.  Corners go around the bottom and then
around the top; edges go around the bottom, around the top, and up at the corners in the same order;
faces come in pairs normal to x, y, z.
"""

import base64
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import numpy as np

from fem_demo.sampling import sample
from fem_demo.simulation import Observation, Simulation


CELL_TYPES = {1: 68, 2: 70, 3: 72}  # VTK_LAGRANGE_CURVE, _QUADRILATERAL, _HEXAHEDRON

# Grid coordinates (x, y, z): 0 and 1 are the ends of an axis and None runs over its interior.
Face = tuple[int | None, ...]


def _faces(dim: int) -> Iterator[Face]:
    around = [(0, 0), (1, 0), (1, 1), (0, 1)]
    square: list[Face] = [(None, 0), (1, None), (None, 1), (0, None)]
    if dim == 1:
        yield from ((0,), (1,), (None,))
    elif dim == 2:
        yield from (*around, *square, (None, None))
    else:
        yield from ((*corner, z) for z in (0, 1) for corner in around)
        yield from ((*edge, z) for z in (0, 1) for edge in square)
        yield from ((*corner, None) for corner in around)
        for axis, end in product(range(3), (0, 1)):
            yield tuple(end if a == axis else None for a in range(3))
        yield (None, None, None)


def lagrange_cell_order(dim: int, order: int) -> np.ndarray:
    """Position, in the (z, y, x) grid of order + 1 points per axis, of each point of the cell."""
    positions = []
    stride = [(order + 1) ** axis for axis in range(dim)]
    for face in _faces(dim):
        spans = [range(1, order) if end is None else (end * order,) for end in face]
        for reversed_point in product(*reversed(spans)):  # x, the last factor, runs fastest
            point = reversed_point[::-1]
            positions.append(sum(i * s for i, s in zip(point, stride, strict=True)))
    return np.array(positions)


def _array(name: str, values: np.ndarray, tuples: int | None = None) -> str:
    """A DataArray element; ``values`` is (count,) or (count, components)."""
    kind = {"f8": "Float64", "i8": "Int64", "u1": "UInt8"}[values.dtype.str[1:]]
    components = values.shape[1] if values.ndim > 1 else 1
    attributes = f'type="{kind}" Name="{name}" NumberOfComponents="{components}"'
    if tuples is not None:
        attributes += f' NumberOfTuples="{tuples}"'
    payload = values.astype(values.dtype.newbyteorder("<")).tobytes()
    header = np.array([len(payload)], dtype="<u8").tobytes()
    text = base64.b64encode(header + payload).decode("ascii")
    return f'        <DataArray {attributes} format="binary">{text}</DataArray>\n'


def save_vtk(simulation: Simulation, final: Observation, path: Path) -> None:
    """Writes positions, velocity, density, pressure and specific internal energy."""
    mesh, order = simulation.mesh, simulation.element.order
    cell_order = lagrange_cell_order(mesh.dim, order)
    points_per_cell = len(cell_order)
    samples = sample(simulation, [np.linspace(0.0, 1.0, order + 1)] * mesh.dim)

    def scalars(field: np.ndarray) -> np.ndarray:
        cells = field.reshape(mesh.element_count, points_per_cell)
        return cells[:, cell_order].ravel()

    def vectors(field: np.ndarray) -> np.ndarray:
        missing = [np.zeros(mesh.element_count * points_per_cell)] * (3 - mesh.dim)
        return np.stack([*(scalars(component) for component in field), *missing], axis=1)

    count = mesh.element_count * points_per_cell
    connectivity = np.arange(count, dtype=np.int64)
    offsets = np.arange(1, mesh.element_count + 1, dtype=np.int64) * points_per_cell
    types = np.full(mesh.element_count, CELL_TYPES[mesh.dim], dtype=np.uint8)
    # Since version 2.1 the upright edges of a hexahedron are listed as described above.
    pieces = [
        '<?xml version="1.0"?>\n',
        '<VTKFile type="UnstructuredGrid" version="2.1" byte_order="LittleEndian" '
        'header_type="UInt64">\n',
        "  <UnstructuredGrid>\n",
        "    <FieldData>\n",
        _array("TimeValue", np.array([final.t]), tuples=1),
        "    </FieldData>\n",
        f'    <Piece NumberOfPoints="{count}" NumberOfCells="{mesh.element_count}">\n',
        "      <Points>\n",
        _array("Points", vectors(samples.position)),
        "      </Points>\n",
        "      <Cells>\n",
        _array("connectivity", connectivity),
        _array("offsets", offsets),
        _array("types", types),
        "      </Cells>\n",
        '      <PointData Scalars="density" Vectors="velocity">\n',
        _array("density", scalars(samples.density)),
        _array("pressure", scalars(samples.pressure)),
        _array("energy", scalars(samples.energy)),
        _array("velocity", vectors(samples.velocity)),
        "      </PointData>\n",
        "    </Piece>\n",
        "  </UnstructuredGrid>\n",
        "</VTKFile>\n",
    ]
    path.write_text("".join(pieces), encoding="ascii")
