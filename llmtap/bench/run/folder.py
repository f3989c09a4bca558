"""The results folder of a benchmark (`Folder`): its files, and the steps from which a run is resumed.

    RESULTS/
      bench.json            SUT, target, parameters, seeds, versions (no keys)
      server.log            output of the server, if llmtap started it
      TEST/asked.json       parameters of the test's runs, to recognise other ones
      TEST/result.json      report of the test
      TEST/steps/NAME/      one load: step.json, requests.jsonl.gz (bodies), requests.parquet, capture/
      TEST/run-2/           the second run of a test (`--runs`)

A load is written to a folder beside its place and renamed when it is complete. `perform.py`, `session.py` and
the reports use this class to read and write; `cli/bench.py` adds `report.md` and `minimum.txt`.
"""

import os
import shutil
from pathlib import Path
from typing import Any, Final

import msgspec

from llmtap.errors import ConfigError
from llmtap.user_files import decode_json

RESULT: Final = "result.json"
_RUN: Final = "run-"


class Folder:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.made = [one for one in (path, *path.parents) if not one.exists()]
        """Folders that this object created, the innermost first."""
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as exc:
            raise ConfigError("--results", f"cannot make {path}: {exc.strerror}") from None

    def unmake(self) -> None:
        for one in self.made:
            if one.is_dir() and not any(one.iterdir()):
                one.rmdir()

    def within(self, name: str) -> "Folder":
        return Folder(self.path / name)

    def run(self, number: int) -> "Folder":
        """Return the folder of a run of this test; the first run uses the test's own folder."""
        return self if number == 1 else self.within(f"{_RUN}{number}")

    def runs(self) -> list[int]:
        numbers = [
            1,
            *(int(at.name.removeprefix(_RUN)) for at in self.path.glob(f"{_RUN}[1-9]*") if _is_run(at)),
        ]
        return sorted(n for n in numbers if (self.path / (f"{_RUN}{n}" if n > 1 else "") / RESULT).is_file())

    def write_json(self, name: str, value: Any) -> Path:
        """Write JSON atomically."""
        place = self.path / name
        beside = place.with_name(place.name + ".new")
        beside.write_bytes(msgspec.json.format(msgspec.json.encode(value)) + b"\n")
        os.replace(beside, place)
        return place

    def read_json(self, name: str) -> Any:
        try:
            return decode_json((self.path / name).read_bytes())
        except FileNotFoundError:
            return None
        except ValueError as exc:  # msgspec's errors, and UnicodeDecodeError
            raise ConfigError(str(self.path / name), f"is no JSON: {exc}") from None

    def place(self, name: str) -> Path:
        return self.path / "steps" / name

    def step(self, name: str, fingerprint: str) -> Path | None:
        """Return the folder of a complete load with this fingerprint, or None."""
        folder = self.place(name)
        told = Folder(folder).read_json("step.json") if folder.is_dir() else None
        return folder if told is not None and told.get("fingerprint") == fingerprint else None

    def begin(self, name: str) -> Path:
        beside = self.place(f"{name}.unfinished")
        shutil.rmtree(beside, ignore_errors=True)
        beside.mkdir(parents=True)
        return beside

    def finish(self, name: str) -> Path:
        place = self.place(name)
        shutil.rmtree(place, ignore_errors=True)
        os.replace(self.place(f"{name}.unfinished"), place)
        return place


def _is_run(path: Path) -> bool:
    number = path.name.removeprefix(_RUN)
    return number.isascii() and number.isdigit() and number != "1"
