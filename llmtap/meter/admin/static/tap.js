// View "Health": the latency that llmtap adds, its own delays, and exchanges that it did not measure.

import { card, el, emptyState, refill, setText, section } from "./dom.js";
import { NONE, basis, bytes, count, number, ranked, seconds, share, width } from "./format.js";
import { Table } from "./table.js";

const PERIOD_MS = 3000;
const UNCERTAIN_MAX = 0.05;
/** Texts for the reasons why exchanges were not measured (ARCHITECTURE.md). */
const LOST = {
  no_meter: "began while no meter was connected",
  meter_lost: "were running when the meter ended",
  overflow: "arrived faster than the meter could process them",
  websocket: "are WebSockets, which the middleware does not measure",
  middleware_error: "caused an error in the middleware",
  packets_lost: "had packets that were not captured",
  packets_cut: "had packets that were cut short",
  clock_step: "were under way when the clock of the packets was set back",
  contradicting: "had bytes that contradict each other",
  not_understood: "were no valid HTTP/1.1",
  silent: "had no packet for ten minutes",
  watch_ended: "were running when llmtap watch ended",
};
/** Words for the kinds of processes that observe traffic, and for the sources of timestamps. */
const KINDS = { relay: "proxy", middleware: "application", passive: "packets" };
const CLOCKS = { kernel: "kernel", mono: "process", packet: "packet" };
const START = "llmtap proxy --upstream http://127.0.0.1:8000";

export class Tap {
  constructor(app) {
    this.app = app;
    this.id = "tap";
    this.title = "Health";
    this.summary = null;
    this.polls = [
      app.poll("summary", (signal) => this.ask(signal), PERIOD_MS, (data) => this.update(data)),
    ];
    this.banner = el("div");
    this.cards = el("dl", { class: "cards" });
    this.relays = new Table(RELAYS, { caption: "Processes that measure", key: (row) => row.name });
    this.dropped = el("p");
    this.watched = el("p");
    this.errors = el("p");
    this.capture = el("p");
    this.about = el("p", { class: "soft" });
    this.node = el("div", {},
      section("State of llmtap", this.banner, this.cards),
      section("Processes that measure", this.relays.node, this.dropped, this.watched),
      section("Meter and capture", this.errors, this.capture, this.about));
  }

  ask(signal) {
    return this.app.api.get("summary", { window: this.app.window, by: "none" }, signal);
  }

  update(summary) {
    this.summary = summary;
    this.app.render("tap", () => this.render());
  }

  onShow() {
    this.render();
  }

  render() {
    const s = this.summary;
    if (!s) return;
    const relays = Object.entries(s.relays).map(([name, relay]) => ({ name, relay }));
    const lost = losses(s.relays);
    const bad = complaints(s, relays, lost);
    refill(this.banner, bad.length
      ? bad.map((words) => el("p", { class: "banner bad" }, words))
      : passed(relays));
    this.renderCards(s);
    const ended = relays.filter(({ relay }) => hasEnded(relay));
    this.relays.update(relays.filter(({ relay }) => !hasEnded(relay)));
    setText(this.dropped, (lost.length
      ? `Not measured, by reason: ${named(lost)}.`
      : "No exchange was dropped since the start.") + skippedIn(s) + endedProcesses(ended));
    setText(this.watched, packets(relays));
    const errors = ranked(s.meter_errors);
    setText(this.errors, errors.length
      ? `Errors of the meter, by kind: ${named(errors)}.`
      : "The meter had no errors.");
    refill(this.capture, captured(s.capture));
    const live = this.app.live;
    const about = [`llmtap ${s.meter.version}`, `meter: ${implementation(s.meter)}`];
    if (live) about.push(listeners(live));
    setText(this.about, about.join(" · "));
    if (!relays.length) refill(this.relays.more, emptyState("No relay has connected to this meter.", START));
  }

  renderCards(s) {
    const rests = basis(s.n, s.window);
    const included = s.uncertain.included ? "; included in the figures" : "";
    const path = inPath(s.relays) ? [
      added("Added to a request", s.added.request, s.window),
      added("Added to a first chunk", s.added.first_chunk, s.window),
      added("Added to a chunk", s.added.chunk, s.window),
    ] : [];
    refill(this.cards,
      ...path,
      card("Longest delay", seconds(s.window.lag_max), "in which a process of llmtap did not read its sockets", rests),
      card("Accuracy of times", width(s.uncertainties),
        `largest error of ${path.length ? "a token's time" : "a packet's time"}; worst ${seconds(s.uncertainty)}`, rests),
      card("Inaccurate", count(s.uncertain.n),
        `exchanges whose times may be wrong by more than ${seconds(s.uncertain.limit)}${included}`, rests));
  }
}

