// What has ended, the newest first, and one of it, or one that is under way, in the inspector.

import { el, refill, section, sendOne } from "./dom.js";
import { ENDED_WELL, NONE, clock, count, seconds } from "./format.js";
import { Inspector } from "./inspector.js";
import { Table, matching } from "./table.js";

const PERIOD_MS = 3000;
const RUNNING_MS = 1000;
const SHOWN = 100;
/** Of a stream under way so much is told chunk by chunk: the most that the API gives. */
const WINDOW = "60s";
const OUTCOMES = [
  "complete", "refused", "client_cancelled", "upstream_error", "upstream_reset", "upstream_timeout",
  "truncated", "rejected", "tap_error",
];

export class Exchanges {
  constructor(app) {
    this.app = app;
    this.id = "exchanges";
    this.title = "Exchanges";
    this.one = null;
    this.told = null;
    this.inspector = new Inspector(app);
    this.polls = [
      app.poll("exchanges", (signal) => this.ask(signal),
        () => (this.inspector.running === null ? PERIOD_MS : RUNNING_MS), (told) => this.heard(told)),
    ];
    this.empty = el("div");
    this.outcome = el("select", { id: "outcome", onchange: () => this.polls[0].again() },
      el("option", { value: "" }, "any"), OUTCOMES.map((name) => el("option", { value: name }, name)));
    this.table = new Table(COLUMNS, { caption: "Newest exchanges", key: (row) => row.id, rows: SHOWN });
    const bar = el("div", { class: "bar" }, el("label", { for: "outcome" }, "Outcome ", this.outcome));
    this.listing = el("div", {}, section("Newest exchanges", bar, this.empty, this.table.node));
    this.heading = el("h2", { tabindex: "-1" });
    const back = el("p", {}, el("a", { href: "#exchanges" }, "← all exchanges"));
    this.single = el("div", { hidden: true }, back, this.heading, this.inspector.node);
    this.node = el("div", {}, this.single, this.listing);
  }

  /** `#exchanges/ID`: that one; else the list. */
  route(rest) {
    const one = rest === "" ? null : rest;
    if (one === this.one) return;
    this.one = one;
    this.single.hidden = one === null;
    this.listing.hidden = one !== null;
    this.inspector.clear();
    if (one !== null) {
      refill(this.heading, `Exchange ${one}`);
      this.heading.focus({ preventScroll: false });
    }
    this.polls[0].again();
  }

  async ask(signal) {
    const { api } = this.app;
    if (this.one === null) {
      const told = await api.get("exchanges", { limit: SHOWN, outcome: this.outcome.value }, signal);
      return { of: null, told };
    }
    const id = this.one;
    if (this.inspector.exchange?.id === id) return { of: id, same: true };
    if (this.inspector.running?.id === id) {
      const running = await this.askRunning(id, signal);
      if (running) return { of: id, running };
    }
    const { exchanges } = await api.get("exchanges", { id, events: "1", limit: 1 }, signal);
    if (exchanges.length) return { of: id, told: exchanges[0] };
    return { of: id, running: await this.askRunning(id, signal) };
  }

  /** The stream of this name, null when it is not under way. */
  async askRunning(id, signal) {
    const { streams } = await this.app.api.get("streams", { id, limit: 1, window: WINDOW }, signal);
    return streams[0] ?? null;
  }

  heard(answer) {
    if (answer.of !== this.one || answer.same) return;
    this.app.render("exchanges", () => {
      if (answer.of === null) {
        this.told = answer.told;
        this.render();
        return;
      }
      if (answer.told) this.inspector.show(answer.told);
      else if (answer.running) this.inspector.watch(answer.running);
      else this.inspector.missing(answer.of);
    });
  }

  render() {
    if (!this.told) return;
    const words = (x) => [x.tenant, x.model, x.arm, x.id, x.request_id, x.path];
    const rows = matching(this.told.exchanges, this.app.filter, words);
    this.table.update(rows);
    refill(this.empty, rows.length ? null : this.nothing());
  }

  nothing() {
    if (this.outcome.value || this.app.filter) {
      return el("p", { class: "soft" }, "None of those kept fits.");
    }
    return sendOne("Nothing has ended yet. Send something through the tap:", this.app.live);
  }

  shown() {
    this.render();
    this.inspector.draw();
  }

  filterChanged() {
    this.render();
  }

  themed() {
    this.inspector.draw();
  }
}

const COLUMNS = [
  {
    id: "id", head: "id", kind: "text",
    text: (x) => x.id, link: (x) => `#exchanges/${encodeURIComponent(x.id)}`,
  },
  { id: "arrival", head: "arrived", text: (x) => clock(x.arrival), value: (x) => x.arrival },
  { id: "tenant", head: "tenant", kind: "text", text: (x) => x.tenant, value: (x) => x.tenant },
  { id: "model", head: "model", kind: "text", text: (x) => x.model ?? NONE, value: (x) => x.model },
  { id: "arm", head: "arm", kind: "text", text: (x) => x.arm ?? NONE, value: (x) => x.arm },
  {
    id: "outcome", head: "outcome", kind: "text",
    text: (x) => x.outcome, value: (x) => x.outcome, state: (x) => (ENDED_WELL.has(x.outcome) ? "" : "bad"),
  },
  { id: "status", head: "status", text: (x) => x.status ?? NONE, value: (x) => x.status },
  { id: "ttft", head: "TTFT", text: (x) => seconds(x.metrics.ttft), value: (x) => x.metrics.ttft },
  {
    id: "gap", head: "longest gap",
    text: (x) => seconds(x.metrics.tbc_max), value: (x) => x.metrics.tbc_max,
  },
  {
    id: "idle", head: "user idle",
    text: (x) => seconds(x.metrics.user_idle), value: (x) => x.metrics.user_idle,
  },
  { id: "e2e", head: "E2E", text: (x) => seconds(x.metrics.e2e), value: (x) => x.metrics.e2e },
  { id: "tokens", head: "tokens", text: (x) => count(x.tokens.output), value: (x) => x.tokens.output },
  {
    id: "wide", head: "±", title: "how wide a stamp can be",
    text: (x) => seconds(x.uncertainty), value: (x) => x.uncertainty,
  },
];
