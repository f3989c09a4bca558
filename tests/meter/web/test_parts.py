"""Parts of the page by themselves, imported in a real browser: lanes, the live feed."""

import pytest

from llmtap.export.sinks import CaptureState
from llmtap.meter.pipeline.capture_pause import PauseWatch
from tests.meter.web.dashboard import an_empty_tally, dashboard, reads
from tests.support.browser import CHROMIUM

S = 1_000_000_000
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium")

LANES = """import("./assets/lanes.js").then(({ Lanes }) => {
  const lanes = new Lanes();
  const stream = (id, age) => ({ id, age, ttft: null, tokens: 0, timeline: [], since_last: null });
  const of = (id) => lanes.by.get(id)?.state(lanes.until) ?? "none";
  const states = [];
  lanes.update([stream("old", 9), stream("new", 1)], 10, 10.1, %s);
  lanes.update([stream("new", 2)], 11, 11.1, %s);
  states.push(of("old"), of("new"), lanes.slots.length);
  lanes.update([stream("old", 11), stream("new", 3)], 12, 12.1, %s);
  return [...states, of("old"), of("new")];
})"""


@pytest.mark.parametrize(
    ("all_streams", "states"),
    [
        ("true", ["ended", "waiting", 2, "waiting", "waiting"]),
        ("false", ["none", "waiting", 2, "waiting", "waiting"]),
    ],
)
async def test_a_stream_that_is_reported_again_runs(all_streams: str, states: list[object]) -> None:
    async with dashboard(an_empty_tally()) as (page, url):
        await page.open(url)
        assert await page.look(LANES.replace("%s", all_streams)) == states


EMPTIED = """import("./assets/lanes.js").then(({ Lanes }) => {
  const lanes = new Lanes();
  const stream = (id) => ({ id, age: 1, ttft: null, since_last: null, tokens: 0, events: 0, timeline: [] });
  const ids = () => lanes.slots.map((lane) => lane.id);
  lanes.update(["a", "b", "c"].map(stream), 10, 10, true);
  const moved = [lanes.tidy(0)];
  lanes.update([stream("a"), stream("c")], 11, 11, true);
  moved.push(lanes.tidy(5));
  const lingers = ids();
  moved.push(lanes.tidy(12));
  return [moved, lingers, ids(), lanes.slots.map((lane) => lane.ended)];
})"""


async def test_an_ended_stream_stays_for_the_span_and_leaves_no_empty_lane() -> None:
    async with dashboard(an_empty_tally()) as (page, url):
        await page.open(url)
        assert await page.look(EMPTIED) == [[False, False, True], ["a", "b", "c"], ["a", "c"], [None, None]]


FADED = """Promise.all([
  import("./assets/lanes.js"), import("./assets/tape.js"),
]).then(([{ Lanes }, { Tape }]) => {
  const lanes = new Lanes(), canvas = document.createElement("canvas");
  canvas.style.width = "100px";
  document.getElementById("main").append(canvas);
  const tape = new Tape(canvas, lanes);
  const stream = (id) => ({ id, age: 5, ttft: 1, since_last: 0, tokens: 1, events: 1, timeline: [[1, 1]] });
  const alpha = () => lanes.slots.map((_, i) => {
    const { data } = canvas.getContext("2d").getImageData(0, i * tape.row, canvas.width, tape.row);
    return Math.max(...data.filter((_, at) => at % 4 === 3));
  });
  lanes.update([stream("a"), stream("b")], 10, 10, true);
  tape.draw(10);
  const before = alpha();
  lanes.update([stream("b")], 11, 11, true);
  tape.draw(11);
  const after = alpha();
  tape.anew();
  tape.draw(11);
  canvas.remove();
  return [before, after, alpha()];
})"""


async def test_what_is_drawn_of_an_ended_stream_fades() -> None:
    async with dashboard(an_empty_tally()) as (page, url):
        await page.open(url)
        before, after, anew = await page.look(FADED)
        assert before == [255, 255]
        for drawn in (after, anew):
            assert drawn[1] == 255
            assert 60 < drawn[0] < 160, "one or two layers at 35 %"


