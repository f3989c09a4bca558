
// The page: draws its charts with the lines that the reader chose.
const { lines, plots } = JSON.parse(document.getElementById("page-data").textContent);
const PAPER_PX = 330; // half of an A4 page between its margins
const paper = matchMedia("print");
const choices = [...document.querySelectorAll("select[data-dimension]")];
const boxes = [...document.querySelectorAll("[data-box] input")];

function fits(of) {
  return choices.every(({ value, dataset }) => !value || !(dataset.dimension in of) || of[dataset.dimension] === value);
}

function isShown(i) {
  return !boxes.length || (boxes[i].checked && fits(lines[i]));
}

function drawAll(width) {
  for (const [id, plot] of Object.entries(plots)) {
    const series = plot.series.filter(({ line }) => line === undefined || isShown(line));
    drawPlot(document.getElementById(id), { ...plot, series }, width);
  }
}

function choose() {
  for (const label of document.querySelectorAll("[data-box]")) {
    label.classList.toggle("hidden", !fits(lines[label.dataset.box]));
  }
  for (const label of document.querySelectorAll("[data-line]")) {
    label.classList.toggle("hidden", !isShown(label.dataset.line));
  }
  for (const panel of document.querySelectorAll(".panel[data-of]")) {
    panel.classList.toggle("hidden", !fits(JSON.parse(panel.dataset.of)));
  }
  const shown = document.getElementById("page-shown");
  if (shown) shown.textContent = `${lines.filter((_, i) => isShown(i)).length} of ${lines.length} lines are shown; tables have all.`;
  drawAll();
}

for (const key of document.querySelectorAll("svg.key")) drawKey(key, JSON.parse(key.dataset.look));
for (const control of [...choices, ...boxes]) control.addEventListener("change", choose);
// Who zooms into a stretch of the run sees it in all charts over time.
addEventListener("zoom", ({ target, detail }) => {
  if (!plots[target.id].timed) return;
  for (const [id, { timed }] of Object.entries(plots)) {
    if (timed && id !== target.id) zoomTo(document.getElementById(id), { x: detail.x });
  }
});

// On paper every table of figures is open, and charts are narrow.
let closed = [];
paper.addEventListener("change", ({ matches }) => {
  if (matches) closed = [...document.querySelectorAll("figure + details:not([open])")];
  for (const one of closed) one.open = matches;
  drawAll(matches ? PAPER_PX : undefined);
});

choose();
