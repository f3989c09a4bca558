"""Break the code of rows of docs/compliance.md, drawn by a seed, and run the tests that the rows cite.

A row is proved if its test passes with the code as it is, and fails with the broken code. What is broken:

- a function: each value that it returns or yields is another one of the same type; without such values, it
  does nothing
- a class: so are all of its methods, and if it has none, its defaults and class attributes
- a module: so are all of its functions and classes
- a requirement of the draft: the verdict of its check

Code is broken in a copy of the tree. Compiled code is not used, because a row cites the Python code.

    .venv/bin/python -m tests.support.mutation.claims --rows 60 --seed 40
"""

import argparse
import ast
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Final

ROOT: Final = Path(__file__).parents[3]
PAGE: Final = ROOT / "docs" / "compliance.md"
_PLACE: Final = re.compile(r"`((?:llmtap|tests)/[\w/]+\.py)(?:::(\w+))?`")
_REQUIREMENT: Final = re.compile(r"\d[\d.]*-\w+")
_KEPT: Final = frozenset({"__init__", "__post_init__", "__repr__", "__str__", "__hash__", "__eq__"})
"""Methods that are not broken: objects must exist before their results can be wrong."""
TIMEOUT_S: Final = 600
_BROKEN: Final = "tests.support.mutation.broken"


@dataclass(frozen=True, slots=True)
class Claim:
    row: str
    """First cells of the row, as a text."""
    requirement: str | None
    code: str
    name: str | None
    test: str
    test_name: str | None


def claims(text: str) -> list[Claim]:
    """Return the rows of the page that cite code and a test."""
    found = []
    for line in text.splitlines():
        if not line.startswith("| "):
            continue
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        code, test = (_PLACE.fullmatch(cell) for cell in cells[-2:])
        if code is None or test is None:
            continue
        requirement = cells[0] if _REQUIREMENT.fullmatch(cells[0]) else None
        found.append(Claim(" | ".join(cells[:-2])[:90], requirement, code[1], code[2], test[1], test[2]))
    return found


def broken_source(source: str, claim: Claim) -> str:
    """Return the source of a module with the cited code broken. Raises LookupError if nothing was found."""
    tree = ast.parse(source)
    if claim.requirement is not None and claim.name is None:
        count = _break_check(tree, claim.requirement)
    else:
        targets = [
            node for node in ast.walk(tree) if claim.name is None or getattr(node, "name", None) == claim.name
        ]
        if claim.name is None:
            targets = list(tree.body)  # type: ignore[arg-type]
        count = sum(_break_node(node) for node in targets)
    if not count:
        raise LookupError(f"nothing to break in {claim.code}::{claim.name or claim.requirement}")
    after = next(
        (i for i, node in enumerate(tree.body) if not _is_docstring(node) and not _is_future(node)),
        len(tree.body),
    )
    tree.body.insert(after, ast.parse(f"from {_BROKEN} import broken as _broken").body[0])
    return ast.unparse(ast.fix_missing_locations(tree))


def _is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _is_future(node: ast.stmt) -> bool:
    return isinstance(node, ast.ImportFrom) and node.module == "__future__"


def _wrapped(value: ast.expr) -> ast.expr:
    return ast.Call(ast.Name("_broken", ast.Load()), [value], [])


def _break_check(tree: ast.Module, requirement: str) -> int:
    """Break the value of the requirement's key in each dictionary of the module."""
    count = 0
    for node in ast.walk(tree):
        if isinstance(node, ast.Dict):
            for i, key in enumerate(node.keys):
                if isinstance(key, ast.Constant) and key.value == requirement:
                    node.values[i], count = _wrapped(node.values[i]), count + 1
                elif key is None and isinstance(comp := node.values[i], ast.DictComp):
                    count += _break_numbered(comp, requirement)
    return count


def _break_numbered(comp: ast.DictComp, requirement: str) -> int:
    """Break the check of `{f"2-{n}": CHECK for n in range(...)}` if the requirement is one of them."""
    match comp:
        case ast.DictComp(
            key=ast.JoinedStr(values=[ast.Constant(value=prefix), _]),
            generators=[
                ast.comprehension(iter=ast.Call(args=[ast.Constant(value=low), ast.Constant(value=high)]))
            ],
        ):
            number = requirement.removeprefix(prefix)
            if number.isdigit() and low <= int(number) < high:
                comp.value = _wrapped(comp.value)
                return 1
    return 0


