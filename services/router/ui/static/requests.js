// Requests that ended, and one request alone.
import { HttpError, json } from "./client.js";
import { clock, duration, tag } from "./format.js";
import { html, useEffect, useRef, useState } from "./preact.js";
import { RequestPanel } from "./waterfall.js";

const REFRESH_MS = 700;
const RETRY_MS = 3000; // when the router did not answer

/** How long the newest request stays once it is shown, and how long its trace may take. */
const READING_MS = 5000;
const FETCHING_MS = 20000;

/** The trace of a request, read again while it runs. Returns [trace, message]. */
export function useTrace(id, revision = 0) {
  const [found, setFound] = useState({ id: "", trace: null, message: "" });
  useEffect(() => {
    if (!id) return undefined;
    let timer = 0;
    let over = false;
    const read = async () => {
      try {
        const trace = await json(`v1/cluster/requests/${encodeURIComponent(id)}`);
        if (over) return;
        if (trace.trace === null) { // another router has it: its stages come when it ended
          setFound((before) => (before.id === id && before.trace ? before : { id, trace: null, message: `Router ${trace.router} tells its stages when it ended` }));
          timer = setTimeout(read, REFRESH_MS);
          return;
        }
        setFound({ id, trace, message: "" });
        if (trace.outcome === "running") timer = setTimeout(read, REFRESH_MS);
      } catch (error) {
        if (over) return;
        setFound((before) => (before.id === id && before.trace ? before : { id, trace: null, message: error.message }));
        if (!(error instanceof HttpError) || error.status >= 500) timer = setTimeout(read, RETRY_MS);
      }
    };
    read();
    return () => { over = true; clearTimeout(timer); };
  }, [id, revision]);
  return found.id === id ? [found.trace, found.message] : [null, ""];
}

/** The newest of the requests that ended, notable ones first. It stays long enough to be read while others end. */
export function useNewest(recent, isShown) {
  const held = useRef({ id: "", at: 0, shown: false });
  const notable = recent.find((row) => row.notable)?.id;
  const newest = notable || recent[0]?.id || "";
  const now = performance.now();
  const { id, at, shown } = held.current;
  if (isShown && !shown) held.current = { id, at: now, shown: true };
  const before = recent.find((row) => row.id === id);
  const over = now - held.current.at >= (held.current.shown ? READING_MS : FETCHING_MS);
  if (newest !== id && (!id || over || (notable && !before?.notable))) held.current = { id: newest, at: now, shown: false };
  return held.current.id;
}

export function OneRequest({ id }) {
  const [trace, message] = useTrace(id);
  return html`<main><p><a href="#/requests">All requests</a></p><${RequestPanel} trace=${trace} message=${message} id=${id} level=${1} /></main>`;
}

export function Requests({ revision, finding, onFinding }) {
  const [outcome, setOutcome] = useState("");
  const [notable, setNotable] = useState(false);
  const [slower, setSlower] = useState("");
  const [rows, setRows] = useState([]);
  const [message, setMessage] = useState("");
  useEffect(() => {
    let over = false;
    const query = new URLSearchParams({ limit: "100", ...(outcome && { outcome }), ...(notable && { notable: "1" }), ...(/^\d+$/.test(slower) && { slower_than_ms: slower }) });
    json(`v1/cluster/requests?${query}`).then(
      (answer) => { if (!over) { setRows(answer.data); setMessage(""); } },
      (error) => { if (!over) setMessage(error.message); },
    );
    return () => { over = true; };
  }, [outcome, notable, slower, revision]);
  const field = useRef(null);
  useEffect(() => {
    if (!finding) return;
    field.current.focus();
    onFinding();
  }, [finding]);
  const find = (event) => {
    event.preventDefault();
    const id = new FormData(event.target).get("id").toString().trim();
    if (id) location.hash = `#/requests/${id}`;
  };
  return html`<main><section class="panel" aria-label="Requests"><h2>Requests <span class="mut">that ended on this router lately</span></h2>
    <div class="filters">
      <label>Outcome<select value=${outcome} onChange=${(event) => setOutcome(event.target.value)}><option value="">any</option>${["finished", "failed", "refused", "cancelled"].map((each) => html`<option value=${each}>${each}</option>`)}</select></label>
      <label>Slower than, ms<input inputmode="numeric" value=${slower} onInput=${(event) => setSlower(event.target.value)} size="8" /></label>
      <label>Which<select value=${notable ? "1" : ""} onChange=${(event) => setNotable(Boolean(event.target.value))}><option value="">all</option><option value="1">failed, replayed, slowest</option></select></label>
      <form class="wide" onSubmit=${find}><label>Find by id<input name="id" ref=${field} placeholder="chatcmpl-…" autocomplete="off" /></label></form>
    </div>
    ${message && html`<p class="bad">${message}</p>`}
    <div class="scroll" tabindex="0" role="region" aria-label="Table of requests"><table>
      <thead><tr><th>Request</th><th>Ended</th><th>Outcome</th><th>Workers</th><th class="n">Prompt</th><th class="n">Cached</th><th class="n">Out</th><th class="n">Attempts</th><th class="n">TTFT</th><th class="n">E2E</th></tr></thead>
      <tbody>${rows.map((row) => html`<tr key=${row.id}><td><a class="mono" href=${`#/requests/${row.id}`} data-pick title=${row.id}>${tag(row.id)}</a></td><td>${clock(row.at_ms)}</td>
        <td><span class=${`tag ${row.outcome}`}>${row.outcome}</span>${row.code && row.outcome !== "finished" ? ` ${row.code}` : ""}</td><td>${row.decode ? (row.prefill === row.decode ? row.decode : `${row.prefill} → ${row.decode}`) : "-"}</td>
        <td class="n">${row.prompt_tokens}</td><td class="n">${row.cached_tokens}</td><td class="n">${row.output_tokens}</td><td class=${row.attempts > 1 ? "n bad" : "n"}>${row.attempts}</td><td class="n">${row.ttft_ms === null ? "-" : duration(row.ttft_ms)}</td><td class="n">${duration(row.e2e_ms)}</td></tr>`)}</tbody></table></div>
    ${!rows.length && !message && html`<p class="mut empty">No request yet.</p>`}
  </section></main>`;
}
