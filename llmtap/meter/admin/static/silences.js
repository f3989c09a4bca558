// Streams that have sent no token for some time, and how many streams went on after such a silence.

import { el, section, setText } from "./dom.js";
import { NONE, count, seconds, share } from "./format.js";
import { Table, matching } from "./table.js";

const PERIOD_MS = 1000;
const WAITS = { first_token: "first token", next_token: "next token" };
const FORMULA = "Silences of finished streams of the model that lasted at least as long, since the start of the meter, "
  + "and those of them that a token ended; the estimated share, with its 95 % interval, takes into account that "
  + "other streams were cut off";

export class Silences {
  constructor(app) {
    this.app = app;
    this.answer = null;
    this.poll = app.poll("silences", (signal) => app.api.get("silences", {}, signal), PERIOD_MS,
      (answer) => this.update(answer));
    this.counts = el("p", { class: "counts" });
    const about = { caption: "Silent streams", key: (row) => row.id, rows: 20 };
    this.table = new Table(this.columns(), about);
    this.node = section("Silent streams", this.counts, this.table.node);
  }

  update(answer) {
    this.answer = answer;
    this.app.render("silences", () => this.render());
  }

  render() {
    if (!this.answer) return;
    const { count: silent, running, threshold, not_judged: unread, streams } = this.answer;
    const rows = matching(streams, this.app.filter, (one) => [one.tenant, one.model, one.arm, one.upstream]);
    const apart = unread ? `; ${count(unread)} not judged, since their answers are not understood` : "";
    const filtered = this.app.filter ? `, ${count(rows.length)} match the filter` : "";
    const words = `${count(silent)} of ${count(running)} running streams sent no token for`
      + ` ${seconds(threshold)} or longer`;
    setText(this.counts, `${words}${filtered}${apart}`);
    this.table.node.hidden = rows.length === 0;
    this.table.update(rows);
  }

  columns() {
    return [
      {
        id: "id", head: "id", kind: "text",
        text: (row) => row.id, link: (row) => `#exchanges/${encodeURIComponent(row.id)}`,
      },
      { id: "tenant", head: "tenant", kind: "text", text: (row) => row.tenant, value: (row) => row.tenant },
      {
        id: "model", head: "model", kind: "text",
        text: (row) => row.model ?? NONE, value: (row) => row.model,
      },
      {
        id: "upstream", head: "upstream", kind: "text",
        text: (row) => row.upstream ?? NONE, value: (row) => row.upstream,
      },
      { id: "kind", head: "waits for", kind: "text", text: (row) => WAITS[row.kind], value: (row) => row.kind },
      { id: "silent", head: "silent", text: (row) => seconds(row.silent), value: (row) => row.silent },
      {
        id: "read", head: "last bytes", title: "Time since the last bytes of any kind, such as keep-alives",
        text: (row) => seconds(row.since_read), value: (row) => row.since_read,
      },
      { id: "past", head: "went on", title: FORMULA, text: (row) => went(row.past), value: (row) => row.past.share },
      { id: "tokens", head: "tokens", text: (row) => count(row.tokens), value: (row) => row.tokens },
      { id: "age", head: "age", text: (row) => seconds(row.age), value: (row) => row.age },
    ];
  }
}

/** Returns how many streams went on: "3 of 240: 1.25 % (0.40 % to 3.82 %)". */
function went({ n, resumed, share: estimate, low, high }) {
  if (!n) return NONE;
  const counts = `${count(resumed)} of ${count(n)}`;
  return estimate === null ? counts : `${counts}: ${share(estimate)} (${share(low)} to ${share(high)})`;
}
