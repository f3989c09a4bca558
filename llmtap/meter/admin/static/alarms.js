// Burn-rate alarms: which ring, and what each of them looks at.

import { count, number, seconds } from "./format.js";

/** Of the time in its name a window may lack this share: it moves in steps. */
const WHOLE = 0.9;
const LENGTHS = { s: 1, m: 60, h: 3600 };

/** All alarms of a summary's classes, those that ring first. */
export function alarmsOf(slo) {
  const found = Object.entries(slo ?? {}).flatMap(([name, { alarms, windows }]) =>
    alarms.map((alarm) => ({ name, alarm, long: windows[alarm.long], short: windows[alarm.short] })));
  return found.sort((a, b) => b.alarm.ringing - a.alarm.ringing);
}

/** "1h", or "the 25 s measured" where the meter is younger than that. */
function span(name, window) {
  const whole = parseInt(name, 10) * LENGTHS[name.at(-1)];
  return window.seconds < WHOLE * whole ? `the ${seconds(window.seconds)} measured` : name;
}

/** "gold spends its error budget 20 times as fast as it may over 1h, 18 times over 5m: page, ..." */
export function ringing({ name, alarm, long, short }) {
  const over = `${number(long.burn_rate)} times as fast as it may over ${span(alarm.long, long)},`
    + ` ${number(short.burn_rate)} times over ${span(alarm.short, short)}`;
  return `${name} spends its error budget ${over}: ${alarm.severity}, from ${number(alarm.burn_rate)} on.`;
}

function state({ alarm, long }) {
  if (alarm.ringing) return "rings";
  if (!alarm.reachable) return "can never ring at this target";
  if (long.counted < alarm.events_min) return `quiet until ${count(alarm.events_min)} counted`;
  return "quiet";
}

export const ALARMS = [
  { id: "name", head: "class", kind: "text", text: (row) => row.name },
  { id: "severity", head: "severity", kind: "text", text: (row) => row.alarm.severity },
  {
    id: "from", head: "rings from", title: "where the burn rates of both windows reach it",
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
