// Elements of the page. They are made of text only, so that names from traffic never become markup.

/** Returns an element. `about`: attributes, and listeners (`on...`); `children`: nodes or texts. */
export function el(tag, about = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(about)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value === true) node.setAttribute(name, "");
    else node.setAttribute(name, String(value));
  }
  fill(node, ...children);
  return node;
}

/** Returns an element of an SVG drawing. */
export function svg(tag, attributes) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, String(value));
  return node;
}

/** Adds children to an element; skips null, undefined and false. */
export function fill(node, ...children) {
  for (const child of children.flat(2)) {
    if (child === null || child === undefined || child === false) continue;
    node.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
  return node;
}

/** Replaces all children of an element. */
export function refill(node, ...children) {
  node.replaceChildren();
  return fill(node, ...children);
}

/** Sets the text of an element only if it differs, since setting an equal text takes time, too. */
export function setText(node, text) {
  const value = String(text);
  if (node.textContent !== value) node.textContent = value;
}

/** Returns a part of the page with a heading, which screen readers list. */
export function section(title, ...children) {
  const id = `h-${title.toLowerCase().replace(/[^a-z]+/g, "-")}`;
  return el("section", { "aria-labelledby": id }, el("h2", { id }, title), ...children);
}

/** Returns an explanation to show instead of data, with a command to copy. */
export function emptyState(words, command = null, more = null) {
  return el("div", { class: "empty" },
    el("p", {}, words), command && el("pre", {}, el("code", {}, command)),
    more && el("p", { class: "soft" }, more));
}

/** Returns an explanation to show instead of data, with an example request. `live`: newest live summary. */
export function sendOne(words, live) {
  if (!live) return emptyState(words);
  if (!live.listen) {
    return emptyState(words, null, "Applications with the middleware are measured here: send it to one of them.");
  }
  const url = `${reachable(live.listen)}/v1/chat/completions`;
  const command = `curl -N ${url} -H 'Content-Type: application/json' \\\n`
    + '  -d \'{"model":"MODEL","stream":true,"messages":[{"role":"user","content":"Hello"}]}\'';
  return emptyState(words, command, "If you have no gateway, start the simulated engine: llmtap sim serve");
}

/** Replaces an address of all interfaces (0.0.0.0) by the host of this page, which the user can reach. */
function reachable(bound) {
  return bound.replace(/\/\/(0\.0\.0\.0|\[::\]):/, `//${location.hostname}:`);
}

/** Returns a card with a figure, its name, a description and its basis (`rests`); `formula`: the tooltip. */
export function card(title, value, about, rests, formula = null) {
  return el("div", { class: "card", title: formula },
    el("dt", { class: formula ? "has-tip" : null }, title),
    el("dd", {},
      el("b", { class: "value" }, value),
      el("small", {}, about),
      el("small", { class: "soft" }, rests)));
}
