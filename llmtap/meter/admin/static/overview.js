// View "Overview": the key figures now, by tenant, model, arm or class, and over the last hour or 24 hours.

import { ALARMS, alarmsOf, ringing } from "./alarms.js";
import { History, draw, legend } from "./charts.js";
import { card, el, emptyState, refill, setText, section, sendOne } from "./dom.js";
import {
  FAILED, NONE, basis, clock, count, number, ranked, rate, seconds, share, width,
} from "./format.js";
import { Labels } from "./labels.js";
import { ALL_TRAFFIC, Table, matching } from "./table.js";
import { capturePaused, losses, lostWithVantages, uncertain, upstreamsDown } from "./tap.js";

const FAILED_MIN = 3;
/** Number of places (path, content type) with answers of unknown format that are listed. */
const PLACES_SHOWN = 2;
const BY = ["tenant", "model", "arm", "class"];
const PERIODS = { "10s": 2000, "1m": 2000, "5m": 5000, "1h": 15000, all: 15000 };
const DRAW_MS = 2000;
/** Lengths of windows in seconds. A window consists of slices, so that it usually covers a little less. */
const LENGTHS = { "1m": 60, "5m": 300, "1h": 3600 };
const SHORT = 0.8;
const SERIES = [
  "ttft_p50", "ttft_p99", "itl_p50", "itl_p99", "achieved_rps", "goodput_rps", "smooth_goodput_tps",
];
/** By period of the charts: step of the points of the meter, and whether live points follow. */
const PERIODS_SHOWN = {
  "last hour": { step: "10s", live: true, words: "Each point covers 10 s" },
  "last 24 hours": { step: "5m", live: false, words: "Each point covers 5 minutes" },
};
const HISTORY_MS = 60000;
const PERCENTILES = [["c0", "p50"], ["c1", "p99"]];
const RATES = [["c6", "all exchanges"], ["c2", "met every objective"]];
const SMOOTH = [["c2", "smooth goodput"]];
const ITL_OPTIONS = "A: time between chunks. B-even: the gap before a chunk, divided among its tokens."
  + " C: timestamps of the server.";
const NOT_COUNTED = "Not counted: errors of clients (4xx), refusals without output, clients that left before a limit"
  + " was missed, and, without count_own_faults, requests that llmtap rejected or lost. Errors of the upstream are bad.";
const MET = "Met their objectives";
const USER_IDLE = "total time that a reader waits with nothing to read, from submit";

export class Overview {
  constructor(app) {
    this.app = app;
    this.id = "overview";
    this.title = "Overview";
    this.by = "tenant";
    this.summary = null;
    this.drawn = 0;
    this.polls = [
      app.poll("summary", (signal) => this.ask(signal), () => PERIODS[app.window] ?? 5000,
        (data) => this.update(data)),
      app.poll("history", (signal) => app.api.get("history", { step: this.shownPeriod.step }, signal), HISTORY_MS,
        (points) => this.showHistory(points)),
    ];
    this.period = el("select", { id: "period", onchange: () => this.setPeriod() },
      Object.keys(PERIODS_SHOWN).map((name) => el("option", { value: name }, name)));
    this.cards = el("dl", { class: "cards" });
    this.outcomes = el("p", { class: "outcomes" });
    this.empty = el("div");
    this.troubles = el("div");
    this.notes = el("div");
    this.scope = el("p", { class: "soft" });
    const key = ({ name, alarm }) => `${name} ${alarm.severity} ${alarm.long}`;
    this.alarms = new Table(ALARMS, { caption: "Burn-rate alarms", key });
    this.alarmed = el("div", { hidden: true }, section("Burn-rate alarms", this.alarms.node));
    const about = { caption: "Figures by tenant", key: (row) => row.name, sort: "n" };
    this.table = new Table(this.columns(), about);
    this.choice = el("div", { class: "choice", role: "group", "aria-label": "Split by" },
      BY.map((by) => this.button(by)));
    this.tableEmpty = el("div");
    this.labels = new Labels("traffic");
    this.charts = Object.fromEntries(["ttft", "itl", "goodput", "smooth"].map(
      (id) => [id, el("div", { class: "plot", role: "img" })]));
    this.pointWords = el("p", { class: "soft" });
    this.node = el("div", {},
      section("Now", this.troubles, this.notes, this.empty, this.scope, this.cards, this.outcomes),
      section("Over time",
        el("div", { class: "bar" }, el("label", { for: "period" }, "Period ", this.period)),
        el("div", { class: "panels" },
          this.figure("Time to first token", "ttft", PERCENTILES),
          this.figure("Inter-token latency", "itl", PERCENTILES)),
        this.pointWords),
      section("Split by", this.choice, this.table.node, this.tableEmpty),
      this.labels.node,
      section("Goodput over time",
        el("div", { class: "panels" },
          this.figure("Goodput, requests/s", "goodput", RATES),
          this.figure("Smooth goodput, tokens/s", "smooth", SMOOTH))),
      this.alarmed);
    this.setPeriod();
  }

