// The page: which view is shown, its requests, and whether its data are up to date.

import { Api } from "./api.js";
import { Chunking } from "./chunking.js";
import { el, setText } from "./dom.js";
import { Exchanges } from "./exchanges.js";
import { Experiment } from "./experiment.js";
import { seconds } from "./format.js";
import { listen } from "./keys.js";
import { measured } from "./measure.js";
import { Overview } from "./overview.js";
import { Feed, Poll } from "./polling.js";
import { Streams } from "./streams.js";
import { Tap } from "./tap.js";

const THEMES = ["auto", "light", "dark"];
const byId = (id) => document.getElementById(id);

class App {
  constructor() {
    this.api = new Api();
    this.api.denied = () => this.askToken();
    this.window = byId("window").value;
    this.filter = "";
    this.live = null;
    this.readerSpeed = null;
    this.view = null;
    this.measured = measured;
    this.feed = new Feed(this.api, (live) => this.onLiveSummary(live));
    this.views = [Overview, Streams, Exchanges, Chunking, Experiment, Tap].map((View) => new View(this));
    this.tabs = this.views.map((view, i) => {
      const key = el("kbd", { "aria-hidden": "true" }, i + 1);
      return el("a", { href: `#${view.id}`, "aria-keyshortcuts": i + 1 }, key, " ", view.title);
    });
  }

  /** Returns a poll for a view; it runs while the view is shown. */
  poll(name, ask, period, onAnswer) {
    return new Poll(name, ask, period, (data) => {
      this.feed.retryNow();
      this.showStatus(); // before the view, so that screen readers read the text of the view last
      onAnswer(data);
    });
  }

  /** Updates the page for one answer, and measures the time. */
  render(name, work) {
    measured(name, work);
  }

  /** Does work after the next frame, since it is not urgent. */
  later(work) {
    requestAnimationFrame(() => setTimeout(work));
  }

  /** Announces a text to screen readers. */
  announce(words) {
    setText(byId("announcement"), words);
  }

