// The live view: requests on their way from the queue to their tokens, over workers and links.
import { LinkLines, linkLabel } from "./links.js";
import { Chart } from "./chart.js";
import { act } from "./demo.js";
import { clock, duration, percent, requestOf, short, size, tag, whole } from "./format.js";
import { html, useEffect, useRef, useState } from "./preact.js";
import { RequestPanel } from "./waterfall.js";

const MAX_CHIPS = 24;
const MAX_ROWS = 9;
const OWNERS = [
  ["live", "live"], ["cached", "cached"], ["pinned", "pinned for a handoff"], ["reserved", "reserved"],
  ["draining", "draining"], ["retired", "retired"], ["free", "free"],
];
const MARKS = { good: ["+", "ok"], info: ["i", "mut"], warn: ["~", "warn"], bad: ["!", "bad"] };
const QUEUED = new Set(["received", "queued", "interrupted"]);

/** A row of the data contract as an object. */
export const asRequest = ([id, router, state, prefill, decode, prompt, cached, out, age, attempt]) => ({
  id, router, state, prefill, decode, prompt, cached, out, age, attempt,
});

function Level({ name, value, unit, good, note }) {
  const mark = good === undefined ? "" : good ? "✓ " : "▲ ";
  const tone = good === undefined ? "mut" : good ? "ok" : "warn";
  return html`<div><dt>${name}</dt><dd>${value} ${unit} <small class=${tone}>${mark}${note}</small></dd></div>`;
}

export function Levels({ cluster }) {
  const { window: seen, objectives, counts } = cluster;
  const minutes = `${Math.round(seen.seconds / 60)} min`;
  const running = Object.entries(counts).reduce((sum, [state, count]) => (QUEUED.has(state) ? sum : sum + count), 0);
  const waiting = cluster.num_requests - running;
  const ms = (value) => (value === null ? "-" : duration(value));
  return html`<section aria-label="Service levels"><dl class="slo">
    <${Level} name="TTFT p95" value=${ms(seen.ttft_p95_ms)} good=${seen.ttft_p95_ms === null ? undefined : seen.ttft_p95_ms <= objectives.ttft_p95_ms} note=${seen.ttft_p95_ms === null ? "no request yet" : `of ${duration(objectives.ttft_p95_ms)}`} />
    <${Level} name="ITL p99" value=${ms(seen.itl_p99_ms)} note=${`in ${minutes}`} />
    <${Level} name="Failed" value=${percent(seen.error_ratio, 2)} good=${seen.requests ? seen.error_ratio <= objectives.error_ratio : undefined} note=${seen.failed ? `${seen.failed} in ${minutes}` : `of ${percent(objectives.error_ratio, 1)}`} />
    <${Level} name="Replayed, refused" value=${`${seen.replayed}, ${seen.refused}`} good=${seen.refused ? false : undefined} note=${`in ${minutes}`} />
    <${Level} name="Output" value=${whole(seen.output_tok_s)} unit="tok/s" note=${`${seen.requests} in ${minutes}`} />
    <${Level} name="Running" value=${running} note=${`${Math.max(0, waiting)} waiting`} />
  </dl></section>`;
}

function PageBar({ worker }) {
  const total = Object.values(worker.pages).reduce((sum, count) => sum + count, 0);
  if (!total) return null;
  const parts = OWNERS.filter(([owner]) => worker.pages[owner] > 0);
  const label = `Pages of ${worker.id}: ${parts.map(([owner]) => `${worker.pages[owner]} ${owner}`).join(", ")}, of ${total}`;
  return html`<div class="bar" role="img" aria-label=${label} title=${label}>
    ${parts.map(([owner]) => html`<i key=${owner} class=${`p-${owner}`} style=${{ width: `${(100 * worker.pages[owner]) / total}%` }}></i>`)}
  </div>`;
}

/** Bytes of the images that a worker holds, of those that it may hold; and how many are encoded. */
function MediaBar({ worker }) {
  const { num_held: held, num_encoded: encoded, num_bytes: bytes, max_bytes: most } = worker.media;
  const waiting = held > encoded ? `, ${whole(held - encoded)} not encoded yet` : "";
  const label = `Images of ${worker.id}: ${whole(encoded)} embeddings${waiting}, ${size(bytes)} of ${size(most)}`;
  return html`<div class=${worker.role === "encode" ? "bar" : "bar media"} role="img" aria-label=${label} title=${label}><i class="p-cached" style=${{ width: `${(100 * bytes) / most}%` }}></i></div>`;
}