  get shownPeriod() {
    return PERIODS_SHOWN[this.period.value];
  }

  setPeriod() {
    setText(this.pointWords, `${this.shownPeriod.words}; the dashed line is the value of the selected window.`);
    this.history = new History(SERIES);
    this.polls[1].again();
  }

  showHistory(points) {
    this.history.begin(points);
    this.draw();
  }

  async ask(signal) {
    const { api, window } = this.app;
    const summary = await api.get("summary", { window, by: BY.join(",") }, signal);
    // If the window is empty, get the newest exchange: its time shows which window is not empty.
    this.last = summary.n ? null : (await api.get("exchanges", { limit: 1 }, signal)).exchanges[0];
    return summary;
  }

  button(by) {
    const pressed = String(by === this.by), onclick = () => this.splitBy(by);
    return el("button", { type: "button", "data-by": by, "aria-pressed": pressed, onclick }, by);
  }

  figure(title, id, lines) {
    this.charts[id].setAttribute("aria-label", `${title} over time`);
    return el("figure", {}, el("figcaption", {}, title), legend(lines), this.charts[id]);
  }

  splitBy(by) {
    this.by = by;
    for (const button of this.choice.children) {
      button.setAttribute("aria-pressed", String(button.dataset.by === by));
    }
    setText(this.table.caption, `Figures by ${by}`);
    this.render();
  }

  update(summary) {
    this.summary = summary;
    this.app.render("overview", () => this.render());
    this.draw(); // the charts show the figures of the cards
  }

  /** Adds a summary of the live feed to the charts: the figures of the last 10 s, once a second. */
  onLiveSummary(live) {
    const m = live.metrics;
    this.live = live;
    if (this.shownPeriod.live) {
      this.history.add(new Date(), {
        ttft_p50: m.ttft.p50, ttft_p99: m.ttft.p99, itl_p50: m.itl.p50, itl_p99: m.itl.p99,
        achieved_rps: live.load.achieved_rps, goodput_rps: live.goodput?.requests_per_second ?? null,
        smooth_goodput_tps: live.smooth_goodput.tokens_per_second,
      });
    }
    if (this.app.view === this && performance.now() - this.drawn > DRAW_MS) this.draw();
    if (this.app.view === this && this.open) setText(this.open, count(live.open));
  }

  onShow() {
    if (this.summary) this.app.render("overview", () => this.render());
    this.draw();
  }

  render() {
    const s = this.summary;
    if (!s) return;
    this.renderTroubles(s);
    const lost = lostWithVantages(s.relays).map((words) => el("p", { class: "soft" }, words));
    refill(this.notes, youngMeter(s.window), lost, unmeasured(s.relays), withoutDialect(s));
    refill(this.empty, this.nothing(s));
    setText(this.scope, this.app.filter ? ALL_TRAFFIC : "");
    this.renderCards(s);
    const outcomes = ranked(s.outcomes);
    refill(this.outcomes, outcomes.length ? "Outcomes: " : null, outcomes.map(([name, n]) => {
      const about = { class: FAILED.has(name) ? "outcome bad" : "outcome" };
      return el("span", about, `${name} ${count(n)} (${share(n / s.n)})`);
    }));
    const rows = this.rows(s);
    const fits = matching(rows, this.app.filter, (row) => [row.name]);
    this.table.update(fits);
    const why = rows.length ? `No ${this.by} fits the filter.` : this.why();
    refill(this.tableEmpty, fits.length ? null : el("p", { class: "soft" }, why));
    this.labels.update({ all: s.labels });
  }

