// Refusals against the labels of requests: false positives and false negatives of a guardrail.

import { el, refill } from "./dom.js";
import { NONE, count, share } from "./format.js";
import { Table } from "./table.js";

/** By label of a request: the result that is an error of the guardrail, and the name of such errors. */
const ERRORS = {
  "should-answer": ["refused", "false positives"],
  "should-refuse": ["answered", "false negatives"],
};

export class Labels {
  /** `head`: title of the first column, which names the rows. */
  constructor(head) {
    this.table = new Table([{ id: "name", head, kind: "text", text: (row) => row.name }, ...COLUMNS],
      { caption: "Refusals against labels", key: (row) => `${row.name} ${row.label}` });
    this.note = el("p", { class: "soft" });
    this.node = el("section", { "aria-label": "Refusals against labels", hidden: true },
      el("h2", {}, "Refusals against labels"), this.table.node, this.note);
  }

  /** Shows the counts of labels. `named`: counts by name of the row; if none has counts, nothing is shown. */
  update(named) {
    const entries = Object.entries(named).filter(([, labels]) => labels);
    this.node.hidden = !entries.length;
    this.table.update(entries.flatMap(([name, labels]) => Object.keys(ERRORS)
      .map((label) => ({ name, label, counts: labels[label] }))
      .filter(({ counts }) => counts.answered + counts.refused + counts.undecided)));
    const ignored = entries.flatMap(([, labels]) => Object.entries(labels.ignored));
    const sums = new Map();
    for (const [reason, n] of ignored) sums.set(reason, (sums.get(reason) ?? 0) + n);
    refill(this.note, sums.size
      ? `Labels that do not count: ${[...sums].map(([reason, n]) => `${reason} ${count(n)}`).join(", ")}.`
      : null);
  }
}

const of = (result) => ({
  id: result, head: result, text: (row) => count(row.counts[result]), value: (row) => row.counts[result],
});

const COLUMNS = [
  { id: "label", head: "label", kind: "text", text: (row) => row.label, value: (row) => row.label },
  of("answered"), of("refused"),
  { ...of("undecided"), head: "neither", title: "failed, cancelled or rejected: in no share" },
  { id: "errors", head: "errors", kind: "text", text: (row) => ERRORS[row.label][1] },
  {
    id: "share", head: "share", title: "of the requests that were answered or refused",
    text: (row) => share(row.counts.share), value: (row) => row.counts.share,
  },
  {
    id: "interval", head: "95 % interval", title: "Wilson's interval of the share",
    text: (row) => (row.counts.interval
      ? `${share(row.counts.interval[0])} to ${share(row.counts.interval[1])}` : NONE),
  },
];
