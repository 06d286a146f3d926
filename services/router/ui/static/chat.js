// A chat with the model: streams, stops, and says where each answer was computed.
import { apiKey, auth, errorOf, readEvents, url } from "./client.js";
import { act } from "./demo.js";
import { duration, tag } from "./format.js";
import { AddButton, pasteInto, Pictures, useDrop, useImages, useImageSupport } from "./images.js";
import { html, useEffect, useMemo, useRef, useState } from "./preact.js";
import { useTrace } from "./requests.js";

const MAX_RAW_CHARS = 200000;
const MAX_URL_CHARS = 64; // of an image in the curl text
const DEFAULTS = { mode: "chat", system: "", temperature: "0.7", top_p: "", max_tokens: "256", seed: "", stop: "", tools: "", extra: "" };

let toHtml = null;
const loadMarkdown = () => import("./markdown.js").then((module) => { toHtml = module.toHtml; });

/** The request's body. Throws an Error that names a field with invalid JSON. */
export function bodyOf(params, turns, model) {
  const body = { model, stream: true, stream_options: { include_usage: true } };
  for (const name of ["temperature", "top_p", "max_tokens", "seed"]) if (params[name] !== "") body[name] = Number(params[name]);
  if (params.stop) body.stop = params.stop.split("\n").filter(Boolean);
  for (const name of ["tools", "extra"]) {
    if (!params[name].trim()) continue;
    let value;
    try { value = JSON.parse(params[name]); } catch (error) { throw new Error(`${name}: ${error.message}`); }
    Object.assign(body, name === "tools" ? { tools: value } : value);
  }
  if (params.mode === "completion") {
    if (turns[turns.length - 1].images?.length) throw new Error("completions take no images: set the endpoint to chat completions");
    return { ...body, prompt: turns[turns.length - 1].text };
  }
  // A question that was refused is not asked again with the next one.
  const kept = turns.filter((turn, index) => (turn.text || turn.images?.length) && !turn.error && !turns[index + 1]?.error);
  const messages = kept.map((turn) => ({ role: turn.role, content: contentOf(turn) }));
  return { ...body, messages: [...(params.system ? [{ role: "system", content: params.system }] : []), ...messages] };
}

function contentOf({ text, images }) {
  if (!images?.length) return text;
  const shown = images.map((image) => ({ type: "image_url", image_url: { url: image.url } }));
  return text.trim() ? [...shown, { type: "text", text }] : shown;
}

const pathOf = (params) => (params.mode === "completion" ? "v1/completions" : "v1/chat/completions");

/** The command that sends the same request, and whether data: URLs are cut short in it: a page of base64 helps nobody. */
function curlOf({ body, path }) {
  const key = apiKey() ? ` -H "Authorization: Bearer $KEY"` : "";
  let isCut = false;
  const text = JSON.stringify(body, (name, value) => {
    if (name !== "url" || typeof value !== "string" || !value.startsWith("data:") || value.length <= MAX_URL_CHARS) return value;
    isCut = true;
    return `${value.slice(0, MAX_URL_CHARS)}...`;
  }, 1);
  return [`curl -N ${url(path)} -H 'Content-Type: application/json'${key} -d '${text.replaceAll("'", "'\\''")}'`, isCut];
}

function Curl({ request }) {
  const [text, isCut] = useMemo(() => (request ? curlOf(request) : ["", false]), [request]);
  return html`${isCut && html`<p class="mut">The data: URLs of images are cut short here. Put whole ones in their place.</p>`}
    <pre class="raw" tabindex="0" data-curl>${text}</pre>`;
}

/** Adds one event of the stream to an answer. */
function take(answer, data) {
  const next = { ...answer, raw: (answer.raw + `data: ${data}\n\n`).slice(-MAX_RAW_CHARS) };
  if (data === "[DONE]") return next;
  const event = JSON.parse(data);
  if (event.error) return { ...next, error: event.error.message };
  if (event.usage) next.usage = event.usage;
  for (const choice of event.choices || []) {
    const delta = choice.delta || { content: choice.text };
    if (delta.content) next.text += delta.content;
    const why = delta.reasoning_content || delta.reasoning;
    if (why) next.reasoning += why;
    for (const part of delta.tool_calls || []) {
      next.calls = [...next.calls];
      const before = next.calls[part.index || 0] || { name: "", arguments: "" };
      next.calls[part.index || 0] = { name: before.name + (part.function?.name || ""), arguments: before.arguments + (part.function?.arguments || "") };
    }
    if (choice.finish_reason) next.finish = choice.finish_reason;
  }
  return next;
}