/** Returns whether a process ended in order, as after a reload: all its exchanges were measured. */
function hasEnded({ connected, lost, dropped, opened }) {
  return !connected && opened !== undefined && !lost && !Object.values(dropped).some(Boolean);
}

function endedProcesses(ended) {
  if (!ended.length) return "";
  const measured = ended.reduce((sum, { relay }) => sum + relay.measured, 0);
  return ` Not listed: processes that have ended (${count(ended.length)}), with ${count(measured)} measured exchanges.`;
}

/** Returns whether a vantage forwards the traffic; `llmtap watch` only reads packets. */
function inPath(relays) {
  const vantages = Object.values(relays);
  return !vantages.length || vantages.some(({ vantage }) => vantage !== "passive");
}

function passed(relays) {
  return relays.some(({ relay }) => relay.opened)
    ? el("p", { class: "banner good" }, "Every exchange was measured.")
    : el("p", { class: "banner" }, "Connected; no exchange has begun since the start.");
}

/** Returns a sentence for each problem of llmtap. */
function complaints(s, relays, lost) {
  const bad = [];
  if (!relays.some(({ relay }) => relay.connected)) bad.push("No process is connected to the meter: nothing is measured.");
  bad.push(...upstreamsDown(s.relays), ...lostWithVantages(s.relays));
  if (lost.length) {
    const why = lost.map(([name, n]) => `${count(n)} ${LOST[name] ?? `(${name})`}`).join("; ");
    const forwarded = inPath(s.relays) ? " Their traffic was forwarded." : "";
    bad.push(`Not measured since the start: ${why}.${forwarded}`);
  }
  const unseen = relays.reduce((sum, { relay }) => sum + (relay.packets?.lost ?? 0), 0);
  if (unseen) bad.push(`The kernel lost ${count(unseen)} packets: exchanges in them may be missing entirely.`);
  if (Object.keys(s.meter_errors).length) {
    bad.push("The meter had errors; see its log.");
  }
  bad.push(...captureComplaints(s.capture));
  const words = uncertain(s);
  if (words) bad.push(`${words}: llmtap gets too little CPU.`);
  return bad;
}

/** Returns a sentence for each upstream that refused the latest connection of a relay. */
export function upstreamsDown(relays) {
  const down = Object.values(relays).filter((relay) => relay.connected).flatMap(
    (relay) => Object.entries(relay.upstreams ?? {}).filter(([, up]) => !up).map(([url]) => url));
  return [...new Set(down)].map((url) => `${url} accepts no connection: clients get 502 or 504.`);
}

/** Returns the begin of a sentence if too many exchanges of the window are uncertain; else null. */
export function uncertain(s) {
  const wide = s.n ? s.uncertain.n / s.n : 0;
  if (wide <= UNCERTAIN_MAX) return null;
  return `${share(wide)} of the exchanges have an uncertainty above ${seconds(s.uncertain.limit)}`;
}

/** Returns a sentence on a capture that cannot write, with the remedy; [] while it can write. */
export function capturePaused(capture) {
  return capture?.pause ? [capture.pause.sentence] : [];
}

function captureComplaints(capture) {
  if (capture === null) return [];
  const { deleted, ...dropped } = capture.dropped; // no complaint: the configured limits removed `deleted`
  const lost = ranked(dropped), bad = [];
  bad.push(...capturePaused(capture));
  if (capture.files_problem) bad.push(`Files of the capture are not delivered: ${capture.files_problem}.`);
  if (lost.length) bad.push(`Exchanges are missing from the capture: ${named(lost)}.`);
  return bad;
}

/** Returns the exchanges that were not measured since the start, by reason: [["overflow", 5], ...] */
export function losses(relays) {
  const lost = {};
  for (const relay of Object.values(relays)) {
    for (const [why, n] of Object.entries(relay.dropped ?? {})) if (n) lost[why] = (lost[why] ?? 0) + n;
  }
  return ranked(lost);
}

/** Returns a sentence for each reason why exchanges were lost with a vantage; they count as `tap_error`. */
export function lostWithVantages(relays) {
  const lost = {};
  for (const { lost: n, lost_reason: why } of Object.values(relays)) if (n) lost[why] = (lost[why] ?? 0) + n;
  return ranked(lost).map(([why, n]) =>
    `${n === 1 ? "1 exchange was" : `${count(n)} exchanges were`} lost since the start (outcome tap_error): ${why}.`);
}

