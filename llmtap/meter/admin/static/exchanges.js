// View "Exchanges": finished exchanges, the newest first, or one exchange in the inspector.

import { el, refill, setText, section, sendOne } from "./dom.js";
import { FAILED, NONE, clock, count, iso, seconds, tokenTime, zone } from "./format.js";
import { Inspector } from "./inspector.js";
import { Table, matching } from "./table.js";

const PERIOD_MS = 3000;
const RUNNING_MS = 1000;
const SHOWN = 100;
/** Number of exchanges that a filter searches: the maximum of the API. They are requested less often. */
const SEARCHED = 1000;
const SEARCH_MS = 9000;
/** Time for which the chunks of a running stream are requested: the maximum of the API. */
const WINDOW = "60s";
const OUTCOMES = [
  "complete", "refused", "client_cancelled", "client_error", "upstream_error", "upstream_reset", "upstream_timeout",
  "truncated", "rejected", "tap_error",
];

export class Exchanges {
  constructor(app) {
    this.app = app;
    this.id = "exchanges";
    this.title = "Exchanges";
    this.one = null;
    this.list = null;
    this.inspector = new Inspector(app);
    this.polls = [
      app.poll("exchanges", (signal) => this.ask(signal),
        () => this.period(), (answer) => this.update(answer)),
    ];
    this.empty = el("div");
    this.outcome = el("select", { id: "outcome", onchange: () => this.polls[0].again() },
      el("option", { value: "" }, "any"), OUTCOMES.map((name) => el("option", { value: name }, name)));
    this.table = new Table(COLUMNS, { caption: "Newest exchanges", key: (row) => row.id, rows: SHOWN });
    /** Whether the focus or the mouse is in the rows. Meanwhile the rows do not change, and new answers wait. */
    this.holds = { focus: false, mouse: false };
    this.waiting = null;
    const { body } = this.table;
    body.addEventListener("focusin", () => this.hold("focus", true));
    body.addEventListener("focusout", () => this.hold("focus", false));
    body.addEventListener("pointerenter", (event) => this.hold("mouse", event.pointerType === "mouse"));
    body.addEventListener("pointerleave", () => this.hold("mouse", false));
    this.words = el("p", { class: "counts" });
    const bar = el("div", { class: "bar" },
      el("label", { for: "outcome" }, "Outcome ", this.outcome), this.words);
    this.listing = el("div", {}, section("Newest exchanges", bar, this.empty, this.table.node));
    this.heading = el("h2", { tabindex: "-1" });
    const back = el("p", {}, el("a", { href: "#exchanges" }, "← all exchanges"));
    this.single = el("div", { hidden: true }, back, this.heading, this.inspector.node);
    this.node = el("div", {}, this.single, this.listing);
  }

  period() {
    if (this.inspector.running !== null) return RUNNING_MS;
    return this.app.filter && this.one === null ? SEARCH_MS : PERIOD_MS;
  }

  /** `#exchanges/ID` shows one exchange; else the list. */
  route(rest) {
    const one = rest === "" ? null : rest;
    if (one !== null) document.title = `${one} · llmtap`;
    if (one === this.one) return;
    const before = this.one;
    if (before === null) this.place = window.scrollY;
    this.holds.mouse = false; // reset it here, because hidden rows cause no `pointerleave` event
    this.one = one;
    this.single.hidden = one === null;
    this.listing.hidden = one !== null;
    this.inspector.clear();
    if (one !== null) {
      refill(this.heading, `Exchange ${one}`);
      this.heading.focus({ preventScroll: false });
    } else {
      document.title = `${this.title} · llmtap`;
      this.table.link(before)?.focus({ preventScroll: true });
      window.scrollTo(0, this.place);
    }
    this.polls[0].again();
  }

  /** Acts on Escape: back from an exchange to the list, or focus out of the list. Returns whether it acted. */
  leave() {
    if (this.one !== null) location.hash = this.id;
    else if (this.holds.focus) document.activeElement.blur();
    else return false;
    return true;
  }

  hold(by, yes) {
    this.holds[by] = yes;
    if (this.held || this.waiting === null) return;
    this.list = this.waiting;
    this.waiting = null;
    this.app.render("exchanges", () => this.render());
  }

  get held() {
    return this.holds.focus || this.holds.mouse;
  }

  async ask(signal) {
    const { api } = this.app;
    if (this.one === null) {
      const limit = this.app.filter ? SEARCHED : SHOWN, outcome = this.outcome.value;
      const list = await api.get("exchanges", { limit, outcome }, signal);
      return { of: null, list: { ...list, limit, outcome } };
    }
    const id = this.one;
    const shown = this.inspector.exchange;
    if (shown?.id === id && !(shown.side && !shown.pair && await this.isPaired(id, signal))) {
      return { of: id, same: true };
    }
    if (this.inspector.running?.id === id) {
      const running = await this.askRunning(id, signal);
      if (running) return { of: id, running };
    }
    const exchange = await this.askEnded(id, signal);
    if (exchange) {
      const { first_token: firstToken } = await this.app.api.get("first_token", { id }, signal);
      return { of: id, exchange, firstToken, pair: await this.askPair(exchange, signal) };
    }
    return { of: id, running: await this.askRunning(id, signal) };
  }

  /** Returns the finished exchange with this id and all its events; null if the meter no longer has it. */
  async askEnded(id, signal) {
    let whole = null, next = null;
    do { // repeat, because a long exchange needs several answers
      const answer = await this.app.api.get("exchanges", { id, events: "1", limit: 1, next }, signal);
      const [part] = answer.exchanges;
      if (!part) break;
      if (whole) whole.events = whole.events.concat(part.events);
      else whole = part;
      next = answer.next;
    } while (next !== null);
    return whole;
  }

