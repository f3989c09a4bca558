// How long the page takes for what it does, kept for whoever wants to know: window.llmtap.renders.

const KEPT_MAX = 5000;

const renders = [];
window.llmtap = { renders, errors: [] };

/** Runs `work` and notes how long it took. */
export function measured(name, work) {
  const began = performance.now();
  try {
    return work();
  } finally {
    renders.push({ name, at: began, ms: performance.now() - began });
    if (renders.length > KEPT_MAX) renders.splice(0, renders.length - KEPT_MAX);
  }
}
