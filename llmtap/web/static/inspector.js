// One exchange, all that is known of it: its chunks against the deadlines of a reader, its figures, its end.

import { colour, draw, layout, legend } from "./charts.js";
import { el, emptyState, refill, say, section } from "./dom.js";
import { NONE, bytes, clock, count, number, seconds, share } from "./format.js";
import { follow } from "./reader.js";
import { Table } from "./table.js";

const CHUNKS_DRAWN = 4000;
const CHUNKS_LISTED = 500;
const LINES = [["c0", "came"], ["c6", "deadlines of a reader who never waits"], ["c1", "read"], ["bad", "the reader waits"], ["area", "the waits as an area"]];
const NAMES = { ttft: "TTFT", ttft_any: "TTFT, any token", ttfb: "TTFB", tpot: "TPOT", e2e: "E2E", user_idle: "user idle", tbc_max: "longest gap", jitter: "jitter", smooth_benefit: "smooth benefit" };

export class Inspector {
  constructor(app) {
    this.app = app;
    this.plot = el("div", { class: "plot tall", role: "img", "aria-label": "Tokens over time, as they came and as a reader takes them" });
    this.words = el("p");
    this.facts = el("div", { class: "facts" });
    this.table = new Table(COLUMNS, { caption: "Chunks of this exchange", key: (row) => row.i, rows: CHUNKS_LISTED });
    this.problem = el("div");
    this.body = el("div", {},
      el("figure", {}, el("figcaption", {}, "Tokens as they came, and as a reader takes them"), legend(LINES), this.plot, this.words),
      this.facts, section("Chunks", this.table.node));
    this.node = el("div", {}, this.problem, this.body);
    this.exchange = null;
  }

  show(x) {
    this.exchange = x;
    refill(this.problem, x.outcome === "complete" ? null : el("p", { class: "banner bad" }, this.ending(x)));
    this.body.hidden = false;
    const submit = x.timeline.submit ?? 0;
    const speed = this.app.readerSpeed ?? 20;
    const seen = this.seen = follow(x.events, submit, 1 / speed, x.tokens.output);
    this.renderFacts(x);
    const chunks = new Map(seen.chunks.map((chunk) => [chunk.index, chunk]));
    let before = submit;
    this.table.update(x.events.map((event, i) => {
      const chunk = chunks.get(i);
      const row = { i, event, gap: event.t - before, chunk };
      before = event.t;
      return row;
    }));
    say(this.words, seen.chunks.length
      ? `Reader of ${number(speed)} tokens/s from submit on: waits ${seconds(seen.idle)} in all, shaded; the last time is for chunk ${seen.worst + 1} of ${seen.chunks.length}, at ${seconds(seen.chunks[seen.worst].t)}. Later pauses are covered by what there is to read.`
      : "No event of it carried output.");
    this.draw();
  }

  ending(x) {
    const refusal = x.refusal ? `: ${x.refusal.kind} (${x.refusal.source}, confidence ${x.refusal.confidence})` : "";
    return `It ended as ${x.outcome}${refusal}${x.error ? `: ${x.error}` : ""}${x.no_token_reason ? `; no token: ${x.no_token_reason}` : ""}.`;
  }

  /** It runs still, or is not kept any more. */
  missing(id, told) {
    this.exchange = null;
    this.body.hidden = true;
    if (told) {
      refill(this.problem, el("p", { class: "banner", role: "status" }, `${id} is under way: ${seconds(told.age)} old, ${count(told.tokens)} tokens, TTFT ${seconds(told.ttft)}. Its chunks are shown as soon as it has ended.`));
    } else {
      refill(this.problem, emptyState(`${id} is not kept: the meter keeps the newest exchanges (meter.exchanges_kept). A capture keeps all of them:`, "llmtap proxy --upstream URL --capture ./capture"));
    }
  }

