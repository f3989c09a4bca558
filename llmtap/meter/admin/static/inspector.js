// One exchange: its chunks against the deadlines of a reader, its figures, its outcome. A running exchange is
// updated until it ends.

import { colour, draw, layout, legend } from "./charts.js";
import { el, emptyState, refill, say, section } from "./dom.js";
import { FAILED, NONE, bytes, clock, count, number, seconds, share, tokenTime, zone } from "./format.js";
import { follow } from "./reader.js";
import { Table } from "./table.js";

const CHUNKS_DRAWN = 4000;
const CHUNKS_LISTED = 500;
/** A longer list is folded: its first chunks, those that the reader waited for longest, and its last. */
const FOLDED_FROM = 50, FIRST = 20, WAITED = 20, LAST = 5;
const SPEED = 20;
const LINES = [
  ["c0", "received"],
  ["c6", "deadlines of a reader who never waits"],
  ["c1", "read"],
  ["bad", "the reader waits"],
  ["area", "delay of the reader"],
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
const TOKEN_TIMES = new Set(["ttft", "ttft_any", "tpot"]);

export class Inspector {
  constructor(app) {
    this.app = app;
    const words = "Tokens over time: received, and read by a reader";
    this.plot = el("div", { class: "plot tall", role: "img", "aria-label": words });
    this.words = el("p");
    this.facts = el("div", { class: "facts" });
    const about = { caption: "Chunks of this exchange", key: (row) => row.i, rows: CHUNKS_LISTED };
    this.table = new Table(COLUMNS, about);
    this.unfolded = false;
    this.unfold = el("button", { type: "button", id: "unfold", onclick: () => this.toggleChunks() });
    this.problem = el("div");
    this.figure = el("figure", {},
      el("figcaption", {}, "Tokens received, and tokens read by a reader"), legend(LINES), this.plot);
    this.body = el("div", {},
      this.figure, this.words, this.facts, section("Chunks", this.table.node, this.unfold));
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
    this.rows = [];
  }

  toggleChunks() {
    this.unfolded = !this.unfolded;
    this.listChunks();
  }

  get speed() {
    return this.app.readerSpeed ?? SPEED;
  }

  /** One that has ended. */
  show(x) {
    if (this.running) this.app.say(`Ended: ${x.outcome}`);
    this.reset();
    this.exchange = x;
    const banner = FAILED.has(x.outcome) ? "banner bad" : "banner";
    refill(this.problem, x.outcome === "complete" ? null : el("p", { class: banner }, ending(x)));
    this.submit = x.timeline.submit ?? 0;
    const seen = this.seen = follow(x.events, this.submit, 1 / this.speed, x.tokens.output);
    this.renderFacts(x);
    this.renderChunks(x.events);
    const worst = seen.chunks[seen.worst];
    say(this.words, worst
      ? `A reader of ${number(this.speed)} tokens/s waits ${seconds(seen.idle)} in total (red line), for the`
        + ` last time for chunk ${worst.index + 1} of ${x.events.length}, at ${seconds(worst.t)}.`
        + " During later pauses the reader still has tokens to read."
      : "No event carried output, so there is no chart.");
    this.reveal();
  }

  /** One that is under way: what `/api/v1/streams` tells of it now. */
  watch(told) {
    if (!this.running) this.app.say(`${told.id} is running`);
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
      `This exchange has run for ${seconds(told.age)} and is shown until it ends. Chunks older than a minute are`
      + " shown as one; classes and bytes are known at its end."));
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
    say(this.words, `A reader of ${number(this.speed)} tokens/s has waited ${seconds(seen.idle)} so far (red line),`
      + ` and ${now}.`);
    this.reveal();
  }

  /** It is neither kept nor under way. */
  missing(id) {
    this.reset();
    this.body.hidden = true;
    refill(this.problem, emptyState(
      `${id} is not kept: the meter keeps only the newest exchanges (meter.exchanges_kept). A capture keeps all:`,
      "llmtap proxy --upstream URL --capture ./capture"));
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
    this.rows = events.map((event, i) => {
      const row = { i, event, gap: event.t - before, chunk: chunks.get(i) };
      before = event.t;
      return row;
    });
    this.listChunks();
  }

  listChunks() {
    const { rows } = this, long = rows.length > FOLDED_FROM;
    this.unfold.hidden = !long;
    const waited = (row) => row.chunk?.waited ?? 0;
    const most = rows.filter(waited).sort((a, b) => waited(b) - waited(a)).slice(0, WAITED);
    const listed = new Set([...rows.slice(0, FIRST), ...most, ...rows.slice(-LAST)]);
    const folded = long && !this.unfolded;
    this.table.update(folded ? rows.filter((row) => listed.has(row)) : rows);
    say(this.unfold, folded ? `Show all ${count(rows.length)} chunks` : "Show fewer chunks");
  }

  renderFacts(x) {
    const metrics = Object.entries(NAMES).map(([name, words]) => {
      const value = TOKEN_TIMES.has(name) ? tokenTime(x, name) : x.metrics[name];
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
      list("Added by llmtap", [
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
      line("received", came, "c0", steps),
      line(`idle ${seconds(idle)}`, level, "bad", { line: { width: 6 } }),
    ], layout({
      margin: { l: 60, r: 14, t: 8, b: 44 },
      xaxis: { title: { text: "seconds since arrival" } },
      yaxis: { title: { text: "tokens" } },
      hovermode: "closest",
    }));
  }
}

/** The chunks of a running stream as events; tokens before its timeline are one event. */
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
  return `Outcome: ${x.outcome}${who}${error}${reason}.`;
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
    id: "gap", head: "gap", title: "since the previous event; for the first event, since submit",
    text: (row) => seconds(row.gap), value: (row) => row.gap,
  },
  {
    id: "class", head: "class", kind: "text",
    text: (row) => row.event.class ?? NONE, value: (row) => row.event.class,
  },
  { id: "bytes", head: "bytes", text: (row) => count(row.event.bytes), value: (row) => row.event.bytes },
  {
    id: "tokens", head: "tokens", title: "declared by the event",
    text: (row) => count(row.event.tokens), value: (row) => row.event.tokens,
  },
  {
    id: "due", head: "deadline", title: "time at which a reader who never waits needs the chunk",
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