function Text({ answer }) {
  const [ready, setReady] = useState(Boolean(toHtml));
  useEffect(() => { if (!ready) loadMarkdown().then(() => setReady(true), () => {}); }, []);
  const caret = answer.open ? " caret" : "";
  if (!ready || !toHtml) return html`<div class=${`md${caret}`}><p>${answer.text}</p></div>`;
  return html`<div class=${`md${caret}`} dangerouslySetInnerHTML=${{ __html: toHtml(answer.text) }}></div>`;
}

function Measured({ answer, demo }) {
  const [trace] = useTrace(answer.id, answer.open ? 0 : 1);
  if (!answer.id) return null;
  const attempts = trace?.sequences?.[0]?.attempts || [];
  const last = attempts[attempts.length - 1];
  const seconds = trace && trace.ttft_us !== undefined ? (trace.e2e_us - trace.ttft_us) / 1e6 : 0;
  const facts = [];
  if (trace?.ttft_us !== undefined && trace?.ttft_us !== null) facts.push(`TTFT ${duration(trace.ttft_us / 1000)}`);
  if (trace?.output_tokens > 1 && seconds > 0) facts.push(`${((trace.output_tokens - 1) / seconds).toFixed(0)} tok/s`);
  if (trace?.output_tokens) facts.push(`${trace.output_tokens} tokens`);
  if (trace?.cached_tokens) facts.push(`${trace.cached_tokens} cached`);
  if (last?.decode) facts.push(last.prefill === last.decode ? last.decode : `${last.prefill} → ${last.decode}`);
  return html`<p class="measured"><span>${facts.join(" · ")}</span>
    ${attempts.length > 1 && html`<b class="warn">replayed ${attempts.length - 1}×</b>`}
    ${answer.finish && html`<span>${answer.finish}</span>`}
    <a href=${`#/requests/${answer.id}`}>waterfall of ${tag(answer.id)}</a>
    ${demo && answer.open && last?.decode && html`<button class="small danger" onClick=${() => act("kill", last.decode)}>Kill its decode worker</button>`}</p>`;
}

function Answer({ answer, demo, number }) {
  const [tab, setTab] = useState("text");
  const pick = (name, label) => html`<button class="link" aria-pressed=${tab === name} onClick=${() => setTab(name)}>${label}</button>`;
  return html`<article class="bubble assistant" aria-label=${`Answer ${number}`} aria-busy=${answer.open}>
    <div class="tabs">${pick("text", "Text")}${pick("raw", "Raw SSE")}${pick("curl", "curl")}</div>
    ${tab === "raw" && html`<pre class="raw" tabindex="0" data-raw>${answer.raw || "nothing yet"}</pre>`}
    ${tab === "curl" && html`<${Curl} request=${answer.request} />`}
    ${tab === "text" && html`<div>
      ${answer.reasoning && html`<details class="why" open=${answer.open && !answer.text}><summary>Reasoning</summary>${answer.reasoning}</details>`}
      <${Text} answer=${answer} />
      ${answer.calls.map((call) => html`<div class="call"><b>${call.name}</b><pre>${call.arguments}</pre></div>`)}
    </div>`}
    ${answer.error && html`<p class="bad" role="alert">${answer.error}</p>`}
    ${answer.stopped && html`<p class="warn">Stopped.</p>`}
    <${Measured} answer=${answer} demo=${demo} />
  </article>`;
}

function Params({ params, set, model }) {
  const field = (name, label, more = {}) => html`<label>${label}<input value=${params[name]} onInput=${(event) => set({ [name]: event.target.value })} autocomplete="off" ...${more} /></label>`;
  const area = (name, label, rows, more = {}) => html`<label>${label}<textarea rows=${rows} value=${params[name]} onInput=${(event) => set({ [name]: event.target.value })} ...${more}></textarea></label>`;
  return html`<aside class="panel params" aria-label="Parameters"><h2>Parameters</h2>
    <p class="mut">${model}</p>
    <label>Endpoint<select value=${params.mode} onChange=${(event) => set({ mode: event.target.value })}><option value="chat">chat completions</option><option value="completion">completions</option></select></label>
    ${params.mode === "chat" && area("system", "System prompt", 2)}
    <div class="pair">${field("temperature", "Temperature", { inputmode: "decimal" })}${field("top_p", "Top p", { inputmode: "decimal" })}</div>
    <div class="pair">${field("max_tokens", "Max tokens", { inputmode: "numeric" })}${field("seed", "Seed", { inputmode: "numeric" })}</div>
    ${area("stop", "Stop strings, one a line", 2)}
    ${params.mode === "chat" && area("tools", "Tools, JSON", 3, { spellcheck: false, class: "mono" })}
    ${area("extra", "More fields, JSON", 2, { spellcheck: false, class: "mono", placeholder: '{"min_p": 0.05}' })}
  </aside>`;
}

export function Chat({ model, demo, revision }) {
  const [params, setParams] = useState(DEFAULTS);
  const [turns, setTurns] = useState([]);
  const [text, setText] = useState("");
  const [takesImages, askAgain] = useImageSupport(revision);
  const { images, isReading, problem, add, remove, clear } = useImages();
  const { over, handlers } = useDrop(takesImages, add);
  const isReady = !isReading && (text.trim() || images.length); // a question does not go without an image that is still read
  const aborter = useRef(null);
  const running = turns.some((turn) => turn.open);
  const set = (change) => setParams((before) => ({ ...before, ...change }));
  const change = (make) => setTurns((before) => [...before.slice(0, -1), make(before[before.length - 1])]);
  const stop = () => aborter.current && aborter.current.abort();
  useEffect(() => {
    const onStop = () => stop();
    addEventListener("baton-stop", onStop);
    return () => { removeEventListener("baton-stop", onStop); stop(); };
  }, []);

  const send = async (event) => {
    event.preventDefault();
    if (running || !isReady) return;
    const asked = [...turns, { role: "user", text, images }];
    const empty = { role: "assistant", text: "", reasoning: "", calls: [], raw: "", request: null, id: "", open: true };
    let body;
    try { body = bodyOf(params, asked, model); } catch (error) {
      setTurns([...asked, { ...empty, open: false, error: error.message }]);
      return;
    }
    setText("");
    clear();
    setTurns([...asked, { ...empty, request: { body, path: pathOf(params) } }]);
    const abort = (aborter.current = new AbortController());
    try {
      const response = await fetch(url(pathOf(params)), { method: "POST", signal: abort.signal, headers: { ...auth(), "content-type": "application/json" }, body: JSON.stringify(body) });
      if (!response.ok) throw await errorOf(response);
      const id = response.headers.get("x-baton-request-id") || "";
      change((answer) => ({ ...answer, id }));
      await readEvents(response, (type, data) => change((answer) => take(answer, data)));
    } catch (error) {
      const noTemplate = /chat template/.test(error.message);
      if (noTemplate) set({ mode: "completion" });
      const why = noTemplate ? `${error.message} The endpoint is set to completions now: send it again.` : error.message;
      change((answer) => (abort.signal.aborted ? { ...answer, stopped: true } : { ...answer, error: why }));
    } finally {
      change((answer) => ({ ...answer, open: false }));
      aborter.current = null;
    }
  };
  const onKey = (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) send(event);
    else if (event.key === "Escape" && running) { event.stopPropagation(); stop(); }
  };
  return html`<main><h2 class="sr">Chat</h2><div class="chat">
    <section class=${over ? "talk over" : "talk"} aria-label="Conversation" ...${handlers}>
      <div class="messages" role="log" aria-label="Messages">${turns.map((turn, index) => (turn.role === "user"
        ? html`<div key=${index} class="bubble user"><${Pictures} images=${turn.images} />${turn.text}</div>`
        : html`<${Answer} key=${index} answer=${turn} demo=${demo} number=${(index + 1) / 2} />`))}
        ${!turns.length && html`<p class="mut empty">Ask something. The Live view shows where the answer is computed.</p>`}</div>
      <form class="panel compose" onSubmit=${send} aria-label="Message">
        <label class="sr" for="message">Message</label>
        <textarea id="message" rows="3" placeholder="Message (Enter sends, Shift+Enter breaks the line)" value=${text} onInput=${(event) => setText(event.target.value)} onKeyDown=${onKey} onFocus=${askAgain} onPaste=${takesImages ? pasteInto(add) : null}></textarea>
        <${Pictures} images=${images} remove=${remove} />
        ${problem && html`<p class="bad" role="alert">${problem}</p>`}
        <div class="acts">
          ${running ? html`<button type="button" class="danger" onClick=${stop}>Stop</button>` : html`<button class="primary" disabled=${!isReady}>Send</button>`}
          ${takesImages && html`<${AddButton} add=${add} />`}
          <button type="button" onClick=${() => { stop(); setTurns([]); }} disabled=${!turns.length || running}>Clear</button>
          <span class="sp"></span><span class="mut">${running ? "streaming" : isReading ? "reading images" : ""}</span>
        </div>
      </form>
    </section>
    <${Params} params=${params} set=${set} model=${model} />
  </div></main>`;
}
