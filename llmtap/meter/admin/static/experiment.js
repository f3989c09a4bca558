// View "Experiment": comparison of the arms, with intervals. This page cannot switch the experiment.

import { el, emptyState, refill, setText, section, svg } from "./dom.js";
import { NONE, count, number, seconds, share } from "./format.js";
import { Labels } from "./labels.js";
import { Table } from "./table.js";

const PERIOD_MS = 5000;
const TOKENS = new Set(["tokens_per_chunk", "output_tokens"]);
const SHARES = new Set(["refused", "failed", "cancelled", "false_positives", "false_negatives"]);
/** Shares in the table of arms. The shares of labelled requests have a table of their own. */
const ARM_SHARES = ["refused", "failed", "cancelled"];
/** A smaller p is shown as "less than this", since a float can be 0 although p is not. */
const P_MIN = 1e-16;
const FIGURES = ["mean", "p50", "p95", "p99"];
const STATES = { off: "is off: all traffic goes to the control", running: "runs", ended: "has ended" };
const SWITCH = "curl -X POST localhost:9464/api/v1/experiment"
  + " -H 'Content-Type: application/json' -d '{\"enabled\":true}'";

export class Experiment {
  constructor(app) {
    this.app = app;
    this.id = "experiment";
    this.title = "Experiment";
    this.experiment = null;
    this.polls = [
      app.poll("experiment", (signal) => app.api.get("experiment", {}, signal), PERIOD_MS,
        (experiment) => this.update(experiment)),
    ];
    this.head = el("div");
    this.figure = el("select", { id: "figure", onchange: () => this.render() },
      FIGURES.map((name) => el("option", { value: name, selected: name === "mean" }, name)));
    this.metric = el("select", { id: "metric", onchange: () => this.render() });
    this.arms = new Table(this.armColumns(), { caption: "Arms", key: (row) => row.name });
    this.differences = new Table(DIFFERENCES, {
      caption: "Differences from the control", key: (row) => `${row.arm} ${row.metric}`, rows: 300,
    });
    this.forest = el("div", { class: "forest" });
    this.headlines = el("div");
    this.tests = el("p", { class: "soft" });
    this.labels = new Labels("arm");
    this.disclosure = el("dl", { class: "disclosure" });
    const choice = el("div", { class: "bar" },
      el("label", { for: "metric" }, "Metric ", this.metric),
      el("label", { for: "figure" }, "Figure ", this.figure));
    this.body = el("div", { hidden: true },
      section("Result", this.headlines),
      section("Arms", choice, this.forest, this.arms.node),
      this.labels.node,
      section("Differences from the control", this.tests, this.differences.node),
      section("Disclosure", this.disclosure));
    this.node = el("div", {}, section("Experiment", this.head), this.body);
  }

  update(experiment) {
    this.experiment = experiment;
    this.app.render("experiment", () => this.render());
  }

  onShow() {
    this.render();
  }

  render() {
    const e = this.experiment;
    if (!e) return;
    this.body.hidden = e.state === "none";
    if (e.state === "none") {
      refill(this.head, emptyState(
        "No experiment is configured. To measure the cost of a guardrail, assign requests to two arms:",
        "llmtap proxy --upstream URL --config config/experiment.toml",
        "Begin with aa = true: the same in both arms, to see that no difference is found."));
      return;
    }
    const stop = e.state === "off" && !e.stopped ? switchedOff() : stopped(e);
    const stage = e.stage && el("p", {}, e.stage.sentence, " The figures are of this stage alone.");
    refill(this.head, about(e), stage, stop, ratio(e.sample_ratio),
      e.warnings.map((words) => el("p", { class: "banner bad" }, words)), bursts(e));
    this.renderArms(e);
    this.labels.update(Object.fromEntries(Object.entries(e.arms).map(([name, arm]) => [name, arm.labels])));
    refill(this.headlines, headlines(e));
    setText(this.tests, findings(e));
    this.tests.title = `a finding has p ≤ α / ${e.comparisons}, with α = ${e.alpha}`;
    this.differences.update(differences(e, this.figure.value));
    refill(this.disclosure, Object.entries(e.disclosure).flatMap(([name, value]) =>
      [el("dt", {}, name.replaceAll("_", " ")), el("dd", {}, inWords(value))]));
  }

