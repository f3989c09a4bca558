// The reader of a stream (smooth goodput paper, eq. 4 and 6), who needs a fixed time for each token, and waits if
// there is no token. All times are seconds.

/** State of the reader of one stream. */
export class Reader {
  /** @param began when the reader begins to wait (submit) @param pace seconds for each token */
  constructor(began, pace) {
    this.pace = pace;
    /** Time when all received tokens are read. */
    this.free = began;
    /** Total time of all waits. */
    this.idle = 0;
  }

  /** Adds tokens received at `t`. Returns the time when the reader began to wait for them; null: no wait. */
  receive(t, tokens) {
    let dry = null;
    if (t > this.free) {
      dry = this.free;
      this.idle += t - this.free;
      this.free = t;
    }
    this.free += tokens * this.pace;
    return dry;
  }
}

/** Returns the tokens of each event with output: as declared, else an equal share of the total, else one. */
function sharesOf(events, total) {
  const declared = events.every((event) => event.tokens !== null);
  const even = total && events.length ? total / events.length : 1;
  return events.map((event) => (declared ? event.tokens : even));
}

const OUTPUT = new Set(["content", "reasoning", "tool_call", "refusal"]);

/**
 * Returns one exchange as the reader sees it: `chunks` [{index, t, tokens, before, due, late, waited}], `waits`
 * [[from, to]], `idle`, `free` (time when all received tokens are read), and `worst`, the index of the chunk with
 * the largest delay (the turning point of Fig. 1).
 *
 * `due` is the time at which a reader who never waits needs the chunk's first token; `waited` is the time that the
 * reader waited for the chunk.
 */
export function follow(events, submit, pace, total = null) {
  const indexed = events.map((event, index) => ({ ...event, index }));
  const carrying = indexed.filter((event) => OUTPUT.has(event.class));
  const tokens = sharesOf(carrying, total);
  const reader = new Reader(submit, pace);
  const chunks = [], waits = [];
  let before = 0, worst = null;
  carrying.forEach((event, i) => {
    const due = submit + before * pace;
    const late = event.t - due;
    const dry = reader.receive(event.t, tokens[i]);
    if (dry !== null) waits.push([dry, event.t]);
    const waited = dry === null ? 0 : event.t - dry;
    chunks.push({ index: event.index, t: event.t, tokens: tokens[i], before, due, late, waited });
    if (worst === null || late > chunks[worst].late) worst = i;
    before += tokens[i];
  });
  return { chunks, waits, idle: reader.idle, free: reader.free, worst, tokens: before };
}
