// State of the running streams: one lane for each, with the reader who reads its tokens (`reader.js`).
// Times are seconds of performance.now().

import { Reader } from "./reader.js";

export const LANES_MAX = 200;
/** Minimum delay of the picture, so that chunks have been received before their place is drawn. */
const BEHIND_S = 1.6;
const DIMMED_S = 2;

/** One stream in its lane. */
class Lane {
  constructor(stream, arrival, pace) {
    this.id = stream.id;
    this.arrival = arrival;
    /** By chunk: time, tokens, and the time when the reader began to wait for it (null: no wait). */
    this.t = [];
    this.tokens = [];
    this.dry = [];
    this.first = null;
    this.last = -Infinity;
    this.ended = null;
    /** Whether the tape has drawn the lane as that of an ended stream. */
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

  /** Adds the new chunks of an entry of `/api/v1/streams`. Returns the time of the first new chunk. */
  update(stream) {
    this.stream = stream;
    this.ended = null;
    const n = this.t.length;
    // A point of a thinned timeline includes later chunks, up to the newest: do not count these again.
    const newest = stream.since_last === null ? -Infinity : stream.age - stream.since_last;
    // Skip chunks up to the latest known time. No chunk is missed, since an answer has all chunks of a read.
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

  /** Removes the chunks from before a time: they are not drawn any more. */
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

/** All lanes. A stream stays in its lane; a new stream can use the lane DIMMED_S after the end of the old one. */
export class Lanes {
  constructor() {
    this.slots = [];
    this.by = new Map();
    this.pace = 0.05;
    /** Time of the latest request: the chunks until this time are known. */
    this.until = -Infinity;
    /** Time of the oldest chunk received since the previous frame; a slow meter reports chunks late. */
    this.freshFrom = Infinity;
    /** Delay of the picture: BEHIND_S, or more if answers take longer. */
    this.behind = BEHIND_S;
  }

  /** Adds an answer of `/api/v1/streams`, requested at `sentAt`. `all`: whether it lists all running streams. */
  update(streams, sentAt, now, all) {
    const here = new Set();
    if (this.until > -Infinity) {
      this.behind += 0.3 * (Math.max(BEHIND_S, 1.1 * (now - this.until)) - this.behind);
    }
    this.until = sentAt;
    // Assume that the meter made the answer, with the ages in it, in the middle of the round trip.
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
        this.drop(lane); // the answer lists only the newest streams, so this one has possibly not ended
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

  /** Removes streams that ended before `since`, and empty lanes. Returns whether the other lanes moved. */
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

  /** Returns the number of streams in each state. */
  states(now) {
    const counts = { waiting: 0, streaming: 0, stalled: 0 };
    for (const lane of this.slots) {
      const state = lane?.state(now);
      if (state in counts) counts[state]++;
    }
    return counts;
  }
}