  renderArms(e) {
    const names = Object.keys(Object.values(e.arms)[0]?.metrics ?? {});
    if (this.metric.options.length !== names.length) {
      refill(this.metric,
        e.compared.filter(({ name }) => names.includes(name))
          .map(({ name, title }) => el("option", { value: name, selected: name === "ttft" }, title)));
    }
    const metric = this.metric.value, figure = this.figure.value;
    const arms = Object.entries(e.arms).map(([name, arm]) => {
      return { name, arm, control: name === e.control, metric, figure };
    });
    this.arms.update(arms);
    this.drawForest(arms.map(({ name, arm }) => {
      const values = arm.metrics[metric];
      return { name, value: values?.[figure], interval: values?.intervals[figure] };
    }), metric);
  }

  armColumns() {
    const of = (row) => row.arm.metrics[row.metric];
    const excluded = (row) => Object.values(row.arm.excluded).reduce((sum, n) => sum + n, 0);
    const shares = (name) => ({
      id: name, head: name,
      text: (row) => `${share(row.arm.shares[name].share)} ${interval(name, row.arm.shares[name].interval)}`,
      value: (row) => row.arm.shares[name].share,
    });
    return [
      {
        id: "name", head: "arm", kind: "text",
        text: (row) => `${row.name}${row.control && row.name !== "control" ? " (control)" : ""}`, value: (row) => row.name,
      },
      {
        id: "assigned", head: "assigned",
        text: (row) => count(row.arm.assigned), value: (row) => row.arm.assigned,
      },
      { id: "units", head: "units", text: (row) => count(row.arm.units), value: (row) => row.arm.units },
      { id: "ended", head: "ended", text: (row) => count(row.arm.ended), value: (row) => row.arm.ended },
      {
        id: "n", head: "n", title: "samples of the metric",
        text: (row) => count(of(row)?.n), value: (row) => of(row)?.n,
      },
      {
        id: "value", head: "figure",
        text: (row) => inUnit(row.metric, of(row)?.[row.figure]),
        value: (row) => of(row)?.[row.figure],
        mark: (row) => (of(row)?.marks.includes(row.figure) ? "few" : ""),
      },
      {
        id: "interval", head: "interval", title: "at 1 - α",
        text: (row) => interval(row.metric, of(row)?.intervals[row.figure]),
      },
      ...ARM_SHARES.map(shares),
      {
        id: "chunks", head: "chunks/read", title: "events per read from the upstream",
        text: (row) => number(row.arm.chunking.events_per_read),
        value: (row) => row.arm.chunking.events_per_read,
      },
      {
        id: "excluded", head: "excluded",
        title: "requests that the arm could not change", text: (row) => count(excluded(row)),
      },
      {
        id: "wide", head: "± worst", title: "the widest stamp of an exchange",
        text: (row) => seconds(row.arm.uncertainty), value: (row) => row.arm.uncertainty,
      },
    ];
  }

  /** Draws the figure of each arm as a point on its interval, all on one scale. */
  drawForest(arms, metric) {
    const ends = arms
      .flatMap(({ value, interval: bounds }) => [value, ...(bounds ?? [])])
      .filter((one) => one !== null && one !== undefined);
    if (!ends.length) {
      refill(this.forest, el("p", { class: "soft" }, "No samples of this metric yet."));
      return;
    }
    const low = Math.min(...ends), high = Math.max(...ends), span = high - low || Math.abs(high) || 1;
    const at = (value) => 4 + (92 * (value - low)) / span;
    refill(this.forest, arms.map(({ name, value, interval: bounds }) => {
      const shape = { viewBox: "0 0 100 10", preserveAspectRatio: "none", "aria-hidden": "true" };
      const picture = svg("svg", shape);
      if (bounds) {
        const width = Math.max(0.4, at(bounds[1]) - at(bounds[0]));
        picture.append(svg("rect", { x: at(bounds[0]), y: 4, width, height: 2, class: "span" }));
      }
      if (value !== null && value !== undefined) {
        picture.append(svg("rect", { x: at(value) - 0.4, y: 1, width: 0.8, height: 8, class: "point" }));
      }
      const words = `${inUnit(metric, value)} ${interval(metric, bounds)}`;
      return el("div", { class: "row" }, el("span", { class: "name" }, name), picture, el("span", {}, words));
    }));
  }
}

