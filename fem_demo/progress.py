"""The progress bar."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module

from fem_demo.simulation import Observation, Simulation


@contextmanager
def progress_bar(simulation: Simulation) -> Iterator[Callable[[Observation], None]]:
    """Yields the function that shows an observation; it is the ``report`` of a run."""
    try:
        tqdm = import_module("tqdm")
    except ImportError:
        print("no progress bar without tqdm: pip install 'jaxmagma[demo]'", file=sys.stderr)
        yield lambda now: None
        return

    limit = simulation.configuration.max_steps
    bar = tqdm.tqdm(
        total=1.0,
        desc=simulation.problem.name,
        bar_format="{percentage:3.0f}%|{bar:20}| {desc} [{elapsed}<{remaining}]",
    )

    def report(now: Observation) -> None:
        done = now.t / simulation.t_final if simulation.t_final > 0 else 1.0
        if limit:
            done = max(done, now.step / limit)
        bar.n = min(done, 1.0)
        bar.set_description_str(
            f"step {now.step}, t {now.t:.4f}, dt {now.dt:.2e}, energy {now.energy:.8f}"
        )

    with bar:
        yield report
