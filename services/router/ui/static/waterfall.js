// One request over time: its stages as bars, the pull as an overlay, events as marks.
import { html } from "./preact.js";
import { clock, exactMs, pathName, size, tag } from "./format.js";

const COLOURS = {
  read: "muted", parse: "muted", admit: "queue", retry: "bad", reserve: "queue", dispatch: "queue",
  prefill_queue: "prefill", encode: "prefill", prefill: "prefill", emit: "muted", transfer_tail: "transfer", join: "decode", decode: "decode",
  finish: "muted",
};
const LATE = new Set(["decode", "finish"]);
const SPLIT = 64;

/** Times to percent: everything up to the batch has 64 % of the width, decoding the rest. */
function scaleOf(trace) {
  const late = trace.stages.find((stage) => LATE.has(stage.stage) && stage.duration_us);
  const end = Math.max(1, trace.e2e_us);
  const cut = late ? late.start_us : end;
  const share = !late ? 100 : cut ? SPLIT : 0;
  const at = (us) => (us <= cut ? (share * us) / Math.max(1, cut) : share + 1 + ((99 - share) * (us - cut)) / Math.max(1, end - cut));
  return { at, cut, split: share === SPLIT };
}

/** The pull of the attempt that the stages are about, on the router's clock. */
function pullOf(trace) {
  const attempts = trace.sequences?.[0]?.attempts || [];
  const attempt = [...attempts].reverse().find((each) => each.prefill_times) || attempts[attempts.length - 1];
  const times = attempt?.import_times;
  if (!times || attempt.reserve_us === undefined) return null;
  const called = attempt.start_us + attempt.reserve_us;
  return { start: called + times.first_chunk_us, end: called + times.commit_us, times };
}

function Row({ name, mute, note, children }) {
  return html`<span class=${mute ? "mut" : ""}>${name}</span>${children}<span class=${mute ? "n mut" : "n"}>${note}</span>`;
}

/** `trace`: as GET /v1/cluster/requests/{id} has it. */
export function Waterfall({ trace }) {
  const { at, cut, split } = scaleOf(trace);
  const pull = pullOf(trace);
  const stages = trace.stages.filter((stage) => stage.duration_us > 0);
  const events = trace.events || [];
  const track = split ? "t split" : "t";
  const bar = (start, end) => ({ left: `${at(start)}%`, width: `${Math.max(0, at(end) - at(start))}%` });
  const rows = stages.map((stage) => {
    const end = stage.start_us + stage.duration_us;
    const marks = events.filter((event) => event.at_us >= stage.start_us && event.at_us <= end && event.kind === "attempt_failed");
    return html`<${Row} key=${stage.stage} name=${stage.stage.replace("_", " ")} note=${exactMs(stage.duration_us)}>
        <span class=${track}>
          <i style=${{ ...bar(stage.start_us, end), "--c": `var(--${COLOURS[stage.stage] || "muted"})` }}></i>
          ${marks.map((event) => html`<u style=${{ left: `${at(event.at_us)}%` }} title=${event.text}></u>`)}
        </span>
      <//>
      ${stage.stage === "prefill" && pull && html`<${Row} name="pull (overlaps)" mute note=${`${size(pull.times.bytes || 0)} ${pathName(pull.times.path || pull.times.transport || "")}`}>
        <span class=${track}><i class="over" style=${{ ...bar(pull.start, pull.end), "--c": "var(--transfer)" }}></i></span>
      <//>`}`;
  });
  return html`<div class="wf" data-stages>
    <span></span>
    <span class="ax"><span>0 to ${exactMs(cut)}</span>${split && html`<span>then ${exactMs(trace.e2e_us - cut)}</span>`}</span>
    <span></span>
    ${rows}
  </div>`;
}

/** What the waterfall adds up to, and what happened to the request. */
export function Sums({ trace }) {
  const total = trace.stages.reduce((sum, stage) => sum + stage.duration_us, 0);
  const ttft = trace.ttft_us;
  const attempts = (trace.sequences || []).flatMap((sequence) => sequence.attempts || []);
  const pull = pullOf(trace);
  return html`<div class="sum">
    <span data-sum=${total} data-e2e=${trace.e2e_us}>${
      ttft === undefined || ttft === null
        ? html`<b>no token</b>, ${trace.outcome === "running" ? "so far" : "E2E"} <b>${exactMs(trace.e2e_us)}</b>`
        : html`TTFT <b>${exactMs(ttft)}</b> + <b>${exactMs(trace.e2e_us - ttft)}</b> = ${trace.outcome === "running" ? "so far" : "E2E"} <b>${exactMs(trace.e2e_us)}</b>`
    }</span>
    <span>${trace.prompt_tokens || 0} prompt tokens${trace.cached_tokens ? `, ${trace.cached_tokens} cached` : ""}</span>
    <span>${trace.output_tokens || 0} tokens out</span>
    ${pull && html`<span>${pull.times.pages === 1 ? "1 page" : `${pull.times.pages || 0} pages`}, proof ${pull.times.proof || "-"}, ${exactMs(pull.times.exposed_us || 0)} of the pull shown</span>`}
    ${attempts.map((attempt) => attempt.end_code && html`<p class="bad">! attempt ${attempt.attempt} ended: ${attempt.decode || "no worker"} while ${attempt.end_phase}: ${attempt.end_code}</p>`)}
    ${(trace.events || []).filter((event) => event.kind !== "attempt_failed").map((event) => html`<p class="warn">at ${exactMs(event.at_us)}: ${event.kind}, ${event.text}</p>`)}
  </div>`;
}

/** Where the request ran: every pair in order. */
export function route(trace) {
  const attempts = trace.sequences?.[0]?.attempts || [];
  const pairs = attempts.filter((attempt) => attempt.decode).map((attempt) => (attempt.prefill === attempt.decode ? attempt.decode : `${attempt.prefill} → ${attempt.decode}`));
  return pairs.join(", then ") || "no worker yet";
}

/** The panel of one request. */
export function RequestPanel({ trace, message, id, level = 2 }) {
  const Head = `h${level}`;
  if (!trace) {
    return html`<section class="panel" aria-label="One request"><${Head} class="title">Request ${id ? html`<span class="mono">${tag(id)}</span>` : ""}<//>
      <p class="mut">${message || (id ? "Reading its stages." : "Choose a request: its stages are shown here, and they add up.")}</p></section>`;
  }
  return html`<section class="panel" aria-label="One request">
    <${Head} class="title">Request <a class="mono" href=${`#/requests/${trace.id}`}>${trace.id}</a>
      <span class=${`tag ${trace.outcome}`}>${trace.outcome}${trace.code && trace.outcome !== "finished" ? `: ${trace.code}` : ""}</span>
      <span class="sp"></span><span class="mut">${route(trace)}</span><//>
    <${Waterfall} trace=${trace} /><${Sums} trace=${trace} />
    ${level === 1 && html`<p class="facts">${clock(trace.arrived_unix_us / 1000)} ${trace.endpoint} on ${trace.router}${trace.tenant ? `, tenant ${trace.tenant}` : ""}${trace.http_request_id ? `, x-request-id ${trace.http_request_id}` : ""}</p>`}
  </section>`;
}
