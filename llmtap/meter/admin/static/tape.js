// The lanes as a tape that moves to the left. Each frame shifts the old picture and draws only the new part, so
// that the CPU time of a frame depends on the new chunks and not on the number of streams.

import { colour } from "./charts.js";

const FRAME_MS = 32;
const ROW_MAX = 22, ROW_MIN = 4, HEIGHT_MAX = 820;

/** Height of each of `n` lanes, in CSS pixels. */
export function rowHeight(n) {
  return Math.max(ROW_MIN, Math.min(ROW_MAX, Math.floor(HEIGHT_MAX / Math.max(1, n))));
}

/** Opacity of a lane whose stream has ended. */
const FADED = 0.35;
const INKS = ["waiting", "streaming", "stalled", "chunk", "first"];

export class Tape {
  constructor(canvas, lanes, about = {}) {
    this.canvas = canvas;
    this.lanes = lanes;
    this.window = 10;
    this.paused = false;
    this.measured = about.measured ?? ((name, work) => work());
    this.at = null;
    this.frame = null;
    this.last = 0;
    this.inks = null;
    this.rows = 0;
    new ResizeObserver(() => this.anew()).observe(canvas);
  }

  start() {
    this.frame ??= requestAnimationFrame((now) => this.turn(now));
  }

  stop() {
    if (this.frame !== null) cancelAnimationFrame(this.frame);
    this.frame = null;
    this.at = null;
  }

  /** Draws everything again at the next frame, after a change of size, colours or lanes. */
  anew() {
    this.at = null;
    this.inks = null;
  }

  turn(now) {
    this.frame = requestAnimationFrame((next) => this.turn(next));
    if (this.paused || now - this.last < FRAME_MS) return;
    this.last = now;
    const { until, behind } = this.lanes;
    if (until > -Infinity) this.measured("tape", () => this.draw(Math.min(until, now / 1000 - behind)));
  }

  /** Draws the tape up to `now`. */
  draw(now) {
    if (this.lanes.slots.length !== this.rows || this.at === null) this.shape();
    const { canvas, ctx } = this;
    if (!canvas.width) return;
    const scale = canvas.width / this.window; // pixels a second
    const edge = Math.max(Math.floor(now * scale), this.at ?? -Infinity);
    const late = this.lanes.freshFrom * scale < this.at;
    this.lanes.freshFrom = Infinity;
    if (this.at === null || late || edge - this.at >= canvas.width) {
      ctx.clearRect(0, 0, canvas.width, canvas.height);
      this.strip(edge - canvas.width, edge, edge, scale);
    } else if (edge > this.at) {
      const moved = edge - this.at;
      ctx.globalCompositeOperation = "copy";
      ctx.drawImage(canvas, -moved, 0);
      ctx.globalCompositeOperation = "source-over";
      this.fade(now);
      this.strip(this.at, edge, edge, scale);
    }
    this.at = edge;
  }

  /** Fades the lanes of the streams that have ended since the previous frame. */
  fade(now) {
    const { ctx, canvas, row } = this;
    this.lanes.slots.forEach((lane, i) => {
      if (!lane || lane.faded || lane.ended === null || lane.ended > now) return;
      lane.faded = true;
      ctx.globalCompositeOperation = "destination-out";
      ctx.globalAlpha = 1 - FADED;
      ctx.fillRect(0, i * row, canvas.width, row);
      ctx.globalAlpha = 1;
      ctx.globalCompositeOperation = "source-over";
    });
  }

  /** Gives the canvas the size that its lanes need, and reads the colours. */
  shape() {
    const { canvas } = this;
    const n = this.rows = this.lanes.slots.length;
    const row = rowHeight(n);
    const ratio = Math.min(2, window.devicePixelRatio || 1);
    this.row = Math.round(row * ratio);
    const height = Math.max(1, n) * row;
    canvas.style.height = `${height}px`;
    canvas.width = Math.round(canvas.clientWidth * ratio);
    canvas.height = Math.round(height * ratio);
    this.ctx = canvas.getContext("2d", { alpha: true });
    this.inks ??= Object.fromEntries(INKS.map((name) => [name, colour(`lane-${name}`)]));
    this.at = null;
  }

  /** Draws the columns [from, to) of the tape, in pixels since time 0; the right end of the canvas is `edge`. */
  strip(from, to, edge, scale) {
    const { ctx, row, inks } = this;
    const shift = this.canvas.width - edge;
    const gap = row > 8 ? 2 : 1;
    const begin = from / scale, end = to / scale;
    const paint = (ink, a, b, y, height) => {
      const left = Math.max(from, Math.floor(a * scale)), right = Math.min(to, Math.ceil(b * scale));
      if (right <= left) return;
      ctx.fillStyle = ink;
      ctx.fillRect(left + shift, y, right - left, height);
    };
    this.lanes.slots.forEach((lane, i) => {
      if (!lane) return;
      lane.faded = lane.ended !== null && lane.ended <= end;
      ctx.globalAlpha = lane.faded ? FADED : 1;
      const y = i * row, height = row - gap;
      const low = Math.max(1, Math.round(height / 3)), middle = y + Math.floor((height - low) / 2);
      const over = lane.ended ?? Infinity;
      const first = lane.first ?? Infinity;
      paint(inks.waiting, lane.arrival, Math.min(first, over, end), middle, low);
      if (first < end) paint(inks.streaming, first, Math.min(over, end), middle, low);
      const { t, dry } = lane;
      let k = t.length; // index of the first chunk in the strip; searched from the end, where most strips are
      while (k > 0 && t[k - 1] >= begin) k--;
      for (let j = k; j < t.length; j++) {
        // A wait ends with a chunk. Draw also a wait that begins in the strip and ends after it.
        if (dry[j] !== null && t[j] > first) paint(inks.stalled, Math.max(dry[j], first), t[j], y, height);
        if (t[j] >= end) break;
      }
      const stalls = lane.first !== null && lane.reader.free < end && lane.ended === null;
      if (stalls) paint(inks.stalled, lane.reader.free, end, y, height);
      let drawn = -1;
      for (let j = k; j < t.length && t[j] < end; j++) {
        const x = Math.floor(t[j] * scale);
        if (x === drawn || x < from || x >= to) continue;
        drawn = x;
        const isFirst = t[j] === lane.first;
        ctx.fillStyle = isFirst ? inks.first : inks.chunk;
        ctx.fillRect(x + shift, y, isFirst ? Math.max(2, Math.round(row / 6)) : 1, height);
      }
    });
    ctx.globalAlpha = 1;
  }

  /** Returns the lane at a vertical position in the window, or null. */
  laneAt(clientY) {
    const box = this.canvas.getBoundingClientRect();
    const slot = Math.floor(((clientY - box.top) / box.height) * this.rows);
    return this.lanes.slots[slot] ?? null;
  }
}
