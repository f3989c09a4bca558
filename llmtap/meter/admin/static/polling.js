// Repeated requests to the API: one at a time, less often while they fail, none while the page is hidden.

const PATIENCE_MS = 15000;
const FEED_WAIT_MS = 4000;

export class Poll {
  /**
   * @param ask (signal) => data
   * @param period time in ms from an answer to the next request, or a function that returns this time
   * @param onAnswer called with each answer
   */
  constructor(name, ask, period, onAnswer) {
    this.name = name;
    this.ask = ask;
    this.period = typeof period === "function" ? period : () => period;
    this.onAnswer = onAnswer;
    this.at = null;
    this.error = null;
    this.failures = 0;
    this.timer = null;
    this.aborter = null;
    this.runs = false;
  }

  start() {
    if (this.runs) return;
    this.runs = true;
    this.began = performance.now();
    this.turn();
  }

  stop() {
    this.runs = false;
    clearTimeout(this.timer);
    this.aborter?.abort();
    this.aborter = null;
  }

  /** Sends a request now, since its parameters have changed. */
  again() {
    if (!this.runs) return;
    clearTimeout(this.timer);
    this.aborter?.abort();
    this.turn();
  }

  /** Whether an answer was received since the poll started, or since the view was shown again. */
  get fresh() {
    return this.at !== null && this.at >= this.began;
  }

  /** Seconds since the latest answer if the next answer is late, else null. */
  staleFor() {
    if (!this.runs) return null;
    const now = performance.now(), awaited = now - (this.fresh ? this.at : this.began);
    return awaited > 3 * this.period() + 2000 ? (now - (this.at ?? this.began)) / 1000 : null;
  }

  async turn() {
    const aborter = new AbortController();
    this.aborter = aborter;
    const patience = setTimeout(() => aborter.abort("late"), PATIENCE_MS);
    try {
      const data = await this.ask(aborter.signal);
      if (this.aborter !== aborter) return;
      this.at = performance.now();
      this.error = null;
      this.failures = 0;
      this.onAnswer(data);
    } catch (error) {
      if (this.aborter !== aborter) return; // stopped, or replaced by a new request
      this.failures++;
      const late = `${this.name}: no answer within ${PATIENCE_MS / 1000} s`;
      this.error = aborter.signal.aborted ? late : error.message;
      if (!("status" in error) && !aborter.signal.aborted) console.error(error); // an error of this page, not of the meter
    } finally {
      clearTimeout(patience);
    }
    if (!this.runs || this.aborter !== aborter) return;
    const slower = Math.min(8, 2 ** Math.max(0, this.failures - 1));
    this.timer = setTimeout(() => this.turn(), this.period() * slower);
  }
}

/** The live feed's summaries, one a second; reconnects when the stream ends. */
export class Feed {
  constructor(api, onAnswer) {
    this.api = api;
    this.onAnswer = onAnswer;
    this.name = "live";
    /** Number of the current call of `listen`; an earlier call sees a higher number, and ends. */
    this.generation = 0;
    this.at = null;
    this.error = null;
    this.runs = false;
    /** Function that ends the wait before the next attempt; null while there is no wait. */
    this.wake = null;
  }

  start() {
    if (this.runs) return;
    this.runs = true;
    this.began = performance.now();
    this.listen(++this.generation);
  }

  stop() {
    this.runs = false;
    this.aborter?.abort();
  }

  again() {
    this.aborter?.abort();
    this.wake?.();
  }

  /** Tries again at once, because another request succeeded: the meter is back. */
  retryNow() {
    if (this.error !== null) this.wake?.();
  }

  staleFor() {
    if (!this.runs) return null;
    const age = performance.now() - (this.at ?? this.began);
    return age > 5000 ? age / 1000 : null;
  }

  async listen(generation) {
    let wait = 1000;
    while (this.runs && generation === this.generation) {
      const aborter = new AbortController();
      this.aborter = aborter;
      // A connection can break without being closed, so end it after PATIENCE_MS without data.
      const watch = () => setTimeout(() => aborter.abort("silent"), PATIENCE_MS);
      let silent = watch();
      try {
        for await (const [name, data] of this.api.events("live", { exchanges: "0" }, aborter.signal)) {
          clearTimeout(silent);
          silent = watch();
          this.at = performance.now();
          this.error = null;
          wait = 1000;
          if (name === "summary") this.onAnswer(data);
        }
      } catch (error) {
        if (aborter.signal.reason === "silent") this.error = `live: nothing within ${PATIENCE_MS / 1000} s`;
        else if (!aborter.signal.aborted) this.error = error.message;
      } finally {
        clearTimeout(silent);
      }
      if (!this.runs || generation !== this.generation) return;
      await new Promise((go) => {
        this.wake = go;
        setTimeout(go, aborter.signal.aborted ? 50 : wait);
      });
      this.wake = null;
      wait = Math.min(FEED_WAIT_MS, wait * 2);
    }
  }
}
