"""Lines of CUDA source, and how numbers and labels stand in them."""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager


# Names of loop variables: `e` is the element.
LETTERS = "abcdfghijklmnopqrstuvwxyz"


class Text:
    """Lines of source; the comments at their ends are the shapes of what they move."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._indent = 0

    def __call__(self, line: str = "", comment: str = "") -> None:
        line = "  " * self._indent + line if line else ""
        self._lines.append(f"{line}  // {comment}" if comment else line)

    @contextmanager
    def braces(self, opening: str = "", comment: str = "", closing: str = "}") -> Iterator[None]:
        """What is printed meanwhile stands in braces."""
        self(f"{opening} {{" if opening else "{", comment)
        self._indent += 1
        yield
        self._indent -= 1
        self(closing)

    def function(
        self, call: str, parameters: Iterable[str], comment: str = ""
    ) -> AbstractContextManager[None]:
        """The same, for a call whose last argument is a function."""
        return self.braces(f"{call}, [&]({listed(parameters)})", comment, "});")

    @property
    def source(self) -> str:
        return "\n".join(self._lines) + "\n"


def linear(terms: Iterable[tuple[str, int, int]]) -> str:
    """`` + 4 * i + j``: labels times strides; what is always zero is left out."""
    text = ""
    for label, stride, extent in terms:
        if extent > 1 and stride:
            text += f" + {label}" if stride == 1 else f" + {stride} * {label}"
    return text


def offset(values: int) -> str:
    return f" + {values}" if values else ""


def shape_of(extents: Iterable[int]) -> str:
    return f"({', '.join(str(x) for x in extents)})"


def listed(values: Iterable[object]) -> str:
    return ", ".join(str(x) for x in values)


def loop_names(extents: dict[str, int]) -> dict[str, str]:
    """Names of loop variables: labels themselves, but for `e`."""
    spare = next(x for x in reversed(LETTERS) if x not in extents)
    return {x: spare if x == "e" else x for x in extents}
