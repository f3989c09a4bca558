// One exchange, all that is known of it: its chunks against the deadlines of a reader, its figures, its end.
// One that is under way is followed until it ends, as far as it is known.

import { colour, draw, layout, legend } from "./charts.js";
import { el, emptyState, refill, say, section } from "./dom.js";
import { NONE, bytes, clock, count, number, seconds, share, zone } from "./format.js";
import { follow } from "./reader.js";
import { Table } from "./table.js";

const CHUNKS_DRAWN = 4000;
const CHUNKS_LISTED = 500;
const SPEED = 20;
const LINES = [
  ["c0", "came"],
  ["c6", "deadlines of a reader who never waits"],
  ["c1", "read"],
  ["bad", "the reader waits"],
  ["area", "the waits as an area"],
];
const NAMES = {
  ttft: "TTFT",
  ttft_any: "TTFT, any token",
  ttfb: "TTFB",
  tpot: "TPOT",
  e2e: "E2E",
  user_idle: "user idle",
  tbc_max: "longest gap",
  jitter: "jitter",
  smooth_benefit: "smooth benefit",
};

export class Inspector {
  constructor(app) {
    this.app = app;
    const words = "Tokens over time, as they came and as a reader takes them";
    this.plot = el("div", { class: "plot tall", role: "img", "aria-label": words });
    this.words = el("p");
    this.facts = el("div", { class: "facts" });
    const about = { caption: "Chunks of this exchange", key: (row) => row.i, rows: CHUNKS_LISTED };
    this.table = new Table(COLUMNS, about);
    this.problem = el("div");
    this.figure = el("figure", {},
      el("figcaption", {}, "Tokens as they came, and as a reader takes them"), legend(LINES), this.plot);
    this.body = el("div", {},
      this.figure, this.words, this.facts, section("Chunks", this.table.node));
    this.node = el("div", { hidden: true }, this.problem, this.body);
    this.clear();
  }

  /** Nothing is shown. */
  clear() {
    this.reset();
    this.node.hidden = true;
  }

  reset() {
    /** The one that is shown: it has ended, or is under way; else null. */
    this.exchange = null;
    this.running = null;
    /** What a reader makes of it, from when on. */
    this.seen = null;
    this.submit = 0;
  }

  get speed() {
    return this.app.readerSpeed ?? SPEED;
  }

  /** One that has ended. */
  show(x) {
    if (this.running) this.app.say(`It has ended: ${x.outcome}`);
    this.reset();
    this.exchange = x;
    refill(this.problem, x.outcome === "complete" ? null : el("p", { class: "banner bad" }, ending(x)));
    this.submit = x.timeline.submit ?? 0;
    const seen = this.seen = follow(x.events, this.submit, 1 / this.speed, x.tokens.output);
    this.renderFacts(x);
    this.renderChunks(x.events);
    const worst = seen.chunks[seen.worst];
    say(this.words, worst
      ? `Reader of ${number(this.speed)} tokens/s from submit on: waits ${seconds(seen.idle)} in all, shaded;`
        + ` the last time is for chunk ${seen.worst + 1} of ${seen.chunks.length}, at ${seconds(worst.t)}.`
        + " Later pauses are covered by what there is to read."
      : "No event of it carried output, so there is no picture of it.");
    this.reveal();
  }

  /** One that is under way: what `/api/v1/streams` tells of it now. */
  watch(told) {
    if (!this.running) this.app.say(`${told.id} is under way`);
    this.reset();
    this.running = told;
    const events = eventsOf(told);
    const seen = this.seen = follow(events, 0, 1 / this.speed);
    const waits = told.age > seen.free;
    if (waits) {
      seen.waits.push([seen.free, told.age]);
      seen.idle += told.age - seen.free;
    }
    refill(this.problem, el("p", { class: "banner" },
      `It is under way, ${seconds(told.age)} old, and is followed until it ends. Its chunks of the last`
      + " minute are shown, what came before as one; classes and bytes are told at its end."));
    refill(this.facts,
      list("So far", [
        ["age", seconds(told.age)], ["TTFT", seconds(told.ttft)], ["user idle", seconds(seen.idle)],
        ["since the last token", seconds(told.since_last)],
        ["tokens", count(told.tokens)], ["events", count(told.events)],
      ]),
      list("Exchange", [
        ["tenant", told.tenant], ["model", told.model ?? NONE], ["arm", told.arm ?? NONE],
        ["route", told.route ?? NONE], ["endpoint", told.endpoint ?? NONE], ["dialect", told.dialect ?? NONE],
      ]));
    this.renderChunks(events.map((event) => ({ ...event, class: null })));
    const now = waits ? "waits now" : `has ${seconds(seen.free - told.age)} to read`;
    say(this.words, `Reader of ${number(this.speed)} tokens/s from arrival on: waited ${seconds(seen.idle)}`
      + ` so far, shaded, and ${now}.`);
    this.reveal();
  }

