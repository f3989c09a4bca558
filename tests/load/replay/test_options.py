"""Options are checked where they are told: each error names its option, and shows no key."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trustme

import llmtap
from llmtap.errors import ConfigError
from llmtap.load.options import BodyOptions, LoadPlan, ScheduleOptions
from llmtap.load.replay.options import http_url_of, maker_for, read_headers, refuse_unused_options
from llmtap.load.replay.plan import make_plan
from llmtap.sim.server.options import SimOptions
from llmtap.units import NS_PER_S, Duration
from tests.load.replay import support
from tests.support.servers.peer import play, wait_until
from tests.support.servers.sim_engine import engine
from tests.support.servers.sim_grpc import grpc_engine

SECOND = Duration(NS_PER_S)
NEVER_SHOWN = "sk-very-secret"


def options(**more: Any) -> LoadPlan:
    return LoadPlan.of(**{"url": "http://h:1", "timeout": SECOND, **more})


@pytest.mark.parametrize(
    ("more", "place"),
    [
        ({"timeout": Duration(0)}, "--timeout"),
        ({"connect_timeout": Duration(0)}, "--connect-timeout"),
        ({"duration": Duration(0)}, "--duration"),
        ({"drain": Duration(-1)}, "--drain"),
        ({"tenant_header": ""}, "--tenant-header"),
        ({"tenant_header": "Host"}, "--tenant-header"),
        ({"label_header": "a b"}, "--label-header"),
        ({"tenant_header": "X-Täter"}, "--tenant-header"),
        ({"headers": [("X Y", NEVER_SHOWN)]}, "--header"),
        ({"headers": [("X", f"{NEVER_SHOWN}\r\nY: 1")]}, "--header"),
        ({"scrape": "h:8000/metrics"}, "--metrics"),
        ({"scrape": "http://"}, "--metrics"),
        ({"scrape": "http://h:eighty/metrics"}, "--metrics"),
        ({"scrape": "grpc://h:1/metrics"}, "--metrics"),
    ],
)
def test_what_cannot_be_is_refused_by_its_option(more: dict[str, Any], place: str) -> None:
    with pytest.raises(ConfigError) as refused:
        options(**more)
    assert NEVER_SHOWN not in str(refused.value)
    assert refused.value.place == place


def test_a_ca_is_a_file_of_certificates(tmp_path: Path) -> None:
    nonsense, key, good = (tmp_path / name for name in ("nonsense", "key", "ca"))
    nonsense.write_text("not a certificate")
    ca = trustme.CA()
    ca.private_key_pem.write_to_path(key)
    ca.cert_pem.write_to_path(good)
    for place, said in (
        (tmp_path, "cannot be read: Is a directory"),
        (nonsense, "contains no certificate in PEM format"),
        (key, "contains no certificate in PEM format"),
    ):
        with pytest.raises(ConfigError) as refused:
            options(ca=str(place))  # also where the target is http://
        assert (refused.value.place, refused.value.problem) == ("--ca", f"{place} {said}")
    trusting = options(ca=str(good)).target.tls()
    assert trusting is not None and len(trusting.get_ca_certs()) == 1
    assert options().target.tls() is None
    anybody = options(insecure=True).target.tls()
    assert anybody is not None and not anybody.check_hostname


def test_tenants_that_would_break_out_of_their_field_are_refused() -> None:
    options().target.check_tenants(["a\r\nHost: b"])  # which nobody sends
    options(tenant_header="X-Tenant").target.check_tenants(["a", "", "ä b", "a"])
    with pytest.raises(ConfigError) as refused:
        options(tenant_header="X-Tenant").target.check_tenants(["a", "a\r\nHost: b"])
    assert refused.value.place == "--tenant-header"


@pytest.mark.parametrize("line", ["", ": ", "X Y: ", "Host: "])
def test_headers_of_the_command_line_and_of_a_file(line: str, tmp_path: Path) -> None:
    line += NEVER_SHOWN
    file = tmp_path / "fields"
    file.write_text(f"X-Good: 1\n\n{line}\n")
    for lines, path, place in (([line], None, "--header"), ([], file, "--header-file, line 3")):
        with pytest.raises(ConfigError) as refused:
            read_headers(lines, path, None)
        assert refused.value.place == place
        assert NEVER_SHOWN not in str(refused.value)


def test_the_key_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_KEY", f"{NEVER_SHOWN}\n")
    assert read_headers([], None, "SOME_KEY") == [("Authorization", f"Bearer {NEVER_SHOWN}")]
    assert read_headers(["authorization: mine"], None, "SOME_KEY") == [("authorization", "mine")]
    monkeypatch.setenv("SOME_KEY", f"{NEVER_SHOWN}\nX: y")
    with pytest.raises(ConfigError) as refused:
        read_headers([], None, "SOME_KEY")
    assert refused.value.place == "--api-key-env"
    assert NEVER_SHOWN not in str(refused.value)


MS = 1_000_000
N = 20
SIM = SimOptions(ttft=Duration(25 * MS), itl=Duration(4 * MS))


@asynccontextmanager
async def serving(spoken: str) -> AsyncIterator[tuple[str, Any]]:
    """A target's URL, and the books of its server."""
    if spoken == "grpc":
        async with grpc_engine(SIM) as g:
            yield f"grpc://{g.address}", g.server.reception.truths
    else:
        async with engine(SIM) as e:
            yield e.url.replace("http", "ws"), e.server.reception.truths


