// Common parts of the charts of all views: drawing (with its duration), legends, and series over time.

import { el } from "./dom.js";
import { measured } from "./measure.js";
import { drawPlot } from "./plot.js";

/** Time without a point after which a line has a gap. The points of the live feed come every second. */
const GAP_MS = 3000;

export function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

/** Returns the legend of a chart; `entries`: [name of the colour, text] of each line. */
export function legend(entries) {
  const key = (ink) => `key ${ink === "area" ? "" : "line"} ink-${ink}`;
  return el("ul", { class: "legend" }, entries.map(([ink, words]) =>
    el("li", {}, el("i", { class: key(ink), "aria-hidden": "true" }), words)));
}

/** Draws a chart into `node`, in place of an earlier chart. */
export function draw(node, plot) {
  measured("chart", () => drawPlot(node, plot));
}

/**
 * Series over time: the points of the meter, then those of the live feed, one a second. When there are `most`
 * points, every second point is removed.
 */
export class History {
  constructor(names, most = 1200) {
    this.most = most;
    this.t = [];
    this.series = Object.fromEntries(names.map((name) => [name, []]));
    this.every = 1;
    this.skipped = 0;
    /** Number of points that the meter kept. They have no gaps: a step without exchanges is a point, too. */
    this.past = 0;
  }

  /** Replaces the points by those of an answer of `/api/v1/history`, and keeps live points that are newer. */
  begin({ step, end, figures }) {
    const n = figures[Object.keys(figures)[0]].length;
    const live = this.t.findIndex((at, i) => i >= this.past && at / 1000 > end);
    const newer = (list) => (live < 0 ? [] : list.slice(live));
    this.t = [...Array.from({ length: n }, (_, i) => new Date(1000 * (end - (n - 1 - i) * step))), ...newer(this.t)];
    for (const name of Object.keys(this.series)) {
      this.series[name] = [...figures[name], ...newer(this.series[name])];
    }
    this.past = n;
    this.every = 1;
  }

  add(t, values) {
    if (++this.skipped < this.every) return;
    this.skipped = 0;
    this.t.push(t);
    for (const name of Object.keys(this.series)) this.series[name].push(values[name] ?? null);
    if (this.t.length < this.most) return;
    const half = (list) => list.filter((_, i) => i % 2 === 0);
    this.t = half(this.t);
    for (const name of Object.keys(this.series)) this.series[name] = half(this.series[name]);
    this.past = Math.ceil(this.past / 2);
    this.every *= 2;
  }

  /** Returns the series to draw: a line has a gap where no point came for GAP_MS. */
  toDraw() {
    const { t, series } = this;
    const after = t.map((at, i) => i > this.past && at - t[i - 1] > GAP_MS * this.every);
    if (!after.includes(true)) return { t, series };
    const cut = (list, between) => list.flatMap((one, i) => (after[i] ? [between(one), one] : [one]));
    const parted = Object.entries(series).map(([name, list]) => [name, cut(list, () => null)]);
    return { t: cut(t, (next) => new Date(next - 1)), series: Object.fromEntries(parted) };
  }
}
