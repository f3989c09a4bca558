// The tap itself: what it adds, how late it ran, what it lost.

import { el, emptyState, refill, say, section } from "./dom.js";
import { NONE, basis, bytes, count, number, ranked, seconds, share, width } from "./format.js";
import { Table } from "./table.js";

const PERIOD_MS = 3000;
const UNCERTAIN_MAX = 0.05;

export class Tap {
  constructor(app) {
    this.app = app;
    this.id = "tap";
    this.title = "Tap";
    this.version = null;
    this.summary = null;
    this.polls = [
      app.poll("summary", (signal) => this.ask(signal), PERIOD_MS, (data) => this.heard(data)),
    ];
    this.banner = el("div");
    this.cards = el("dl", { class: "cards" });
    this.relays = new Table(RELAYS, { caption: "Relays", key: (row) => row.name });
    this.dropped = el("p");
    this.errors = el("p");
    this.capture = el("p");
    this.about = el("p", { class: "soft" });
    this.node = el("div", {},
      section("Is it well", this.banner, this.cards),
      section("Relays", this.relays.node, this.dropped),
      section("Meter and capture", this.errors, this.capture, this.about));
  }

  async ask(signal) {
    this.version ??= (await this.app.api.get("openapi.json", {}, signal)).info.version;
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
    const lost = losses(relays);
    const bad = [];
    if (!relays.some(({ relay }) => relay.connected)) bad.push("No relay is connected: nothing is measured.");
    if (lost.length) bad.push(`Exchanges were not measured: ${lost.map(([why, n]) => `${why} ${count(n)}`).join(", ")}. Traffic went on.`);
    if (Object.keys(s.meter_errors).length) bad.push("Some exchanges could not be understood; see the meter's log.");
    if (s.n && s.uncertain.n / s.n > UNCERTAIN_MAX) bad.push(`${share(s.uncertain.n / s.n)} of the exchanges have stamps wider than ${seconds(s.uncertain.limit)}: the relays get too little CPU.`);
    refill(this.banner, bad.length ? bad.map((words) => el("p", { class: "banner bad" }, words)) : el("p", { class: "banner good" }, "Every exchange that passed is measured."));
    refill(this.cards,
      added("Added to a request", s.added.request, s.window),
      added("Added to a first chunk", s.added.first_chunk, s.window),
      added("Added to a chunk", s.added.chunk, s.window),
      card("Loop lag", seconds(s.window.lag_max), "worst of the relays in the window", basis(s.n, s.window)),
      card("Uncertainty", width(s.uncertainty), "the longest a byte may have waited unread", basis(s.n, s.window)),
      card("Too uncertain", count(s.uncertain.n), `exchanges wider than ${seconds(s.uncertain.limit)}${s.uncertain.included ? "; they are in the figures" : ""}`, basis(s.n, s.window)));
    this.relays.update(relays);
    say(this.dropped, lost.length ? `Not measured, by reason: ${lost.map(([why, n]) => `${why} ${count(n)}`).join(", ")}.` : "Nothing dropped since the relays started.");
    const errors = ranked(s.meter_errors);
    say(this.errors, errors.length ? `Not understood, by kind: ${errors.map(([kind, n]) => `${kind} ${count(n)}`).join(", ")}.` : "Everything was understood.");
    refill(this.capture, s.capture === null
      ? ["No capture runs: ", el("code", {}, "--capture DIR"), " keeps every exchange as a row of Parquet."]
      : `Capture: ${Object.entries(s.capture).map(([name, value]) => `${name} ${typeof value === "number" ? number(value) : JSON.stringify(value)}`).join(", ")}.`);
    const live = this.app.live;
    say(this.about, `llmtap ${this.version ?? NONE}${live ? ` · ${count(live.subscribers)} listen to the live feed, ${count(live.missed)} exchanges missed by slow ones` : ""}`);
    if (!relays.length) refill(this.relays.more, emptyState("No relay ever spoke to this meter.", "llmtap proxy --upstream http://127.0.0.1:8000"));
  }
}

function losses(relays) {
  const lost = {};
  for (const { relay } of relays) {
    for (const [why, n] of Object.entries(relay.dropped ?? {})) if (n) lost[why] = (lost[why] ?? 0) + n;
    if (relay.lost) lost.relay_lost = (lost.relay_lost ?? 0) + relay.lost;
  }
  return ranked(lost);
}

function card(title, value, about, rests) {
  return el("div", { class: "card" }, el("dt", {}, title), el("dd", {}, el("b", { class: "value" }, value), el("small", {}, about), el("small", { class: "soft" }, rests)));
}

function added(title, figures, window) {
  const few = figures.marks.includes("p99") ? ", few samples" : "";
  return card(title, seconds(figures.p50), `p50; p99 ${seconds(figures.p99)}${few}; at most ${seconds(figures.max)}`, basis(figures.n, window));
}

const RELAYS = [
  { id: "name", head: "relay", kind: "text", text: (row) => row.name, value: (row) => row.name },
  { id: "state", head: "state", kind: "text", text: (row) => (row.relay.connected ? "connected" : "gone"), state: (row) => (row.relay.connected ? "" : "bad") },
  { id: "said", head: "spoke", title: "seconds ago", text: (row) => seconds(row.relay.status_age), value: (row) => row.relay.status_age },
  { id: "clock", head: "stamps", kind: "text", text: (row) => row.relay.clock },
  { id: "opened", head: "began", text: (row) => count(row.relay.opened), value: (row) => row.relay.opened },
  { id: "measured", head: "measured", text: (row) => count(row.relay.measured), value: (row) => row.relay.measured },
  { id: "unsettled", head: "open", text: (row) => count(row.relay.unsettled), value: (row) => row.relay.unsettled },
  { id: "streams", head: "streams", text: (row) => count(row.relay.streams), value: (row) => row.relay.streams },
  { id: "connections", head: "connections", text: (row) => count(row.relay.connections), value: (row) => row.relay.connections },
  { id: "lag", head: "lag", title: "worst since its last status", text: (row) => seconds(row.relay.lag_max), value: (row) => row.relay.lag_max },
  { id: "pending", head: "tap waits", title: "bytes that the meter has not taken yet", text: (row) => bytes(row.relay.tap_pending_bytes), value: (row) => row.relay.tap_pending_bytes },
  { id: "cpu", head: "CPU", text: (row) => seconds(row.relay.cpu), value: (row) => row.relay.cpu },
  { id: "rss", head: "memory", text: (row) => bytes(row.relay.rss_bytes), value: (row) => row.relay.rss_bytes },
  { id: "up", head: "up", text: (row) => bytes(row.relay.bytes_up), value: (row) => row.relay.bytes_up },
  { id: "down", head: "down", text: (row) => bytes(row.relay.bytes_down), value: (row) => row.relay.bytes_down },
];
