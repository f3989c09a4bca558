// Running streams: a lane for each stream, and a table.

import { el, emptyState, refill, setText, section, sendOne } from "./dom.js";
import { NONE, count, seconds } from "./format.js";
import { LANES_MAX, Lanes } from "./lanes.js";
import { Silences } from "./silences.js";
import { Table, matching } from "./table.js";
import { Tape, rowHeight } from "./tape.js";

const PERIOD_MS = 1000;
const KEYS = [
  ["waiting", "waits for its first token"],
  ["first", "first token"],
  ["chunk", "chunk"],
  ["streaming", "the reader has tokens to read"],
  ["stalled", "stalled: the reader waits (user idle)"],
  ["ended", "faded: the stream has ended"],
];
const SPANS_S = [10, 20, 30, 60];
/** Choice of a span that shows the oldest running stream from its start, rounded up to STEP_S. */
const AUTO = "auto";
const STEP_S = 5;
/** The automatic span shrinks only if the streams need less than this share of it, so that it changes rarely. */
const SHRINK = 0.75;
/** Minimum height of a lane with a label, in pixels. */
const LABELLED_PX = 14;

export class Streams {
  constructor(app) {
    this.app = app;
    this.id = "streams";
    this.title = "Streams";
    this.lanes = new Lanes();
    this.answer = null;
    this.sentAt = null;
    this.silences = new Silences(app);
    this.polls = [
      app.poll("streams", (signal) => this.ask(signal), PERIOD_MS, (answer) => this.update(answer)),
      this.silences.poll,
    ];
    const picture = { class: "tape", role: "img", tabindex: "0", "aria-label": "No streams yet" };
    this.canvas = el("canvas", picture);
    this.tape = new Tape(this.canvas, this.lanes, { measured: app.measured });
    const tip = { class: "tip soft", "aria-hidden": "true" };
    this.tip = el("p", tip, "Each lane is a stream. Click a lane to inspect it.");
    /** Labels of the lanes, hidden from screen readers, since the table has the same names. */
    this.names = el("ul", { class: "names", "aria-hidden": "true" });
    this.canvas.addEventListener("mousemove", (event) => this.point(event));
    this.canvas.addEventListener("click", (event) => this.open(this.tape.laneAt(event.clientY)));
    this.canvas.addEventListener("keydown", (event) => {
      if (event.key === "Enter") this.open(this.lanes.slots.find((lane) => lane && lane.ended === null));
    });
    const button = { type: "button", id: "pause", "aria-pressed": "false", onclick: () => this.pause() };
    this.pauseButton = el("button", button, "Pause");
    this.span = el("select", { id: "span", onchange: () => this.setSpan() },
      el("option", { value: AUTO }, "as the streams"), SPANS_S.map((n) => el("option", { value: n }, `${n} s`)));
    this.counts = el("p", { class: "counts" });
    this.empty = el("div");
    this.axis = el("div", { class: "axis soft", "aria-hidden": "true" }, el("span"), el("span"));
    const about = { caption: "Streams under way", key: (row) => row.id, rows: 50 };
    const bar = el("div", { class: "bar" },
      this.pauseButton, el("label", { for: "span" }, "Span ", this.span), this.counts);
    this.table = new Table(this.columns(), about);
    this.node = el("div", {},
      section("Streams under way",
        bar,
        this.legend(), this.tip, this.empty, el("div", { class: "lanes" }, this.names, this.canvas, this.axis)),
      this.silences.node,
      el("details", { open: true }, el("summary", {}, "Table"), this.table.node));
    this.setSpan();
  }

  legend() {
    return el("ul", { class: "legend" }, KEYS.map(([name, words]) =>
      el("li", {}, el("i", { class: `key lane-${name}`, "aria-hidden": "true" }), words)));
  }

  setSpan() {
    this.tape.window = this.span.value === AUTO ? SPANS_S[0] : Number(this.span.value);
    this.tape.anew();
    this.sentAt = null;
    this.polls[0].again();
  }

  /** Sets the automatic span by the age of the oldest running stream. */
  followStreams(now) {
    if (this.span.value !== AUTO) return;
    const running = this.lanes.slots.filter((lane) => lane && lane.ended === null);
    const oldest = Math.max(0, ...running.map((lane) => now - this.lanes.behind - lane.arrival));
    const steps = STEP_S * Math.ceil(oldest / STEP_S);
    const needed = Math.min(SPANS_S.at(-1), Math.max(SPANS_S[0], steps));
    if (needed <= this.tape.window && needed > SHRINK * this.tape.window) return;
    this.tape.window = needed;
    this.tape.anew();
  }

  async ask(signal) {
    const sentAt = performance.now() / 1000;
    // Request the time since the previous request and 1 s more; at first and after a pause, the longest span.
    const since = this.sentAt === null ? 60 : sentAt - this.sentAt + 1;
    const window = Math.min(60, Math.ceil(since));
    const answer = await this.app.api.get("streams", { limit: LANES_MAX, window: `${window}s` }, signal);
    return { ...answer, sentAt };
  }

  update(answer) {
    const now = performance.now() / 1000;
    this.sentAt = answer.sentAt;
    this.answer = answer;
    this.app.render("streams", () => {
      this.lanes.pace = 1 / (this.app.readerSpeed ?? 20);
      this.lanes.update(this.filtered(), answer.sentAt, now, answer.count <= answer.streams.length);
      this.followStreams(now);
      if (this.lanes.tidy(now - this.tape.window - this.lanes.behind)) this.tape.anew();
      this.render(now);
    });
  }