  start() {
    byId("tabs").append(...this.tabs.map((tab) => el("li", {}, tab)));
    for (const view of this.views) {
      view.node.hidden = true;
      byId("main").append(view.node);
    }
    byId("window").addEventListener("change", () => {
      this.window = byId("window").value;
      for (const poll of this.view.polls) poll.again();
    });
    byId("filter").addEventListener("input", () => this.setFilter(byId("filter").value));
    byId("theme").addEventListener("click", () => this.nextTheme());
    byId("help-open").addEventListener("click", () => byId("help").showModal());
    byId("skip").addEventListener("click", (event) => {
      event.preventDefault(); // the link must not change the hash, which names the view
      byId("main").focus();
    });
    byId("token-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.useToken(byId("token").value);
    });
    window.addEventListener("hashchange", () => this.route());
    document.addEventListener("visibilitychange", () => this.onVisibility());
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.onThemeChange());
    listen(this);
    this.showTheme();
    this.route();
    this.feed.start();
    setInterval(() => this.showStatus(), 1000);
  }

  /** Returns the view that the hash of the URL names, and the rest of the hash. */
  viewOfHash() {
    const [name, ...rest] = location.hash.slice(1).split("/");
    return [this.views.find((one) => one.id === name) ?? this.views[0], rest.join("/")];
  }

  route() {
    const [view, rest] = this.viewOfHash();
    if (view !== this.view) {
      const before = this.view;
      if (before) {
        for (const poll of before.polls) poll.stop();
        before.onHide?.();
        before.node.hidden = true;
        window.scrollTo(0, 0);
      }
      this.view = view;
      view.node.hidden = false;
      this.views.forEach((one, i) => {
        if (one === view) this.tabs[i].setAttribute("aria-current", "page");
        else this.tabs[i].removeAttribute("aria-current");
      });
      reveal(this.tabs[this.views.indexOf(view)]);
      document.title = `${view.title} · llmtap`;
      for (const poll of view.polls) poll.start();
      view.onShow?.();
      if (before) this.announce(view.title);
    }
    let part = rest;
    try {
      part = decodeURIComponent(part);
    } catch {
      // The encoding is invalid, so somebody typed it: the view reports that it is unknown.
    }
    view.route?.(part);
    this.showStatus();
  }

  /** Moves by `step` views from the view in the hash. The new hash causes `route`, which shows the new view. */
  go(step) {
    const at = this.views.indexOf(this.viewOfHash()[0]);
    location.hash = this.views[(at + step + this.views.length) % this.views.length].id;
  }

  /** Stops all requests while the page is hidden, and starts them when it is visible. */
  onVisibility() {
    if (document.hidden) {
      for (const poll of this.view.polls) poll.stop();
      this.feed.stop();
    } else {
      for (const poll of this.view.polls) poll.start();
      this.feed.start();
      this.view.onShow?.();
    }
  }

  onLiveSummary(live) {
    this.live = live;
    this.readerSpeed = live.smooth_goodput.speed_tokens_per_second ?? this.readerSpeed;
    for (const view of this.views) if (view.onLiveSummary) this.render("live", () => view.onLiveSummary(live));
  }

  setFilter(text) {
    this.filter = text;
    this.view.filterChanged ? this.view.filterChanged() : this.view.render();
  }

  /** Shows the state of the connection and the age of the data. */
  showStatus() {
    const sources = [...this.view.polls, this.feed];
    const failed = sources.find((one) => one.error !== null);
    const stale = sources.map((one) => one.staleFor()).filter((age) => age !== null);
    const complete = this.view.polls.every((poll) => poll.fresh || !poll.runs);
    let state = "live", words = "live", more = "";
    const oldest = stale.length ? seconds(Math.max(...stale)) : null;
    const shown = this.view.polls.some((poll) => poll.at !== null);
    const age = oldest && shown ? `the figures are ${oldest} old` : "";
    if (failed) [state, words, more] = ["failed", failed.error, age];
    else if (oldest) [state, words] = ["stale", `stale: the last answer was received ${oldest} ago`];
    else if (!complete) [state, words] = ["waiting", "connecting"];
    else if (this.view.tape?.paused) words = "paused";
    const node = byId("status");
    if (node.dataset.state !== state) {
      node.dataset.state = state;
      if (state !== "waiting") this.announce(words);
    }
    setText(byId("status-text"), words);
    setText(byId("status-more"), more);
    byId("main").classList.toggle("stale", state === "stale" || age !== "");
  }

  askToken() {
    const dialog = byId("token-dialog");
    setText(byId("token-problem"), this.api.token === null ? "" : "The token was refused.");
    if (!dialog.open) dialog.showModal();
  }

  useToken(token) {
    this.api.useToken(token);
    byId("token").value = "";
    byId("token-dialog").close();
    for (const poll of this.view.polls) poll.again();
    this.feed.again();
  }

  nextTheme() {
    const now = document.documentElement.dataset.theme ?? "auto";
    const next = THEMES[(THEMES.indexOf(now) + 1) % THEMES.length];
    if (next === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = next;
    try {
      if (next === "auto") localStorage.removeItem("llmtap.theme");
      else localStorage.setItem("llmtap.theme", next);
    } catch {
      // Storage is blocked: the choice lasts as long as the page.
    }
    this.showTheme();
    this.onThemeChange();
  }

  showTheme() {
    setText(byId("theme-now"), document.documentElement.dataset.theme ?? "auto");
  }

  /** Draws all canvases again: a canvas keeps the values of the old colours. */
  onThemeChange() {
    for (const view of this.views) view.onThemeChange?.();
  }
}

/** Scrolls a tab into view, for phones. `scrollIntoView` would also move the start of keyboard navigation. */
function reveal(tab) {
  const list = tab.closest("ul");
  const here = tab.getBoundingClientRect(), visible = list.getBoundingClientRect();
  if (here.left < visible.left) list.scrollLeft -= visible.left - here.left;
  else if (here.right > visible.right) list.scrollLeft += here.right - visible.right;
}

window.addEventListener("error", (event) => window.llmtap.errors.push(String(event.message)));
window.addEventListener("unhandledrejection", (event) => window.llmtap.errors.push(String(event.reason)));
new App().start();