  /** Shows one banner with all troubles, the worst first, and the table of alarms. */
  renderTroubles(s) {
    const alarms = alarmsOf(s.slo);
    const lines = [
      ...upstreamsDown(s.relays), failing(s), ...alarms.filter(({ alarm }) => alarm.ringing && !alarm.inhibited).map(ringing),
      ...ttftSteps(s.ttft_steps), ...capturePaused(s.capture), unreliable(s),
    ].filter(Boolean).map((line) => el("p", {}, line));
    // Replace the banner only if its text differs, since screen readers read a new banner aloud.
    const words = lines.map((line) => line.textContent).join();
    if (words !== this.announced) {
      this.announced = words;
      refill(this.troubles, lines.length ? el("div", { class: "banner bad", role: "alert" }, lines) : null);
    }
    this.alarmed.hidden = !alarms.length;
    this.alarms.update(alarms);
  }

  /** Returns why there are no data, and what to do; null if there are data. */
  nothing(s) {
    if (s.n) return null;
    if (!Object.values(s.relays).some((relay) => relay.connected)) {
      const words = "No relay is connected to the meter, so nothing is measured.";
      return emptyState(words, "llmtap proxy --upstream http://127.0.0.1:8000");
    }
    if (this.last) {
      const { arrival, timeline } = this.last;
      const ended = Date.parse(arrival) + 1000 * (timeline.delivered ?? timeline.response_end ?? 0);
      const ago = (Date.parse(s.window.end) - ended) / 1000;
      const shows = Object.keys(LENGTHS).find((name) => ago < SHORT * LENGTHS[name]) ?? "all";
      return emptyState(`No exchange has ended in this window (${s.window.name}). The last exchange ended `
        + `${seconds(ago)} ago, at ${clock(new Date(ended))}: the window "${shows}" shows it.`);
    }
    const words = `No exchange has ended in this window (${s.window.name}). Send a request through llmtap:`;
    return sendOne(words, this.app.live);
  }

  why() {
    if (this.by === "arm") {
      return "No arm had traffic in this window. config/experiment.toml is an example of an experiment.";
    }
    if (this.by === "class") {
      return "No class of tenants has objectives and traffic. config/slo.toml is an example.";
    }
    return "No exchange in this window.";
  }

  renderCards(s) {
    const m = s.metrics, smooth = s.smooth_goodput;
    const wide = width(s.uncertainties);
    const bursts = m.itl.p50 === 0 ? "; bursts: over half of the gaps are 0" : "";
    const option = m.itl.option ? `option ${m.itl.option}${bursts}` : "no gaps yet";
    const speed = `${number(smooth.speed_tokens_per_second)} tokens/s`;
    const several = smooth.alpha === null;
    const formula = several
      ? "sum of (output tokens - α × f(user idle)) per second; α and f differ between meters"
      : "sum of (output tokens - α × f(user idle)) per second;"
        + ` α = ${number(smooth.alpha)}, ${afterComma(smooth.idle)}`;
    const counted = ranked(s.tokens.source).map(([name]) => name).join(", ");
    const sources = counted ? `counted by ${counted}` : "nothing counted yet";
    this.flight = card("In flight", count(this.live?.open), "running exchanges", "now");
    const cards = [
      large(pair("TTFT", m.ttft, wide, s.window)),
      large(objectives(s.goodput, s.window, Object.keys(s.slo ?? {}))),
      card("Requests/s", number(s.load.achieved_rps), `started ${number(s.load.offered_rps)}/s`,
        basis(s.n, s.window)),
      this.flight,
      pair("ITL", m.itl, wide, s.window, option, ITL_OPTIONS),
      pair("User idle", m.user_idle, wide, s.window, `reader of ${speed}`, USER_IDLE),
      card("Smooth goodput", rate(smooth.tokens_per_second, "tokens/s"),
        several ? "several readers" : `reader of ${speed}`, basis(smooth.n, s.window), formula),
      card("Output", rate(s.tokens.output_per_second, "tokens/s"), sources,
        basis(s.n, s.window)),
    ];
    this.open = this.flight.querySelector(".value");
    refill(this.cards, cards);
  }

  rows(s) {
    const burn = burnRates(s.slo, this.by);
    const parts = Object.entries(s.by[this.by] ?? {});
    return parts.map(([name, part]) => ({ name, part, burn: burn(name) }));
  }

