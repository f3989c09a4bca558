// Charts as SVG, for report pages and the dashboard: lines, steps, points, bars, intervals and areas.
//
// drawPlot(node, plot) draws into `node`, and again when its size changes; `Plot` in document.py lists the fields of a
// plot. Colours are variables of the page: another theme, or paper, needs no new drawing. A pointer shows the values
// of the nearest point; dragging with a mouse zooms, and a double click shows everything again.

const DASHES = {
  solid: "", dash: "7 4", dot: "2 3", dashdot: "7 3 2 3", longdash: "11 4", longdashdot: "11 3 2 3",
};
const SHAPES = {
  dot: "m-2 0a2 2 0 1 0 4 0a2 2 0 1 0-4 0z",
  circle: "m-4 0a4 4 0 1 0 8 0a4 4 0 1 0-8 0z",
  square: "m-3.5-3.5h7v7h-7z",
  diamond: "m0-5 5 5-5 5-5-5z",
  triangle: "m0-5 5 9h-10z",
  cross: "m-1.8-4.8h3.6v3h3v3.6h-3v3h-3.6v-3h-3v-3.6h3z",
  x: "m-2.5-5 2.5 2.5 2.5-2.5 2.5 2.5-2.5 2.5 2.5 2.5-2.5 2.5-2.5-2.5-2.5 2.5-2.5-2.5 2.5-2.5-2.5-2.5z",
};
/** Strokes over the colour of bars, in a square of 8 pixels. */
const HATCHES = {
  "/": "M-2 2 2-2M0 8 8 0M6 10 10 6", ".": "M2 4h3", x: "M0 0 8 8M0 8 8 0", "-": "M0 4h8", "|": "M4 0v8",
  "+": "M0 4h8M4 0v8",
};
const CLOCK_STEPS_MS = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 21600, 86400].map((s) => s * 1000);
const TICKS_MAX = 12;
const FONT = "12px system-ui, sans-serif";
const LINE_PX = 18;
/** A point farther from the pointer is not shown. */
const REACH_PX = 40, SAME_PX = 2;
/** A shorter drag is a click; one this flat is of the horizontal axis only. */
const DRAG_PX = 8, FLAT_PX = 30;
const SLANTED_PX_MAX = 130;
const MARK_PX = 15, MARKS_MAX = 6;

const ruler = document.createElement("canvas").getContext("2d");
const tip = document.createElement("div");
tip.className = "plot-tip";
tip.ariaHidden = "true";
tip.hidden = true;
for (const event of ["pointerdown", "scroll"]) addEventListener(event, hide, { capture: true, passive: true });
let hatches = 0;

/** Draws `plot` into `node`, `width` pixels wide (default: as wide as the node). */
export function drawPlot(node, plot, width = node.clientWidth) {
  if (!node.chart) {
    node.chart = { zoom: {} };
    listen(node);
    new ResizeObserver(() => {
      const { chart } = node;
      if (node.clientWidth !== chart.width || node.clientHeight !== chart.height) render(node, node.clientWidth);
    }).observe(node);
  }
  if (node.chart.plot?.of !== plot.of) node.chart.zoom = {};
  node.chart.plot = plot;
  render(node, width);
}

/** Shows the stretch `zoom.x` and `zoom.y` of the axes; everything where they are undefined. */
export function zoomTo(node, zoom) {
  node.chart.zoom = zoom;
  render(node, node.clientWidth);
}

/** Draws the look of a line or of bars into the key of a legend. */
export function drawKey(node, { ink, dash, symbol, bar, hatch }) {
  node.setAttribute("viewBox", "-20 -7 40 14");
  if (bar) return void node.append(...filled({ ink, hatch }, { x: -8, y: -5, width: 16, height: 10 }));
  node.append(svg("path", { d: "M-20 0h40", ...stroke(ink, 2, dash) }));
  if (symbol) node.append(svg("path", { d: `M0 0${SHAPES[symbol]}`, fill: `var(--${ink})` }));
}

