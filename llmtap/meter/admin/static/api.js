// Requests to the admin API, with the token if one is required. The token is sent in a header field only.

const TOKEN_KEY = "llmtap.token";
/** Texts that a header field can contain (Fetch: a byte string). With other texts, `fetch` sends no request. */
const SENDABLE = /^[\x21-\x7e\x80-\xff]*$/;
const BROKE = "the connection to llmtap broke";

class ApiError extends Error {
  constructor(status, message, field = null) {
    super(message);
    this.status = status;
    this.field = field;
  }
}

export class Api {
  constructor() {
    this.token = sessionStorage.getItem(TOKEN_KEY);
    /** Called when the admin port requires a token, or refuses the present one. */
    this.denied = () => {};
  }

  /** Stores the token without blanks at its ends, which were possibly copied with it. */
  useToken(token) {
    this.token = token.trim();
    sessionStorage.setItem(TOKEN_KEY, this.token);
  }

  /** Returns the JSON at a path. Throws ApiError with the message of the admin port. */
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
   * Yields server-sent events as [name, data], until the stream ends. An EventSource could not send the token.
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
      throw new ApiError(0, "llmtap does not answer");
    }
    if (answer.ok) return answer;
    if (answer.status === 401) this.refuse();
    let problem = null;
    try {
      problem = (await answer.json()).error;
    } catch {
      // The answer is not from the admin port, but for example from a proxy in front of it: report the status.
    }
    const words = `${path}: ${problem?.message ?? answer.statusText} (${answer.status})`;
    throw new ApiError(answer.status, words, problem?.field ?? null);
  }

  /** Asks the user for a token; throws ApiError. */
  refuse() {
    this.denied();
    const words = this.token === null ? "llmtap requires its token" : "llmtap refuses this token";
    throw new ApiError(401, words);
  }
}
