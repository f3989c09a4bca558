// Runs before the first paint, so that the page does not flash in the other theme.
"use strict";
(() => {
  try {
    const saved = localStorage.getItem("llmtap.theme");
    if (saved === "light" || saved === "dark") document.documentElement.dataset.theme = saved;
  } catch {
    // Storage is blocked: use the system's theme.
  }
})();