function svg(tag, given = {}, ...children) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(given)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

function stroke(ink, width = 2, dash = "solid") {
  return { fill: "none", stroke: `var(--${ink})`, "stroke-width": width, "stroke-dasharray": DASHES[dash] };
}

/** A rectangle in the colour and with the hatch of its series. */
function filled({ ink, hatch }, box) {
  const rect = svg("rect", { ...box, fill: `var(--${ink})` });
  if (!hatch) return [rect];
  const id = `hatch-${++hatches}`;
  const strokes = svg("path", { d: HATCHES[hatch], ...stroke("ground", 1.5) });
  const pattern = svg("pattern", { id, width: 8, height: 8, patternUnits: "userSpaceOnUse" }, strokes);
  return [rect, pattern, svg("rect", { ...box, fill: `url(#${id})` })];
}

function widthOf(text) {
  ruler.font = FONT;
  return ruler.measureText(text).width;
}

// ---------------------------------------------------------------- axes

function valueText(axis, value) {
  if (axis.kind === "category") return String(value);
  if (axis.kind === "clock") return new Date(value).toTimeString().slice(0, 8);
  const whole = Math.floor(Math.log10(Math.abs(value) || 1)) + 1;
  const digits = axis.share
    ? { style: "percent", maximumFractionDigits: 2 }
    : { maximumSignificantDigits: Math.max(4, Math.min(21, whole)) };
  return value.toLocaleString("en", digits) + (axis.suffix ?? "");
}

function textWithStep(axis, step) {
  if (axis.kind === "clock") return (value) => valueText(axis, value);
  const digits = Math.max(0, -Math.floor(Math.log10(axis.share ? step * 100 : step) + 1e-9));
  const format = new Intl.NumberFormat("en", {
    style: axis.share ? "percent" : "decimal", minimumFractionDigits: digits, maximumFractionDigits: digits,
  });
  return (value) => (value ? format.format(value) : axis.share ? "0%" : "0") + (axis.suffix ?? "");
}

function* stepsOf(axis, span) {
  if (axis.kind === "clock") yield* CLOCK_STEPS_MS;
  for (let power = Math.floor(Math.log10(span)) - 1; ; power++) {
    for (const digit of [1, 2, 5]) yield Number(`${digit}e${power}`);
  }
}

/** Yields values of ticks with what makes their texts, from many ticks to few. */
function* tickSets(axis, [low, high]) {
  if (axis.kind === "log" && high / low > 3) {
    const first = Math.floor(Math.log10(low));
    const sets = [[1, [1, 2, 3, 5, 7]], [1, [1, 2, 5]], [1, [1, 3]], [1, [1]], [2, [1]], [3, [1]], [6, [1]]];
    for (const [every, digits] of sets) {
      const values = [];
      for (let power = first; 10 ** power <= high; power += every) {
        values.push(...digits.map((digit) => Number(`${digit}e${power}`)));
      }
      yield [values.filter((value) => value >= low && value <= high), (value) => valueText(axis, value)];
    }
  }
  for (const step of stepsOf(axis, high - low)) {
    if ((high - low) / step > TICKS_MAX) continue;
    const values = [];
    for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) values.push(i * step);
    yield [values, textWithStep(axis, step)];
  }
}

/** The most ticks whose texts, `sizeOf` pixels long, have room beside each other. */
function ticksOf(axis, range, scale, sizeOf) {
  for (const [values, textOf] of tickSets(axis, range)) {
    const ticks = values.map((value) => ({ value, at: scale(value), text: textOf(value) }));
    const fits = (tick, i) => !i
      || Math.abs(tick.at - ticks[i - 1].at) >= (sizeOf(tick.text) + sizeOf(ticks[i - 1].text)) / 2;
    if (ticks.every(fits)) return ticks;
  }
}

