"""Metrics of foreign servers: the parser agrees with prometheus_client, and a hostile page costs little."""

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

import llmtap.net.server_metrics as module
from llmtap.net.server_metrics import LINE_BYTES_MAX, LINES_MAX, read_metrics, read_metrics_in_thread

NAME = "vllm:num_requests_running"
SPACE = st.sampled_from(["", " ", "\t", "  "])
LABEL = st.from_regex(r"[a-zA-Z_][a-zA-Z0-9_]{0,5}", fullmatch=True).filter(lambda name: name[:2] != "__")
TEXT = st.text(st.sampled_from('ab,}{=" \\\n#é'), max_size=6)


def escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


@given(
    st.dictionaries(LABEL, TEXT, max_size=4), st.integers(0, 10**9) | st.floats(0, 1e9), SPACE, st.booleans()
)
def test_a_line_means_what_prometheus_client_reads(
    labels: dict[str, str], value: float, space: str, comma: bool
) -> None:
    pairs = f"{space},{space}".join(
        f'{name}{space}={space}"{escaped(text)}"' for name, text in labels.items()
    )
    braces = f"{space}{{{space}{pairs}{',' if comma and pairs else ''}{space}}}" if labels else ""
    line = f"{NAME}{braces} {value}\n"
    (family,) = text_string_to_metric_families(line)
    assert read_metrics(line.encode()) == {"running": family.samples[0].value}


def test_labels_tell_engines_apart() -> None:
    page = (
        f'{NAME}{{engine="0",tp_rank="0"}} 3\n{NAME}{{engine="0",tp_rank="1"}} 3\n{NAME}{{engine="}}1"}} 4\n'
    )
    assert read_metrics(page.encode()) == {"running": 7}


@pytest.mark.parametrize(
    ("page", "reason"),
    [
        (NAME.encode() + b"{" + b",".join(b'l%d="x"' % i for i in range(128_000)) + b"} 1\n", "longer than"),
        (NAME.encode() + b'{a="' + b"x" * LINE_BYTES_MAX + b'"} 1\n', f"line 1: {NAME}: longer than"),
        (b"\n" * (LINES_MAX + 1), "lines"),
        (b"a 1\n" * (LINES_MAX + 1), "lines"),
        (NAME.encode() + b'{a="1",a="2"} 1\n', "twice"),
        (NAME.encode() + b'{a="1" b="2"} 1\n', "malformed"),
        (NAME.encode() + b'{a="1"} 1 2 3\n', "value"),
        (NAME.encode() + b"{} 1_000\n", f"line 1: {NAME}: the value is"),
    ],
)
def test_a_page_beyond_the_limits_is_refused(page: bytes, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        read_metrics(page)


async def test_a_page_is_parsed_outside_the_loop() -> None:
    threads: list[threading.Thread] = []

    def record(body: bytes) -> dict[str, float]:
        threads.append(threading.current_thread())
        return {}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "read_metrics", record)
        await read_metrics_in_thread(b"")
    assert threads and threads[0] is not threading.main_thread()