/** Returns a line with the state of the experiment, its settings, and who switched it. */
function about(e) {
  const state = STATES[e.state] ?? e.state;
  let words = ` ${state}${e.aa ? " as an A/A test" : ""} · unit ${e.unit}`;
  if (e.stop_worse?.length) words += ` · stops if an arm is worse in ${e.stop_worse.join(", ")}`;
  if ((e.covariate ?? "none") !== "none") words += ` · means adjusted by ${e.covariate}`;
  const by = ` · switched by ${e.switched_by}${e.until ? ` · until ${e.until}` : ""}`;
  const title = `α = ${e.alpha}: risk of a false finding. Fingerprint of the key: ${e.key_fingerprint}`;
  return el("p", { title }, el("b", { class: "has-tip" }, e.name), `${words}${by}`);
}

/** Returns a banner with the arm that ended the experiment because it was worse; null if none did. */
function stopped(e) {
  if (!e.stopped) return null;
  const { arm, figure, at, difference, anytime_interval: bounds } = e.stopped;
  const metric = figure.split(".")[0];
  return el("p", { class: "banner bad", role: "alert" },
    `Stopped at ${at}: ${arm} is worse than ${e.control} in ${figure}, by ${inUnit(metric, difference)}`
    + ` ${interval(metric, bounds)}. All traffic goes to ${e.control}.`);
}

function switchedOff() {
  return el("p", { class: "banner" }, "Switch it on: ", el("code", {}, SWITCH));
}

/** Returns a line or banner that says whether units were assigned in the configured ratio. */
function ratio(sample) {
  if (sample.alarm) {
    return el("p", { class: "banner bad", role: "alert" },
      `Sample ratio mismatch (p ${pValue(sample.p)}): the split is not what was configured,`
      + ` so no comparison below can be trusted. Units: ${units(sample)}.`);
  }
  const words = `Sample ratio as configured (p ${pValue(sample.p)}, alarm at ${sample.alpha}): ${units(sample)}.`;
  return el("p", { class: "soft" }, words);
}

/** Returns a banner for each arm with several chunks per read: most gaps are 0, so that it looks too good. */
function bursts(e) {
  return e.cautions.map(({ arm, events_per_read: n, control_events_per_read: usual }) => el("p", { class: "banner" },
    `${arm}: ${number(n)} chunks arrive together (${e.control}: ${number(usual)}), so most gaps are 0.`
    + " Its TBC, ITL and TPOT look too good; compare TTFT and the longest pause."));
}

/** Returns a sentence for each arm on its median TTFT, or on the data that are missing for a comparison. */
function headlines(e) {
  return Object.entries(e.differences).map(([arm, by]) => {
    const d = by.ttft?.p50, few = [arm, e.control].some((name) => e.arms[name].units < e.units_needed);
    if (few) return el("p", {}, el("b", {}, `${arm}: no result yet. `), missing(e));
    if (!d?.interval) return el("p", {}, `${arm}: there are too few streams to compare the time to first token.`);
    const [low, high] = d.interval, level = `${Number((100 * (1 - e.alpha)).toPrecision(4))} %`;
    if (low <= 0 && high >= 0) {
      return el("p", {}, el("b", {}, `${arm} shows no difference in the median time to first token`),
        ` (${level} confidence: ${interval("ttft", d.interval)}).`);
    }
    const ends = [Math.abs(low), Math.abs(high)].sort((a, b) => a - b).map(seconds);
    const change = low > 0 ? "adds" : "saves", preposition = low > 0 ? "to" : "of";
    return el("p", {},
      el("b", {}, `${arm} ${change} ${seconds(Math.abs(d.difference))} ${preposition} the median time to first token`),
      ` (${level} confidence: ${ends[0]} to ${ends[1]}; valid for one look).`);
  });
}

/** Returns a sentence on how many units each arm has, and how many a comparison needs. */
function missing(e) {
  const named = Object.entries(e.arms).map(([name, arm]) => `${name} has ${count(arm.units)}`);
  return `A comparison of means needs ${e.units_needed} units in each arm: ${named.join(", ")}.`;
}

function findings(e) {
  const titles = new Map(e.compared.map(({ name, title }) => [name, title]));
  const found = e.findings.map((one) => `${titles.get(one.metric)} (${one.arm})`);
  const early = Object.values(e.arms).some((arm) => arm.units < e.units_needed);
  return `Findings in ${e.comparisons} comparisons: ${found.join(", ") || "none"}.`
    + (early ? " Only shares are compared so far." : "");
}