/** The range of an axis that shows all values, with a margin of `pad` of its length where it does not begin at 0. */
function extent(axis, values, pad) {
  if (axis.range) return axis.range;
  const log = axis.kind === "log";
  let low = Infinity, high = -Infinity;
  for (const value of values) {
    if (value === null || value === undefined || (log && value <= 0)) continue;
    low = Math.min(low, value);
    high = Math.max(high, value);
  }
  if (low > high) return log ? [1, 10] : [0, 1];
  if (log) {
    const factor = low === high ? 2 : (high / low) ** pad;
    return [low / factor, high * factor];
  }
  if (axis.zero) [low, high] = [Math.min(low, 0), Math.max(high, 0)];
  if (low === high) return axis.zero ? [0, 1] : [low - (Math.abs(low) || 1) / 2, high + (Math.abs(high) || 1) / 2];
  const margin = (high - low) * pad, kept = (end) => axis.zero && end === 0;
  return [kept(low) ? 0 : low - margin, kept(high) ? 0 : high + margin];
}

/** From values to pixels; `scale.back` from pixels to values. */
function scaleOf(axis, [low, high], from, to) {
  const [into, out] = axis.kind === "log" ? [Math.log10, (power) => 10 ** power] : [Number, Number];
  const start = into(low), perPixel = (into(high) - start) / (to - from);
  const scale = (value) => (value === null || value === undefined ? NaN : from + (into(value) - start) / perPixel);
  scale.back = (pixel) => out(start + (pixel - from) * perPixel);
  return scale;
}

/** Names shortened to `most` pixels. */
function shortened(name, most) {
  let text = name;
  while (text.length > 1 && widthOf(text) > most) text = `${text.slice(0, -2).trimEnd()}…`;
  return text;
}

// ---------------------------------------------------------------- drawing

/** The series with places on the x axis as numbers, and where bars begin and end. */
function placed(plot, names) {
  const order = names && new Map(names.map((name, i) => [name, i]));
  const all = plot.series.map((one) => ({
    ...one, places: names ? one.x.map((x) => order.get(String(x))) : one.x.map((x) => (x === null ? null : Number(x))),
  }));
  const bars = all.filter((one) => one.bars);
  const gapOf = (some) => {
    const places = [...new Set(some.flatMap((one) => one.places))].sort((a, b) => a - b);
    return places.slice(1).reduce((gap, place, i) => Math.min(gap, place - places[i]), names ? 1 : Infinity);
  };
  for (const one of bars) {
    const gap = gapOf(plot.overlay ? [one] : bars);
    const room = (Number.isFinite(gap) ? gap : 1) * (plot.overlay ? 1 : .75);
    one.spans = one.places.map((place) => {
      const group = plot.overlay ? [one] : bars.filter((other) => other.places.includes(place));
      const from = place + room * (group.indexOf(one) / group.length - .5);
      return [from, from + room / group.length];
    });
  }
  return all;
}

