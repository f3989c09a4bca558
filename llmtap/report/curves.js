"use strict";
(() => {
  const { lines, plots } = JSON.parse(document.getElementById("figures").textContent);
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const paper = matchMedia("print");
  const divs = Object.keys(plots).map((id) => document.getElementById(id));
  const PAPER_PX = 330; // half of an A4 page between its margins

  function colours() {
    const style = getComputedStyle(document.documentElement);
    return (name) => style.getPropertyValue(name).trim();
  }

  function themed(layout, colour) {
    const axis = (own) => ({
      ...own, automargin: true, gridcolor: colour("--grid"), linecolor: colour("--rule"),
      zerolinecolor: colour("--rule"), exponentformat: "none", separatethousands: true, title: { ...own.title, font: { size: 12 } },
    });
    return {
      ...layout,
      xaxis: axis(layout.xaxis), yaxis: axis(layout.yaxis),
      margin: { l: 48, r: 12, t: 12, b: 44 },
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { color: colour("--ink"), size: 12, family: "system-ui, sans-serif" },
      hoverlabel: { bgcolor: colour("--ground"), bordercolor: colour("--rule"), font: { color: colour("--ink") }, align: "left" },
      hovermode: "closest", showlegend: false,
      dragmode: matchMedia("(pointer: fine)").matches ? "zoom" : false, // a finger scrolls the page
    };
  }

  function painted(plot, colour) {
    const data = plot.data.map((trace) => {
      if (trace.meta?.line === undefined) return trace; // a heat map has colours of its own
      const i = trace.meta.line; // null: not a run's
      const color = colour(i === null ? "--soft" : `--c${lines[i].colour}`);
      const error_y = trace.error_y && { ...trace.error_y, color: trace.type === "bar" ? colour("--ink") : color };
      const visible = i === null || isShown(i);
      if (trace.type === "bar") return { ...trace, error_y, visible, marker: { ...trace.marker, color } };
      return { ...trace, error_y, visible, line: { ...trace.line, color }, marker: { ...trace.marker, color } };
    });
    return [data, themed(plot.layout, colour)];
  }

  function draw(width) {
    const colour = colours();
    for (const div of divs.filter(({ clientWidth }) => clientWidth)) { // which hidden ones have not
      const [data, layout] = painted(plots[div.id], colour);
      layout.width = width ?? div.clientWidth; // plotly would keep that of the time before
      Plotly.react(div, data, layout, { displayModeBar: false });
    }
  }

  const choices = [...document.querySelectorAll("select[data-dimension]")];
  const boxes = [...document.querySelectorAll("[data-box] input")];

  function fits(of) {
    return choices.every(({ value, dataset }) => !value || !(dataset.dimension in of) || of[dataset.dimension] === value);
  }

  function isShown(i) {
    return !boxes.length || (boxes[i].checked && fits(lines[i].of));
  }

  function choose() {
    for (const label of document.querySelectorAll("[data-box]")) {
      label.classList.toggle("hidden", !fits(lines[label.dataset.box].of));
    }
    for (const label of document.querySelectorAll("[data-line]")) {
      label.classList.toggle("hidden", !isShown(label.dataset.line));
    }
    for (const panel of document.querySelectorAll(".panel[data-of]")) {
      panel.classList.toggle("hidden", !fits(JSON.parse(panel.dataset.of)));
    }
    const shown = document.getElementById("shown");
    if (shown) shown.textContent = `${lines.filter((_, i) => isShown(i)).length} of ${lines.length} lines are shown; tables have all.`;
    draw();
  }

  for (const control of [...choices, ...boxes]) control.addEventListener("change", choose);
  dark.addEventListener("change", () => draw());
  let waiting;
  addEventListener("resize", () => {
    clearTimeout(waiting);
    waiting = setTimeout(() => paper.matches || draw(), 100);
  });

  // On paper every table of figures is open, charts are narrow and light.
  let closed = [];
  function beginPrint() {
    closed = [...document.querySelectorAll("figure + details:not([open])")];
    for (const one of closed) one.open = true;
    draw(PAPER_PX);
  }
  function endPrint() {
    for (const one of closed) one.open = false;
    draw();
  }
  paper.addEventListener("change", ({ matches }) => (matches ? beginPrint() : endPrint()));

  choose();
})();
