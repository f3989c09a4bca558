// Sets the theme that the user chose. Runs before the first paint, so that the other theme is never visible.
"use strict";
(() => {
  try {
    const saved = localStorage.getItem("llmtap.theme");
    if (saved === "light" || saved === "dark") document.documentElement.dataset.theme = saved;
  } catch {
    // Storage is blocked: use the system's theme.
  }
})();
