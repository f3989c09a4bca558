"""Runs the benchmark client of an inference engine without the engine: `engineless.py CLIENT ARGUMENTS`.

vLLM and SGLang ship their load generators inside the engine's package, which wants CUDA. Here only the
generators' own files are on the path (`install.py`), untouched; whatever else they import from the engine is
a placeholder that says so when it is used, but for the few things below that they do use: a tokenizer is
transformers', a command line argparse's. CLIENT is `vllm`, `sglang`, or `sglang-rust`, which is compiled and
needs none of this.
"""

from __future__ import annotations

import argparse
import gc
import importlib.abc
import importlib.machinery
import logging
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

CLIENT = Path(sys.prefix) / "client"
ENGINES = ("vllm", "sglang")


class Absent(ModuleType):
    """A module of the engine's: every name in it is a class that cannot be made."""

    __path__: list[str] = []

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)

        def refuse(_: object, *arguments: object, **named: object) -> None:
            raise RuntimeError(f"{self.__name__}.{name} is the engine's, and there is no engine here")

        made = type(name, (), {"__init__": refuse, "__module__": self.__name__})
        setattr(self, name, made)
        return made


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Comes last: finds what nobody else has found of the engine."""

    def __init__(self, given: dict[str, dict[str, object]]) -> None:
        self._given = given

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] not in ENGINES:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return Absent(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        vars(module).update(self._given.get(module.__name__, {}))


def _tokenizer(folder: str, **_: object) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def _freeze() -> None:
    gc.collect()
    gc.freeze()


class _Placeholder(Absent):
    def placeholder_attr(self, name: str) -> type:
        return getattr(self, name)


def _base_url(base_url: str | None, host: str, port: int) -> str:
    return base_url or f"http://{host}:{port}"


GIVEN: dict[str, dict[str, object]] = {
    "vllm.tokenizers": {"get_tokenizer": _tokenizer},
    "vllm.logger": {"init_logger": logging.getLogger},
    "vllm.utils.argparse_utils": {"FlexibleArgumentParser": argparse.ArgumentParser},
    "vllm.utils.gc_utils": {"freeze_gc_heap": _freeze},
    "vllm.utils.import_utils": {"PlaceholderModule": _Placeholder},
    "vllm.utils.mistral": {"is_mistral_tokenizer": lambda tokenizer: False},
    "vllm.utils.network_utils": {"join_host_port": lambda host, port: f"{host}:{port}"},
    "sglang.srt.disaggregation.utils": {"FAKE_BOOTSTRAP_HOST": ""},
    "sglang.srt.utils.network": {"resolve_base_url": _base_url},
}


def _vllm(arguments: list[str]) -> None:
    from vllm.benchmarks import serve  # type: ignore[import-not-found]

    parser = argparse.ArgumentParser()
    serve.add_cli_args(parser)
    if not any("--trust-remote-code" in action.option_strings for action in parser._actions):
        parser.add_argument("--trust-remote-code", action="store_true")
    serve.main(parser.parse_args(arguments))


def _sglang(arguments: list[str]) -> None:
    import transformers  # noqa: F401  # before there is a `datasets` that it would look into

    sys.modules["datasets"] = Absent("datasets")
    sys.argv = ["bench_serving", *arguments]
    from sglang.benchmark import serving  # type: ignore[import-not-found]

    serving.cli_main()


def _sglang_rust(arguments: list[str]) -> None:
    sys.path.insert(0, str(CLIENT / "sglang/srt/rust_extensions"))
    import _bench  # type: ignore[import-not-found]

    _bench.run_argv(["sglang-bench", *arguments])


CLIENTS: dict[str, Callable[[list[str]], None]] = {
    "vllm": _vllm,
    "sglang": _sglang,
    "sglang-rust": _sglang_rust,
}

if __name__ == "__main__":
    sys.path.insert(0, str(CLIENT))
    sys.meta_path.append(Finder(GIVEN))
    CLIENTS[sys.argv[1]](sys.argv[2:])
