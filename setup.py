"""Build the optional extension `llmtap.native._native`; everything else stands in pyproject.toml.

Without a C compiler the installation goes on, and llmtap runs its Python implementation.
LLMTAP_BUILD=python: do not build it. LLMTAP_BUILD=native: fail where it cannot be built. Default: try.
"""

import os
import sys
from typing import Any

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

WANTED = os.environ.get("LLMTAP_BUILD", "try")
FOLDER = "llmtap/native"


class OptionalBuild(build_ext):
    """Builds the extension, or says in one line why llmtap runs without it."""

    def run(self) -> None:
        try:
            super().run()
        except Exception as error:
            self._give_up(error)

    def build_extension(self, ext: Extension) -> None:
        try:
            super().build_extension(ext)
        except Exception as error:
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        if WANTED == "native":
            raise error
        print(
            f"llmtap: the compiled per-chunk path was not built, Python runs instead: {error}",
            file=sys.stderr,
        )

    def copy_extensions_to_source(self) -> None:
        if all(
            os.path.exists(self.get_ext_fullpath(ext.name)) or self._was_built(ext) for ext in self.extensions
        ):
            super().copy_extensions_to_source()

    def _was_built(self, ext: Extension) -> bool:
        return os.path.exists(os.path.join(self.build_lib, self.get_ext_filename(ext.name)))


def extensions() -> list[Any]:
    """The extension, translated by Cython into the build folder."""
    if WANTED == "python":
        return []
    from Cython.Build import cythonize

    extension = Extension(
        "llmtap.native._native",
        [f"{FOLDER}/_native.pyx", f"{FOLDER}/framing.c", f"{FOLDER}/matcher.c", f"{FOLDER}/heads.c"],
        depends=[
            f"{FOLDER}/{name}"
            for name in ("relay.pxi", "meter.pxi", "heads.pxi", "heads.h", "framing.h", "matcher.h")
        ],
        include_dirs=[FOLDER],
        extra_compile_args=["-O2", "-fno-strict-aliasing"],
    )
    return cythonize([extension], build_dir="build/cython", language_level=3)


setup(ext_modules=extensions(), cmdclass={"build_ext": OptionalBuild})
