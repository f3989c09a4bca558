"""What the simulations print: tables in Markdown."""

from collections.abc import Iterable


def table(columns: Iterable[str], rows: Iterable[Iterable[object]]) -> None:
    """Prints it, with an empty line below."""
    columns = list(columns)
    print("| " + " | ".join(columns) + " |\n|" + "---|" * len(columns))
    for row in rows:
        print("| " + " | ".join(map(str, row)) + " |")
    print(flush=True)