  /** Returns whether an exchange is in a pair, which the meter knows some time after the end. */
  async isPaired(id, signal) {
    const { exchanges } = await this.app.api.get("exchanges", { id, limit: 1 }, signal);
    return Boolean(exchanges[0]?.pair);
  }

  /** Returns the exchanges of a pair with their events, and the titles of its figures; null without a pair. */
  async askPair(x, signal) {
    if (!x.pair) return null;
    const { api } = this.app;
    const { exchanges } = await api.get("exchanges", { pair_id: x.pair.id, events: "1", limit: 50 }, signal);
    const { figures } = await api.get("pairs", { limit: 1 }, signal);
    return { members: exchanges, figures };
  }

  /** Returns the running stream with this id, or null. */
  async askRunning(id, signal) {
    const { streams } = await this.app.api.get("streams", { id, limit: 1, window: WINDOW }, signal);
    return streams[0] ?? null;
  }

  update(answer) {
    if (answer.of !== this.one || answer.same) return;
    this.app.render("exchanges", () => {
      if (answer.of === null) {
        // Show the answer at once, even if rows are held, if the filter or the limit has changed.
        const same = this.list?.limit === answer.list.limit && this.list.outcome === answer.list.outcome;
        if (this.held && same) this.waiting = answer.list;
        else [this.list, this.waiting] = [answer.list, null];
        this.render();
        return;
      }
      if (answer.exchange) this.inspector.show(answer.exchange, answer.firstToken, answer.pair);
      else if (answer.running) this.inspector.watch(answer.running);
      else this.inspector.missing(answer.of);
    });
  }

  render() {
    if (!this.list) return;
    const words = (x) => [x.tenant, x.model, x.arm, x.id, x.request_id, x.upstream_request_id, x.trace_id, x.path];
    const rows = matching(this.list.exchanges, this.app.filter, words);
    this.table.update(rows);
    setText(this.words, rows.length ? this.about(rows.length) : "");
    refill(this.empty, rows.length ? null : this.nothing());
  }

  /** Returns a description of the rows, because the list has the newest exchanges only. */
  about(n) {
    const { exchanges, next } = this.list;
    const all = `${next === null ? "all" : "the newest"} ${count(exchanges.length)} kept`;
    const which = this.app.filter ? `${count(n)} of ${all} fit the filter` : `${all}, the last to end first`;
    if (this.waiting === null) return which;
    const here = new Set(exchanges.map((x) => x.id));
    const newer = this.waiting.exchanges.filter((x) => !here.has(x.id)).length;
    return `${which} · held while you are in it; ${count(newer)} newer`;
  }

  nothing() {
    const { exchanges, next, outcome } = this.list;
    if (outcome || this.app.filter) {
      const those = next === null ? "those kept" : `the newest ${count(exchanges.length)} kept`;
      return el("p", { class: "soft" }, `None of ${those} fits.`);
    }
    return sendOne("No exchange has ended yet. Send a request through llmtap:", this.app.live);
  }

  onShow() {
    this.render();
    this.inspector.draw();
  }

  filterChanged() {
    this.render();
    const limit = this.app.filter ? SEARCHED : SHOWN;
    if (this.list?.limit !== limit) this.polls[0].again();
  }
}

/** Returns the latest known time of an exchange in ms since 1970: its end, its last write, or its arrival. */
function endOf(x) {
  const { response_end: end, delivered } = x.timeline;
  return Date.parse(x.arrival) + 1000 * (end ?? delivered ?? 0);
}

const COLUMNS = [
  {
    id: "id", head: "id", kind: "text",
    text: (x) => x.id, link: (x) => `#exchanges/${encodeURIComponent(x.id)}`,
  },
  {
    id: "ended", head: `ended, ${zone()}`,
    text: (x) => clock(endOf(x)), value: (x) => endOf(x), tip: (x) => `arrived ${iso(x.arrival)}`,
  },
  {
    id: "outcome", head: "outcome", kind: "text",
    text: (x) => x.outcome, value: (x) => x.outcome, tip: (x) => x.error ?? "",
    state: (x) => (FAILED.has(x.outcome) ? "bad" : ""),
  },
  {
    id: "ttft", head: "TTFT", title: "– if the answer came in one piece",
    text: (x) => seconds(tokenTime(x, "ttft")), value: (x) => tokenTime(x, "ttft"),
  },
  { id: "tenant", head: "tenant", kind: "text", text: (x) => x.tenant, value: (x) => x.tenant },
  { id: "model", head: "model", kind: "text", text: (x) => x.model ?? NONE, value: (x) => x.model },
  { id: "arm", head: "arm", kind: "text", text: (x) => x.arm ?? NONE, value: (x) => x.arm },
  { id: "path", head: "path", kind: "text", text: (x) => x.path, value: (x) => x.path },
  { id: "status", head: "status", text: (x) => x.status ?? NONE, value: (x) => x.status },
  {
    id: "gap", head: "longest pause",
    text: (x) => seconds(x.metrics.tbc_max), value: (x) => x.metrics.tbc_max,
  },
  {
    id: "idle", head: "user idle",
    text: (x) => seconds(x.metrics.user_idle), value: (x) => x.metrics.user_idle,
  },
  { id: "e2e", head: "E2E", text: (x) => seconds(x.metrics.e2e), value: (x) => x.metrics.e2e },
  { id: "tokens", head: "tokens", text: (x) => count(x.tokens.output), value: (x) => x.tokens.output },
  {
    id: "wide", head: "±", title: "uncertainty of the timestamps",
    text: (x) => seconds(x.uncertainty), value: (x) => x.uncertainty,
  },
];