  renderFacts(x) {
    const metrics = Object.entries(NAMES).map(([name, words]) => [words, name === "smooth_benefit" ? `${number(x.metrics[name])} tokens` : seconds(x.metrics[name])]);
    metrics.push(["±", `${seconds(x.uncertainty)}${x.uncertain ? ", more than the limit" : ""}`]);
    const c = x.chunking, t = x.tokens;
    refill(this.facts,
      list("Figures", metrics),
      list("Exchange", [
        ["tenant", x.tenant], ["model", x.model ?? NONE], ["arm", x.arm ?? NONE], ["route", x.route ?? NONE],
        ["arrived", clock(x.arrival)], ["request", `${x.method} ${x.path}`], ["status", x.status ?? NONE], ["outcome", x.outcome],
        ["finish", x.finish_reason ?? NONE], ["dialect", x.dialect ?? NONE], ["request id", x.request_id ?? NONE], ["clock", x.clock],
      ]),
      list("Chunking", [
        ["tokens", `${count(t.output)} by ${t.source}`], ["input", `${count(t.input)}, ${count(t.cached)} cached`], ["reasoning", count(t.reasoning)],
        ["events", `${count(c.events)}, ${count(c.content_events)} with output`], ["reads", `${count(c.reads)}, ${number(c.events_per_read)} events each`],
        ["tokens a chunk", number(c.tokens_per_chunk_mean)], ["single tokens", share(c.single_token_share)],
        ["bursts", `${count(c.bursts)}, longest hold ${seconds(c.burst_hold_max)}`], ["bytes", `${bytes(x.request_bytes)} up, ${bytes(x.response_bytes)} down`],
      ]),
      list("The tap", [
        ["added to the request", seconds(x.added.request)], ["added to the first chunk", seconds(x.added.first_chunk)],
        ["added to a chunk, at most", seconds(x.added.chunk_max)], ["held by the client", seconds(x.paused)],
        ["guardrail", x.guardrail ? `${x.guardrail.action} (${x.guardrail.signal})` : NONE], ["retries", count(x.retries)],
        ...(x.server_timing ?? []).map((time) => [`server: ${time.name}`, seconds(time.ms / 1000)]),
      ]));
  }

  draw() {
    const x = this.exchange;
    if (!x) return;
    const { chunks, waits, idle } = this.seen;
    const submit = x.timeline.submit ?? 0;
    const speed = this.app.readerSpeed ?? 20;
    const every = Math.max(1, Math.ceil(chunks.length / CHUNKS_DRAWN));
    const came = { x: [0, submit], y: [0, 0] };
    chunks.forEach((chunk, i) => {
      if (i % every && i < chunks.length - 1) return;
      came.x.push(chunk.t);
      came.y.push(chunk.before + chunk.tokens);
    });
    const total = this.seen.tokens;
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
    const level = { x: waits.flatMap(([from, to]) => [from, to, null]), y: waits.flatMap(() => [0, 0, null]) };
    const line = (name, data, ink, about = {}) => ({ type: "scatter", mode: "lines", name, ...data, ...about, line: { color: colour(ink), width: 2, ...about.line } });
    const area = { x: [...wished.x, ...read.x.slice().reverse()], y: [...wished.y, ...read.y.slice().reverse()] };
    draw(this.plot, [
      line("waits, as area", area, "bad", { fill: "toself", fillcolor: colour("idle-area"), line: { width: 0 }, hoverinfo: "skip" }),
      line("deadlines", wished, "c6", { line: { dash: "dash" } }),
      line("read", read, "c1"),
      line("came", came, "c0", { mode: chunks.length < 400 ? "lines+markers" : "lines", line: { shape: "hv" }, marker: { size: 4 } }),
      line(`idle ${seconds(idle)}`, level, "bad", { line: { width: 6 } }),
    ], layout({ margin: { l: 60, r: 14, t: 8, b: 44 }, xaxis: { title: { text: "seconds since arrival" } }, yaxis: { title: { text: "tokens" } }, hovermode: "closest" }));
  }
}

const COLUMNS = [
  { id: "i", head: "#", text: (row) => count(row.i + 1), value: (row) => row.i },
  { id: "t", head: "at", title: "since arrival", text: (row) => seconds(row.event.t), value: (row) => row.event.t },
  { id: "gap", head: "gap", title: "since the event before, the first since submit", text: (row) => seconds(row.gap), value: (row) => row.gap },
  { id: "class", head: "class", kind: "text", text: (row) => row.event.class, value: (row) => row.event.class },
  { id: "bytes", head: "bytes", text: (row) => count(row.event.bytes), value: (row) => row.event.bytes },
  { id: "tokens", head: "tokens", title: "that the event declares", text: (row) => count(row.event.tokens), value: (row) => row.event.tokens },
  { id: "due", head: "deadline", title: "when a reader who never waited wants it", text: (row) => seconds(row.chunk?.due), value: (row) => row.chunk?.due },
  { id: "late", head: "late by", text: (row) => (row.chunk ? (row.chunk.late > 0 ? seconds(row.chunk.late) : "in time") : NONE), value: (row) => row.chunk?.late, state: (row) => (row.chunk?.late > 0 ? "bad" : "") },
];

function list(title, rows) {
  return el("div", {}, el("h3", {}, title), el("dl", {}, rows.map(([name, value]) => [el("dt", {}, name), el("dd", {}, value)])));
}