FEED = """import("./assets/polling.js").then(async ({ Feed }) => {
  const timer = window.setTimeout;
  window.setTimeout = (work, ms) => timer(work, ms === 15000 ? 100 : ms);
  let asked = 0;
  const errors = [];
  const api = {
    async *events(path, fields, signal) {
      errors.push(feed.error);
      yield ["summary", asked++];
      await new Promise((_, failed) => signal.addEventListener("abort", () => failed(signal.reason)));
    },
  };
  const received = [];
  const feed = new Feed(api, (n) => received.push(n));
  feed.start();
  while (received.length < 2) await new Promise((go) => timer(go, 10));
  feed.stop();
  return [received, errors];
})"""


async def test_a_feed_that_falls_silent_is_asked_anew() -> None:
    async with dashboard(an_empty_tally()) as (page, url):
        await page.open(url)
        received, errors = await page.look(FEED)
        assert received == [0, 1]
        assert errors == [None, "live: nothing within 15 s"]


class _Troubled:
    """A recorder whose disk is full."""

    def state(self) -> CaptureState:
        watch = PauseWatch(64 << 20, "/var/spool/llmtap", "/captures")
        for at_s, mib in ((0, 4), (20, 24)):
            watch.update("disk_full", at_s * S, rows=240, n_bytes=mib << 20, dropped=0)
        dropped = {"disk_full": 3, "deleted": 5}
        return CaptureState(problem="disk_full", pause=watch.pause, waiting=240, dropped=dropped)


async def test_a_capture_in_trouble_is_not_well() -> None:
    tally = an_empty_tally()
    tally.recorder = _Troubled()  # type: ignore[assignment]

    async with dashboard(tally) as (page, url):
        for view in ("tap", "overview"):
            await page.open(f"{url}#{view}")
            await reads(
                page, "The capture is paused: the disk of /var/spool/llmtap has too little free space."
            )
            await reads(page, "240 exchanges wait in memory")
            await reads(page, "lasts for about 40 s")
        await page.open(f"{url}#tap")
        await reads(page, "Exchanges are missing from the capture: disk_full 3.")
        await reads(page, "problem disk_full,")
        await reads(page, "dropped deleted 5, disk_full 3")
        assert page.problems == []


async def test_the_state_of_a_capture_leaves_out_what_does_not_apply() -> None:
    tally = an_empty_tally()
    tally.recorder = _Troubled()  # type: ignore[assignment]

    async with dashboard(tally) as (page, url):
        await page.open(url + "#tap")
        await reads(page, "Capture: ")
        for raw in ("null", "{}", "files_problem"):
            assert not await page.look(f"document.body.innerText.includes({raw!r})"), raw


ALARMS = """import("./assets/alarms.js").then(({ alarmsOf, ringing }) => {
  const window = (burn_rate) => ({ burn_rate, seconds: 3600, counted: 100 });
  const windows = (burn_rate) => ({ "1h": window(burn_rate), "5m": window(burn_rate) });
  const alarm = { severity: "page", long: "1h", short: "5m", burn_rate: 14, reachable: true, events_min: 7 };
  const alarms = [{ ...alarm, tenant: null, ringing: false }, { ...alarm, tenant: "acme", ringing: true }];
  const slo = { all: { alarms, windows: windows(2), by: { tenant: { acme: windows(20) } } } };
  return alarmsOf(slo).map((row) => [row.name, row.long.burn_rate, ringing(row).split(":")[0]]);
})"""


async def test_an_alarm_of_a_tenant_has_its_name_and_burn_rates() -> None:
    async with dashboard(an_empty_tally()) as (page, url):
        await page.open(url)
        assert await page.look(ALARMS) == [
            ["acme (all)", 20, "acme (all) uses its error budget too fast"],
            ["all", 2, "all uses its error budget too fast"],
        ]
