// The wait of one exchange for its first token: a bar for each part, and the parts that are unusually long,
// compared with the last hour.

import { el, refill, section, setText, svg } from "./dom.js";
import { NONE, seconds } from "./format.js";

export class FirstToken {
  constructor() {
    this.sentence = el("p");
    this.bars = el("div", { class: "forest parts", role: "list" });
    this.rule = el("p", { class: "soft" });
    this.node = el("div", { hidden: true },
      section("Wait for the first token", this.sentence, this.bars, this.rule));
  }

  /** Shows an answer of `/api/v1/first_token`; null hides the section. */
  show(answer) {
    this.node.hidden = !answer;
    if (!answer) return;
    setText(this.sentence, answer.sentence);
    setText(this.rule, answer.rule);
    refill(this.bars, answer.parts.map((part) => row(part, answer.waited || 1)));
  }
}

function row(part, whole) {
  const shape = { viewBox: "0 0 100 10", preserveAspectRatio: "none", "aria-hidden": "true" };
  const picture = svg("svg", shape);
  if (part.seconds) {
    const width = Math.max(0.4, (100 * part.seconds) / whole), x = Math.min(100 - width, (100 * part.start) / whole);
    picture.append(svg("rect", { x, y: 2, width, height: 6, class: part.unusual ? "unusual" : "point" }));
  }
  const usual = part.median === null ? NONE : seconds(part.median);
  const words = part.seconds === null ? NONE : `${seconds(part.seconds)} (median ${usual})`;
  return el("div", { class: "row", role: "listitem", title: part.meaning },
    el("span", { class: "name has-tip" }, part.title), picture,
    el("span", { class: part.unusual ? "bad" : null }, part.unusual ? `${words}, unusual` : words));
}