  /** It is neither kept nor under way. */
  missing(id) {
    this.reset();
    this.body.hidden = true;
    refill(this.problem, emptyState(
      `${id} is not kept: the meter keeps the newest exchanges (meter.exchanges_kept). A capture keeps all of`
      + " them:", "llmtap proxy --upstream URL --capture ./capture"));
    this.node.hidden = false;
  }

  reveal() {
    this.node.hidden = this.body.hidden = false;
    // One under way has its waiting to show; one that ended without a token has nothing.
    this.figure.hidden = this.exchange !== null && this.seen.worst === null;
    this.draw();
  }

  renderChunks(events) {
    const chunks = new Map(this.seen.chunks.map((chunk) => [chunk.index, chunk]));
    let before = this.submit;
    this.table.update(events.map((event, i) => {
      const row = { i, event, gap: event.t - before, chunk: chunks.get(i) };
      before = event.t;
      return row;
    }));
  }

  renderFacts(x) {
    const metrics = Object.entries(NAMES).map(([name, words]) => {
      const value = x.metrics[name];
      return [words, name === "smooth_benefit" ? `${number(value)} tokens` : seconds(value)];
    });
    metrics.push(["±", `${seconds(x.uncertainty)}${x.uncertain ? ", more than the limit" : ""}`]);
    const c = x.chunking, t = x.tokens;
    refill(this.facts,
      list("Figures", metrics),
      list("Exchange", [
        ["tenant", x.tenant], ["model", x.model ?? NONE], ["arm", x.arm ?? NONE], ["route", x.route ?? NONE],
        ["arrived", `${clock(x.arrival)} ${zone()}`], ["request", `${x.method} ${x.path}`],
        ["status", x.status ?? NONE],
        ["outcome", x.outcome], ["finish", x.finish_reason ?? NONE], ["dialect", x.dialect ?? NONE],
        ["request id", x.request_id ?? NONE], ["clock", x.clock],
      ]),
      list("Chunking", [
        ["tokens", `${count(t.output)} by ${t.source}`],
        ["input", `${count(t.input)}, ${count(t.cached)} cached`],
        ["reasoning", count(t.reasoning)],
        ["events", `${count(c.events)}, ${count(c.content_events)} with output`],
        ["reads", `${count(c.reads)}, ${number(c.events_per_read)} events each`],
        ["tokens a chunk", number(c.tokens_per_chunk_mean)],
        ["single tokens", share(c.single_token_share)],
        ["bursts", `${count(c.bursts)}, longest hold ${seconds(c.burst_hold_max)}`],
        ["bytes", `${bytes(x.request_bytes)} up, ${bytes(x.response_bytes)} down`],
      ]),
      list("The tap", [
        ["added to the request", seconds(x.added.request)],
        ["added to the first chunk", seconds(x.added.first_chunk)],
        ["added to a chunk, at most", seconds(x.added.chunk_max)],
        ["held by the client", seconds(x.paused)],
        ["guardrail", x.guardrail ? `${x.guardrail.action} (${x.guardrail.signal})` : NONE],
        ["retries", count(x.retries)],
        ...(x.server_timing ?? []).map((time) => [`server: ${time.name}`, seconds(time.ms / 1000)]),
      ]));
  }

