"""High-order Lagrangian hydrodynamics on jaxmagma.

The compressible Euler equations in a frame that moves with the gas: the mesh is made of curved
elements, position and velocity are continuous polynomials of degree k on them, the specific
internal energy is discontinuous of degree k-1, and every quadrature point carries its mass for
ever.  All operators are functions of one element, contractions with one-dimensional tables and what
happens at its quadrature points; `jaxmagma.fuse` runs them over all elements (partial assembly).

Read in this order: `basis`, `mesh`, `problems` (what is solved); `spaces`, `operators`, `cg` (the
linear algebra); `spectrum`, `physics` (one quadrature point); `hydrodynamics`, `initial`,
`integrators`, `simulation`, `checkpoint` (the run); `tensor`, `sampling`, `picture`, `cut`,
`animation`, `vtk`, `rates`, `verify`, `recover_blast` (what is made of it).

``python -m fem_demo`` runs a blast; ``python -m fem_demo.verify`` checks the digits;
``python -m fem_demo.recover_blast`` differentiates through the whole run.
"""
