"""The command line, the picture and the VTK file."""

import base64
import json
import re
from pathlib import Path
from xml.etree import ElementTree

import jax
import numpy as np
import pytest

from fem_demo import verify
from fem_demo.__main__ import main
from fem_demo.cut import cut
from fem_demo.vtk import lagrange_cell_order


FIELDS = {
    "problem", "dim", "order", "refine", "step", "t", "dt", "e_norm", "internal_energy",
    "kinetic_energy", "energy_change", "x_norm", "v_norm", "dofs_h1", "dofs_l2", "wall_s", "rates",
    "velocity_errors", "compile_s", "machine",
}  # fmt: skip
SMALL = ["sedov", "--refine", "1", "--max-steps", "3"]


def test_a_run_writes_summary_picture_and_vtk(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, file = tmp_path / "deep" / "out", tmp_path / "summary.json"
    assert main([*SMALL, "--out", str(out), "--json", str(file), "--vtk"]) == 0
    printed = capsys.readouterr()
    assert "step 3, t = " in printed.out
    assert "|e| = " in printed.out
    assert "energy change = " in printed.out
    for phase in ("CG (H1)", "CG (L2)", "Forces", "UpdateQuadData", "Major kernels"):
        assert re.search(rf"^{re.escape(phase)} .* s +[0-9.]+ mega", printed.out, re.MULTILINE)
    assert "step 3" in printed.err  # the progress bar

    result = json.loads(file.read_text())
    assert set(result) >= FIELDS
    assert (result["problem"], result["dim"], result["order"], result["step"]) == ("sedov", 2, 2, 3)
    assert (result["dofs_h1"], result["dofs_l2"]) == (2 * 9 * 9, 16 * 4)
    assert set(result["rates"]) == {
        "cg_h1", "cg_l2", "forces", "update_quad_data", "major_kernels",
    }  # fmt: skip
    assert all(rate > 0 for rate in result["rates"].values())
    assert set(result["phase_seconds"]) == set(result["rates"])

    assert result["velocity_errors"] is None

    _check_picture(out / "sedov.png")
    _check_vtk(out / "sedov.vtu", cells=16, points_per_cell=9, cell_type=70, area=1.0)


def test_a_vortex_reports_its_velocity_errors(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "summary.json"
    arguments = ["gresho", "--refine", "1", "--max-steps", "2", "--no-plot", "--json", str(file)]
    assert main(arguments) == 0
    errors = json.loads(file.read_text())["velocity_errors"]
    assert 0 < errors["l_1"] < errors["l_2"] < errors["l_inf"] < 1  # the square has the area 1
    line = "velocity error: L_inf = {l_inf:.10e}, L_1 = {l_1:.10e}, L_2 = {l_2:.10e}"
    assert line.format(**errors) in capsys.readouterr().out


def test_a_run_without_steps_has_a_summary(tmp_path: Path) -> None:
    file = tmp_path / "summary.json"
    arguments = ["sod", "--dim", "1", "--t-final", "0", "--no-plot", "--json", str(file)]
    assert main(arguments) == 0
    result = json.loads(file.read_text())
    assert (result["step"], result["t"], result["energy_change"]) == (0, 0.0, 0.0)
    assert result["rates"]["cg_h1"] == 0


def _check_picture(path: Path) -> None:
    from matplotlib.image import imread

    pixels = imread(path)
    assert min(pixels.shape[:2]) > 400
    colours = np.unique((pixels[..., :3] * 255).astype(int).reshape(-1, 3), axis=0)
    assert len(colours) > 100


@pytest.mark.parametrize("arguments", [["taylor-green", "--dim", "3"], ["sod", "--dim", "1"]])
def test_pictures_in_one_and_three_dimensions(arguments: list[str], tmp_path: Path) -> None:
    assert main([*arguments, "--refine", "0", "--max-steps", "2", "--out", str(tmp_path)]) == 0
    _check_picture(tmp_path / f"{arguments[0]}.png")


def test_a_section_of_a_sheared_box_has_its_area_and_its_fields() -> None:
    """The cube [0, 1]^3 sheared by x += z / 2, made of two elements along x."""
    line = np.linspace(0, 1, 5)
    z, y, x = np.meshgrid(line, line, line, indexing="ij")
    position = np.stack([np.stack([(x + e) / 2 + z / 2, y, z]) for e in (0, 1)], axis=1)
    fields = {"linear": position[0] + 2 * position[1]}
    for axis, value, area in ((2, 0.3, 1.0), (1, 0.55, 1.0), (0, 0.26, 0.52), (0, 0.76, 1.0)):
        section = cut(position, fields, axis, value)
        corners = section.page[:, section.triangles]  # (2, t, 3)
        (ax, bx), (ay, by) = corners[:, :, 1:].transpose(0, 2, 1) - corners[:, None, :, 0]
        assert np.abs(ax * by - bx * ay).sum() / 2 == pytest.approx(area, rel=1e-9)
        inside = [a for a in range(3) if a != axis]
        points = np.empty((3, section.page.shape[1]))
        points[inside], points[axis] = section.page, value
        np.testing.assert_allclose(section.fields["linear"], points[0] + 2 * points[1], atol=1e-12)
        # The outline is drawn once and the face between the elements twice.
        length = np.sqrt(((section.edges[:, 1] - section.edges[:, 0]) ** 2).sum(axis=1)).sum()
        assert length >= 2 * area + 2 * area**0.5


def test_a_section_along_noisy_faces_shows_the_elements_and_not_the_noise() -> None:
    """Two cubes, one on the other, cut where they meet."""
    line = np.linspace(0, 1, 5)
    z, y, x = np.meshgrid(line, line, line, indexing="ij")
    position = np.stack([np.stack([x, y, z + e]) for e in (0, 1)], axis=1)
    position += 1e-9 * np.random.default_rng(0).standard_normal(position.shape)
    section = cut(position, {}, 2, 1.0)
    length = np.sqrt(((section.edges[:, 1] - section.edges[:, 0]) ** 2).sum(axis=1)).sum()
    assert length == pytest.approx(4, rel=1e-6)  # the outline of one of them
    assert section.page.min() > -1e-6
    assert section.page.max() < 1 + 1e-6


def test_picture_of_a_section(tmp_path: Path) -> None:
    arguments = ["taylor-green", "--dim", "3", "--refine", "0", "--max-steps", "2"]
    assert main([*arguments, "--cut", "z=0.3", "--out", str(tmp_path)]) == 0
    _check_picture(tmp_path / "taylor-green.png")


def test_animation(tmp_path: Path) -> None:
    from PIL import Image

    arguments = ["sedov", "--refine", "0", "--t-final", "0.3", "--no-plot", "--animate"]
    assert main([*arguments, "--out", str(tmp_path)]) == 0
    with Image.open(tmp_path / "sedov.gif") as film:
        assert film.format == "GIF"
        assert getattr(film, "n_frames", 1) > 3
        assert min(film.size) > 300


def test_no_plot_leaves_no_directory(tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert main([*SMALL, "--no-plot", "--out", str(out)]) == 0
    assert not out.exists()


def _decode(array: ElementTree.Element) -> np.ndarray:
    kinds = {"Float64": "<f8", "Int64": "<i8", "UInt8": "|u1"}
    payload = base64.b64decode(array.text or "")
    size = int(np.frombuffer(payload[:8], "<u8")[0])
    assert size == len(payload) - 8
    values = np.frombuffer(payload[8:], kinds[array.attrib["type"]])
    components = int(array.attrib["NumberOfComponents"])
    return values.reshape(-1, components) if components > 1 else values


def _check_vtk(path: Path, cells: int, points_per_cell: int, cell_type: int, area: float) -> None:
    root = ElementTree.parse(path).getroot()
    assert root.tag == "VTKFile"
    assert root.attrib["type"] == "UnstructuredGrid"
    piece = root.find("UnstructuredGrid/Piece")
    assert piece is not None
    assert piece.attrib["NumberOfCells"] == str(cells)
    assert piece.attrib["NumberOfPoints"] == str(cells * points_per_cell)
    arrays = {a.attrib["Name"]: _decode(a) for a in root.iter("DataArray")}
    assert arrays["Points"].shape == (cells * points_per_cell, 3)
    assert (arrays["types"] == cell_type).all()
    np.testing.assert_array_equal(arrays["offsets"], np.arange(1, cells + 1) * points_per_cell)
    np.testing.assert_array_equal(arrays["connectivity"], np.arange(cells * points_per_cell))
    for name in ("density", "pressure", "energy"):
        assert arrays[name].shape == (cells * points_per_cell,)
        assert np.isfinite(arrays[name]).all()
    assert arrays["velocity"].shape == arrays["Points"].shape
    assert arrays["density"].min() > 0
    # The corners come first and go around: the shoelace formula adds up to about the area.
    x, y, _ = arrays["Points"].reshape(cells, points_per_cell, 3)[:, :4].transpose(2, 0, 1)
    around = x * np.roll(y, -1, axis=1) - np.roll(x, -1, axis=1) * y
    assert around.sum() / 2 == pytest.approx(area, rel=1e-2)


def test_quadratic_cells_are_ordered_as_vtk_documents() -> None:
    # Corners, then mid-edges around; the centre last.  The grid positions run x fastest.
    assert lagrange_cell_order(2, 2).tolist() == [0, 2, 8, 6, 1, 5, 7, 3, 4]
    assert lagrange_cell_order(3, 1).tolist() == [0, 1, 3, 2, 4, 5, 7, 6]
    quadratic_hexahedron = [
        0, 2, 8, 6, 18, 20, 26, 24,  # corners
        1, 5, 7, 3, 19, 23, 25, 21, 9, 11, 17, 15,  # edges
        12, 14, 10, 16, 4, 22,  # faces, normal to x, y, z
        13,
    ]  # fmt: skip
    assert lagrange_cell_order(3, 2).tolist() == quadratic_hexahedron


@pytest.mark.parametrize("dim", [1, 2, 3])
@pytest.mark.parametrize("order", [1, 2, 3, 4])
def test_every_point_is_listed_once(dim: int, order: int) -> None:
    assert sorted(lagrange_cell_order(dim, order)) == list(range((order + 1) ** dim))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["kelvin"], "unknown problem 'kelvin'"),
        (["--mesh", "torus"], "unknown mesh 'torus'"),
        (["--t-final", "-1"], "t-final must not be negative"),
        (["--t-final", "soon"], "argument --t-final: invalid float value: 'soon'"),
        (["--integrator", "rk5"], "unknown integrator 'rk5'"),
        (["--dim", "4"], "argument --dim"),
        (["--order", "0"], "order must be at least 1"),
        (["--dim", "2", "--mesh", "cube01_hex"], "mesh cube01_hex has dimension 3, not 2"),
        (["sedov", "--mesh", "no"], "unknown mesh"),
        (["--assembly", "none"], "unknown assembly 'none'"),
        (["--dim", "3", "--cut", "w=1"], "a cut is an axis and a number, as in z=0.5, not 'w=1'"),
        (["--dim", "3", "--cut", "z"], "a cut is an axis and a number"),
        (["--dim", "3", "--cut", "z=9"], "the cut z = 9 misses mesh cube01_hex, from 0 to 1"),
        (["--refine", "30"], "refine 30 makes more than 2,147,483,647 velocity unknowns"),
        (["--dim", "2", "--cut", "z=0.5"], "--cut needs three dimensions"),
        (["--dim", "1", "--animate"], "--animate needs two or three dimensions"),
        (["--frobnicate"], "unrecognized arguments: --frobnicate"),
        (["--out", "{file}"], "cannot write to directory"),
        (["--out", "{file}/deeper"], "cannot write to directory"),
        (["--no-plot", "--json", "{file}/x.json"], "cannot write to directory"),
        (["--no-plot", "--json", "{directory}"], "it is a directory"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "file"
    file.write_text("")
    arguments = [a.format(file=file, directory=tmp_path) for a in arguments]
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    assert exit_.value.code == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_verify_rejects_rows_that_do_not_exist(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        verify.main(["15"])
    assert exit_.value.code == 2
    assert "there is no row 15" in capsys.readouterr().err


def test_verify_prints_a_record(capsys: pytest.CaptureFixture[str]) -> None:
    assert verify.main(["10"]) == 0
    command, machine, _, row = capsys.readouterr().out.splitlines()
    assert command == "# python -m fem_demo.verify 10"
    assert f"jax {jax.__version__}" in machine
    assert row.split()[:3] == ["10", "default", "4"]
    assert row.split()[-1] == "pass"


def test_verify_measures_the_progress_bar(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verify, "ROUNDS", 1)
    assert verify.main(["10", "--bar-cost"]) == 0
    assert re.search(r"^row 10: .* progress bar are .*%", capsys.readouterr().out, re.M)
