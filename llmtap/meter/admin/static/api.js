// The admin API, asked with the token where one is needed. It goes into a header and nowhere else.

const KEPT = "llmtap.token";
/** What a header can carry (Fetch: a byte string); with a token beyond it a browser sends nothing at all. */
const SENDABLE = /^[\x21-\x7e\x80-\xff]*$/;
const BROKE = "the connection to the tap broke";

class ApiError extends Error {
  constructor(status, message, field = null) {
    super(message);
    this.status = status;
    this.field = field;
  }
}

export class Api {
  constructor() {
    this.token = sessionStorage.getItem(KEPT);
    /** Is called when the tap asks for a token, or for another one. */
    this.denied = () => {};
  }

  /** Blanks around it came with the copying. */
  useToken(token) {
    this.token = token.trim();
    sessionStorage.setItem(KEPT, this.token);
  }

  /** The JSON at a path. Raises ApiError with what the tap says. */
  async get(path, fields = {}, signal = undefined) {
    const answer = await this.ask(path, fields, signal);
    try {
      return await answer.json();
    } catch (error) {
      if (error.name === "AbortError") throw error;
      const words = error instanceof SyntaxError ? `${path}: the answer is no JSON` : BROKE;
      throw new ApiError(answer.status, words);
    }
  }

  /**
   * Server-sent events as [name, data], until the stream ends. Not an EventSource, which can send no header.
   */
  async *events(path, fields = {}, signal = undefined) {
    const answer = await this.ask(path, fields, signal);
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    let held = "", name = "", data = [];
    try {
      for (;;) {
        const { value, done } = await reader.read().catch((error) => {
          throw error.name === "AbortError" ? error : new ApiError(0, BROKE);
        });
        if (done) return;
        const lines = (held + value).split("\n");
        held = lines.pop();
        for (const line of lines) {
          if (line === "") {
            if (data.length) yield [name, JSON.parse(data.join("\n"))];
            name = "";
            data = [];
          } else if (line.startsWith("event:")) name = line.slice(6).trim();
          else if (line.startsWith("data:")) data.push(line.slice(5).trimStart());
        }
      }
    } finally {
      reader.cancel().catch(() => {});
    }
  }

  async ask(path, fields, signal) {
    const url = new URL(`api/v1/${path}`, document.baseURI);
    for (const [name, value] of Object.entries(fields)) {
      if (value !== null && value !== undefined && value !== "") url.searchParams.set(name, value);
    }
    const { token } = this;
    if (token !== null && !SENDABLE.test(token)) this.refuse();
    const headers = token === null ? {} : { Authorization: `Bearer ${token}` };
    let answer;
    try {
      const about = { headers, signal, credentials: "omit", cache: "no-store", redirect: "error" };
      answer = await fetch(url, about);
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new ApiError(0, "the tap does not answer");
    }
    if (answer.ok) return answer;
    if (answer.status === 401) this.refuse();
    let told = null;
    try {
      told = (await answer.json()).error;
    } catch {
      // Whoever answers is no tap; the status has to do.
    }
    const words = `${path}: ${told?.message ?? answer.statusText} (${answer.status})`;
    throw new ApiError(answer.status, words, told?.field ?? null);
  }

  /** Asks for a token, or for another one; raises ApiError. */
  refuse() {
    this.denied();
    const words = this.token === null ? "the tap asks for its token" : "the tap refuses this token";
    throw new ApiError(401, words);
  }
}