function render(node, width) {
  const { chart } = node, { plot, zoom } = chart, height = node.clientHeight;
  Object.assign(chart, { width, height });
  if (!width || !height) return;
  const names = plot.x.kind === "category" ? [...new Set(plot.series.flatMap(({ x }) => x.map(String)))] : null;
  const series = placed(plot, names);
  const marks = plot.marks ?? [];
  const xRange = zoom.x ?? (names
    ? [-.5, names.length - .5]
    : extent(plot.x, [...series.flatMap((one) => one.spans?.flat() ?? one.places), ...marks.map(({ x }) => x)], plot.x.kind === "clock" ? 0 : .04));
  const yRange = zoom.y
    ?? extent(plot.y, series.flatMap(({ y, low, high }) => [...y, ...(low ?? []), ...(high ?? [])]), .05);

  // The texts of the y axis decide where the area begins, its width which texts of the x axis have room.
  const top = 12 + MARK_PX * Math.min(MARKS_MAX, marks.length);
  const y = (bottom) => scaleOf(plot.y, yRange, height - bottom, top);
  const yTicks = (bottom) => ticksOf(plot.y, yRange, y(bottom), () => 34);
  let bottom = 24 + (plot.x.title ? LINE_PX : 0);
  const left = Math.max(34, ...yTicks(bottom).map(({ text }) => widthOf(text) + 12)) + (plot.y.title ? LINE_PX : 0);
  const x = scaleOf(plot.x, xRange, left, width - 14);
  const slanted = names && Math.max(...names.map(widthOf)) > (width - 14 - left) / names.length - 8;
  const most = slanted ? Math.min(SLANTED_PX_MAX, x(0) * 1.2) : width;
  const xTicks = names
    ? names.map((name, i) => ({ value: i, at: x(i), text: shortened(name, most) }))
    : ticksOf(plot.x, xRange, x, (text) => widthOf(text) + 24);
  if (slanted) bottom += .57 * Math.max(...xTicks.map(({ text }) => widthOf(text)));
  const area = { left, top, right: width - 14, bottom: height - bottom, x, y: y(bottom) };

  const picture = svg("svg", { width, height, "aria-hidden": "true" });
  picture.append(...axes(plot, area, xTicks, yTicks(bottom), slanted));
  chart.points = [];
  const box = [left - 2, top - 2, area.right - left + 4, area.bottom - top + 4];
  const inside = svg("svg", { x: box[0], y: box[1], width: box[2], height: box[3], viewBox: box.join(" ") });
  const over = series.flatMap((one) => drawn(one, area, plot, inside, chart.points));
  picture.append(inside, ...over, ...marks.flatMap((mark, i) => markOf(mark, i, area)));
  if (plot.empty && !chart.points.length) {
    const middle = { x: (left + area.right) / 2, y: (top + area.bottom) / 2, "text-anchor": "middle" };
    picture.append(svg("text", middle, plot.empty));
  }
  chart.area = area;
  chart.shown = svg("g");
  picture.append(chart.shown);
  node.querySelector("svg")?.remove();
  node.append(picture);
  if (chart.pointer) point(node);
}

function axes(plot, { left, top, right, bottom }, xTicks, yTicks, slanted) {
  const line = ({ value }, kind, d) => svg("path", { d, class: kind !== "log" && value === 0 ? "zero" : "grid" });
  const names = plot.x.kind === "category";
  const nodes = yTicks.flatMap((tick) => [
    line(tick, plot.y.kind, `M${left} ${tick.at}H${right}`),
    svg("text", { x: left - 6, y: tick.at + 4, "text-anchor": "end" }, tick.text),
  ]);
  for (const tick of xTicks) {
    if (!names) nodes.push(line(tick, plot.x.kind, `M${tick.at} ${top}V${bottom}`));
    const half = widthOf(tick.text) / 2;
    nodes.push(svg("text", slanted
      ? { transform: `translate(${tick.at + 4} ${bottom + 14}) rotate(-35)`, "text-anchor": "end", class: "x" }
      : { x: Math.min(tick.at, right + 13 - half), y: bottom + 16, "text-anchor": "middle", class: "x" }, tick.text));
  }
  const middle = { "text-anchor": "middle", class: "title" };
  if (plot.x.title) nodes.push(svg("text", { ...middle, x: (left + right) / 2, y: bottom + LINE_PX * 2 }, plot.x.title));
  if (plot.y.title) {
    const place = `translate(12 ${(top + bottom) / 2}) rotate(-90)`;
    nodes.push(svg("text", { ...middle, transform: place }, shortened(plot.y.title, bottom - top + 20)));
  }
  return nodes;
}