/** Returns a sentence with the packet counts of each passive vantage; "" without one. */
function packets(relays) {
  return relays.filter(({ relay }) => relay.packets).map(({ name, relay }) => {
    const parts = [`packets ${named(ranked(relay.packets)) || "none"}`];
    parts.push(`connections ${named(ranked(relay.watched)) || "none"}`);
    parts.push(`${bytes(relay.missing_bytes)} missing`);
    return `${name}: ${parts.join("; ")}.`;
  }).join(" ");
}

/** Returns a sentence with the number of requests that are counted but not measured, if there are any. */
function skippedIn(s) {
  return s.not_inference ? ` Not inference, so not measured (${s.window.name}): ${count(s.not_inference)}.` : "";
}

/** Returns counts as text: "overflow 5, no_meter 2". */
function named(counts) {
  return counts.map(([name, n]) => `${name} ${count(n)}`).join(", ");
}

function listeners(live) {
  const missed = `${count(live.missed)} exchanges missed by slow subscribers`;
  return `live feed: ${count(live.subscribers)} subscribers, ${missed}`;
}

/** Returns which implementation runs, and why: "native", or "python (LLMTAP_NATIVE=0)". */
function implementation({ implementation: name, implementation_reason: reason }) {
  return reason ? `${name} (${reason})` : name;
}

function captured(capture) {
  if (capture === null) {
    const words = " stores every exchange as a row of Parquet.";
    return ["No capture is running: ", el("code", {}, "--capture DIR"), words];
  }
  const textOf = (value) => {
    if (typeof value === "number") return number(value);
    return typeof value === "object" ? named(ranked(value)) || "none" : String(value);
  };
  const { pause, ...figures } = capture; // without the pause, which the banner shows
  const known = Object.entries(figures).filter(([, value]) => value !== null && value !== "");
  return `Capture: ${known.map(([name, value]) => `${name.replaceAll("_", " ")} ${textOf(value)}`).join(", ")}.`;
}

function added(title, figures, window) {
  const few = (name) => (figures.marks.includes(name) ? ", few samples" : "");
  const words = `p50${few("p50")}; p99 ${seconds(figures.p99)}${few("p99")}; at most ${seconds(figures.max)}`;
  return card(title, seconds(figures.p50), words, basis(figures.n, window));
}

const of = (name, as) => ({ text: (row) => as(row.relay[name]), value: (row) => row.relay[name] });

const RELAYS = [
  { id: "name", head: "name", kind: "text", text: (row) => row.name, value: (row) => row.name },
  {
    id: "state", head: "state", kind: "text",
    text: (row) => (row.relay.connected ? "connected" : "gone"),
    state: (row) => (row.relay.connected ? "" : "bad"),
  },
  {
    id: "vantage", head: "kind", title: "where the process observes the traffic", kind: "text",
    text: (row) => [KINDS[row.relay.vantage] ?? NONE, row.relay.side].filter(Boolean).join(", "),
  },
  { id: "status_age", head: "last report", title: "time since its last report to the meter", ...of("status_age", seconds) },
  {
    id: "clock", head: "timestamps", title: "who takes the time of a read", kind: "text",
    text: (row) => CLOCKS[row.relay.clock] ?? row.relay.clock,
  },
  {
    id: "implementation", head: "code", title: "native: compiled code; python: the slower Python code", kind: "text",
    text: (row) => row.relay.implementation ?? NONE,
    tip: (row) => row.relay.implementation_reason ?? "",
  },
  { id: "opened", head: "started", ...of("opened", count) },
  { id: "measured", head: "measured", ...of("measured", count) },
  { id: "unsettled", head: "running", title: "exchanges that have begun and not ended", ...of("unsettled", count) },
  { id: "streams", head: "forwarding", title: "requests that it forwards now", ...of("streams", count) },
  { id: "connections", head: "connections", ...of("connections", count) },
  { id: "lag", head: "delay", title: "longest time without a read, since its last report", ...of("lag_max", seconds) },
  {
    id: "pending", head: "queued", title: "bytes of observations that wait for the meter",
    ...of("tap_pending_bytes", bytes),
  },
  { id: "cpu", head: "CPU", ...of("cpu", seconds) },
  { id: "rss", head: "memory", ...of("rss_bytes", bytes) },
  { id: "up", head: "requests", title: "bytes from clients to the upstream", ...of("bytes_up", bytes) },
  { id: "down", head: "answers", title: "bytes from the upstream to clients", ...of("bytes_down", bytes) },
];
