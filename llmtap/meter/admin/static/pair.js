// Both sides of a gateway: a lane for the exchange of the client, and one below for each request of the gateway.

import { el, refill, section, svg } from "./dom.js";
import { number, seconds } from "./format.js";

const TICKS_MAX = 400;

export class Pair {
  constructor() {
    this.lanes = el("div", { class: "forest parts", role: "list" });
    this.facts = el("dl");
    this.node = el("div", { hidden: true }, section("Both sides of the gateway", this.lanes, this.facts));
  }

  /** Shows the exchanges of a pair (`members`), with the titles of its figures; null hides the section. */
  show(pair) {
    const front = pair?.members.find((x) => x.side === "front");
    this.node.hidden = !front;
    if (!front) return;
    const begin = secondsOf(front.arrival);
    const backs = pair.members.filter((x) => x.side === "back");
    const lanes = [front, ...backs.sort((a, b) => secondsOf(a.arrival) - secondsOf(b.arrival))].map((x) => {
      const start = secondsOf(x.arrival) - begin;
      return { x, start, end: start + (x.timeline.response_end ?? x.events.at(-1)?.t ?? 0) };
    });
    const whole = Math.max(...lanes.map((lane) => lane.end)) || 1;
    refill(this.lanes, lanes.map((lane) => row(lane, whole)));
    const figures = Object.entries(front.pair.figures).map(([name, values]) => {
      const { title, definition, unit } = pair.figures[name];
      const text = unit === "s" ? seconds : number;
      const words = values.map((one) => `${text(one.value)} (${text(one.low)} to ${text(one.high)})`).join(", ");
      return [el("dt", { class: "has-tip", title: definition }, title), el("dd", {}, words)];
    });
    refill(this.facts, figures);
  }
}

function row({ x, start, end }, whole) {
  const at = (t) => (100 * t) / whole;
  const picture = svg("svg", { viewBox: "0 0 100 10", preserveAspectRatio: "none", "aria-hidden": "true" });
  picture.append(svg("rect", { x: at(start), y: 4.5, width: Math.max(0.2, at(end - start)), height: 1, class: "point" }));
  const every = Math.ceil(x.events.length / TICKS_MAX) || 1;
  for (const event of x.events.filter((_, i) => i % every === 0)) {
    picture.append(svg("rect", { x: at(start + event.t), y: 1, width: 0.25, height: 8, class: "point" }));
  }
  const role = x.pair.role?.replace("_", " ");
  const name = el("a", { href: `#exchanges/${x.id}` }, role ? `back: ${role}` : "front");
  const evidence = x.pair.evidence.length ? `, paired by ${x.pair.evidence.join(", ").replaceAll("_", " ")}` : "";
  return el("div", { class: "row", role: "listitem" },
    el("span", { class: "name" }, name), picture,
    el("span", {}, `${x.model ?? ""} ${x.outcome}, ${x.events.length} events from ${seconds(start)}${evidence}`));
}

/** Returns the seconds since 1970 of a date with microseconds, which `Date` would cut to milliseconds. */
function secondsOf(date) {
  const [whole, fraction = "0"] = date.replace("Z", "").split(".");
  return Date.parse(`${whole}Z`) / 1000 + Number(`0.${fraction}`);
}
