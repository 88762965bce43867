import jax.numpy as jnp
import numpy as np

from fem_demo.cg import conjugate_gradients


def _system(n: int = 40) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(3)
    A = rng.standard_normal((n, n))
    A = A @ A.T + n * np.diag(rng.uniform(1, 30, n))
    return A, rng.standard_normal((3, n)) * np.array([[1.0], [1e-6], [1e6]])


def test_each_system_is_solved_as_if_it_were_alone() -> None:
    A, b = _system()
    diagonal = jnp.asarray(1 / np.diag(A))[None]
    many, limit = jnp.asarray(A), jnp.asarray(200)

    def solve(rhs: np.ndarray, tolerance: float) -> tuple[np.ndarray, np.ndarray]:
        solution = conjugate_gradients(
            lambda x: x @ many, jnp.asarray(rhs), jnp.asarray(tolerance), limit, diagonal
        )
        return np.asarray(solution.x), np.asarray(solution.iterations)

    # An eigenvector of the preconditioned matrix takes one iteration, the others several.
    root = 1 / np.sqrt(np.diag(A))
    b[1] = A @ (root * np.linalg.eigh(A * root * root[:, None])[1][:, 0])
    x, iterations = solve(b, 1e-6)
    assert iterations[1] == 1 < iterations[0]
    for m in range(3):
        alone, count = solve(b[m : m + 1], 1e-6)
        assert count[0] == iterations[m]
        np.testing.assert_allclose(x[m], alone[0], rtol=1e-12, atol=1e-14 * np.abs(alone).max())
    x, _ = solve(b, 1e-15)
    np.testing.assert_allclose(x, np.linalg.solve(A, b.T).T, rtol=1e-9)


def test_a_zero_right_hand_side_takes_no_iteration() -> None:
    A, _ = _system()
    solution = conjugate_gradients(
        lambda x: x @ jnp.asarray(A), jnp.zeros((2, 40)), jnp.asarray(1e-8), jnp.asarray(10)
    )
    assert solution.iterations.tolist() == [0, 0]
    np.testing.assert_array_equal(solution.x, 0)


def test_the_iterations_are_limited() -> None:
    A, b = _system()
    solution = conjugate_gradients(
        lambda x: x @ jnp.asarray(A), jnp.asarray(b), jnp.asarray(1e-14), jnp.asarray(4)
    )
    assert solution.iterations.tolist() == [4, 4, 4]
