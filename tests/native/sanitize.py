"""Runs the compiled code under the sanitizers for addresses, undefined behaviour, threads: `make sanitize`.

    .venv/bin/python tests/native/sanitize.py                   # 1,000,000 inputs for each C file, then tests
    .venv/bin/python tests/native/sanitize.py --inputs N --seed N
    .venv/bin/python tests/native/sanitize.py tests/vantage/relay       # these tests instead of tests/native

1. A planted fault, which must be found.
2. `harness/*_fuzz.c`, each with its C file of llmtap/native, on seeded random and mutated inputs.
3. `harness/*_threads.c`, each with its C files, under ThreadSanitizer and under AddressSanitizer.
4. The extension built with both sanitizers, in a copy of the repository in .e2e/sanitize, and the tests of
   tests/native with it. The interpreter is not built so: leaks are not looked for. PYTHONMALLOC=malloc gives
   every object a block of its own, so that an access out of its bounds is noticed.

Needs gcc with libasan, libubsan and libtsan. Exits 1 at the first finding. Standard library only.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]
HARNESS = HERE / "harness"
SOURCES = REPOSITORY / "llmtap" / "native"
HOME = REPOSITORY / ".e2e" / "sanitize"
FLAGS = ["-g", "-O1", "-fno-omit-frame-pointer", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
THREAD_FLAGS = ["-g", "-O1", "-fno-omit-frame-pointer", "-fsanitize=thread"]
INPUTS = 1_000_000
STEPS = 100_000
THREADED = {"forwarder": ("forwarder", "framing", "reading")}
"""C files of `harness/NAME_threads.c`."""
COPIED = ("llmtap", "tests", "setup.py", "pyproject.toml", "README.md", "LICENSE")


def run(argv: list[str], **about: str) -> None:
    """Run a program; end with its status if it fails."""
    print("+", " ".join(argv), flush=True)
    done = subprocess.run(argv, cwd=HOME, env={**os.environ, **about}, check=False)
    if done.returncode:
        sys.exit(f"sanitize: {argv[0]} ended with {done.returncode}")


def compiled(target: Path, *more: Path) -> str:
    """Return the program made of a harness, the driver and more C files."""
    program = HOME / target.stem
    sources = [str(path) for path in (HARNESS / "driver.c", target, *more)]
    run(["gcc", *FLAGS, "-Wall", "-Wextra", "-Werror", f"-I{SOURCES}", "-o", str(program), *sources])
    return str(program)


def check_sanitizers() -> None:
    """A fault of one byte is found."""
    done = subprocess.run(
        [compiled(HARNESS / "planted.c"), "10", "1"], capture_output=True, text=True, check=False
    )
    if not done.returncode or "heap-buffer-overflow" not in done.stderr:
        sys.exit(f"sanitize: the planted fault was not found:\n{done.stdout}{done.stderr}")


def fuzz_c(inputs: int, seed: int) -> None:
    """Run each harness with its C file: `harness/NAME_fuzz.c`, samples in `harness/NAME/`."""
    for target in sorted(HARNESS.glob("*_fuzz.c")):
        name = target.stem.removesuffix("_fuzz")
        samples = sorted(str(path) for path in (HARNESS / name).iterdir())
        run([compiled(target, SOURCES / f"{name}.c"), str(inputs), str(seed), *samples])


def run_threads(steps: int, seed: int) -> None:
    """Run each harness of threads with its C files."""
    for name, sources in THREADED.items():
        files = [HARNESS / f"{name}_threads.c", *(SOURCES / f"{source}.c" for source in sources)]
        for kind, flags in (("thread", THREAD_FLAGS), ("address", FLAGS)):
            program = HOME / f"{name}_{kind}"
            run(
                [
                    "gcc",
                    *flags,
                    "-Wall",
                    "-Wextra",
                    "-Werror",
                    f"-I{SOURCES}",
                    "-pthread",
                    "-o",
                    str(program),
                    *map(str, files),
                ]
            )
            # ThreadSanitizer needs the usual places of memory, which newer kernels randomise too far.
            run(["setarch", "--addr-no-randomize", str(program), str(steps), str(seed)])


def built_tree() -> Path:
    """Return a copy of the repository whose extension is built with the sanitizers."""
    tree = HOME / "tree"
    shutil.rmtree(tree, ignore_errors=True)
    tree.mkdir()
    ignored = shutil.ignore_patterns("*.so", "__pycache__")
    for name in COPIED:
        source = REPOSITORY / name
        if source.is_dir():
            shutil.copytree(source, tree / name, ignore=ignored)
        else:
            shutil.copy2(source, tree)
    wheels = HOME / "wheel"
    shutil.rmtree(wheels, ignore_errors=True)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    flags = " ".join(FLAGS)
    run(
        [*pip, "wheel", "--no-deps", "--wheel-dir", str(wheels), str(tree)],
        CFLAGS=flags,
        LDFLAGS=flags,
        LLMTAP_BUILD="native",
    )
    (wheel,) = wheels.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if name.endswith(".so"):
                archive.extract(name, tree)
    return tree


def library(name: str) -> str:
    found = subprocess.run(
        ["gcc", f"-print-file-name={name}"], capture_output=True, text=True, check=True
    ).stdout
    return found.strip()


def run_tests(tree: Path, tests: list[str]) -> None:
    """Run the tests with the sanitized extension, in one process."""
    about = {
        "LD_PRELOAD": f"{library('libasan.so')} {library('libubsan.so')}",
        "PYTHONMALLOC": "malloc",
        "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=0:quarantine_size_mb=8",  # tests look at memory
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "PYTHONPATH": str(tree),
    }
    check = "from llmtap import native; assert native.NAME == 'native', native.REASON; print(native.__file__)"
    run([sys.executable, "-c", check], **about)
    paths = [str(tree / path) for path in tests]
    options = [
        "-n",
        "0",
        "-p",
        "no:cacheprovider",
        "-s",  # pytest would keep a sanitizer's report to itself
        "--rootdir",
        str(tree),
        "-c",
        str(tree / "pyproject.toml"),
    ]
    run([sys.executable, "-m", "pytest", *options, *paths], **about)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--inputs", type=int, default=INPUTS, help="inputs for each C file")
    parser.add_argument("--steps", type=int, default=STEPS, help="steps for each harness of threads")
    parser.add_argument("--seed", type=int, default=1, help="random seed")
    parser.add_argument("tests", nargs="*", default=["tests/native"], help="tests for the extension")
    options = parser.parse_args()
    HOME.mkdir(parents=True, exist_ok=True)
    check_sanitizers()
    fuzz_c(options.inputs, options.seed)
    run_threads(options.steps, options.seed)
    run_tests(built_tree(), options.tests)
    print("sanitize: ok")


if __name__ == "__main__":
    main()
