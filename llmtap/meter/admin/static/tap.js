// The tap itself: what it adds, how late it ran, what it lost.

import { card, el, emptyState, refill, say, section } from "./dom.js";
import { NONE, basis, bytes, count, number, ranked, seconds, share, width } from "./format.js";
import { Table } from "./table.js";

const PERIOD_MS = 3000;
const UNCERTAIN_MAX = 0.05;
/** Why exchanges were not measured: reasons of the relays' ledgers (ARCHITECTURE.md). */
const LOST = {
  no_meter: "began while the meter was away",
  meter_lost: "were under way when the meter went away",
  overflow: "came faster than the meter could take them",
  websocket: "are WebSockets, which are not measured",
  middleware_error: "met an error of the middleware",
  relay_lost: "went down with a relay",
  packets_lost: "had packets that were not captured",
  packets_cut: "had packets that were cut short",
  contradicting: "had bytes that contradict each other",
  not_understood: "were no valid HTTP/1.1",
  silent: "fell silent for ten minutes",
  watch_ended: "were under way when the watching process ended",
};
const START = "llmtap proxy --upstream http://127.0.0.1:8000";

export class Tap {
  constructor(app) {
    this.app = app;
    this.id = "tap";
    this.title = "Tap";
    this.summary = null;
    this.polls = [
      app.poll("summary", (signal) => this.ask(signal), PERIOD_MS, (data) => this.heard(data)),
    ];
    this.banner = el("div");
    this.cards = el("dl", { class: "cards" });
    this.relays = new Table(RELAYS, { caption: "Vantages", key: (row) => row.name });
    this.dropped = el("p");
    this.watched = el("p");
    this.errors = el("p");
    this.capture = el("p");
    this.about = el("p", { class: "soft" });
    this.node = el("div", {},
      section("Is it well", this.banner, this.cards),
      section("Vantages", this.relays.node, this.dropped, this.watched),
      section("Meter and capture", this.errors, this.capture, this.about));
  }

  ask(signal) {
    return this.app.api.get("summary", { window: this.app.window, by: "none" }, signal);
  }

  heard(summary) {
    this.summary = summary;
    this.app.render("tap", () => this.render());
  }

  shown() {
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
    this.relays.update(relays);
    say(this.dropped, lost.length
      ? `Not measured, by reason: ${named(lost)}.`
      : "Nothing dropped since the relays started.");
    say(this.watched, packets(relays));
    const errors = ranked(s.meter_errors);
    say(this.errors, errors.length
      ? `Not understood, by kind: ${named(errors)}.`
      : "Everything was understood.");
    refill(this.capture, captured(s.capture));
    const live = this.app.live;
    const about = [`llmtap ${s.meter.version}`, `meter: ${implementation(s.meter)}`];
    if (live) about.push(listeners(live));
    say(this.about, about.join(" · "));
    if (!relays.length) refill(this.relays.more, emptyState("No relay ever spoke to this meter.", START));
  }

  renderCards(s) {
    const rests = basis(s.n, s.window);
    const included = s.uncertain.included ? "; they are in the figures" : "";
    refill(this.cards,
      added("Added to a request", s.added.request, s.window),
      added("Added to a first chunk", s.added.first_chunk, s.window),
      added("Added to a chunk", s.added.chunk, s.window),
      card("Loop lag", seconds(s.window.lag_max), "worst of the relays in the window", rests),
      card("Uncertainty", width(s.uncertainty), "the longest a byte may have waited unread", rests),
      card("Too uncertain", count(s.uncertain.n),
        `exchanges wider than ${seconds(s.uncertain.limit)}${included}`, rests));
  }
}

function passed(relays) {
  return relays.some(({ relay }) => relay.opened)
    ? el("p", { class: "banner good" }, "Every exchange that passed is measured.")
    : el("p", { class: "banner" }, "The relays are connected; no exchange has passed since they started.");
}

/** What is not as it should be, in sentences. */
function complaints(s, relays, lost) {
  const bad = [];
  if (!relays.some(({ relay }) => relay.connected)) bad.push("No relay is connected: nothing is measured.");
  if (lost.length) {
    const why = lost.map(([name, n]) => `${count(n)} ${LOST[name] ?? `(${name})`}`).join("; ");
    bad.push(`Not measured since the relays started: ${why}. Their traffic passed.`);
  }
  const unseen = relays.reduce((sum, { relay }) => sum + (relay.packets?.lost ?? 0), 0);
  if (unseen) bad.push(`The kernel lost ${count(unseen)} packets: exchanges in them may be missing entirely.`);
  if (Object.keys(s.meter_errors).length) {
    bad.push("Some exchanges could not be understood; see the meter's log.");
  }
  bad.push(...captureComplaints(s.capture));
  const wide = s.n ? s.uncertain.n / s.n : 0;
  if (wide > UNCERTAIN_MAX) {
    const limit = seconds(s.uncertain.limit);
    const words = `${share(wide)} of the exchanges have stamps wider than ${limit}`;
    bad.push(`${words}: the relays get too little CPU.`);
  }
  return bad;
}

