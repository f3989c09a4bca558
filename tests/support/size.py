"""`make size`: count lines, repeated names and import cycles, beside their limits; exit 1 above a ceiling.

Needs only the standard library. The rules:

- A line of code holds a token that is neither a comment nor part of a docstring. Every string that stands
  alone as a statement counts as a docstring.
- `__init__.py` counts as a module, but not towards the modules of its folder.
- A module may be longer than 500 lines if its docstring says why, in a sentence with "Long because".
- Imports include those inside functions. Those under `if TYPE_CHECKING:` count only for the cycles "with
  imports for types".
"""

import ast
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Final

FOLDER_MODULES_MAX: Final = 15
MODULE_LINES_MAX: Final = 500
REASON: Final = "long because"
LLMTAP_LINES_MAX: Final = 115_180
TESTS_LINES_MAX: Final = 100_777
"""Ceilings that only fall: a change that makes the code shorter lowers them."""


@dataclass(frozen=True, slots=True)
class Module:
    """One Python file."""

    name: str
    """Dotted, as it is imported; a package's is that of its `__init__.py`."""
    path: Path
    lines: int
    code: int
    docstring: str
    classes: tuple[str, ...]
    """Names of public classes at the top level."""
    imports: frozenset[str]
    """Absolute names of what it imports at run time: of modules, and of things in modules."""
    type_imports: frozenset[str]
    """The same under `if TYPE_CHECKING:`."""


def read_tree(folder: Path) -> dict[str, Module]:
    """Return the modules below `folder` by name. The folder's own name is the first part of each."""
    found = {}
    for path in sorted(folder.rglob("*.py")):
        parts = path.relative_to(folder.parent).with_suffix("").parts
        is_package = parts[-1] == "__init__"
        name = ".".join(parts[:-1] if is_package else parts)
        found[name] = _read(name, path, is_package=is_package)
    return found


def _read(name: str, path: Path, *, is_package: bool) -> Module:
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    imports: dict[bool, set[str]] = {False: set(), True: set()}
    for one, for_types in _imports(tree, name if is_package else name.rpartition(".")[0]):
        imports[for_types].add(one)
    classes = (node.name for node in tree.body if isinstance(node, ast.ClassDef))
    return Module(
        name,
        path,
        text.count("\n"),
        _code_lines(text, tree),
        ast.get_docstring(tree) or "",
        tuple(one for one in classes if not one.startswith("_")),
        frozenset(imports[False]),
        frozenset(imports[True]),
    )


def _code_lines(text: str, tree: ast.Module) -> int:
    docstrings: set[int] = set()
    strings: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and _is_text(node.value):
            docstrings.update(_span(node))
        elif _is_text(node) or isinstance(node, ast.JoinedStr):
            strings.update(_span(node))
    # Within a string of several lines neither a blank line nor a "#" is what it is elsewhere.
    marked = {n for n, line in enumerate(text.split("\n"), 1) if line.strip() and line.lstrip()[0] != "#"}
    return len((marked | strings) - docstrings)


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str | bytes)


def _span(node: ast.expr | ast.stmt) -> range:
    return range(node.lineno, (node.end_lineno or node.lineno) + 1)


def _imports(tree: ast.AST, package: str, for_types: bool = False) -> Iterator[tuple[str, bool]]:
    """Yield each imported name, and whether only types need it."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, for_types) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: package.count(".") + 2 - node.level] if node.level else []
            base = ".".join([*parents, *([node.module] if node.module else [])])
            yield from ((f"{base}.{alias.name}", for_types) for alias in node.names)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from _imports(ast.Module(node.body, []), package, for_types=True)
            yield from _imports(ast.Module(node.orelse, []), package, for_types)
        elif isinstance(node, ast.stmt | ast.ExceptHandler | ast.match_case):
            yield from _imports(node, package, for_types)


def import_graph(modules: Mapping[str, Module], *, with_types: bool = False) -> dict[str, set[str]]:
    """Return what each module imports of the others."""
    graph: dict[str, set[str]] = {}
    for name, module in modules.items():
        imports = module.imports | module.type_imports if with_types else module.imports
        wanted = ({one, one.rpartition(".")[0]} & modules.keys() for one in imports)
        # The longest is the module: `from a import b` is of a.b if there is one, and of a otherwise.
        graph[name] = {max(found, key=len) for found in wanted if found} - {name}
    return graph


def cycles(graph: Mapping[str, set[str]]) -> list[str]:
    """Return a cycle of imports, if there is any."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as found:
        return [", ".join(found.args[1])]
    return []


