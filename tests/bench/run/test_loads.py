"""What was sent is kept byte for byte, up to a bound; its digest always."""

import gzip
import json
from array import array
from hashlib import sha256
from pathlib import Path
from typing import Any

from llmtap.bench.run.session import REQUESTS_FILE, write_requests
from llmtap.load.bodies import BodyMaker, BodyOptions, prepare
from llmtap.workload.registry import workload_named
from llmtap.workload.requests import Requests


def kept(folder: Path, requests: Requests, **more: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What is told, and the lines of the file, if there is one."""
    prompts = workload_named("synthetic-uniform", "TRACE").prompts(requests, 7)
    maker = BodyMaker(BodyOptions(endpoint="completions", model="m"))
    with prepare(requests, prompts, maker) as prepared:
        told = write_requests(prepared, requests, folder, **({"planned": True} | more))
    file = folder / REQUESTS_FILE
    lines = gzip.decompress(file.read_bytes()).splitlines() if file.exists() else []
    return told, [json.loads(line) for line in lines]


def three() -> Requests:
    requests = workload_named("synthetic-uniform", "TRACE").requests(3, 7)
    requests.arrival_ns = array("q", [0, 500_000_000, 1_250_000_000])
    return requests


def test_each_line_has_a_request_as_it_was_sent(tmp_path: Path) -> None:
    requests = three()
    told, lines = kept(tmp_path, requests)
    assert [line["arrival"] for line in lines] == [0.0, 0.5, 1.25]
    assert [line["after"] for line in lines] == [None] * 3
    assert [len(line["body"]["prompt"]) for line in lines] == list(requests.input)
    assert [line["body"]["max_tokens"] for line in lines] == list(requests.output)
    assert told["rows"] == 3
    raw = [
        line.partition(b'"body":')[2][:-1]
        for line in gzip.decompress((tmp_path / REQUESTS_FILE).read_bytes()).splitlines()
    ]
    assert told["bytes"] == sum(map(len, raw))
    assert told["sha256"] == sha256(b"".join(raw)).hexdigest()


def test_too_many_bytes_leave_their_digest(tmp_path: Path) -> None:
    whole, _ = kept(tmp_path, three())
    (tmp_path / REQUESTS_FILE).unlink()
    told, lines = kept(tmp_path, three(), bytes_max=whole["bytes"] - 1)
    assert lines == []
    assert told == whole | {"file": None}


def test_who_waits_for_whom_and_what_nobody_planned(tmp_path: Path) -> None:
    requests = three()
    requests.after, requests.think_ns = array("q", [-1, 0, 1]), array("q", [0, 0, 0])
    _, lines = kept(tmp_path, requests, planned=False)
    assert [line["after"] for line in lines] == [None, 0, 1]
    assert [line["arrival"] for line in lines] == [None] * 3
