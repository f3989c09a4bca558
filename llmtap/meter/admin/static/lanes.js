// The streams under way as the page keeps them: one lane each, with the reader that waits at its end.
// Times are seconds of performance.now().

import { Reader } from "./reader.js";

export const LANES_MAX = 200;
/** So far behind now is drawn, at least: chunks must have been heard of before their place is drawn. */
const BEHIND_S = 1.6;
const DIMMED_S = 2;

/** One stream in its lane. */
class Lane {
  constructor(told, arrival, pace) {
    this.id = told.id;
    this.arrival = arrival;
    /** Of chunks: when, how many tokens, and when the reader had run dry before it (null: had not). */
    this.t = [];
    this.tokens = [];
    this.dry = [];
    this.first = null;
    this.last = -Infinity;
    this.ended = null;
    this.reader = new Reader(arrival, pace);
    this.pace = pace;
    const shown = told.timeline.reduce((sum, [, tokens]) => sum + tokens, 0);
    const before = told.tokens - shown;
    if (before > 0 && told.ttft !== null) {
      // It began before we looked: the reader is taken to have waited for the first token only.
      this.first = arrival + told.ttft;
      this.reader.hear(this.first, before);
    }
    this.hear(told);
  }

  /** What is told of it; returns when the first new chunk came. */
  hear(told) {
    this.told = told;
    this.ended = null;
    const n = this.t.length;
    // Points of a thinned timeline stand for chunks after them: none of those may be heard a second time.
    const heard = told.since_last === null ? -Infinity : told.age - told.since_last;
    // All chunks of a read share its stamp, and are told together.
    const known = this.last + 1e-5;
    for (const [offset, tokens] of told.timeline) {
      if (offset <= known) continue;
      this.last = offset;
      const t = this.arrival + offset;
      this.first ??= t;
      this.t.push(t);
      this.tokens.push(tokens);
      this.dry.push(this.reader.hear(t, tokens));
    }
    this.last = Math.max(this.last, heard);
    return this.t[n] ?? Infinity;
  }

  /** What is older is not drawn any more. */
  forget(before) {
    let n = 0;
    while (n < this.t.length && this.t[n] < before) n++;
    if (n > 64) for (const list of [this.t, this.tokens, this.dry]) list.splice(0, n);
  }

  /** `waiting`, `streaming` or `stalled`: the reader has read all there was. */
  state(now) {
    if (this.ended !== null) return "ended";
    if (this.first === null || now < this.first) return "waiting";
    return now > this.reader.free ? "stalled" : "streaming";
  }
}

/** All lanes. A stream stays in its lane; a lane is taken again a little after its stream has ended. */
export class Lanes {
  constructor() {
    this.slots = [];
    this.by = new Map();
    this.pace = 0.05;
    /** What the tap had seen until then has been heard. */
    this.until = -Infinity;
    /** The oldest of the chunks heard of since the tape last looked: a meter that is behind tells late. */
    this.freshFrom = Infinity;
    /** As BEHIND_S, or more where answers take longer. */
    this.behind = BEHIND_S;
  }

  /** What `/api/v1/streams` told, asked between `asked` and `now`; `all`: there are no others. */
  hear(streams, asked, now, all) {
    const here = new Set();
    if (this.until > -Infinity) {
      this.behind += 0.3 * (Math.max(BEHIND_S, 1.1 * (now - this.until)) - this.behind);
    }
    this.until = asked;
    // Stamps of the tap are older than the answer by half its way.
    const at = now - (now - asked) / 2;
    for (const told of streams) {
      here.add(told.id);
      const lane = this.by.get(told.id);
      if (lane) this.freshFrom = Math.min(this.freshFrom, lane.hear(told));
      else this.add(new Lane(told, at - told.age, this.pace), now);
    }
    for (const lane of this.by.values()) {
      if (here.has(lane.id) || lane.ended !== null) continue;
      if (!all) {
        this.drop(lane); // only the newest are told: nobody knows whether it has ended
        continue;
      }
      lane.ended = lane.t.length ? Math.max(lane.t.at(-1), asked - 1) : asked;
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

  /** Takes out what ended before `since`, and empty lanes at the end. */
  tidy(since) {
    for (const lane of this.by.values()) {
      lane.forget(since);
      if (lane.ended !== null && lane.ended < since) this.drop(lane);
    }
    while (this.slots.length && this.slots.at(-1) === null) this.slots.pop();
  }

  clear() {
    this.until = -Infinity;
    this.slots = [];
    this.by.clear();
  }

  /** How many are in each state. */
  states(now) {
    const found = { waiting: 0, streaming: 0, stalled: 0 };
    for (const lane of this.slots) {
      const state = lane?.state(now);
      if (state in found) found[state]++;
    }
    return found;
  }
}
