// Charts by plotly, which is 4.8 MB: it is loaded when the first one is to be drawn, and figures do not wait.
// It is given numbers and fixed words only, never names from traffic: it reads tags in its texts.

import { el } from "./dom.js";
import { measured } from "./measure.js";

/** Without a point for so long nobody knows what was between; the feed's come a second apart. */
const GAP_MS = 3000;

let loading = null;

function plotly() {
  loading ??= new Promise((done, failed) => {
    const script = document.createElement("script");
    script.src = "assets/plotly.js";
    // As it runs it adds a style element for maps, of which we draw none; the policy would refuse it aloud.
    const { head } = document;
    const add = (node) => Node.prototype.appendChild.call(head, node);
    head.appendChild = (node) => (node.tagName === "STYLE" ? node : add(node));
    script.onload = () => {
      delete head.appendChild;
      done(window.Plotly);
    };
    script.onerror = () => {
      delete head.appendChild;
      loading = null;
      failed(new Error("plotly.js did not load"));
    };
    head.append(script);
  });
  return loading;
}

export function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

/** What the lines of a chart are: [colour's name, words]. */
export function legend(entries) {
  const key = (ink) => `key ${ink === "area" ? "" : "line"} ink-${ink}`;
  return el("ul", { class: "legend" }, entries.map(([ink, words]) =>
    el("li", {}, el("i", { class: key(ink), "aria-hidden": "true" }), words)));
}

/** The frame of all charts. */
export function layout(about = {}) {
  const grid = { gridcolor: colour("grid"), linecolor: colour("rule"), zerolinecolor: colour("rule") };
  return {
    // Fixed margins and a legend of our own: plotly would draw twice to find room for its own.
    margin: { l: 52, r: 14, t: 8, b: 26 },
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: "system-ui, sans-serif", size: 12, color: colour("ink") },
    // The series grow in place: without it plotly takes them for unchanged.
    datarevision: performance.now(),
    hovermode: "x",
    hoverlabel: { bgcolor: colour("ground"), bordercolor: colour("rule") },
    showlegend: false,
    ...about,
    xaxis: { ...grid, ...about.xaxis },
    yaxis: { ...grid, rangemode: "tozero", ...about.yaxis },
  };
}

/** Draws into `node`, or draws anew; a second call before the first is done draws what is newest. */
export async function draw(node, data, frame) {
  node.wanted = { data, frame };
  if (node.drawing) return;
  node.drawing = true;
  try {
    const Plotly = await plotly();
    while (node.wanted) {
      const { data: traces, frame: shape } = node.wanted;
      node.wanted = null;
      if (!node.isConnected || !node.clientWidth) break; // another view is shown: it is drawn when it is back
      const about = { displayModeBar: false, responsive: true };
      await measured("chart", () => Plotly.react(node, traces, shape, about));
      // Where plotly measures texts; a screen reader would find a picture without a name.
      document.getElementById("js-plotly-tester")?.setAttribute("aria-hidden", "true");
    }
    node.classList.remove("failed");
  } catch (error) {
    node.classList.add("failed");
    node.textContent = `No chart: ${error.message}.`;
  } finally {
    node.drawing = false;
  }
}

/** Series over the time that the page is open: a point a second; when it is full every second point goes. */
export class History {
  constructor(names, most = 1200) {
    this.most = most;
    this.t = [];
    this.series = Object.fromEntries(names.map((name) => [name, []]));
    this.every = 1;
    this.skipped = 0;
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
    this.every *= 2;
  }

  /** As it is drawn: where nothing was heard for a while the lines have a gap. */
  drawn() {
    const { t, series } = this;
    const after = t.map((at, i) => i > 0 && at - t[i - 1] > GAP_MS * this.every);
    if (!after.includes(true)) return { t, series };
    const cut = (list, between) => list.flatMap((one, i) => (after[i] ? [between(one), one] : [one]));
    const parted = Object.entries(series).map(([name, list]) => [name, cut(list, () => null)]);
    return { t: cut(t, (next) => new Date(next - 1)), series: Object.fromEntries(parted) };
  }
}
