// One exchange: its chunks against the deadlines of a reader, its figures, its outcome. A running exchange is
// updated until it ends.

import { draw, legend } from "./charts.js";
import { el, emptyState, refill, setText, section } from "./dom.js";
import { FAILED, NONE, bytes, clock, count, number, seconds, share, tokenTime, zone } from "./format.js";
import { FirstToken } from "./first_token.js";
import { METRICS } from "./metrics.js";
import { Pair } from "./pair.js";
import { follow } from "./reader.js";
import { Table } from "./table.js";

const CHUNKS_DRAWN = 4000;
const CHUNKS_LISTED = 500;
/** A longer list shows only the first chunks, those with the longest waits, and the last chunks. */
const FOLDED_FROM = 50, FIRST = 20, WAITED = 20, LAST = 5;
const SPEED = 20;
const LINES = [
  ["c0", "received"],
  ["c6", "deadlines of a reader who never waits"],
  ["c1", "read"],
  ["bad", "the reader waits"],
  ["area", "delay of the reader"],
];

export class Inspector {
  constructor(app) {
    this.app = app;
    const words = "Tokens over time: received, and read by a reader";
    this.plot = el("div", { class: "plot tall", role: "img", "aria-label": words });
    this.words = el("p");
    this.firstToken = new FirstToken();
    this.pair = new Pair();
    this.facts = el("div", { class: "facts" });
    const about = { caption: "Chunks of this exchange", key: (row) => row.i, rows: CHUNKS_LISTED };
    this.table = new Table(COLUMNS, about);
    this.unfolded = false;
    this.unfold = el("button", { type: "button", id: "unfold", onclick: () => this.toggleChunks() });
    this.problem = el("div");
    this.figure = el("figure", {},
      el("figcaption", {}, "Tokens received, and tokens read by a reader"), legend(LINES), this.plot);
    this.body = el("div", {},
      this.figure, this.words, this.firstToken.node, this.pair.node, this.facts,
      section("Chunks", this.table.node, this.unfold));
    this.node = el("div", { hidden: true }, this.problem, this.body);
    this.clear();
  }

  /** Hides everything. */
  clear() {
    this.reset();
    this.node.hidden = true;
  }

  reset() {
    /** The exchange that is shown: finished (`exchange`) or running (`running`); the other one is null. */
    this.exchange = null;
    this.running = null;
    /** Result of `follow`: the waits of the reader. */
    this.reading = null;
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

  /** Shows a finished exchange. `firstToken`: parts of its wait; `pair`: both sides of a gateway, or null. */
  show(x, firstToken, pair) {
    if (this.running) this.app.announce(`Ended: ${x.outcome}`);
    this.reset();
    this.exchange = x;
    const banner = FAILED.has(x.outcome) ? "banner bad" : "banner";
    refill(this.problem, x.outcome === "complete" ? null : el("p", { class: banner }, ending(x)));
    this.submit = x.timeline.submit ?? 0;
    const reading = this.reading = follow(x.events, this.submit, 1 / this.speed, x.tokens.output);
    this.firstToken.show(firstToken);
    this.pair.show(pair);
    this.renderFacts(x);
    this.renderChunks(x.events);
    const worst = reading.chunks[reading.worst];
    setText(this.words, worst
      ? `A reader of ${number(this.speed)} tokens/s waits ${seconds(reading.idle)} in total (red line), for the`
        + ` last time for chunk ${worst.index + 1} of ${x.events.length}, at ${seconds(worst.t)}.`
        + " During later pauses the reader still has tokens to read."
      : "No event carried output, so there is no chart.");
    this.reveal();
  }

  /** Shows a running exchange. `stream`: its entry in `/api/v1/streams`. */
  watch(stream) {
    if (!this.running) this.app.announce(`${stream.id} is running`);
    this.reset();
    this.running = stream;
    this.firstToken.show(null);
    this.pair.show(null);
    const events = eventsOf(stream);
    const reading = this.reading = follow(events, 0, 1 / this.speed);
    const waits = stream.age > reading.free;
    if (waits) {
      reading.waits.push([reading.free, stream.age]);
      reading.idle += stream.age - reading.free;
    }
    refill(this.problem, el("p", { class: "banner" },
      `This exchange has run for ${seconds(stream.age)} and is shown until it ends. Chunks older than a minute are`
      + " shown as one; classes and bytes are known at its end."));
    refill(this.facts,
      list("So far", [
        ["age", seconds(stream.age)], ["TTFT", seconds(stream.ttft)], ["user idle", seconds(reading.idle)],
        ["since the last token", seconds(stream.since_last)],
        ["tokens", count(stream.tokens)], ["events", count(stream.events)],
      ]),
      list("Exchange", [
        ["tenant", stream.tenant], ["model", stream.model ?? NONE], ["arm", stream.arm ?? NONE],
        ["route", stream.route ?? NONE], ["endpoint", stream.endpoint ?? NONE], ["dialect", stream.dialect ?? NONE],
      ]));
    this.renderChunks(events.map((event) => ({ ...event, class: null })));
    const now = waits ? "waits now" : `has ${seconds(reading.free - stream.age)} to read`;
    setText(this.words, `A reader of ${number(this.speed)} tokens/s has waited ${seconds(reading.idle)} so far (red line),`
      + ` and ${now}.`);
    this.reveal();
  }

  /** Shows that the exchange is unknown: it is not running, and not among the newest finished exchanges. */
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
    // Show no chart if the exchange ended without a token. A running exchange always shows its wait.
    this.figure.hidden = this.exchange !== null && this.reading.worst === null;
    this.draw();
  }

