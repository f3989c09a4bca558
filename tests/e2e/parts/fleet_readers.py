"""One question, when the first token came, put to everything that can read two taps' exchanges as one.

Each reader returns complaints: where its answer is not that of the pooled exchanges.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import duckdb
import pyarrow.compute as pc
import pyarrow.dataset as ds
from parts.vantages import percentile
from pyarrow import fs

import llmtap
from llmtap.net.cluster import ray_cluster
from tests.support.servers.otlp_receiver import OtlpReceiver, plain

EDGES_S = (0.02, 0.04, 0.06, 0.08, 0.1, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0)
RELATIVE = 1e-9
QUERY = """
SELECT count(*) AS n, count(DISTINCT capture) AS captures,
       quantile_disc((first_content_us - submit_us) / 1e6, 0.9) AS p90
FROM {source} WHERE stream AND first_content_us IS NOT NULL
"""


def by_llmtap(url: str, streams: int) -> tuple[list[float], list[str]]:
    """TTFTs (s) of all rows below the prefix, whoever wrote them; complaints about what is missing."""
    capture = llmtap.read(url)
    integrity = capture.integrity()
    wrong = []
    if not integrity.ok or len(integrity.captures) != 2:
        wrong.append(f"integrity: {integrity.to_dict()}")
    if not all(one.closed and not one.missing for one in integrity.captures):
        wrong.append("a capture was not closed, or has gaps")
    table = capture.table(["submit_us", "first_content_us", "output_tokens"])
    table = table.filter(pc.is_valid(table["first_content_us"]))
    ttfts_us = pc.subtract(table["first_content_us"], table["submit_us"]).to_pylist()
    if len(ttfts_us) != streams:
        wrong.append(f"the captures hold {len(ttfts_us)} streams, {streams} were asked for")
    print(f"  llmtap.read: {capture!r}")
    return [us / 1e6 for us in ttfts_us], wrong


def _store(port: int, keys: Mapping[str, str]) -> Any:
    return fs.S3FileSystem(
        access_key=keys["AWS_ACCESS_KEY_ID"],
        secret_key=keys["AWS_SECRET_ACCESS_KEY"],
        endpoint_override=f"127.0.0.1:{port}",
        scheme="http",
        region="us-east-1",
    )


def by_duckdb(port: int, bucket: str, keys: Mapping[str, str], ttfts_s: Sequence[float]) -> Iterator[str]:
    """By DuckDB's own httpfs where that is installed; else what pyarrow reads from the store is its table."""
    # Nothing is fetched: an extension that is not there stays away.
    settings = {"autoinstall_known_extensions": "false", "autoload_known_extensions": "false"}
    with duckdb.connect(config=settings) as connection:
        try:
            connection.execute("LOAD httpfs")
        except duckdb.Error:
            way = "pyarrow.dataset (httpfs is not installed)"
            dataset = ds.dataset(f"{bucket}/captures", format="parquet", filesystem=_store(port, keys))
            connection.register("exchanges", dataset)
            source = "exchanges"
        else:
            way = "httpfs"
            connection.execute(
                f"CREATE SECRET (TYPE s3, KEY_ID '{keys['AWS_ACCESS_KEY_ID']}',"
                f" SECRET '{keys['AWS_SECRET_ACCESS_KEY']}', ENDPOINT '127.0.0.1:{port}',"
                " URL_STYLE 'path', USE_SSL false, REGION 'us-east-1')"
            )
            source = f"'s3://{bucket}/captures/*.parquet'"
        found = connection.execute(QUERY.format(source=source)).fetchone()
    assert found is not None
    n, captures, p90_s = found
    truth = percentile(ttfts_s, 0.9)
    print(f"  DuckDB by {way}: {n} streams of {captures} captures, p90 {p90_s * 1e3:.0f} ms")
    if (n, captures) != (len(ttfts_s), 2) or not math.isclose(p90_s, truth, rel_tol=RELATIVE):
        yield f"DuckDB says {found}, the pooled exchanges {len(ttfts_s)}, 2 and {truth}"


def counts(values: Sequence[float], edges: Sequence[float]) -> list[int]:
    """By upper edges, the last without one."""
    out = [0] * (len(edges) + 1)
    for value in values:
        out[bisect_left(edges, value)] += 1
    return out


def by_otlp(receiver: OtlpReceiver, names: Sequence[str], ttfts_s: Sequence[float]) -> Iterator[str]:
    """Sums, over both taps, of the last cumulative histogram that each sent."""
    last: dict[str, Any] = {}
    spans: dict[str, int] = {}
    for request in receiver.metrics:
        for resource in request.resource_metrics:
            name = plain(list(resource.resource.attributes)).get("service.instance.id", "")
            for scope in resource.scope_metrics:
                for metric in scope.metrics:
                    if metric.name == "llmtap.time_to_first_token":
                        last[name] = metric.histogram.data_points
    for request in receiver.traces:
        for resource in request.resource_spans:
            name = plain(list(resource.resource.attributes)).get("service.instance.id", "")
            spans[name] = spans.get(name, 0) + sum(len(scope.spans) for scope in resource.scope_spans)
    points = [point for found in last.values() for point in found]
    n = sum(point.count for point in points)
    print(f"  one receiver: {n} streams in the histograms of {sorted(last)}, spans {spans}")
    if sorted(last) != sorted(names) or n != len(ttfts_s) or sum(spans.values()) != len(ttfts_s):
        yield f"OTLP: {n} streams, {spans} spans; the captures hold {len(ttfts_s)}"
        return
    edges = list(points[0].explicit_bounds)
    summed = [sum(column) for column in zip(*(point.bucket_counts for point in points), strict=True)]
    # The capture has whole microseconds, rounded down: a value at an edge may change sides.
    truth = counts(ttfts_s, edges)
    apart = sum(abs(a - b) for a, b in zip(summed, truth, strict=True))
    if apart > 2:
        yield f"OTLP: the summed histogram {summed} is not that of the pooled exchanges {truth}"


def by_ray(url: str, port: int, keys: Mapping[str, str], ttfts_s: Sequence[float]) -> Iterator[str]:
    """A task for each file, on a local Ray; histograms come back, and are summed."""
    paths = [file.path for file in llmtap.read(url).files]
    access = dict(keys)
    edges = EDGES_S

    def part(path: str) -> list[int]:
        import pyarrow.parquet as pq
        from pyarrow import fs

        store = fs.S3FileSystem(
            access_key=access["AWS_ACCESS_KEY_ID"],
            secret_key=access["AWS_SECRET_ACCESS_KEY"],
            endpoint_override=f"127.0.0.1:{port}",
            scheme="http",
            region="us-east-1",
        )
        table = pq.read_table(path, columns=["submit_us", "first_content_us"], filesystem=store)
        rows = zip(table["submit_us"].to_pylist(), table["first_content_us"].to_pylist(), strict=True)
        found = [0] * (len(edges) + 1)
        for submit_us, first_us in rows:
            if first_us is not None:
                found[bisect_left(edges, (first_us - submit_us) / 1e6)] += 1
        return found

    with ray_cluster("local", 2) as ray:
        task = ray.remote(part)
        parts = ray.get([task.remote(path) for path in paths])
    summed = [sum(column) for column in zip(*parts, strict=True)]
    print(f"  Ray: {len(paths)} files, {sum(summed)} streams")
    if summed != counts(ttfts_s, EDGES_S):
        yield f"Ray: {summed}; the pooled exchanges {counts(ttfts_s, EDGES_S)}"