function captureComplaints(capture) {
  if (capture === null) return [];
  const { deleted, ...dropped } = capture.dropped; // what was deleted made room as the settings ask
  const lost = ranked(dropped), bad = [];
  if (capture.problem) bad.push(`The capture takes no rows: ${capture.problem}.`);
  if (capture.files_problem) bad.push(`Files of the capture wait for their place: ${capture.files_problem}.`);
  if (lost.length) bad.push(`The capture lacks exchanges: ${named(lost)}.`);
  return bad;
}

/** Exchanges that were not measured since the relays started, by reason: [["overflow", 5], ...] */
export function losses(relays) {
  const lost = {};
  for (const relay of Object.values(relays)) {
    for (const [why, n] of Object.entries(relay.dropped ?? {})) if (n) lost[why] = (lost[why] ?? 0) + n;
    if (relay.lost) lost.relay_lost = (lost.relay_lost ?? 0) + relay.lost;
  }
  return ranked(lost);
}

/** What a passive vantage saw; "" where there is none. */
function packets(relays) {
  return relays.filter(({ relay }) => relay.packets).map(({ name, relay }) => {
    const parts = [`packets ${named(ranked(relay.packets)) || "none"}`];
    parts.push(`connections ${named(ranked(relay.watched)) || "none"}`);
    parts.push(`${bytes(relay.missing_bytes)} missing`);
    return `${name}: ${parts.join("; ")}.`;
  }).join(" ");
}

/** "overflow 5, no_meter 2" */
function named(counts) {
  return counts.map(([name, n]) => `${name} ${count(n)}`).join(", ");
}

function listeners(live) {
  const missed = `${count(live.missed)} exchanges missed by slow ones`;
  return `${count(live.subscribers)} listen to the live feed, ${missed}`;
}

/** "native", or "python (LLMTAP_NATIVE=0)" */
function implementation({ implementation: name, implementation_reason: reason }) {
  return reason ? `${name} (${reason})` : name;
}

function captured(capture) {
  if (capture === null) {
    const words = " keeps every exchange as a row of Parquet.";
    return ["No capture runs: ", el("code", {}, "--capture DIR"), words];
  }
  const said = (value) => (typeof value === "number" ? number(value) : JSON.stringify(value));
  return `Capture: ${Object.entries(capture).map(([name, value]) => `${name} ${said(value)}`).join(", ")}.`;
}

function added(title, figures, window) {
  const few = figures.marks.includes("p99") ? ", few samples" : "";
  const words = `p50; p99 ${seconds(figures.p99)}${few}; at most ${seconds(figures.max)}`;
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
    id: "vantage", head: "vantage", kind: "text",
    text: (row) => [row.relay.vantage ?? NONE, row.relay.side].filter(Boolean).join(", "),
  },
  { id: "said", head: "spoke", title: "seconds ago", ...of("status_age", seconds) },
  { id: "clock", head: "stamps", kind: "text", text: (row) => row.relay.clock },
  {
    id: "implementation", head: "runs", title: "implementation of the per-chunk path", kind: "text",
    text: (row) => row.relay.implementation ?? NONE,
    tip: (row) => row.relay.implementation_reason ?? "",
  },
  { id: "opened", head: "began", ...of("opened", count) },
  { id: "measured", head: "measured", ...of("measured", count) },
  { id: "unsettled", head: "open", ...of("unsettled", count) },
  { id: "streams", head: "streams", ...of("streams", count) },
  { id: "connections", head: "connections", ...of("connections", count) },
  { id: "lag", head: "lag", title: "worst since its last status", ...of("lag_max", seconds) },
  {
    id: "pending", head: "tap waits", title: "bytes that the meter has not taken yet",
    ...of("tap_pending_bytes", bytes),
  },
  { id: "cpu", head: "CPU", ...of("cpu", seconds) },
  { id: "rss", head: "memory", ...of("rss_bytes", bytes) },
  { id: "up", head: "up", ...of("bytes_up", bytes) },
  { id: "down", head: "down", ...of("bytes_down", bytes) },
];