  columns() {
    const figure = (metric, name) => {
      const of = (row) => row.part.metrics[metric];
      return {
        text: (row) => seconds(of(row)[name]), value: (row) => of(row)[name],
        mark: (row) => fewMark(of(row), name),
      };
    };
    const burn = (window) => {
      const burnt = (row) => row.burn?.[window]?.burn_rate;
      return {
        text: (row) => number(burnt(row)),
        value: (row) => burnt(row) ?? null,
        mark: (row) => (row.burn?.[window]?.marks.length ? "few" : ""),
        state: (row) => (burnt(row) > 1 ? "bad" : ""),
      };
    };
    return [
      { id: "name", head: "name", kind: "text", text: (row) => row.name, value: (row) => row.name },
      {
        id: "n", head: "n", title: "exchanges in the window",
        text: (row) => count(row.part.n), value: (row) => row.part.n,
      },
      {
        id: "rps", head: "req/s",
        text: (row) => number(row.part.load.achieved_rps), value: (row) => row.part.load.achieved_rps,
      },
      { id: "ttft50", head: "TTFT p50", ...figure("ttft", "p50") },
      { id: "ttft99", head: "p99", title: "TTFT p99", ...figure("ttft", "p99") },
      { id: "itl50", head: "ITL p50", ...figure("itl", "p50") },
      { id: "itl99", head: "p99", title: "ITL p99", ...figure("itl", "p99") },
      {
        id: "option", head: "option", title: `option of ITL. ${ITL_OPTIONS}`,
        text: (row) => row.part.metrics.itl.option ?? NONE,
      },
      { id: "idle99", head: "idle p99", title: "user idle p99", ...figure("user_idle", "p99") },
      {
        id: "met", head: "met", title: `share of the counted exchanges that met every objective. ${NOT_COUNTED}`,
        text: (row) => share(row.part.goodput?.attainment),
        value: (row) => row.part.goodput?.attainment ?? null,
      },
      {
        id: "smooth", head: "smooth", title: "smooth goodput, tokens/s",
        text: (row) => number(row.part.smooth_goodput.tokens_per_second),
        value: (row) => row.part.smooth_goodput.tokens_per_second,
      },
      {
        id: "refused", head: "refused",
        text: (row) => share(row.part.refusals.share), value: (row) => row.part.refusals.share,
      },
      {
        id: "failed", head: "failed", title: "share that failed by a fault of the upstream or of llmtap",
        text: (row) => share(failures(row.part)), value: (row) => failures(row.part),
        state: (row) => (failures(row.part) ? "bad" : ""),
      },
      {
        id: "burn5", head: "burn 5m", title: "burn rate over 5 minutes; 1 uses exactly the error budget",
        ...burn("5m"),
      },
      { id: "burn60", head: "burn 1h", title: "burn rate over an hour", ...burn("1h") },
      {
        id: "wide", head: "± p99", title: "uncertainty of the timestamps of 99 % of the exchanges",
        text: (row) => seconds(row.part.uncertainties.p99), value: (row) => row.part.uncertainties.p99,
      },
    ];
  }

  draw() {
    this.drawn = performance.now();
    const { t, series } = this.history.toDraw();
    if (t.length < 2) return;
    const m = this.summary?.metrics;
    const line = (name, y, ink) => ({ name, x: t, y, ink });
    const level = (y, ink) => (y === null || y === undefined
      ? []
      : [{ x: [t[0], t.at(-1)], y: [y, y], ink, width: 1, dash: "dash", silent: true }]);
    const latency = (p50, p99, figures) => [
      line("p50", p50, "c0"), line("p99", p99, "c1"), ...level(figures?.p50, "c0"), ...level(figures?.p99, "c1"),
    ];
    const rates = [
      line("all exchanges", series.achieved_rps, "c6"), line("met every objective", series.goodput_rps, "c2"),
    ];
    const pairs = {
      ttft: [latency(series.ttft_p50, series.ttft_p99, m?.ttft), " s"],
      itl: [latency(series.itl_p50, series.itl_p99, m?.itl), " s"],
      goodput: [rates, ""],
      smooth: [[line("smooth goodput", series.smooth_goodput_tps, "c2")], ""],
    };
    for (const [id, [lines, suffix]] of Object.entries(pairs)) {
      const axes = { x: { kind: "clock" }, y: { zero: true, suffix } };
      const plot = { series: lines, ...axes, together: true, empty: "no samples yet" };
      this.app.later(() => draw(this.charts[id], plot));
    }
  }
}

/** Returns a note if the meter has run for a shorter time than the window, else null. */
function youngMeter(window) {
  if (!(window.seconds < SHORT * LENGTHS[window.name])) return null;
  const words = `The meter started at ${clock(window.start)}: the window covers ${seconds(window.seconds)}.`;
  return el("p", { class: "soft" }, words);
}

/** Returns a line of the banner if a tenth of the exchanges failed, and at least FAILED_MIN; else null. */
function failing(s) {
  const n = failed(s.outcomes);
  if (n < FAILED_MIN || n < s.n / 10) return null;
  return [
    `${count(n)} of ${count(s.n)} exchanges failed (${share(n / s.n)}). Each one's error: `,
    el("a", { href: "#exchanges" }, "exchanges"),
  ];
}

