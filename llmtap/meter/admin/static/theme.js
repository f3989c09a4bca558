// Runs before the first paint: the page must not flash in the other theme.
"use strict";
(() => {
  try {
    const kept = localStorage.getItem("llmtap.theme");
    if (kept === "light" || kept === "dark") document.documentElement.dataset.theme = kept;
  } catch {
    // A browser that keeps nothing shows what the system has.
  }
})();
