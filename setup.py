"""Build the optional extension `llmtap.native._native`; everything else is in pyproject.toml.

The environment variable LLMTAP_BUILD selects what happens:

- unset: build the extension if a C compiler works. Otherwise install without it, and llmtap runs Python.
- `native`: build the extension, and fail if that is not possible.
- `python`: do not build it.
"""

import os
import runpy
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

FOLDER = Path("llmtap/native")
MODES = ("", "native", "python")


class BuildAlways(build_ext):
    """Rebuild always: in a checkout or a copied tree, timestamps do not show which file is newer."""

    def finalize_options(self) -> None:
        super().finalize_options()
        self.force = True
        self.cython_c_in_temp = True  # the translated file is not a source

    def build_extension(self, ext: Extension) -> None:
        # Where this build fails, the extension of an earlier one must not be installed in its place.
        Path(self.get_ext_fullpath(ext.name)).unlink(missing_ok=True)
        super().build_extension(ext)


class NamedByContent(bdist_wheel):
    """Name a wheel without the extension `py3-none-any`: it runs on any platform."""

    def get_tag(self) -> tuple[str, str, str]:
        self.root_is_pure = not any(Path(self.bdist_dir).rglob("_native*.so"))
        return super().get_tag()


def extension(mode: str) -> Extension:
    fingerprint = runpy.run_path(str(FOLDER / "fingerprint.py"))["fingerprint"](FOLDER)
    return Extension(
        "llmtap.native._native",
        [str(FOLDER / "_native.pyx"), *map(str, sorted(FOLDER.glob("*.c")))],
        depends=[str(path) for pattern in ("*.pxi", "*.h") for path in sorted(FOLDER.glob(pattern))],
        include_dirs=[str(FOLDER)],
        define_macros=[("LLMTAP_FINGERPRINT", f'"{fingerprint}"')],
        extra_compile_args=["-O2", "-fno-strict-aliasing"],
        optional=mode != "native",
    )


wanted = os.environ.get("LLMTAP_BUILD", "")
if wanted not in MODES:
    sys.exit(f"LLMTAP_BUILD: expected native or python, or no value, got {wanted!r}")
setup(
    ext_modules=[] if wanted == "python" else [extension(wanted)],
    cmdclass={"build_ext": BuildAlways, "bdist_wheel": NamedByContent},
)