  draw() {
    if (!this.seen) return;
    const { speed, submit } = this;
    const { chunks, waits, idle, tokens: total } = this.seen;
    const every = Math.max(1, Math.ceil(chunks.length / CHUNKS_DRAWN));
    const came = { x: [0, submit], y: [0, 0] };
    chunks.forEach((chunk, i) => {
      if (i % every && i < chunks.length - 1) return;
      came.x.push(chunk.t);
      came.y.push(chunk.before + chunk.tokens);
    });
    // The reader: along the wished line until he runs dry, then level until the chunk that he waits for.
    const read = { x: [submit], y: [0] };
    let at = submit, done = 0;
    for (const [from, to] of waits) {
      done += (from - at) * speed;
      read.x.push(from, to);
      read.y.push(done, done);
      at = to;
    }
    const end = at + (total - done) / speed;
    read.x.push(end);
    read.y.push(total);
    const wished = { x: [submit, submit + total / speed], y: [0, total] };
    const spans = waits.flatMap(([from, to]) => [from, to, null]);
    const level = { x: spans, y: waits.flatMap(() => [0, 0, null]) };
    const line = (name, data, ink, about = {}) => ({
      type: "scatter", mode: "lines", name, ...data, ...about,
      line: { color: colour(ink), width: 2, ...about.line },
    });
    const area = {
      x: [...wished.x, ...read.x.slice().reverse()],
      y: [...wished.y, ...read.y.slice().reverse()],
    };
    const shaded = {
      fill: "toself", fillcolor: colour("idle-area"), line: { width: 0 }, hoverinfo: "skip",
    };
    const steps = {
      mode: chunks.length < 400 ? "lines+markers" : "lines", line: { shape: "hv" }, marker: { size: 4 },
    };
    draw(this.plot, [
      line("waits, as area", area, "bad", shaded),
      line("deadlines", wished, "c6", { line: { dash: "dash" } }),
      line("read", read, "c1"),
      line("came", came, "c0", steps),
      line(`idle ${seconds(idle)}`, level, "bad", { line: { width: 6 } }),
    ], layout({
      margin: { l: 60, r: 14, t: 8, b: 44 },
      xaxis: { title: { text: "seconds since arrival" } },
      yaxis: { title: { text: "tokens" } },
      hovermode: "closest",
    }));
  }
}

/** What is told of a stream under way as events; what came before its timeline is one of them. */
function eventsOf(told) {
  const event = (t, tokens) => ({ t, tokens, class: "content", bytes: null });
  const shown = told.timeline.reduce((sum, [, tokens]) => sum + tokens, 0);
  const earlier = told.tokens - shown;
  const first = earlier > 0 && told.ttft !== null ? [event(told.ttft, earlier)] : [];
  return [...first, ...told.timeline.map(([t, tokens]) => event(t, tokens))];
}

function ending(x) {
  const { refusal } = x;
  const who = refusal ? `: ${refusal.kind} (${refusal.source}, confidence ${refusal.confidence})` : "";
  const error = x.error ? `: ${x.error}` : "";
  const reason = x.no_token_reason ? `; no token: ${x.no_token_reason}` : "";
  return `It ended as ${x.outcome}${who}${error}${reason}.`;
}

function lateness(row) {
  if (!row.chunk) return NONE;
  return row.chunk.late > 0 ? seconds(row.chunk.late) : "in time";
}

const COLUMNS = [
  { id: "i", head: "#", text: (row) => count(row.i + 1), value: (row) => row.i },
  {
    id: "t", head: "at", title: "since arrival",
    text: (row) => seconds(row.event.t), value: (row) => row.event.t,
  },
  {
    id: "gap", head: "gap", title: "since the event before, the first since submit",
    text: (row) => seconds(row.gap), value: (row) => row.gap,
  },
  {
    id: "class", head: "class", kind: "text",
    text: (row) => row.event.class ?? NONE, value: (row) => row.event.class,
  },
  { id: "bytes", head: "bytes", text: (row) => count(row.event.bytes), value: (row) => row.event.bytes },
  {
    id: "tokens", head: "tokens", title: "that the event declares",
    text: (row) => count(row.event.tokens), value: (row) => row.event.tokens,
  },
  {
    id: "due", head: "deadline", title: "when a reader who never waited wants it",
    text: (row) => seconds(row.chunk?.due), value: (row) => row.chunk?.due,
  },
  {
    id: "late", head: "late by",
    text: lateness, value: (row) => row.chunk?.late, state: (row) => (row.chunk?.late > 0 ? "bad" : ""),
  },
];

function list(title, rows) {
  const pairs = rows.map(([name, value]) => [el("dt", {}, name), el("dd", {}, value)]);
  return el("div", {}, el("h3", {}, title), el("dl", {}, pairs));
}