function Chip({ request, colour, chosen, onPick, plain }) {
  const seen = useRef(false);
  const fresh = !seen.current;
  useEffect(() => { seen.current = true; });
  const name = `${tag(request.id)}${request.attempt > 1 ? `, attempt ${request.attempt}` : ""}`;
  const kind = `chip${request.attempt > 1 ? " re" : ""}${fresh ? " new" : ""}${plain ? " plain" : ""}`;
  return html`<button class=${kind} style=${{ "--c": `var(--${colour})` }} title=${request.id} aria-label=${`Request ${name}`}
    aria-pressed=${chosen === requestOf(request.id)} onClick=${() => onPick(requestOf(request.id))}>${tag(request.id)}</button>`;
}

const GONE = { lost: "no heartbeat", left: "left after its drain" };

function Facts({ worker }) {
  if (worker.gone_ms !== null) return html`<p class="facts">${GONE[worker.status]} for ${duration(worker.gone_ms)}</p>`;
  const facts = [worker.role === "decode" ? `rows ${worker.rows}/${worker.max_rows}` : `queue ${worker.queue}`];
  const unit = worker.role === "encode" ? "rows" : "tok";
  if (worker.role !== "decode" && worker.queue_tokens) facts.push(`${short(worker.queue_tokens)} ${unit} wait`);
  if (worker.tok_s !== null) facts.push(`${short(worker.tok_s)} ${unit}/s`);
  if (worker.role === "encode" && worker.media) facts.push(`${whole(worker.media.num_encoded)} embeddings, ${size(worker.media.num_bytes)}`);
  else if (worker.media && worker.media.num_held) facts.push(`${whole(worker.media.num_held)} images, ${size(worker.media.num_bytes)}`);
  if (worker.hit_ratio !== null) facts.push(`hit ${percent(worker.hit_ratio)}`);
  if (worker.step_age_ms > 1000) facts.push(`in one step for ${duration(worker.step_age_ms)}`);
  return html`<p class="facts">${facts.join(" · ")}</p>`;
}

function Worker({ worker, requests, demo, children }) {
  const there = worker.gone_ms === null;
  return html`<article class=${`card ${worker.status}`} data-worker=${worker.id} data-role=${worker.role} data-status=${worker.status}>
    <div class="name"><h4>${worker.id}</h4><span class=${`tag ${worker.status}`}>${worker.status}</span></div>
    <${Facts} worker=${worker} />
    ${there && worker.role !== "encode" && html`<${PageBar} worker=${worker} />`}
    ${there && worker.media && html`<${MediaBar} worker=${worker} />`}
    ${children}
    ${demo && there && html`<div class="acts">
      <button class="small danger" onClick=${() => act("kill", worker.id)} aria-label=${`Kill ${worker.id}`}>Kill</button>
      <button class="small" onClick=${() => act("drain", worker.id)} aria-label=${`Drain ${worker.id}`} disabled=${worker.status === "draining"}>Drain</button>
    </div>`}
  </article>`;
}

function Lane({ name, count, note, colour, on, children }) {
  return html`<section class=${on ? "lane on" : "lane"} style=${{ "--c": `var(--${colour})` }} aria-label=${name}>
    <h3 class="head">${name} <b>${count}</b><span>${note}</span></h3>${children}
  </section>`;
}