def _break_node(node: ast.AST) -> int:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return _break_function(node)
    if isinstance(node, ast.ClassDef):
        methods = [one for one in node.body if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)]
        count = sum(_break_function(one) for one in methods if one.name not in _KEPT)
        return count or _break_defaults(node)
    return 0


def _break_function(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    count = 0
    for node in _own_nodes(function):
        if isinstance(node, ast.Return | ast.Yield | ast.YieldFrom) and node.value is not None:
            node.value, count = _wrapped(node.value), count + 1
    if not count and not _is_abstract(function):
        function.body, count = [ast.Pass()], 1
    return count


def _is_abstract(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    rest = [node for node in function.body if not _is_docstring(node)]
    return not rest or isinstance(rest[0], ast.Raise)


def _own_nodes(function: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a function without those of functions inside it."""
    for node in ast.iter_child_nodes(function):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef):
            yield node
            yield from _own_nodes(node)


def _break_defaults(node: ast.ClassDef) -> int:
    count = 0
    for field in node.body:
        if isinstance(field, ast.AnnAssign | ast.Assign) and field.value is not None:
            field.value, count = _wrapped(field.value), count + 1
    return count


# ---------------------------------------------------------------- running


def copy_tree(target: Path) -> None:
    """Copy the files that git knows or does not ignore, and the compiled code, which some tests need."""
    names = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    compiled = [str(path.relative_to(ROOT)) for path in (ROOT / "llmtap" / "native").glob("*.so")]
    for name in [*filter(None, names.split("\0")), *compiled]:
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)


def run_test(tree: Path, claim: Claim) -> int | None:
    """Run the cited test in a tree. Return pytest's exit code; None after TIMEOUT_S."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "0", "-p", "no:cacheprovider", claim.test]
    if claim.test_name is not None:
        command += ["-k", claim.test_name]
    env = {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1", "LLMTAP_NATIVE": "0"}
    log = (tree / "pytest.log").open("wb")
    with (
        log,
        subprocess.Popen(
            command, cwd=tree, env=env, stdout=log, stderr=log, start_new_session=True
        ) as process,
    ):
        try:
            return process.wait(TIMEOUT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return None


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=60, help="number of rows to draw (default: 60)")
    parser.add_argument("--seed", type=int, default=40, help="seed of the draw (default: 40)")
    parser.add_argument(
        "--part", default="0:", metavar="FROM:TO", help="part of the drawn rows (default: all)"
    )
    options = parser.parse_args()
    rows = claims(PAGE.read_text(encoding="utf-8"))
    begin, _, end = options.part.partition(":")
    drawn = Random(options.seed).sample(rows, min(options.rows, len(rows)))[
        int(begin or 0) : int(end) if end else None
    ]
    proved, passes = 0, {}
    with tempfile.TemporaryDirectory(prefix="claims-") as folder:
        tree = Path(folder)
        copy_tree(tree)
        for claim in drawn:
            test = (claim.test, claim.test_name)
            if test not in passes:
                passes[test] = run_test(tree, claim)
            path = tree / claim.code
            source = path.read_text(encoding="utf-8")
            try:
                path.write_text(broken_source(source, claim), encoding="utf-8")
                code = run_test(tree, claim)
            except LookupError as exc:
                code = 0
                print(exc, flush=True)
            finally:
                path.write_text(source, encoding="utf-8")
            is_proved = passes[test] == 0 and code in (1, 2, None)
            proved += is_proved
            state = "proved" if is_proved else f"NOT PROVED (as it is: {passes[test]}, broken: {code})"
            places = (f"{path}::{name or '*'}" for path, name in ((claim.code, claim.name), test))
            print(f"{state}: {claim.row}: {': '.join(places)}", flush=True)
    print(f"{proved} of {len(drawn)} rows proved (of {len(rows)}; seed {options.seed})")
    sys.exit(proved < len(drawn))


if __name__ == "__main__":
    main()
