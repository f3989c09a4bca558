// View "Chunking": how answers are divided into chunks, and which requests were refused.

import { card, el, refill, setText, section, sendOne } from "./dom.js";
import { NONE, basis, clock, count, iso, number, ranked, seconds, share, zone } from "./format.js";
import { ALL_TRAFFIC, Table, matching } from "./table.js";

const PERIODS = { "10s": 2000, "1m": 3000, "5m": 5000, "1h": 15000, all: 15000 };
const REFUSED_MS = 5000;
const REFUSED_MAX = 50;

export class Chunking {
  constructor(app) {
    this.app = app;
    this.id = "chunking";
    this.title = "Chunking";
    this.summary = null;
    this.polls = [
      app.poll("summary", (signal) => this.ask(signal), () => PERIODS[app.window] ?? 5000,
        (data) => this.update(data)),
      app.poll("refused exchanges", (signal) => this.askRefused(signal), REFUSED_MS,
        (data) => this.refused(data)),
    ];
    this.empty = el("div");
    this.scope = el("p", { class: "soft" });
    this.totals = el("dl", { class: "cards" });
    this.averages = el("dl", { class: "cards" });
    this.table = new Table(COLUMNS, {
      caption: "Chunking and refusals by model and tenant",
      key: (row) => `${row.label} ${row.name}`,
      sort: "events",
    });
    const newest = { caption: "Newest refused exchanges", key: (x) => x.id, rows: REFUSED_MAX };
    this.list = new Table(REFUSED, newest);
    this.none = el("div");
    this.node = el("div", {},
      section("Chunking of answers", this.empty, this.scope, this.totals),
      section("Size and pace of chunks", this.averages),
      section("By model and tenant", this.table.node),
      section("Newest refused", this.list.node, this.none));
  }

  ask(signal) {
    return this.app.api.get("summary", { window: this.app.window, by: "model,tenant" }, signal);
  }

  askRefused(signal) {
    return this.app.api.get("exchanges", { outcome: "refused", limit: REFUSED_MAX }, signal);
  }

  update(summary) {
    this.summary = summary;
    this.app.render("chunking", () => this.render());
  }

  refused(answer) {
    this.refusedAnswer = answer;
    this.app.render("refused", () => this.renderRefused());
  }

  onShow() {
    this.render();
    this.renderRefused();
  }

  filterChanged() {
    this.onShow();
  }

  render() {
    const s = this.summary;
    if (!s) return;
    const words = `No exchange has ended in this window (${s.window.name}). Select a longer window, or send a request:`;
    refill(this.empty, s.n ? null : sendOne(words, this.app.live));
    setText(this.scope, this.app.filter ? ALL_TRAFFIC : "");
    this.renderTotals(s, basis(s.n, s.window));
    this.renderAverages(s.chunking, basis(s.n, s.window));
    const rows = ["model", "tenant"].flatMap((label) =>
      Object.entries(s.by[label] ?? {}).map(([name, part]) => ({ label, name, part })));
    this.table.update(matching(rows, this.app.filter, (row) => [row.name]));
  }

  renderAverages(c, rests) {
    const known = count(c.chunks_with_known_tokens);
    const unknown = c.content_events ? 1 - c.chunks_with_known_tokens / c.content_events : 0;
    const most = `at most ${count(c.tokens_per_chunk_max)}`;
    const about = unknown > 0 ? `${most}; ${share(unknown)} of the chunks have an unknown size` : most;
    refill(this.averages, [
      card("Tokens per chunk", number(c.tokens_per_chunk_mean), about,
        `n ${known} chunks with a known size`),
      card("Single tokens", share(c.single_token_share), "of these chunks carry one token", `n ${known}`),
      card("Events per read", number(c.events_per_read), "arrive together", `n ${count(c.reads)} reads`),
      card("Bytes per event", number(c.bytes_per_event_mean), "of the decoded body, on average",
        `n ${count(c.events)} events`),
      card("Longest hold", seconds(c.bursts.hold_max), "pause before a burst", rests),
    ]);
  }

