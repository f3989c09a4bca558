// A table that reuses its rows and changes only the cells that differ, so that focus and selection stay.

import { el, setText } from "./dom.js";

export class Table {
  /**
   * @param columns [{id, head, title?, text: row => string, value?: row => sortable, mark?: row => string,
   *                  kind?: "text", link?: row => href, state?: row => class, tip?: row => string}]
   * @param about caption (for screen readers), key: row => string, sort: id of a column,
   *              rows: maximum number of rows shown
   */
  constructor(columns, { caption, key, sort = null, down = true, rows = 200 }) {
    this.columns = columns;
    this.key = key;
    this.sort = sort;
    this.down = down;
    this.most = rows;
    this.lines = new Map();
    this.data = [];
    this.heads = columns.map((column) => this.head(column));
    this.body = el("tbody", { onpointerover: unfold });
    this.more = el("p", { class: "soft" });
    this.caption = el("caption", { class: "unseen" }, caption);
    this.table = el("table", {}, this.caption, el("thead", {}, el("tr", {}, this.heads)), this.body);
    // The table scrolls sideways on a phone, so it must be reachable by keyboard.
    const about = { class: "scroll", tabindex: "0", role: "region", "aria-label": caption };
    this.node = el("div", {}, el("div", about, this.table), this.more);
    this.markSorted();
  }

  head(column) {
    const about = { scope: "col", class: column.kind === "text" ? "text" : null, title: column.title };
    if (!column.value) return el("th", about, column.head);
    const sort = () => this.sortBy(column.id);
    return el("th", about, el("button", { type: "button", onclick: sort }, column.head));
  }

  /** Returns the link in the row with this key, or null. */
  link(key) {
    return this.lines.get(key)?.node.querySelector("a") ?? null;
  }

  sortBy(id) {
    this.down = this.sort === id ? !this.down : true;
    this.sort = id;
    this.markSorted();
    this.update(this.data);
  }

  markSorted() {
    this.columns.forEach((column, i) => {
      const order = this.down ? "descending" : "ascending";
      if (column.id === this.sort) this.heads[i].setAttribute("aria-sort", order);
      else this.heads[i].removeAttribute("aria-sort");
    });
  }

  update(data) {
    this.data = data;
    const rows = this.sorted(data);
    const shown = rows.slice(0, this.most);
    // Remove old rows first: the remaining rows are then mostly in order, and need not be moved.
    const keys = new Set(shown.map(this.key));
    const spare = [];
    for (const [key, line] of this.lines) {
      if (keys.has(key)) continue;
      line.node.remove();
      this.lines.delete(key);
      spare.push(line);
    }
    let before = null;
    for (const row of shown) {
      const key = this.key(row);
      let line = this.lines.get(key);
      if (!line) {
        line = spare.pop() ?? this.line();
        this.lines.set(key, line);
      }
      this.put(line, row);
      const place = before ? before.nextSibling : this.body.firstChild;
      if (place !== line.node) this.body.insertBefore(line.node, place);
      before = line.node;
    }
    const left = rows.length - shown.length;
    setText(this.more, left > 0 ? `${left.toLocaleString("en")} more; sort or filter to see them` : "");
  }

  sorted(data) {
    const column = this.columns.find((one) => one.id === this.sort);
    if (!column?.value) return data;
    const sign = this.down ? -1 : 1;
    return data
      .map((row) => [column.value(row), row])
      .sort(([a], [b]) => {
        // Put unknown values last in both directions.
        if (a === null || a === undefined) return b === null || b === undefined ? 0 : 1;
        if (b === null || b === undefined) return -1;
        return sign * (typeof a === "string" ? a.localeCompare(b) : a - b);
      })
      .map(([, row]) => row);
  }

  line() {
    const cells = this.columns.map((column, i) => {
      const base = column.kind === "text" ? "text" : "";
      const node = el(i === 0 ? "th" : "td", { scope: i === 0 ? "row" : null, class: base || null });
      const text = node.appendChild(column.link ? el("a") : document.createTextNode(""));
      const mark = column.mark ? node.appendChild(el("span", { class: "few" })) : null;
      return { node, text, mark, base, shown: "", marked: "", state: "", href: "", tip: "" };
    });
    return { node: el("tr", {}, cells.map((cell) => cell.node)), cells };
  }

  /** Sets the cells that differ from the stored texts: to read the texts from the document takes longer. */
  put(line, row) {
    this.columns.forEach((column, i) => {
      const cell = line.cells[i];
      const text = String(column.text(row));
      const marked = column.mark?.(row) ?? "", state = column.state?.(row) ?? "";
      if (cell.shown !== text) cell.text.textContent = cell.shown = text;
      if (cell.marked !== marked) cell.mark.textContent = cell.marked = marked;
      if (cell.state !== state) {
        cell.state = state;
        cell.node.className = `${cell.base} ${state}`.trim();
      }
      if (column.link) {
        const href = column.link(row);
        if (cell.href !== href) cell.text.setAttribute("href", (cell.href = href));
      }
      if (column.tip) {
        const tip = column.tip(row);
        if (cell.tip !== tip) cell.node.title = cell.tip = tip;
      }
    });
  }
}

/** Note for figures to which the filter does not apply. */
export const ALL_TRAFFIC = "The filter applies to the table only; cards and charts show all traffic.";

/** Sets the tooltip of a truncated cell when the mouse enters the cell, since to measure all cells is slow. */
function unfold(event) {
  const cell = event.target.closest("th, td");
  if (!cell) return;
  const cut = cell.scrollWidth > cell.clientWidth;
  if (cut) cell.title = cell.textContent;
  else if (cell.title === cell.textContent) cell.removeAttribute("title");
}

/** Returns the rows with the text of the filter in one of their `values`. */
export function matching(rows, filter, values) {
  const words = filter.trim().toLowerCase();
  if (!words) return rows;
  return rows.filter((row) => values(row).some((value) => value?.toLowerCase().includes(words)));
}