/** Returns a line of the banner for each model whose TTFT has risen and not come back. */
function ttftSteps({ models }) {
  const risen = Object.values(models).filter(({ state, step }) => step && step.until === null && state !== "few");
  return risen.map(({ sentence }) => sentence);
}

/** Returns a note on exchanges that were not measured, so that no figure includes them; null without any. */
function unmeasured(relays) {
  const n = losses(relays).reduce((sum, [, lost]) => sum + lost, 0);
  if (!n) return null;
  const words = `${n === 1 ? "1 exchange was" : `${count(n)} exchanges were`} not measured since the relays started: `;
  return el("p", { class: "soft" }, words, el("a", { href: "#tap" }, "why"));
}

/** Returns a note with the share of answers of unknown format, where they come from, and what to do. */
function withoutDialect(s) {
  const places = s.without_dialect ?? [];
  if (!places.length) return null;
  const n = places.reduce((sum, place) => sum + place.n, 0);
  const names = places.slice(0, PLACES_SHOWN).map((place) =>
    `${place.path} ${place.content_type ?? ""} (${count(place.n)} ${place.reading === "none" ? "not understood" : "inferred"})`);
  const more = places.length > PLACES_SHOWN ? ", …" : "";
  return el("p", { class: "soft" },
    `${share(n / s.n)} of the answers have an unknown format: ${names.join(", ")}${more}. Save one, and write a dialect: `,
    el("code", {}, "llmtap inspect FILE --draft NAME"));
}

/** Returns a line of the banner if too many exchanges are uncertain, as in the view "Health"; else null. */
function unreliable(s) {
  const words = uncertain(s);
  return words && [`${words}: their times are unreliable. See `, el("a", { href: "#tap" }, "Health")];
}

function large(node) {
  node.classList.add("large");
  return node;
}

/** Returns the card with the share of exchanges that met their objectives, and goodput. */
function objectives(good, window, classes) {
  const none = classes.length
    ? `no exchange counts yet: classes ${classes.join(", ")}`
    : "no objectives; config/slo.toml is an example";
  const left = [["not_judged", "not judged"], ["own_faults", "left out (faults of llmtap)"]];
  const unknown = left.map(([name, words]) => (good?.[name] ? `, ${count(good[name])} ${words}` : "")).join("");
  if (!good || good.attainment === null) return card(MET, NONE, `${none}${unknown}`, basis(0, window));
  const several = good.objectives.startsWith("several");
  const met = several ? "the objectives of their class" : good.objectives;
  return card(MET, share(good.attainment), `${met}; goodput ${number(good.requests_per_second)}/s${unknown}`,
    basis(good.counted, window), NOT_COUNTED);
}

/** Returns the mark of a percentile with too few samples, else "". */
const fewMark = (figures, name) => (figures.marks.includes(name) ? "few" : "");

/** Returns the card with p50 and p99 of a latency, and their basis; `formula`: the tooltip. */
function pair(title, figures, wide, window, about = null, formula = null) {
  const shown = ["p50", "p99"].map((name) => el("span", {}, el("i", {}, name),
    el("b", { class: "value" }, seconds(figures[name])),
    el("span", { class: "few", title: "fewer than ten samples beyond it" }, fewMark(figures, name))));
  return el("div", { class: "card", title: formula }, el("dt", { class: formula ? "has-tip" : null }, title),
    el("dd", {},
      el("span", { class: "two" }, ...shown),
      about && el("small", {}, about),
      el("small", { class: "soft" }, `${basis(figures.n, window)} · ${wide}`)));
}

function failed(outcomes) {
  return [...FAILED].reduce((sum, name) => sum + (outcomes[name] ?? 0), 0);
}

function failures(part) {
  return failed(part.outcomes) / (part.n || 1);
}

function afterComma(text) {
  return text.slice(text.lastIndexOf(", ") + 2);
}

/** Returns a function from the name of a tenant or class to its burn rates. Models and arms have none. */
function burnRates(slo, by) {
  if (by === "class") return (name) => slo[name]?.windows;
  if (by !== "tenant") return () => undefined;
  const rates = new Map();
  for (const one of Object.values(slo)) {
    for (const [tenant, windows] of Object.entries(one.by.tenant)) rates.set(tenant, windows);
  }
  return (name) => rates.get(name);
}
