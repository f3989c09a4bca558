"""The page says what the result says, the verdict first; what is missing is left out, and names are text."""

import html
import re
from importlib.resources import files
from typing import Any

import plotly.graph_objects as plotly
import pytest
from plotly.offline import get_plotlyjs

from llmtap.load.replay.result import timeline_of
from llmtap.report.replay_page import replay_html
from llmtap.report.replay_terms import RATES
from llmtap.report.terminal import milliseconds
from llmtap.units import NS_PER_S
from tests.support.pages import Page, contrast
from tests.support.replay_results import BEGAN_NS, replay_result

GOOD = replay_result()
CHARTS = {
    "first-token", "between-tokens", "end-to-end", "user-idle", "lateness", "load", "over-time-host",
    "over-time-server", "over-time-gpu",
}  # fmt: skip


def page(result: dict[str, Any]) -> Page:
    return Page(replay_html(result))


def plots(made: Page) -> dict[str, Any]:
    found: dict[str, Any] = made.figures["plots"]
    return found


def with_ends(result: dict[str, Any]) -> dict[str, Any]:
    """Each request took a tenth of a second."""
    sent = [BEGAN_NS + i * NS_PER_S // 20 for i in range(result["n"])]
    timeline = timeline_of(
        sent, [t + NS_PER_S // 10 for t in sent], began_ns=BEGAN_NS, until_ns=sent[-1] + NS_PER_S
    )
    return result | {"timeline": timeline | {"asked": result["timeline"]["asked"]}}


def test_every_chart_is_there_with_a_table_and_a_caption() -> None:
    made = page(GOOD)
    assert {plot.rsplit("-", 1)[0] for plot in plots(made)} == CHARTS
    assert made.captions.keys() == CHARTS
    assert made.tables.keys() == CHARTS | {"settings", "figures-table", "outcomes"}
    for plot in plots(made).values():
        plotly.Figure(data=plot["data"], layout=plot["layout"])


def test_the_verdict_comes_before_any_figure() -> None:
    for result, said in ((GOOD, "Valid."), (replay_result(failed=3), "Not valid.")):
        words = page(result).words
        assert words.index(said) < words.index("What was run") < words.index("Latencies, ms")
        assert words.index(said) < words.index("Requests sent")


def test_findings_are_told_with_their_limits_and_in_red() -> None:
    result = replay_result(failed=3) | {
        "verdict": {"valid": False, "findings": [
            {"what": "dispatch_lateness", "figure": 0.01, "limit": 0.002, "says": "all was late"},
            {"what": "rate", "figure": 0.9, "limit": 0.995, "says": "too few left"},
            {"what": "lost", "figure": 1, "limit": 0, "says": "one died"},
        ]}
    }  # fmt: skip
    made = page(result)
    for said in ("all was late (limit 2.00 ms)", "too few left (limit 99.5 %)", "one died (limit 0)"):
        assert said in made.words
    assert [given for _, given in made.elements if given.get("class") == "verdict bad"]
    style = files("llmtap.report").joinpath("replay_page.css").read_text()
    assert re.search(r"\.verdict\.bad.*color: var\(--bad\)", style)
    assert not [given for _, given in page(GOOD).elements if given.get("class") == "verdict bad"]
    own = page(replay_result(failed=3))
    assert "3 of 120 requests did not end well (truncated 3)" in own.words
    assert "Nobody has judged" in page({k: v for k, v in GOOD.items() if k != "verdict"}).words


def test_the_table_has_the_figures_with_marks_for_too_few() -> None:
    made = page(GOOD)
    head, *rows = made.tables["figures-table"]
    assert head == ["", "n", "mean", "p50", "p90", "p95", "p99", "p99.9", "max"]
    by_name = {row[0]: row[1:] for row in rows}
    ttft = GOOD["metrics"]["ttft"]
    cells = [milliseconds(ttft[name]) for name in ("mean", "p50", "p90", "p95", "p99", "p999", "max")]
    cells[4] += "*"
    cells[5] += "*"
    assert by_name["TTFT"] == ["120", *cells]
    option = GOOD["metrics"]["itl"]["option"]
    assert {"TTFT, from schedule", "E2E, from schedule", "dispatch lateness", f"ITL (option {option})"} <= (
        by_name.keys()
    )
    assert by_name["dispatch lateness"][-1] == "0"
    assert [cell.endswith("*") for cell in by_name["smooth benefit, tokens"][-3:]] == [True, True, False]
    assert "IETF 5.1.4.3" in made.words
    many = page(replay_result(2_000))
    ttft_row = next(row for row in many.tables["figures-table"] if row[0] == "TTFT")
    assert [cell.endswith("*") for cell in ttft_row[-3:]] == [False, True, False]


def test_ttft_from_submit_and_from_schedule_are_in_one_plot() -> None:
    result = replay_result(late_ms=40)
    drawn = plots(page(result))["first-token-0"]["data"]
    by_name: dict[str, list[tuple[float, float]]] = {}
    for one in drawn:
        by_name.setdefault(one["name"], []).extend(zip(one["x"], one["y"], strict=True))
    quantiles = result["quantiles"]
    for name, place in (("TTFT from submit", "submit"), ("TTFT from schedule", "schedule")):
        expected = list(zip((v * 1e3 for v in quantiles[place]["ttft"]), quantiles["shares"], strict=True))
        # Where the dotted part begins a point is in both.
        assert list(dict.fromkeys(by_name[name])) == list(dict.fromkeys(expected))
    assert {one["meta"]["line"] for one in drawn} == {0, 1}


def test_over_time_what_was_asked_sent_ended_and_in_flight() -> None:
    result = with_ends(replay_result())
    made = page(result)
    lines = {one["name"]: one for one in plots(made)["load-0"]["data"]}
    assert lines.keys() == {"asked", "sent", "ended"}
    assert lines["sent"]["y"][:-1] == result["timeline"]["sent"]
    assert lines["asked"]["meta"]["line"] is None
    flying = {one["name"]: one["y"] for one in plots(made)["load-1"]["data"]}
    assert flying["in flight"][:-1] == result["timeline"]["in_flight"]
    assert flying["running, says the server"] == [5, 6, 7, 8, 9, 10, 11]
    head, *rows = made.tables["load"]
    assert head == ["1 s from, s", "asked", "sent", "ended", "in flight"]
    columns = [result["timeline"][name] for name in ("t", "asked", "sent", "ended", "in_flight")]
    assert rows == [[f"{v:g}" for v in row] for row in zip(*columns, strict=True)]


def test_without_ends_nothing_is_said_to_be_in_flight() -> None:
    timeline = GOOD["timeline"] | {"ended": None, "in_flight": None}
    made = page(GOOD | {"timeline": timeline})
    assert [one["name"] for one in plots(made)["load-0"]["data"]] == ["sent", "asked"]
    names = [one["name"] for one in plots(made)["load-1"]["data"]]
    assert names == ["running, says the server", "waiting, says the server"]


def test_charts_over_time_have_one_axis() -> None:
    seconds = GOOD["window"]["seconds"]
    made = plots(page(GOOD))
    timed = {name for name, plot in made.items() if plot["layout"].get("meta")}
    assert {name.rsplit("-", 1)[0] for name in timed} == {
        "load", "over-time-host", "over-time-server", "over-time-gpu",
    }  # fmt: skip
    assert {tuple(made[name]["layout"]["xaxis"]["range"]) for name in timed} == {(0, seconds)}


def test_all_that_design_demands_of_a_figure_stands_under_it() -> None:
    made = page(GOOD)
    seconds = f"{GOOD['window']['seconds']:.4g} s"
    for key, caption in made.captions.items():
        for said in ("open loop, 20", "req/s asked", f"window {seconds}", "uncertainty 0.0500 ms",
                     "arrivals recorded, 20 req/s", "sent to http://host:8000"):  # fmt: skip
            assert said in caption, (key, said)
    assert "n 120" in made.captions["first-token"]
    assert f"ITL option {GOOD['metrics']['itl']['option']}" in made.captions["between-tokens"]
    assert "counted by usage (120)" in made.captions["between-tokens"]
    assert "1 process" in made.captions["lateness"]


def test_the_whole_plan_is_there() -> None:
    rows = dict(row for row in page(GOOD).tables["settings"] if len(row) == 2)
    assert rows["plan.arrivals.scale"] == "2"
    assert rows["plan.body.model"] == "tiny"
    assert rows["plan.body.stream"] == "yes"
    assert rows["plan.conversations"] == "-"
    assert rows["plan.notes"] == "a note"
    assert rows["warm-up"] == "none (cold start)"
    assert "Note: a note" in page(GOOD).words


def test_outcomes_are_counted_with_their_shares() -> None:
    rows = page(replay_result(failed=30)).tables["outcomes"]
    assert ["complete", "90", "90 of 120"] in rows
    assert ["truncated", "30", "30 of 120"] in rows
    rows = page(replay_result(2_000, failed=30)).tables["outcomes"]
    assert ["truncated", "30", "1.5 %"] in rows


@pytest.mark.parametrize("part", [
    "plan", "load", "metrics", "corrected", "quantiles", "timeline", "system", "sender", "tokens", "goodput",
    "smooth_goodput", "dispatch_lateness", "outcomes", "warmup", "window", "uncertainty", "verdict",
])  # fmt: skip
def test_a_part_that_is_missing_or_null_is_left_out(part: str) -> None:
    for result in ({k: v for k, v in GOOD.items() if k != part}, GOOD | {part: None}):
        made = page(result)
        assert made.headings[0].startswith("Replay of ")
        if part == "quantiles":
            assert {plot.rsplit("-", 1)[0] for plot in plots(made)} == {
                key for key in CHARTS if key.startswith(("load", "over-time"))
            }
        if part == "system":
            assert not [plot for plot in plots(made) if plot.startswith("over-time")]


def test_the_least_is_a_page_too() -> None:
    made = page({"n": 0, "verdict": {"valid": True, "findings": []}})
    assert not plots(made)
    assert made.headings[0] == "Replay of ? to ?"


def test_a_closed_loop_asks_for_no_rate() -> None:
    made = page(replay_result(closed=True))
    assert "arrivals whenever an answer has ended" in made.captions["first-token"]
    assert "closed loop" in made.captions["first-token"]
    assert {one["name"] for one in plots(made)["first-token-0"]["data"]} == {"TTFT from submit"}
    assert "lateness-0" not in plots(made)


EVIL = "<img src=x onerror=alert(1)>\"'&</script><script>alert(2)</script>"


def test_names_of_others_are_text_everywhere() -> None:
    plain = with_ends(replay_result(failed=1))

    def spoilt(value: Any) -> Any:
        """Every text and name that somebody else can choose."""
        if isinstance(value, dict):
            return {k: spoilt(v) for k, v in value.items()}
        if isinstance(value, list):
            return [spoilt(v) for v in value]
        return EVIL if isinstance(value, str) else value

    evil = plain | {
        "plan": spoilt(plain["plan"]) | {EVIL: EVIL},
        "outcomes": {EVIL: 119, "complete": 1},
        "refusals": {"n": 1, "kinds": {EVIL: 1}},
        "tokens": plain["tokens"] | {"source": {EVIL: 3}},
        "warmup": {"requests": 3, "problem": EVIL},
        "verdict": {"valid": False, "findings": [{"what": EVIL, "limit": 1, "says": EVIL}]},
        "window": plain["window"] | {"start": EVIL, "end": EVIL},
    }  # fmt: skip
    evil["metrics"] = plain["metrics"] | {
        "itl": plain["metrics"]["itl"] | {"option": EVIL, "policy": {EVIL: 1}}
    }
    series = evil["system"]["series"]
    series["server"]["series"][EVIL] = {"unit": EVIL, "kind": "gauge", "values": [1.0] * 9}
    made = page(evil)
    assert EVIL in made.headings[0]
    tags = {tag for tag, _ in made.elements}
    assert "img" not in tags
    assert sum(tag == "script" for tag, _ in made.elements) == 3
    assert not [given for _, given in made.elements if any(name.startswith("on") for name in given)]
    names = {data["name"] for plot in plots(made).values() for data in plot["data"]}
    assert html.escape(EVIL) in names
    # Plotly reads tags in names and texts: it is given none.
    for plot in plots(made).values():
        for data in plot["data"]:
            told = data["hovertemplate"].replace("<br>", "").replace("<extra></extra>", "")
            assert "<" not in data["name"] + told


def test_nothing_is_loaded_from_elsewhere() -> None:
    library = get_plotlyjs()
    made = page(GOOD)
    assert made.scripts[0].strip() == library.strip()
    own = made.text.replace(library, "").replace("http://host:8000", "")
    assert not re.search(r"https?:|//\S+\.\w", own)
    for tag, given in made.elements:
        assert not given.keys() & {"src", "srcset", "data", "action", "poster", "background"}, tag
        assert tag not in ("link", "iframe", "object", "embed", "base", "form", "img"), tag
        assert (given.get("href") or "#").startswith("#")
    assert not re.search(r"@import|url\(|fetch\(|XMLHttpRequest|import\(", own)
    (policy,) = [given["content"] or "" for _, given in made.elements if given.get("http-equiv")]
    assert policy.startswith("default-src 'none'")


def test_the_page_can_be_found_through_without_seeing_it() -> None:
    made = page(GOOD)
    ids = [given["id"] for _, given in made.elements if given.get("id")]
    assert len(ids) == len(set(ids))
    links = {(given["href"] or "").removeprefix("#") for tag, given in made.elements if tag == "a"}
    assert links == CHARTS | {"settings", "figures-table", "outcomes"}
    drawn = [given for _, given in made.elements if given.get("class") == "plot"]
    assert {given["id"] for given in drawn} == plots(made).keys()
    assert all(given["role"] == "img" and given["aria-label"] for given in drawn)


def test_the_verdict_can_be_read_in_light_in_dark_and_on_paper() -> None:
    room = files("llmtap.report")

    def blocks(name: str) -> list[dict[str, str]]:
        found = re.findall(r":root {(.*?)}", room.joinpath(name).read_text(), re.S)
        return [dict(re.findall(r"--(\w+): (#\w{6});", block)) for block in found]

    own, common = blocks("replay_page.css"), blocks("curves.css")
    assert len(own) == len(common) == 3
    for mine, ground in zip(own, common, strict=True):
        for name in ("bad", "good"):
            assert contrast(mine[name], ground["ground"]) >= 4.5, name


def test_a_remark_stands_beside_valid_figures() -> None:
    remark = {"what": "prompt_tokens", "figure": 0.05, "limit": 0.01, "says": "apart", "invalidates": False}
    made = page(GOOD | {"verdict": {"valid": True, "findings": [remark]}})
    assert "Valid. But mind:apart (limit 1 %)" in made.words
    assert not [given for _, given in made.elements if given.get("class") == "verdict bad"]


def test_the_words_of_rates_are_explained_where_the_plan_is_told() -> None:
    assert RATES in page(GOOD).words


def test_tiles_count_where_there_is_little_to_take_a_share_of() -> None:
    words = page(replay_result(60, late_ms=500)).words
    assert "planned, 50 of 60 in time" in words
    assert "120 of 120 met ttft:200ms tpot:50ms" in page(GOOD).words
    older = {name: value for name, value in GOOD["load"].items() if name not in ("due", "in_time")}
    assert "120 in time" not in page(GOOD | {"load": older}).words
