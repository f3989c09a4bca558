// The page: which view is shown, what is asked for it, and whether what it shows is fresh.

import { Api } from "./api.js";
import { Chunking } from "./chunking.js";
import { el, say } from "./dom.js";
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
    this.feed = new Feed(this.api, (live) => this.lived(live));
    this.views = [Overview, Streams, Exchanges, Chunking, Experiment, Tap].map((View) => new View(this));
    this.tabs = this.views.map((view, i) => {
      const key = el("kbd", { "aria-hidden": "true" }, i + 1);
      return el("a", { href: `#${view.id}`, "aria-keyshortcuts": i + 1 }, key, " ", view.title);
    });
  }

  /** For views: asks while they are shown. */
  poll(name, ask, period, heard) {
    return new Poll(name, ask, period, (data) => {
      this.feed.answered();
      this.tell(); // before the view's own words, which are read out then
      heard(data);
    });
  }

  /** Work on the page for one answer, timed. */
  render(name, work) {
    measured(name, work);
  }

  /** Work that need not be in the same turn as the rest. */
  later(work) {
    requestAnimationFrame(() => setTimeout(work));
  }

  /** For screen readers. */
  say(words) {
    say(byId("said"), words);
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
      event.preventDefault(); // the hash is the view's
      byId("main").focus();
    });
    byId("token-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.useToken(byId("token").value);
    });
    window.addEventListener("hashchange", () => this.route());
    document.addEventListener("visibilitychange", () => this.look());
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.themed());
    listen(this);
    this.showTheme();
    this.route();
    this.feed.start();
    setInterval(() => this.tell(), 1000);
  }

  /** The view that the hash names, and what else it says. */
  named() {
    const [name, ...rest] = location.hash.slice(1).split("/");
    return [this.views.find((one) => one.id === name) ?? this.views[0], rest.join("/")];
  }

  route() {
    const [view, rest] = this.named();
    if (view !== this.view) {
      const before = this.view;
      if (before) {
        for (const poll of before.polls) poll.stop();
        before.hidden?.();
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
      view.shown?.();
      if (before) this.say(view.title);
    }
    let part = rest;
    try {
      part = decodeURIComponent(part);
    } catch {
      // Typed by hand: it names nothing, and the view says so.
    }
    view.route?.(part);
    this.tell();
  }

  /** So many views on, from the one that is named: what is shown follows a moment later. */
  go(step) {
    const at = this.views.indexOf(this.named()[0]);
    location.hash = this.views[(at + step + this.views.length) % this.views.length].id;
  }

  /** A page that nobody sees asks for nothing. */
  look() {
    if (document.hidden) {
      for (const poll of this.view.polls) poll.stop();
      this.feed.stop();
    } else {
      for (const poll of this.view.polls) poll.start();
      this.feed.start();
      this.view.shown?.();
    }
  }

  lived(live) {
    this.live = live;
    this.readerSpeed = live.smooth_goodput.speed_tokens_per_second ?? this.readerSpeed;
    for (const view of this.views) if (view.lived) this.render("live", () => view.lived(live));
  }

  setFilter(text) {
    this.filter = text;
    this.view.filterChanged ? this.view.filterChanged() : this.view.render();
  }

  /** How fresh is what is shown. */
  tell() {
    const asked = [...this.view.polls, this.feed];
    const failed = asked.find((one) => one.error !== null);
    const stale = asked.map((one) => one.staleFor()).filter((age) => age !== null);
    const heard = this.view.polls.every((poll) => poll.fresh || !poll.runs);
    let state = "live", words = "live", more = "";
    const oldest = stale.length ? seconds(Math.max(...stale)) : null;
    const shown = this.view.polls.some((poll) => poll.at !== null);
    const age = oldest && shown ? `the figures are ${oldest} old` : "";
    if (failed) [state, words, more] = ["failed", failed.error, age];
    else if (oldest) [state, words] = ["stale", `stale: the last answer was received ${oldest} ago`];
    else if (!heard) [state, words] = ["waiting", "connecting"];
    else if (this.view.tape?.paused) words = "paused";
    const node = byId("status");
    if (node.dataset.state !== state) {
      node.dataset.state = state;
      if (state !== "waiting") this.say(words);
    }
    say(byId("status-text"), words);
    say(byId("status-more"), more);
    byId("main").classList.toggle("stale", state === "stale" || age !== "");
  }

  askToken() {
    const dialog = byId("token-dialog");
    say(byId("token-problem"), this.api.token === null ? "" : "The token was refused.");
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
      // It lasts as long as the page then.
    }
    this.showTheme();
    this.themed();
  }

  showTheme() {
    say(byId("theme-now"), document.documentElement.dataset.theme ?? "auto");
  }

  /** Canvases and charts know their colours by value. */
  themed() {
    for (const view of this.views) view.themed?.();
    if (this.view.draw) this.view.draw();
  }
}

/** On a phone a tab may lie outside of its list. (scrollIntoView would also move where Tab goes on from.) */
function reveal(tab) {
  const list = tab.closest("ul");
  const here = tab.getBoundingClientRect(), seen = list.getBoundingClientRect();
  if (here.left < seen.left) list.scrollLeft -= seen.left - here.left;
  else if (here.right > seen.right) list.scrollLeft += here.right - seen.right;
}

window.addEventListener("error", (event) => window.llmtap.errors.push(String(event.message)));
window.addEventListener("unhandledrejection", (event) => window.llmtap.errors.push(String(event.reason)));
new App().start();