/** Draws a series into `inside`, adds its points to `points`, and returns what may stand out of the area. */
function drawn(one, area, plot, inside, points) {
  const over = [], shapes = new Map(), round = (pixel) => Math.round(pixel * 10) / 10;
  const isDrawn = (i) => Number.isFinite(area.x(one.places[i])) && Number.isFinite(area.y(one.y[i]));
  /** A point of a line without a neighbour on either side: a line alone would not show it. */
  const isAlone = (i) => !one.spans && !one.area && !one.scattered && !isDrawn(i - 1) && !isDrawn(i + 1);
  let path = "", joined = false, ends = "";
  one.places.forEach((place, i) => {
    const span = one.spans?.[i].map(area.x);
    const x = round(span ? (span[0] + span[1]) / 2 : area.x(place)), y = round(area.y(one.y[i]));
    if (!Number.isFinite(x) || !Number.isFinite(y)) {
      joined = false;
      return;
    }
    if (span) {
      const [from, to] = [y, area.y(0)].sort((a, b) => a - b);
      const bars = filled(one, { x: span[0], y: from, width: span[1] - span[0], height: to - from });
      inside.append(svg("g", plot.overlay && plot.series.length > 1 ? { opacity: .6 } : {}, ...bars));
    } else if (!joined) path += `M${x} ${y}`;
    else path += { hv: `H${x}V${y}`, vh: `V${y}H${x}` }[one.step] ?? `L${x} ${y}`;
    joined = true;
    for (const end of [one.low?.[i], one.high?.[i]]) {
      if (end !== null && end !== undefined) ends += `M${x} ${y}V${round(area.y(end))}m-4 0h8`;
    }
    if (x < area.left - 1 || x > area.right + 1 || y < area.top - 1 || y > area.bottom + 1) return;
    const symbol = one.symbols ? one.symbols[i % one.symbols.length] : isAlone(i) && "dot";
    if (symbol) shapes.set(symbol, `${shapes.get(symbol) ?? ""}M${x} ${y}${SHAPES[symbol.replace("-open", "")]}`);
    if (!one.silent) points.push({ x, y, one, i, half: span ? (span[1] - span[0]) / 2 : 0 });
  });
  if (one.area) inside.append(svg("path", { d: `${path}z`, fill: `var(--${one.ink})` }));
  else if (!one.scattered) inside.append(svg("path", { d: path, ...stroke(one.ink, one.width, one.dash) }));
  if (ends) inside.append(svg("path", { d: ends, ...stroke(one.bars ? "ink" : one.ink, 1.2) }));
  for (const [symbol, d] of shapes) {
    const open = symbol.endsWith("-open");
    over.push(svg("path", { d, ...stroke(one.ink, open ? 1.5 : 0), fill: open ? "var(--ground)" : `var(--${one.ink})` }));
  }
  return over;
}

/** A named place on the x axis; names of several stand below each other, above the area. */
function markOf({ x, text }, i, area) {
  const at = area.x(x), before = at > (area.left + area.right) / 2, y = MARK_PX * (i % MARKS_MAX);
  if (!(at >= area.left && at <= area.right)) return [];
  const place = { x: at + (before ? -5 : 5), y: y + 12, "text-anchor": before ? "end" : "start" };
  return [svg("path", { d: `M${at} ${y + 2}V${area.bottom}`, ...stroke("soft", 1.5, "dot") }), svg("text", place, text)];
}

// ---------------------------------------------------------------- pointer

function hide() {
  tip.hidden = true;
}

/** What a pointer shows of a point. */
function textOf({ one, i }, plot) {
  const hover = () => (plot.hover ?? "").replace(/\{([xy])\}/g, (_, axis) => valueText(plot[axis], one[axis][i]));
  return one.texts?.[i] ?? `${one.name}\n${hover()}`;
}