  renderChunks(events) {
    const chunks = new Map(this.reading.chunks.map((chunk) => [chunk.index, chunk]));
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
    setText(this.unfold, folded ? `Show all ${count(rows.length)} chunks` : "Show fewer chunks");
  }

  renderFacts(x) {
    const metrics = METRICS.map(({ name, title, unit, streams }) => {
      const value = streams ? tokenTime(x, name) : x.metrics[name];
      return [title, unit === "s" ? seconds(value) : number(value)];
    });
    metrics.push(["±", `${seconds(x.uncertainty)}${x.uncertain ? ", more than the limit" : ""}`]);
    const c = x.chunking, t = x.tokens;
    refill(this.facts,
      list("Figures", metrics),
      list("Exchange", [
        ["tenant", x.tenant], ["model", x.model ?? NONE], ["arm", x.arm ?? NONE], ["route", x.route ?? NONE],
        ["label", x.label ?? NONE], ["side", x.side ?? NONE],
        ["arrived", `${clock(x.arrival)} ${zone()}`], ["request", `${x.method} ${x.path}`],
        ["status", x.status ?? NONE],
        ["outcome", x.outcome], ["finish", x.finish_reason ?? NONE], ["dialect", x.dialect ?? NONE],
        ["request id", x.request_id ?? NONE],
        ["response id", x.upstream_request_id ?? NONE], ["trace id", traceLink(x)], ["clock", x.clock],
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
        ...heldFigures(x.held),
        ["guardrail", x.guardrail ? `${x.guardrail.action}, ${x.guardrail.phase} (${x.guardrail.signal})` : NONE],
        ["retries", count(x.retries)],
        ...(x.server_timing ?? []).map((time) => [`server: ${time.name}`, seconds(time.ms / 1000)]),
      ]));
  }

  draw() {
    if (!this.reading) return;
    const { speed, submit } = this;
    const { chunks, waits, idle, tokens: total } = this.reading;
    const every = Math.max(1, Math.ceil(chunks.length / CHUNKS_DRAWN));
    const came = { x: [0, submit], y: [0, 0] };
    chunks.forEach((chunk, i) => {
      if (i % every && i < chunks.length - 1) return;
      came.x.push(chunk.t);
      came.y.push(chunk.before + chunk.tokens);
    });
    // The line of the reader rises with the reading speed until no token is left, and is then level until the
    // next chunk.
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
    const area = {
      x: [...wished.x, ...read.x.slice().reverse()],
      y: [...wished.y, ...read.y.slice().reverse()],
    };
    draw(this.plot, {
      of: (this.exchange ?? this.running).id,
      series: [
        { name: "waits", ...area, ink: "idle-area", area: true, silent: true },
        { name: "deadlines", ...wished, ink: "c6", dash: "dash" },
        { name: "read", ...read, ink: "c1" },
        { name: "received", ...came, ink: "c0", step: "hv", symbols: chunks.length < 400 ? ["dot"] : null },
        { name: `idle ${seconds(idle)}`, ...level, ink: "bad", width: 6 },
      ],
      x: { title: "seconds since arrival", zero: true },
      y: { title: "tokens", zero: true },
      hover: "{y} tokens at {x} s",
    });
  }
}

/** Returns the chunks of a running stream as events; the tokens before its timeline are one event. */
function eventsOf(stream) {
  const event = (t, tokens) => ({ t, tokens, class: "content", bytes: null });
  const shown = stream.timeline.reduce((sum, [, tokens]) => sum + tokens, 0);
  const earlier = stream.tokens - shown;
  const first = earlier > 0 && stream.ttft !== null ? [event(stream.ttft, earlier)] : [];
  return [...first, ...stream.timeline.map(([t, tokens]) => event(t, tokens))];
}

function ending(x) {
  const { refusal } = x;
  const stage = refusal?.detail?.stage ? `, stage ${refusal.detail.stage}: ${refusal.detail.why}` : "";
  const who = refusal ? `: ${refusal.kind} (${refusal.source}, confidence ${refusal.confidence}${stage})` : "";
  const error = x.error ? `: ${x.error}` : "";
  const reason = x.no_token_reason ? `; no token: ${x.no_token_reason}` : "";
  return `Outcome: ${x.outcome}${who}${error}${reason}.`;
}

/** Returns the trace id, as a link if `meter.trace_url` is configured. */
function traceLink({ trace_id: id, trace_url: href }) {
  return href ? el("a", { href, target: "_blank", rel: "noopener" }, id) : id ?? NONE;
}

/** Returns the figures of a stream that its client held: as delivered, and without the time of the client. */
function heldFigures(held) {
  if (!held) return [];
  const pair = (name) => `${seconds(held[`${name}_delivered`])}; server alone at least ${seconds(held[`${name}_server`])}`;
  return [["longest pause, delivered", pair("tbc_max")], ["TPOT, delivered", pair("tpot")]];
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
