
// Charts over time show one stretch of it: who zooms into one, zooms into all.
(() => {
  const { plots } = JSON.parse(document.getElementById("figures").textContent);
  const timed = Object.keys(plots).filter((id) => plots[id].layout.meta?.time).map((id) => document.getElementById(id)).filter((div) => div.on);
  let busy = false;

  function rangeOf(changed, whole) {
    if (changed["xaxis.autorange"]) return whole;
    return changed["xaxis.range"] ?? (changed["xaxis.range[0]"] === undefined ? null : [changed["xaxis.range[0]"], changed["xaxis.range[1]"]]);
  }

  for (const div of timed) {
    div.on("plotly_relayout", async (changed) => {
      const range = rangeOf(changed, plots[div.id].layout.xaxis.range);
      if (busy || !range) return;
      busy = true;
      await Promise.all(timed.map((other) => Plotly.relayout(other, { "xaxis.range": [...range] })));
      busy = false;
    });
  }
})();