def repeated_classes(modules: Iterable[Module]) -> dict[str, list[str]]:
    """Return the names of public classes that several modules define, with these modules."""
    places = defaultdict(list)
    for module in modules:
        for name in module.classes:
            places[name].append(module.name)
    return {name: found for name, found in sorted(places.items()) if len(found) > 1}


def folders(modules: Iterable[Module]) -> dict[Path, int]:
    """Return the folders with more than FOLDER_MODULES_MAX modules, the largest first."""
    counts = Counter(module.path.parent for module in modules if module.path.name != "__init__.py")
    return {folder: n for folder, n in counts.most_common() if n > FOLDER_MODULES_MAX}


def unexplained(modules: Iterable[Module]) -> list[Module]:
    """Return the modules of more than MODULE_LINES_MAX lines without a reason, the longest first."""
    found = [
        m
        for m in modules
        if m.lines > MODULE_LINES_MAX and REASON not in " ".join(m.docstring.lower().split())
    ]
    return sorted(found, key=lambda m: -m.lines)


def report(root: Path) -> tuple[str, bool]:
    """Return the tables for the repository at `root`, and whether the lines are within the ceilings."""
    product, tests = read_tree(root / "llmtap"), read_tree(root / "tests")
    both = [*product.values(), *tests.values()]

    groups: dict[str, list[Module]] = defaultdict(list)
    for module in product.values():
        groups[_group(module, root)].append(module)
    groups["llmtap/"], groups["tests/"] = list(product.values()), list(tests.values())
    counts = {
        group: (len(members), sum(m.lines for m in members), sum(m.code for m in members))
        for group, members in groups.items()
    }
    rows = [("", "modules", "lines", "code")]
    rows += [(group, *map("{:,}".format, counts[group])) for group in groups]

    def within(path: Path) -> str:
        return path.relative_to(root).as_posix()

    offenders = {
        f"folders of more than {FOLDER_MODULES_MAX} modules": [
            f"{within(folder)}/ {n}" for folder, n in folders(both).items()
        ],
        f"modules over {MODULE_LINES_MAX} lines without a reason": [
            f"{within(m.path)} {m.lines}" for m in unexplained(both)
        ],
        "public class names of several modules": [
            f"{name}: {', '.join(at)}" for name, at in repeated_classes(product.values()).items()
        ],
        "import cycles": cycles(import_graph(product)),
        "import cycles with imports for types": cycles(import_graph(product, with_types=True)),
    }
    lines, test_lines = counts["llmtap/"][1], counts["tests/"][1]
    limits = [
        ("", "now", "limit"),
        ("lines of llmtap/", f"{lines:,}", f"{LLMTAP_LINES_MAX:,}"),
        ("lines of tests/", f"{test_lines:,}", f"{TESTS_LINES_MAX:,}"),
        *((what, f"{len(found):,}", "0") for what, found in offenders.items()),
    ]
    lists = [[f"{what}:", *(f"  {one}" for one in found)] for what, found in offenders.items() if found]
    text = "\n\n".join("\n".join(part) for part in (_aligned(rows), _aligned(limits), *lists))
    return text, lines <= LLMTAP_LINES_MAX and test_lines <= TESTS_LINES_MAX


def _group(module: Module, root: Path) -> str:
    """The package directly below llmtap/, or the module itself where it lies in none."""
    below = module.path.relative_to(root / "llmtap").parts
    return f"llmtap/{below[0]}/" if len(below) > 1 else "llmtap/*.py"


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """The first column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            [row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))]
        ).rstrip()
        for row in rows
    ]


if __name__ == "__main__":
    tables, is_within = report(Path(__file__).parents[2])
    print(tables)
    sys.exit(0 if is_within else 1)
