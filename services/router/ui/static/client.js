// HTTP of the page: the API key, JSON answers, and the live feed as one stream of server-sent events.

const KEY = "baton-key";
const FIRST_RETRY_MS = 500;
const MAX_RETRY_MS = 8000;
const ANSWER_MS = 20000;
const SILENT_MS = 45000; // a snapshot comes every 15 s

/** Paths are relative to the page, so that a proxy may put it below a folder. @param {string} path */
export const url = (path) => new URL(path, document.baseURI).href;

export const apiKey = () => sessionStorage.getItem(KEY) || "";
/** @param {string} key */
export const setApiKey = (key) => (key ? sessionStorage.setItem(KEY, key) : sessionStorage.removeItem(KEY));

/** @returns {Record<string, string>} */
export const auth = () => (apiKey() ? { authorization: `Bearer ${apiKey()}` } : {});

/** An answer with another status than 200. */
export class HttpError extends Error {
  /** @param {number} status @param {string} message @param {string} code */
  constructor(status, message, code) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

/** @param {Response} response */
export async function errorOf(response) {
  const text = await response.text();
  try {
    const { error } = JSON.parse(text);
    return new HttpError(response.status, error.message, error.code || "");
  } catch {
    return new HttpError(response.status, text.slice(0, 200) || response.statusText, "");
  }
}

/**
 * A whole answer as JSON. Throws an Error without one within ANSWER_MS.
 * @param {string} path @param {RequestInit} [options] without a signal
 */
export async function json(path, options = {}) {
  const aborter = new AbortController();
  const timer = setTimeout(() => aborter.abort(), ANSWER_MS);
  try {
    const response = await fetch(url(path), { ...options, signal: aborter.signal, headers: { ...auth(), ...(options.headers || {}) } });
    if (!response.ok) throw await errorOf(response);
    return await response.json();
  } catch (error) {
    throw aborter.signal.aborted ? new Error(`no answer within ${ANSWER_MS / 1000} s`) : error;
  } finally {
    clearTimeout(timer);
  }
}

/**
 * Reads server-sent events: `onEvent(type, data)` for each.
 * @param {Response} response @param {(type: string, data: string) => void} onEvent
 */
export async function readEvents(response, onEvent) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    rest += value;
    const blocks = rest.split("\n\n");
    rest = blocks.pop() || "";
    for (const block of blocks) {
      let type = "message";
      const data = [];
      for (const line of block.split("\n")) {
        if (line.startsWith("event: ")) type = line.slice(7);
        else if (line.startsWith("data: ")) data.push(line.slice(6));
      }
      if (data.length) onEvent(type, data.join("\n"));
    }
  }
}

/**
 * Follows the cluster until `stop`. `onChange(state)`: {status, cluster, heardAt, message}; status is connecting, live,
 * locked (a key is needed), full or cut. A hidden tab holds no connection, and a connection that is silent is replaced.
 */
export class Feed {
  /** @param {(state: object) => void} onChange */
  constructor(onChange) {
    this.state = { status: "connecting", cluster: null, heardAt: 0, message: "" };
    this.onChange = onChange;
    this.retryMs = FIRST_RETRY_MS;
    this.aborter = null;
    this.timer = 0;
    this.silence = 0;
    this.onVisible = () => (document.hidden ? this.pause() : this.restart());
    document.addEventListener("visibilitychange", this.onVisible);
  }

  set(change) {
    this.state = { ...this.state, ...change };
    this.onChange(this.state);
  }

  /** Connects at once, with the key of this moment. */
  restart() {
    this.pause();
    this.retryMs = FIRST_RETRY_MS;
    this.connect();
  }

  pause() {
    clearTimeout(this.timer);
    clearTimeout(this.silence);
    if (this.aborter) this.aborter.abort();
    this.aborter = null;
  }

  stop() {
    this.pause();
    document.removeEventListener("visibilitychange", this.onVisible);
  }

  async connect() {
    const aborter = (this.aborter = new AbortController());
    const listen = () => {
      clearTimeout(this.silence);
      this.silence = setTimeout(() => aborter.abort(), SILENT_MS);
    };
    listen();
    try {
      const response = await fetch(url("v1/cluster/events"), { headers: auth(), signal: aborter.signal });
      if (!response.ok) throw await errorOf(response);
      this.retryMs = FIRST_RETRY_MS;
      await readEvents(response, (type, data) => { listen(); this.take(type, JSON.parse(data)); });
      throw new Error("the stream ended");
    } catch (error) {
      if (this.aborter !== aborter) return; // paused, or connected anew
      clearTimeout(this.silence);
      if (aborter.signal.aborted) this.lose(`nothing came for ${SILENT_MS / 1000} s`);
      else if (error instanceof HttpError && error.status === 401) this.set({ status: "locked", cluster: null });
      else if (error instanceof HttpError && error.status === 429) this.lose(error.message, "full");
      else this.lose(error.message);
    }
  }

  take(type, content) {
    const now = performance.now();
    const old = this.state.cluster;
    if (type === "snapshot") this.set({ status: "live", cluster: content, heardAt: now, message: "" });
    else if (old && type === "frame") this.set({ status: "live", cluster: { ...old, ...content }, heardAt: now });
    else if (old && type === "event") this.set({ cluster: { ...old, events: [...old.events, content].slice(-200) }, heardAt: now });
    else if (old && type === "request") this.set({ cluster: { ...old, recent: [content, ...old.recent].slice(0, 50) }, heardAt: now });
  }

  lose(message, status = "cut") {
    this.set({ status, message });
    this.timer = setTimeout(() => this.connect(), this.retryMs * (0.75 + 0.5 * Math.random()));
    this.retryMs = Math.min(2 * this.retryMs, MAX_RETRY_MS);
  }
}
