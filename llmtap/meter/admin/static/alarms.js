// Burn-rate alarms: their state, limits and windows.

import { count, number, seconds } from "./format.js";

/** Minimum share of its nominal length that a complete window covers, because a window moves in steps. */
const WHOLE = 0.9;
const LENGTHS = { s: 1, m: 60, h: 3600 };

/** Returns all alarms of the classes of a summary; firing alarms first. */
export function alarmsOf(slo) {
  const rows = Object.entries(slo ?? {}).flatMap(([name, { alarms, windows, by }]) =>
    alarms.map((alarm) => {
      const own = alarm.tenant === null ? windows : by.tenant[alarm.tenant];
      const owner = alarm.tenant === null ? name : `${alarm.tenant} (${name})`;
      return { name: owner, alarm, long: own[alarm.long], short: own[alarm.short] };
    }));
  return rows.sort((a, b) => b.alarm.ringing - a.alarm.ringing);
}

/** Returns "1h", or "the 25 s measured" if the meter or the class has existed for a shorter time. */
function span(name, window) {
  const whole = parseInt(name, 10) * LENGTHS[name.at(-1)];
  return window.seconds < WHOLE * whole ? `the ${seconds(window.seconds)} measured` : name;
}

/** Returns the sentence of a firing alarm: "gold uses ...: burn rate 20 over 1h and 18 over 5m; page above ..." */
export function ringing({ name, alarm, long, short }) {
  const spans = [[alarm.long, long], [alarm.short, short]];
  const rates = new Set(spans.map(([of, window]) => `${number(window.burn_rate)} over ${span(of, window)}`));
  return `${name} uses its error budget too fast: burn rate ${[...rates].join(" and ")};`
    + ` ${alarm.severity} above ${number(alarm.burn_rate)} over ${alarm.long} and ${alarm.short}.`;
}

function state({ alarm, long }) {
  if (alarm.ringing) return "firing";
  if (!alarm.reachable) return "cannot fire at this target";
  if (long.counted < alarm.events_min) return `quiet until ${count(alarm.events_min)} counted`;
  return "quiet";
}

export const ALARMS = [
  { id: "name", head: "class", kind: "text", text: (row) => row.name },
  { id: "severity", head: "severity", kind: "text", text: (row) => row.alarm.severity },
  {
    id: "from", head: "limit", title: "the alarm fires if the burn rates of both windows reach it",
    text: (row) => number(row.alarm.burn_rate),
  },
  {
    id: "long", head: "long window", kind: "text",
    text: (row) => `${span(row.alarm.long, row.long)}: ${number(row.long.burn_rate)}`,
  },
  {
    id: "short", head: "short window", kind: "text",
    text: (row) => `${span(row.alarm.short, row.short)}: ${number(row.short.burn_rate)}`,
  },
  { id: "counted", head: "counted", title: "in the long window", text: (row) => count(row.long.counted) },
  {
    id: "state", head: "state", kind: "text",
    text: state, state: (row) => (row.alarm.ringing ? "bad" : ""),
  },
];