function Flow({ cluster, chosen, onPick, tab }) {
  const flow = useRef(null);
  const requests = cluster.requests.map(asRequest);
  const of = (states, role, id) => requests.filter((each) => states.includes(each.state) && (!role || each[role] === id));
  const queue = requests.filter((each) => QUEUED.has(each.state));
  const prefilling = of(["reserved", "prefilling"]);
  const moving = of(["sealed"]);
  const decoding = of(["decoding"]);
  const prefills = cluster.workers.filter((worker) => worker.role === "prefill");
  const encodes = cluster.workers.filter((worker) => worker.role === "encode");
  const decodes = cluster.workers.filter((worker) => worker.role === "decode");
  const tokens = (workers) => short(workers.reduce((sum, worker) => sum + (worker.tok_s || 0), 0));
  const cut = cluster.num_requests - requests.length;
  const chip = (request, colour) => html`<${Chip} key=${request.id} request=${request} colour=${colour} chosen=${chosen} onPick=${onPick} />`;
  const own = cluster.scope === "own";
  return html`<div class="flow" ref=${flow}>
    <${Lane} name="Queue" count=${queue.length} note=${`${short(queue.reduce((sum, each) => sum + each.prompt, 0))} tok`} colour="queue" on=${tab === 0}>
      <ul class="rows">${queue.slice(0, MAX_ROWS).map((each) => html`<li key=${each.id}>${chip(each, "queue")}<span class="mut">${whole(each.prompt)} tok${each.state === "interrupted" ? ", replays" : ""}</span></li>`)}
        ${!queue.length && html`<li class="mut">Nothing waits.</li>`}${queue.length > MAX_ROWS && html`<li class="mut">+${queue.length - MAX_ROWS}</li>`}</ul>
    <//>
    <${Lane} name="Prefill" count=${prefilling.length} note=${own ? "" : `${tokens(prefills)} tok/s`} colour="prefill" on=${tab === 1}>
      ${own && html`<ul class="rows">${prefilling.slice(0, MAX_CHIPS).map((each) => html`<li key=${each.id}>${chip(each, "prefill")}<span class="mut">${each.prefill}</span></li>`)}</ul>`}
      ${prefills.map((worker) => html`<${Worker} key=${worker.id} worker=${worker} demo=${cluster.demo}>
        <ul class="rows">${prefilling.filter((each) => each.prefill === worker.id).slice(0, MAX_ROWS).map((each) => html`<li key=${each.id}>${chip(each, "prefill")}<span class="prog" aria-hidden="true"><i></i></span><span class="mut">${short(each.prompt)} tok · ${duration(each.age)}</span></li>`)}</ul>
      <//>`)}
      ${!own && !prefills.length && html`<p class="mut">No prefill worker.</p>`}
      ${encodes.length > 0 && html`<section aria-label="Encode workers"><p class="mut">Encode images for prefill:</p>
        ${encodes.map((worker) => html`<${Worker} key=${worker.id} worker=${worker} demo=${cluster.demo} />`)}</section>`}
    <//>
    <${Lane} name="Transfer" count=${moving.length} note="GiB/s and path" colour="transfer" on=${tab === 2}>
      <ul class="rows only-phone">${cluster.links.slice(0, 10).map((link) => html`<li key=${link.from + link.to}><span>${link.from} → ${link.to}</span><span class="sp"></span><b class=${link.state === "up" ? "" : "bad"}>${linkLabel(link)}</b></li>`)}</ul>
      ${own && html`<ul class="rows">${moving.map((each) => html`<li key=${each.id}>${chip(each, "transfer")}</li>`)}</ul>`}
      ${cluster.links.filter((link) => link.reason).map((link) => html`<p key=${link.from + link.to} class="facts bad">${link.from} → ${link.to}: ${link.reason}</p>`)}
    <//>
    <${Lane} name="Decode" count=${decoding.length} note=${own ? "" : `${whole(cluster.window.output_tok_s)} tok/s`} colour="decode" on=${tab === 3}>
      ${own && html`<div class="chips">${decoding.slice(0, MAX_CHIPS).map((each) => chip(each, "decode"))}</div>`}
      ${decodes.map((worker) => {
        const here = decoding.filter((each) => each.decode === worker.id);
        return html`<${Worker} key=${worker.id} worker=${worker} demo=${cluster.demo}>
          ${here.length > 0 && html`<div class="chips">${here.slice(0, MAX_CHIPS).map((each) => chip(each, "decode"))}${here.length > MAX_CHIPS && html`<span class="mut">+${here.length - MAX_CHIPS}</span>`}</div>`}
        <//>`;
      })}
      ${!own && !decodes.length && html`<p class="mut">No decode worker.</p>`}
      ${cut > 0 && html`<p class="mut">${whole(cut)} more requests are not listed.</p>`}
    <//>
    <${Lane} name="Client" count=${cluster.recent.length} note="last finished" colour="muted" on=${tab === 4}>
      <ul class="rows">${cluster.recent.slice(0, MAX_ROWS).map((each) => html`<li key=${each.id}>
        <${Chip} request=${{ id: each.id, attempt: each.attempts }} colour=${each.outcome === "failed" ? "bad" : "muted"} chosen=${chosen} onPick=${onPick} plain />
        <span class="mut">${each.outcome === "finished" ? `${each.output_tokens} tok · ${duration(each.e2e_ms)}` : each.outcome}</span></li>`)}
        ${!cluster.recent.length && html`<li class="mut">None yet.</li>`}</ul>
    <//>
    <${LinkLines} flow=${flow} links=${cluster.links} moving=${moving} />
  </div>`;
}

function Happened({ events, failuresOnly, setFailuresOnly, onPick }) {
  const shown = events.filter((event) => !failuresOnly || event.level === "bad" || event.level === "warn").slice(-60).reverse();
  return html`<section class="panel" aria-label="What happened"><h2>What happened
      <button class="link" aria-pressed=${!failuresOnly} onClick=${() => setFailuresOnly(false)}>all</button>
      <button class="link" aria-pressed=${failuresOnly} onClick=${() => setFailuresOnly(true)}>failures</button></h2>
    <div role="log" aria-live="polite" aria-label="Events" class="feed" tabindex="0"><ul>
      ${shown.map((event) => html`<li key=${event.seq} data-event=${event.kind}><span class="mono mut">${clock(event.at_ms)}</span>
        <b class=${MARKS[event.level]?.[1] || "mut"} aria-hidden="true">${MARKS[event.level]?.[0] || "i"}</b>
        <span class="text">${event.request && html`<button class="chip" onClick=${() => onPick(event.request)} aria-label=${`Request ${tag(event.request)}`}>${tag(event.request)}</button> `}${event.router && html`<span class="mut">${event.router}</span> `}${event.kind === "replayed" ? "replayed: " : event.kind === "attempt_failed" ? "lost: " : ""}${event.text}</span></li>`)}
      ${!shown.length && html`<li class="mut none">Nothing yet: joins, drains, losses and replays appear here.</li>`}
    </ul></div></section>`;
}

function Idle({ model }) {
  const body = `{"model": "${model}", "prompt": "Hello", "max_tokens": 64, "stream": true}`;
  return html`<section class="panel empty" aria-label="Nothing runs"><p>Nothing runs. Send something and watch it pass.</p>
    <a href="#/chat">Open the chat</a><pre tabindex="0">curl -N ${location.origin}/v1/completions -H 'Content-Type: application/json' -d '${body}'</pre></section>`;
}

function NoPair({ cluster }) {
  const roles = new Set(cluster.workers.filter((worker) => worker.status === "ready").map((worker) => worker.role));
  if (cluster.scope === "own" || (roles.has("prefill") && roles.has("decode"))) return null;
  const missing = ["prefill", "decode"].filter((role) => !roles.has(role)).join(" and ");
  return html`<section class="notice" aria-label="Missing workers"><b class="warn">▲ No ${missing} worker is ready.</b><code>baton serve ${missing.split(" ")[0]} --model … --redis-url …</code></section>`;
}

const MUTE = { unread: "is asked for its requests", silent: "does not answer", unreadable: "answers in a form that cannot be read" };

/** The other routers of the cluster; nothing for a single one. */
function Routers({ cluster }) {
  if (cluster.routers.length < 2) return null;
  return html`<section class="key" aria-label="Routers"><b>Routers:</b>${cluster.routers.map((router, index) => html`<span key=${index + router.id} data-router=${router.id} data-status=${router.status}>
    ${router.open === null ? html`<b class=${router.status === "unread" ? "mut" : "warn"}>${router.status === "unread" ? "" : "▲ "}${router.id} ${MUTE[router.status]}: its requests are not shown</b>` : `${router.id}${index ? "" : " (this one)"}${router.status === "draining" ? ", draining" : ""}: ${whole(router.open)} open, ${whole(router.output_tok_s)} tok/s`}</span>`)}</section>`;
}

export function Live({ cluster, history, chosen, trace, message, onPick, failuresOnly, setFailuresOnly }) {
  const [tab, setTab] = useState(3);
  const counts = {};
  for (const row of cluster.requests) counts[row[2]] = (counts[row[2]] || 0) + 1;
  const tabs = [
    ["Queue", (counts.queued || 0) + (counts.received || 0) + (counts.interrupted || 0)],
    ["Prefill", (counts.reserved || 0) + (counts.prefilling || 0)], ["Xfer", counts.sealed || 0],
    ["Decode", counts.decoding || 0], ["Client", cluster.recent.length],
  ];
  const idle = !cluster.requests.length && !cluster.recent.length;
  return html`<${NoPair} cluster=${cluster} />
    <${Levels} cluster=${cluster} />
    <${Routers} cluster=${cluster} />
    <main>
      <h2 class="sr">Requests on their way</h2>
      ${cluster.scope === "own" && html`<p class="mut">This key shows your own requests. A key marked <code>operator</code> shows workers and links too.</p>`}
      <div class="tabs-phone" role="tablist" aria-label="Stage">${tabs.map(([name, count], index) => html`<button role="tab" key=${name} aria-selected=${tab === index} onClick=${() => setTab(index)}>${name} <b>${count}</b></button>`)}</div>
      <${Flow} cluster=${cluster} chosen=${chosen} onPick=${onPick} tab=${tab} />
      ${cluster.scope === "all" && html`<div class="key"><b>Pages:</b>${OWNERS.filter(([owner]) => owner !== "retired").map(([owner, name]) => html`<span key=${owner}><i class=${`p-${owner}`}></i>${name}</span>`)}<span class="end">red border: replayed after a failure</span></div>`}
      ${idle && html`<${Idle} model=${cluster.model} />`}
      <div class="two">
        <${Happened} events=${cluster.events} failuresOnly=${failuresOnly} setFailuresOnly=${setFailuresOnly} onPick=${onPick} />
        <${RequestPanel} trace=${trace} message=${message} id=${chosen} />
      </div>
      <${Chart} history=${history} />
    </main>`;
}
