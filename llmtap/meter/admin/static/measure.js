// Durations of the work of this page, for tests and debugging: `window.llmtap.renders`.

const RENDERS_MAX = 5000;

const renders = [];
window.llmtap = { renders, errors: [] };

/** Runs `work` and records its duration. */
export function measured(name, work) {
  const began = performance.now();
  try {
    return work();
  } finally {
    renders.push({ name, at: began, ms: performance.now() - began });
    if (renders.length > RENDERS_MAX) renders.splice(0, renders.length - RENDERS_MAX);
  }
}
