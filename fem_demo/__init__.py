"""High-order Lagrangian hydrodynamics on jaxmagma.

The compressible Euler equations in a frame that moves with the gas: the mesh is made of curved
elements, position and velocity are continuous polynomials of degree k on them, the specific
internal energy is discontinuous of degree k-1, and every quadrature point carries its mass for
ever.  All operators are contractions over elements with one-dimensional tables (partial assembly),
written as whole einsums.

Read in this order: `basis`, `mesh`, `problems` (what is solved); `spaces`, `operators`, `cg` (the
linear algebra); `matrices`, `physics` (one quadrature point); `hydrodynamics`, `initial`,
`integrators`, `simulation` (the run); `tensor`, `sampling`, `picture`, `vtk`, `rates`, `verify`
(what is made of it).

``python -m fem_demo`` runs a blast; ``python -m fem_demo.verify`` checks the digits.
"""