/** Shows the values of the point nearest to the pointer, and of others there; of plots with `together`, at its x. */
function point(node) {
  const { points, plot, pointer, shown } = node.chart, { together } = plot;
  let nearest = null, least = REACH_PX ** 2;
  for (const one of points) {
    const across = Math.max(0, Math.abs(one.x - pointer.x) - one.half);
    const along = together ? 0 : (one.y - pointer.y) * (one.half ? .05 : 1);
    const far = across ** 2 + along ** 2;
    if (far < least) [nearest, least] = [one, far];
  }
  shown.replaceChildren();
  if (!nearest) return hide();
  const near = new Map([[nearest.one, nearest]]);
  for (const one of points) {
    const there = one.x === nearest.x && (together || Math.abs(one.y - nearest.y) < SAME_PX);
    if (there && !near.has(one.one)) near.set(one.one, one);
  }
  const found = [...near.values()];
  shown.append(...found.map(({ x, y, one }) => svg("circle", { cx: x, cy: y, r: 5, ...stroke(one.ink) })));
  tip.textContent = together
    ? [valueText(plot.x, nearest.one.x[nearest.i]), ...found.map(({ one, i }) => `${one.name}: ${valueText(plot.y, one.y[i])}`)].join("\n")
    : found.map((one) => textOf(one, plot)).join("\n\n");
  tip.hidden = false;
  document.body.append(tip);
  const { left, top } = node.getBoundingClientRect(), { offsetWidth: wide, offsetHeight: high } = tip;
  const beside = left + nearest.x + 12 + wide < innerWidth ? left + nearest.x + 12 : left + nearest.x - 12 - wide;
  tip.style.left = `${Math.max(4, Math.min(innerWidth - wide - 4, beside))}px`;
  tip.style.top = `${Math.max(4, Math.min(innerHeight - high - 4, top + nearest.y - high - 8))}px`;
}

function listen(node) {
  const { chart } = node;
  let from = null;
  const at = ({ clientX, clientY }) => {
    const { left, top } = node.getBoundingClientRect();
    return { x: clientX - left, y: clientY - top };
  };
  const show = (event) => {
    chart.pointer = at(event);
    if (chart.area) point(node);
  };
  const leave = () => {
    chart.pointer = null;
    chart.shown?.replaceChildren();
    hide();
  };
  /** The box from where the drag began to the pointer: [from, to] of each axis that it selects. */
  const selected = ({ x, y }) => {
    const { left, right, top, bottom } = chart.area;
    const span = (a, b, least, low, high) => (Math.abs(a - b) < least
      ? null
      : [a, b].sort((c, d) => c - d).map((pixel) => Math.max(low, Math.min(high, pixel))));
    return { x: span(from.x, x, DRAG_PX, left, right), y: span(from.y, y, FLAT_PX, top, bottom) };
  };
  const zoomed = (zoom) => {
    zoomTo(node, zoom);
    node.dispatchEvent(new CustomEvent("zoom", { detail: zoom, bubbles: true }));
  };
  node.addEventListener("pointermove", (event) => {
    if (!from) return show(event);
    const { left, right, top, bottom } = chart.area, box = selected(at(event));
    const [x1, x2] = box.x ?? [left, right], [y1, y2] = box.y ?? [top, bottom];
    const rect = svg("rect", { class: "selection", x: x1, y: y1, width: x2 - x1, height: y2 - y1 });
    chart.shown.replaceChildren(...(box.x || box.y ? [rect] : []));
  });
  node.addEventListener("click", show); // a finger points without moving
  node.addEventListener("pointerleave", (event) => event.pointerType === "mouse" && leave());
  node.addEventListener("pointerdown", (event) => {
    if (event.pointerType !== "mouse" || event.button || !chart.area) return;
    event.preventDefault(); // no text is selected
    leave();
    node.setPointerCapture(event.pointerId);
    from = at(event);
  });
  node.addEventListener("pointerup", (event) => {
    if (!from) return;
    const box = selected(at(event)), { x, y } = chart.area;
    from = null;
    if (!box.x && !box.y) return;
    zoomed({
      x: box.x?.map(x.back) ?? chart.zoom.x,
      y: box.y?.map(y.back).reverse() ?? chart.zoom.y,
    });
  });
  node.addEventListener("pointercancel", () => {
    from = null;
  });
  node.addEventListener("dblclick", () => zoomed({}));
}