  filtered() {
    return matching(this.answer.streams, this.app.filter, (one) => [one.tenant, one.model, one.arm]);
  }

  render(now = performance.now() / 1000) {
    if (!this.answer) return;
    const rows = this.filtered();
    const filtered = this.app.filter ? " (filtered)" : "";
    const shown = rows.length < this.answer.count
      ? `, the newest ${count(rows.length)} shown${filtered}`
      : "";
    const { waiting, streaming, stalled } = this.lanes.states(now);
    const states = `${waiting} waiting, ${streaming} streaming, ${stalled} stalled`;
    const words = `${count(this.answer.count)} under way${shown}: ${states}`;
    setText(this.counts, words);
    this.canvas.setAttribute("aria-label", words);
    setText(this.axis.children[0], `${seconds(this.tape.window + this.lanes.behind)} ago`);
    const behind = `${seconds(this.lanes.behind)} ago`;
    setText(this.axis.children[1], behind);
    const idle = rows.length === 0 && this.lanes.slots.length === 0;
    const why = idle ? `${this.answer.count} ${this.app.live?.listen}` : null;
    if (why !== this.why) refill(this.empty, idle ? this.nothing() : null);
    this.why = why;
    this.canvas.hidden = this.axis.hidden = this.tip.hidden = this.names.hidden = idle;
    this.nameLanes(now);
    this.table.update(rows.map((row) => ({ ...row, state: this.lanes.by.get(row.id)?.state(now) ?? NONE })));
  }

  /** Labels each lane with tenant, model and arm. A lane that begins after the right edge is still empty. */
  nameLanes(now) {
    const { slots } = this.lanes, height = rowHeight(slots.length);
    const labelled = height >= LABELLED_PX ? slots : [];
    const edge = now - this.lanes.behind;
    const texts = labelled.map((lane) => {
      if (!lane) return "";
      return lane.arrival > edge ? `${nameOf(lane.stream)} (starts)` : nameOf(lane.stream);
    });
    const ended = labelled.map((lane) => lane !== null && lane.ended !== null && lane.ended <= edge);
    const state = texts.map((text, i) => `${text} ${ended[i]}`).join("\n");
    if (state === this.named) return;
    this.named = state;
    refill(this.names, texts.map((text, i) => el("li", { title: text, class: ended[i] ? "ended" : null }, text)));
    for (const name of this.names.children) name.style.height = `${height}px`;
  }

  nothing() {
    if (this.answer.count) return emptyState("None of the newest streams matches the filter.");
    return sendOne("No stream is running. Send a request through llmtap:", this.app.live);
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
      { id: "arm", head: "arm", kind: "text", text: (row) => row.arm ?? NONE, value: (row) => row.arm },
      {
        id: "state", head: "state", kind: "text",
        text: (row) => row.state, value: (row) => row.state, state: (row) => `state ${row.state}`,
      },
      { id: "age", head: "age", text: (row) => seconds(row.age), value: (row) => row.age },
      { id: "ttft", head: "TTFT", text: (row) => seconds(row.ttft), value: (row) => row.ttft },
      { id: "tokens", head: "tokens", text: (row) => count(row.tokens), value: (row) => row.tokens },
      { id: "events", head: "events", text: (row) => count(row.events), value: (row) => row.events },
      {
        id: "last", head: "since last",
        text: (row) => seconds(row.since_last), value: (row) => row.since_last,
      },
      { id: "dialect", head: "dialect", kind: "text", text: (row) => row.dialect ?? NONE },
    ];
  }

  point(event) {
    const lane = this.tape.laneAt(event.clientY);
    if (!lane) return;
    const { id, tokens, age } = lane.stream;
    const state = lane.state(performance.now() / 1000);
    setText(this.tip, `${id} · ${nameOf(lane.stream)} · ${count(tokens)} tokens · ${seconds(age)} old · ${state}`);
  }

  open(lane) {
    if (lane) location.hash = `#exchanges/${encodeURIComponent(lane.id)}`;
  }

  pause() {
    this.tape.paused = !this.tape.paused;
    setText(this.pauseButton, this.tape.paused ? "Resume" : "Pause");
    this.pauseButton.setAttribute("aria-pressed", String(this.tape.paused));
    this.app.announce(this.tape.paused ? "Paused" : "Resumed");
    if (this.tape.paused) this.polls[0].stop();
    else {
      this.forget();
      this.polls[0].start();
    }
  }

  /** Removes all lanes, so that the next answer builds them again. */
  forget() {
    this.sentAt = null;
    this.lanes.clear();
    this.tape.anew();
  }

  filterChanged() {
    if (!this.tape.paused) {
      this.forget();
      this.polls[0].again();
    }
    this.render();
    this.silences.render();
  }

  onShow() {
    if (this.tape.paused) this.polls[0].stop(); // a paused picture needs no answers
    else this.forget();
    this.tape.start();
  }

  onHide() {
    this.tape.stop();
  }

  onThemeChange() {
    this.tape.anew();
  }
}

/** Returns the label of a stream: "acme · tiny · guarded". */
function nameOf({ tenant, model, arm }) {
  return [tenant, model, arm].filter((part) => part !== null).join(" · ");
}
