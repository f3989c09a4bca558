// Figures as text. An unknown value is shown as a dash, never as 0.

export const NONE = "–";
/** Outcomes that are failures of the upstream or of llmtap; the same as FAILED of exchange/outcome.py. */
export const FAILED = new Set([
  "upstream_error", "upstream_reset", "upstream_timeout", "truncated", "rejected", "tap_error",
]);

function digits(value) {
  const size = Math.abs(value);
  if (size === 0 || size >= 100) return 0;
  return size >= 10 ? 1 : 2;
}

export function number(value, least = null) {
  if (value === null || value === undefined || Number.isNaN(value)) return NONE;
  const places = least ?? (Number.isInteger(value) ? 0 : digits(value));
  const shape = { minimumFractionDigits: places, maximumFractionDigits: places, signDisplay: "negative" };
  return value.toLocaleString("en", shape); // "negative": a value that is rounded to 0 has no sign
}

/** Returns a time in a readable unit: "0.85 ms", "120 ms", "1.2 s", "3 min 20 s"; `value`: seconds. */
export function seconds(value) {
  if (value === null || value === undefined) return NONE;
  const size = Math.abs(value);
  if (size === 0) return "0 ms";
  if (size < 0.001) return `${number(value * 1e6, size < 1e-5 ? 1 : 0)} µs`;
  if (size < 1) return `${number(value * 1e3)} ms`;
  if (size < 120) return `${number(value)} s`;
  const whole = Math.round(value); // rounded before the division, so that 49 min 59.6 s are 50 min 0 s
  if (size < 7200) return `${Math.trunc(whole / 60)} min ${whole % 60} s`;
  return `${number(value / 3600)} h`;
}

/** Returns a metric of the times of tokens; null for an answer that is not a stream. */
export function tokenTime(exchange, name) {
  return exchange.stream ? exchange.metrics[name] : null;
}

/** Returns "347 tokens/s"; a dash alone if the value is unknown. */
export function rate(value, unit) {
  return value === null || value === undefined ? NONE : `${number(value)} ${unit}`;
}

export function share(value) {
  if (value === null || value === undefined) return NONE;
  return `${number(value * 100, value !== 0 && Math.abs(value) < 0.1 ? 2 : 1)} %`;
}

export function count(value) {
  return value === null || value === undefined ? NONE : value.toLocaleString("en");
}

export function bytes(value) {
  if (value === null || value === undefined) return NONE;
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let at = 0;
  for (; value >= 1024 && at < units.length - 1; at++) value /= 1024;
  return `${number(value, at ? 1 : 0)} ${units[at]}`;
}

/** Returns the basis of a figure, samples and window: "n 1,234 · 1m (58 s)". */
export function basis(n, window) {
  return window ? `n ${count(n)} · ${window.name} (${seconds(window.seconds)})` : `n ${count(n)}`;
}

/** Returns the uncertainty of timestamps: "± 60 µs (p99 ± 0.9 ms)". */
export function width(stamps) {
  return stamps?.n ? `±\u00a0${seconds(stamps.p50)} (p99 ±\u00a0${seconds(stamps.p99)})` : "±\u00a0unknown";
}

/** Returns the time of day in the time zone of the browser (`zone`). */
export function clock(date) {
  const at = new Date(date ?? NaN);
  return Number.isNaN(at.getTime()) ? NONE : at.toLocaleTimeString("en-GB");
}

/** Returns the name of the time zone of `clock`: "UTC", "GMT+2". */
export function zone() {
  const parts = new Intl.DateTimeFormat("en-GB", { timeZoneName: "short" }).formatToParts(new Date());
  return parts.find((part) => part.type === "timeZoneName").value;
}

/** Returns a time in UTC: "2026-01-15T12:00:00.000Z". */
export function iso(date) {
  const at = new Date(date);
  return Number.isNaN(at.getTime()) ? NONE : at.toISOString();
}

/** Returns the counts by name as pairs, the largest first: [["complete", 12], ...] */
export function ranked(counts) {
  return Object.entries(counts ?? {}).sort((a, b) => b[1] - a[1]);
}