/** Returns a row for each difference, by arm and metric: findings first, misleading differences last. */
function differences(e, figure) {
  const found = new Set(e.findings.map((one) => `${one.arm} ${one.metric}`));
  const misleading = new Set(e.cautions.flatMap(({ arm, metrics }) => metrics.map((metric) => `${arm} ${metric}`)));
  const rows = Object.entries(e.differences).flatMap(([arm, by]) =>
    e.compared.flatMap(({ name: metric, title }) => {
      const statistics = by[metric] ?? {}, name = `${arm} ${metric}`;
      const key = metric in statistics ? metric : SHARES.has(metric) ? "share" : figure;
      const d = statistics[key];
      if (!d) return [];
      const few = Math.min(samples(e, arm, metric), samples(e, e.control, metric)) < e.units_needed;
      const different = d.different ?? (d.p === undefined ? null : d.p <= e.alpha);
      const row = { arm, metric, title, figure: key, d, few, different };
      return [{ ...row, isMisleading: misleading.has(name), isFinding: found.has(name) }];
    }));
  const rank = (row) => (row.isMisleading ? 3 : row.isFinding ? 0 : row.different ? 1 : 2);
  return rows.sort((a, b) => rank(a) - rank(b));
}

/** Returns the number of units of an arm with a value of the metric; for a share, of all its units. */
function samples(e, name, metric) {
  const arm = e.arms[name];
  return arm.metrics[metric]?.units ?? arm.units;
}

/** Returns a value of the disclosure as text. */
function inWords(value) {
  if (value === true || value === false) return value ? "yes" : "no";
  if (Array.isArray(value)) return value.map(inWords).join(", ");
  if (value && typeof value === "object") {
    return Object.entries(value).map(([name, one]) => `${name.replaceAll("_", " ")}: ${inWords(one)}`).join("; ");
  }
  return value === null || value === "" ? NONE : String(value);
}

function inUnit(metric, value) {
  if (SHARES.has(metric)) return share(value);
  return TOKENS.has(metric) ? number(value) : seconds(value);
}

function interval(metric, bounds) {
  return bounds ? `[${inUnit(metric, bounds[0])}, ${inUnit(metric, bounds[1])}]` : NONE;
}

function units(sample) {
  const named = Object.entries(sample.units);
  return named.map(([name, n]) => `${name} ${count(n)} (${share(sample.expected[name])} expected)`).join(", ");
}

function pValue(p) {
  if (p === undefined) return NONE;
  if (p < P_MIN) return `< ${P_MIN}`;
  return p < 0.001 ? p.toExponential(1) : number(p, 3);
}

/** Returns whether a row is a finding: only the figure with the p is, not other figures of the metric. */
function isFinding(row) {
  return row.isFinding && !row.isMisleading && row.d.p !== undefined;
}

function verdict(row) {
  if (row.isMisleading) return "misleading: chunks arrive together";
  if (isFinding(row)) return "finding";
  if (row.isFinding) return "finding for the mean";
  if (row.different === null) return row.few ? "too few samples" : "not tested";
  return row.different ? "different, uncorrected" : "no difference shown";
}

function state(row) {
  return row.isMisleading ? "faded" : "";
}

const DIFFERENCES = [
  { id: "arm", head: "arm", kind: "text", text: (row) => row.arm, value: (row) => row.arm, state },
  { id: "metric", head: "metric", kind: "text", text: (row) => row.title, value: (row) => row.title, state },
  { id: "figure", head: "figure", kind: "text", text: (row) => row.figure },
  {
    id: "difference", head: "difference",
    text: (row) => inUnit(row.metric, row.d.difference), value: (row) => row.d.difference,
  },
  {
    id: "unadjusted", head: "unadjusted",
    title: "difference before the adjustment by the covariate, and the share of its variance that is left",
    text: (row) => (row.d.unadjusted_difference === undefined ? NONE
      : `${inUnit(row.metric, row.d.unadjusted_difference)} (${share(row.d.variance_left)})`),
    value: (row) => row.d.unadjusted_difference ?? null,
  },
  {
    id: "interval", head: "interval", title: "valid for one look",
    text: (row) => interval(row.metric, row.d.interval),
  },
  {
    id: "anytime", head: "anytime interval", title: "valid however often you look",
    text: (row) => interval(row.metric, row.d.anytime_interval),
  },
  {
    id: "p", head: "p",
    title: "valid however often you look: it belongs to the anytime interval, so it can be large although the"
      + " interval for one look excludes 0",
    text: (row) => pValue(row.d.p), value: (row) => row.d.p,
  },
  {
    id: "result", head: "result", kind: "text",
    text: verdict, state: (row) => (isFinding(row) ? "finding" : state(row)),
  },
];
