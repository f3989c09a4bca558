// Keyboard shortcuts, except in input fields.

const byId = (id) => document.getElementById(id);

export function listen(app) {
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
    const at = event.target;
    if (at.matches("input, select, textarea")) {
      if (event.key === "Escape" && at.id === "filter") {
        at.value = "";
        app.setFilter("");
        at.blur();
      }
      return;
    }
    if (act(app, event.key, at)) event.preventDefault();
  });
}

/** Carries out a shortcut. Returns whether the key has a meaning. */
function act(app, key, at) {
  const isView = key.length === 1 && key >= "1" && key <= String(app.views.length);
  if (isView) location.hash = app.views[Number(key) - 1].id;
  else if (key === "/") byId("filter").focus();
  else if (key === "?") byId("help").showModal();
  else if (key === "t") app.nextTheme();
  // Exceptions: in a table that scrolls, arrow keys scroll; on a button, the space key presses it.
  else if (key === "ArrowRight" && !at.closest(".scroll")) app.go(1);
  else if (key === "ArrowLeft" && !at.closest(".scroll")) app.go(-1);
  else if (key === "Escape" && app.view.leave) return app.view.leave();
  else if (key === " " && app.view.pause && !at.closest("button, a, summary, .scroll")) app.view.pause();
  else return false;
  return true;
}