@pytest.mark.parametrize(
    ("spoken", "endpoint", "workload"),
    [("ws", "realtime", "conversation"), ("grpc", "grpc", "synthetic-uniform")],
)
def test_a_replay_of_twenty_requests(spoken: str, endpoint: str, workload: str, tmp_path: Path) -> None:
    plan = make_plan(ScheduleOptions(source=workload, requests=N, rate=60.0), chat=False)

    async def work() -> tuple[dict[str, Any], list[Any]]:
        async with serving(spoken) as (url, log):
            found = await support.replayed(plan, url, capture=tmp_path, slo="ttft:1s")
            await wait_until(lambda: len(log.page_since(0).truths) == N)
            return found, log.page_since(0).truths

    result, truths = play(work(), 200)
    assert (result["load"]["sent"], result["load"]["unsent"], result["outcomes"]) == (N, 0, {"complete": N})
    assert result["dispatch_lateness"]["n"] == N
    assert result["sender"]["clock"] == ("mono" if spoken == "grpc" else "kernel")
    assert result["plan"]["body"]["endpoint"] == endpoint
    lengths = result["lengths"]
    assert lengths["output_wanted"]
    assert (lengths["output_told"], lengths["output_exact"], lengths["input_told"]) == (N, N, N)
    if spoken == "grpc":
        assert lengths["input_exact"] == N, "its ids are what was asked"
    # By the server's own books, row for row.
    books = {truth.id: truth for truth in truths}
    rows = llmtap.read(tmp_path).table().to_pylist()
    assert len(rows) == len(books) == N
    for row in rows:
        truth = books[row["request_id"]]
        assert (row["output_tokens"], row["input_tokens"]) == (len(truth.sent_ns[0]), truth.prompt_tokens)
        assert row["scheduled_us"] is not None and row["dispatch_late_us"] >= 0
        # No TTFT is shorter than the server's, but for what the exchange says it is uncertain of, and the
        # microseconds to which a capture rounds.
        true_us = (truth.sent_ns[0][0] - truth.accepted_ns) / 1e3
        assert row["first_content_us"] - row["submit_us"] >= true_us - row["uncertainty_us"] - 2


@pytest.mark.parametrize("target", ["grpc://h:1", "ws://h:1", "wss://h:1"])
def test_what_means_nothing_there_is_refused(target: str) -> None:
    named: dict[str, dict[str, Any]] = {
        "--endpoint": {"endpoint": "responses"},
        "--body-field": {"fields": {"top_p": msgspec.Raw(b"1")}},
        "--no-stream": {"stream": False},
        "--fresh": {"fresh": True},
        "--retries": {"retries": 1},
        "--tenant-header": {"tenant_header": "X-Tenant"},
        "--label-header": {"label_header": "x-llmtap-label"},
    }
    of_grpc = {"--server": {"server": "vllm"}, "--insecure": {"insecure": True}}
    for option, given in (named | (of_grpc if target.startswith("grpc") else {})).items():
        with pytest.raises(ConfigError, match=f"^{option}: has no effect on {target.partition(':')[0]}://"):
            refuse_unused_options(LoadPlan.of(url=target, **given))
        refuse_unused_options(LoadPlan.of(url="http://h:1", **given))
    refuse_unused_options(LoadPlan.of(url=target, rate=1.0))


@pytest.mark.parametrize(
    ("target", "beside"),
    [
        ("http://h:1/v1", "http://h:1/v1"),
        ("ws://h:1/v1/realtime?model=m", "http://h:1"),
        ("wss://h", "https://h"),
        ("grpc://h:1", None),
    ],
)
def test_http_beside(target: str, beside: str | None) -> None:
    assert http_url_of(target) == beside


@pytest.mark.parametrize(
    ("target", "server", "exact"),
    [("grpc://h:1", "auto", True), ("ws://h:1", "auto", False), ("ws://h:1", "vllm", True)],
)
def test_exact_lengths_where_the_server_knows_how(target: str, server: Any, exact: bool) -> None:
    assert maker_for(target, BodyOptions(server=server), None).output_exact is exact
