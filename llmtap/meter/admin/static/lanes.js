// State of the running streams: one lane each, with a reader at its end.
// Times are seconds of performance.now().

import { Reader } from "./reader.js";

export const LANES_MAX = 200;
/** Minimum delay of the picture: chunks must have been received before their place is drawn. */
const BEHIND_S = 1.6;
const DIMMED_S = 2;

/** One stream in its lane. */
class Lane {
  constructor(stream, arrival, pace) {
    this.id = stream.id;
    this.arrival = arrival;
    /** By chunk: time, tokens, and time when the reader began to wait for it (null: did not wait). */
    this.t = [];
    this.tokens = [];
    this.dry = [];
    this.first = null;
    this.last = -Infinity;
    this.ended = null;
    /** Whether the tape shows that the stream has ended. */
    this.faded = false;
    this.reader = new Reader(arrival, pace);
    this.pace = pace;
    const shown = stream.timeline.reduce((sum, [, tokens]) => sum + tokens, 0);
    const before = stream.tokens - shown;
    if (before > 0 && stream.ttft !== null) {
      // The stream began before the page was opened: assume that the reader waited for the first token only.
      this.first = arrival + stream.ttft;
      this.reader.receive(this.first, before);
    }
    this.update(stream);
  }

  /** Takes the stream's newest entry of `/api/v1/streams`. Returns the time of the first new chunk. */
  update(stream) {
    this.stream = stream;
    this.ended = null;
    const n = this.t.length;
    // A point of a thinned timeline stands for chunks after it, too: do not count those again.
    const newest = stream.since_last === null ? -Infinity : stream.age - stream.since_last;
    // All chunks of a read have the same time and are in the same answer.
    const known = this.last + 1e-5;
    for (const [offset, tokens] of stream.timeline) {
      if (offset <= known) continue;
      this.last = offset;
      const t = this.arrival + offset;
      this.first ??= t;
      this.t.push(t);
      this.tokens.push(tokens);
      this.dry.push(this.reader.receive(t, tokens));
    }
    this.last = Math.max(this.last, newest);
    return this.t[n] ?? Infinity;
  }

  /** Drops older chunks, which are not drawn any more. */
  forget(before) {
    let n = 0;
    while (n < this.t.length && this.t[n] < before) n++;
    if (n > 64) for (const list of [this.t, this.tokens, this.dry]) list.splice(0, n);
  }

  /** `waiting`, `streaming`, `stalled` (the reader has read all tokens) or `ended`. */
  state(now) {
    if (this.ended !== null) return "ended";
    if (this.first === null || now < this.first) return "waiting";
    return now > this.reader.free ? "stalled" : "streaming";
  }
}

/** All lanes. A stream stays in its lane; the lane is used again some time after the stream has ended. */
export class Lanes {
  constructor() {
    this.slots = [];
    this.by = new Map();
    this.pace = 0.05;
    /** Time of the latest request: chunks until then are known. */
    this.until = -Infinity;
    /** Time of the oldest chunk received since the last drawing: a slow meter reports late. */
    this.freshFrom = Infinity;
    /** BEHIND_S, or more if answers take longer. */
    this.behind = BEHIND_S;
  }

  /** Takes an answer of `/api/v1/streams`, requested at `sentAt`; `all`: it lists all running streams. */
  update(streams, sentAt, now, all) {
    const here = new Set();
    if (this.until > -Infinity) {
      this.behind += 0.3 * (Math.max(BEHIND_S, 1.1 * (now - this.until)) - this.behind);
    }
    this.until = sentAt;
    // Ages in the answer are as of half the round trip ago.
    const at = now - (now - sentAt) / 2;
    for (const stream of streams) {
      here.add(stream.id);
      const lane = this.by.get(stream.id);
      if (lane) this.freshFrom = Math.min(this.freshFrom, lane.update(stream));
      else this.add(new Lane(stream, at - stream.age, this.pace), now);
    }
    for (const lane of this.by.values()) {
      if (here.has(lane.id) || lane.ended !== null) continue;
      if (!all) {
        this.drop(lane); // only the newest streams are listed: it is unknown whether this one has ended
        continue;
      }
      lane.ended = lane.t.length ? Math.max(lane.t.at(-1), sentAt - 1) : sentAt;
    }
  }

  add(lane, now) {
    const free = (one) => one === null || (one.ended !== null && now - one.ended > DIMMED_S);
    let slot = this.slots.findIndex(free);
    if (slot < 0) {
      if (this.slots.length >= LANES_MAX) return;
      slot = this.slots.length;
    }
    const before = this.slots[slot];
    if (before) this.by.delete(before.id);
    this.slots[slot] = lane;
    this.by.set(lane.id, lane);
  }

  drop(lane) {
    this.by.delete(lane.id);
    this.slots[this.slots.indexOf(lane)] = null;
  }

  /** Removes streams that ended before `since`, and empty lanes. Returns whether other lanes moved. */
  tidy(since) {
    for (const lane of this.by.values()) {
      lane.forget(since);
      if (lane.ended !== null && lane.ended < since) this.drop(lane);
    }
    const moved = this.slots.includes(null);
    if (moved) this.slots = this.slots.filter((lane) => lane !== null);
    return moved;
  }

  clear() {
    this.until = -Infinity;
    this.slots = [];
    this.by.clear();
  }

  /** Number of streams in each state. */
  states(now) {
    const counts = { waiting: 0, streaming: 0, stalled: 0 };
    for (const lane of this.slots) {
      const state = lane?.state(now);
      if (state in counts) counts[state]++;
    }
    return counts;
  }
}