  renderTotals(s, rests) {
    const c = s.chunking;
    const named = (counts) => ranked(counts).map(([name, n]) => `${name} ${count(n)}`).join(", ");
    const made = `${count(s.tokens.cancelled)} tokens generated before`;
    const wasted = `${count(s.tokens.after_cancel)} after the client disconnected`;
    const reasons = named(s.no_token.reasons) || "every stream had a token";
    refill(this.totals, [
      card("Answers", count(s.n), "that ended in the window", rests),
      card("Events", count(c.events), `${count(c.content_events)} with output`, rests),
      card("Bursts", count(c.bursts.n),
        `in ${count(c.bursts.streams)} streams, ${count(c.bursts.events)} events`, rests),
      card("Refused", count(s.refusals.n), s.refusals.n
        ? `${share(s.refusals.share)}: ${named(s.refusals.kinds)}` : "by the model or a guardrail", rests),
      card("No token", count(s.no_token.n), reasons, rests),
      card("Cancelled", count(s.outcomes.client_cancelled ?? 0), `${made}, ${wasted}`, rests),
    ]);
  }

  renderRefused() {
    if (!this.refusedAnswer) return;
    const rows = matching(this.refusedAnswer.exchanges, this.app.filter, (x) => [x.tenant, x.model, x.arm]);
    this.list.update(rows);
    const n = this.refusedAnswer.exchanges.length;
    const words = n
      ? `None of the newest ${count(n)} refused exchanges matches the filter.`
      : "No kept exchange was refused.";
    refill(this.none, rows.length ? null : el("p", { class: "soft" }, words));
  }
}

const COLUMNS = [
  { id: "name", head: "name", kind: "text", text: (row) => row.name, value: (row) => row.name },
  { id: "label", head: "label", kind: "text", text: (row) => row.label, value: (row) => row.label },
  { id: "n", head: "n", text: (row) => count(row.part.n), value: (row) => row.part.n },
  {
    id: "events", head: "events",
    text: (row) => count(row.part.chunking.events), value: (row) => row.part.chunking.events,
  },
  {
    id: "tokens", head: "tokens/chunk",
    text: (row) => number(row.part.chunking.tokens_per_chunk_mean),
    value: (row) => row.part.chunking.tokens_per_chunk_mean,
  },
  {
    id: "single", head: "single", title: "share of chunks with one token",
    text: (row) => share(row.part.chunking.single_token_share),
    value: (row) => row.part.chunking.single_token_share,
  },
  {
    id: "reads", head: "events/read",
    text: (row) => number(row.part.chunking.events_per_read),
    value: (row) => row.part.chunking.events_per_read,
  },
  {
    id: "bursts", head: "bursts",
    text: (row) => count(row.part.chunking.bursts.n), value: (row) => row.part.chunking.bursts.n,
  },
  {
    id: "hold", head: "longest hold",
    text: (row) => seconds(row.part.chunking.bursts.hold_max),
    value: (row) => row.part.chunking.bursts.hold_max,
  },
  {
    id: "refused", head: "refusals", title: "share of all refusals, those found by words included",
    text: (row) => share(row.part.refusals.share), value: (row) => row.part.refusals.share,
  },
  {
    id: "none", head: "no token",
    text: (row) => count(row.part.no_token.n), value: (row) => row.part.no_token.n,
  },
];

const REFUSED = [
  {
    id: "id", head: "id", kind: "text",
    text: (x) => x.id, link: (x) => `#exchanges/${encodeURIComponent(x.id)}`,
  },
  {
    id: "arrival", head: `arrived, ${zone()}`,
    text: (x) => clock(x.arrival), value: (x) => x.arrival, tip: (x) => iso(x.arrival),
  },
  { id: "tenant", head: "tenant", kind: "text", text: (x) => x.tenant, value: (x) => x.tenant },
  { id: "model", head: "model", kind: "text", text: (x) => x.model ?? NONE, value: (x) => x.model },
  {
    id: "kind", head: "kind", kind: "text",
    text: (x) => x.refusal?.kind ?? "unknown", value: (x) => x.refusal?.kind,
    tip: (x) => (x.refusal?.detail?.stage ? `stage ${x.refusal.detail.stage}: ${x.refusal.detail.why}` : ""),
  },
  { id: "source", head: "source", kind: "text", text: (x) => x.refusal?.source ?? NONE },
  { id: "confidence", head: "confidence", kind: "text", text: (x) => x.refusal?.confidence ?? NONE },
  {
    id: "late", head: "tokens before", title: "tokens that the client had received before",
    text: (x) => count(x.guardrail?.tokens_before), value: (x) => x.guardrail?.tokens_before,
  },
];
