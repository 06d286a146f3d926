// The page: header, views by the address after #, keys, theme, the feed.
import { Chat } from "./chat.js";
import { apiKey, Feed, setApiKey } from "./client.js";
import { noHistory, remember } from "./chart.js";
import { Live } from "./live.js";
import { html, render, useEffect, useRef, useState } from "./preact.js";
import { OneRequest, Requests, useNewest, useTrace } from "./requests.js";
import { requestOf } from "./format.js";

const VIEWS = [["#/", "Live"], ["#/chat", "Chat"], ["#/requests", "Requests"]];
const KEYS = [
  ["g l, g c, g r", "Live, Chat, Requests"], ["j, k", "next, previous request"], ["Enter", "open the chosen request"],
  ["Esc", "stop the answer, or go back"], ["/", "find a request by id"], ["p", "pause the view"], ["f", "failures only"],
  ["t", "light or dark"], ["?", "this list"],
];
const STALE_MS = 3000;
const THEME = "baton-theme";

const viewOf = () => location.hash || "#/";

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  try { localStorage.setItem(THEME, theme); } catch { /* private mode */ }
}

function toggleTheme() {
  const now = document.documentElement.dataset.theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
  setTheme(now === "dark" ? "light" : "dark");
  dispatchEvent(new Event("baton-theme"));
}

function KeyGate({ onKey, wrong }) {
  const submit = (event) => {
    event.preventDefault();
    setApiKey(new FormData(event.target).get("key").toString().trim());
    onKey();
  };
  return html`<main><section class="panel gate" aria-label="API key"><h2>This router needs an API key</h2>
    <p class="mut">It stays in this tab and goes to this router only. A key marked <code>operator</code> shows the whole cluster.</p>
    <form onSubmit=${submit}><label class="sr" for="key">API key</label><input id="key" name="key" type="password" autocomplete="off" placeholder="sk-baton-…" required /><button class="primary">Use it</button></form>
    ${wrong && html`<p class="bad" role="alert">This key is not known here.</p>`}</section></main>`;
}

function News({ state, now, paused }) {
  const silent = now - state.heardAt;
  if (paused) return html`<span class="news"><span class="dot warn"></span>paused</span>`;
  if (state.status === "live" && silent < STALE_MS) return html`<span class="news"><span class="dot"></span>live</span>`;
  if (state.status === "connecting") return html`<span class="news"><span class="dot warn"></span>connecting</span>`;
  if (state.status === "locked") return html`<span class="news"><span class="dot bad"></span>key needed</span>`;
  const since = state.heardAt ? `no news for ${Math.round(silent / 1000)} s` : "not connected";
  return html`<span class="news" role="status"><span class="dot bad"></span>${since}</span>`;
}

function Header({ cluster, view, children }) {
  const count = (role) => cluster.workers.filter((worker) => worker.role === role && worker.gone_ms === null).length;
  const about = cluster ? `${cluster.model} · ${cluster.router}${cluster.scope === "all" ? ` · ${count("prefill")} prefill · ${count("decode")} decode` : ""}` : "";
  return html`<header class="top"><h1>BATON</h1><span class="mut hide">${about}</span>
    <nav aria-label="Views">${VIEWS.map(([hash, name]) => html`<a key=${hash} href=${hash} aria-current=${here(view, hash) ? "page" : null}>${name}</a>`)}</nav>
    <span class="sp"></span>${children}</header>`;
}

const here = (view, hash) => (hash === "#/requests" ? view.startsWith(hash) : view === hash);

/** Keys of the page; off while a field has the focus. */
function useKeys(actions, help) {
  const latest = useRef(actions);
  latest.current = actions;
  useEffect(() => {
    let went = -Infinity;
    const onKey = (event) => {
      const typing = /^(INPUT|TEXTAREA|SELECT)$/.test(event.target.tagName);
      if (help.current?.open) return; // the dialog's own keys
      if (event.ctrlKey || event.metaKey || event.altKey || (typing && event.key !== "Escape")) return;
      const name = performance.now() - went < 1200 ? `g ${event.key}` : event.key;
      went = event.key === "g" ? performance.now() : -Infinity;
      if (event.key === "Enter" && event.target.closest("a, button")) return;
      const action = latest.current[name];
      if (action) { event.preventDefault(); action(event); }
    };
    document.addEventListener("keydown", onKey);
    return () => document.removeEventListener("keydown", onKey);
  }, []);
}

function App() {
  const [state, setState] = useState({ status: "connecting", cluster: null, heardAt: 0 });
  const [history, setHistory] = useState(noHistory());
  const [view, setView] = useState(viewOf());
  const [chosen, setChosen] = useState("");
  const [failuresOnly, setFailuresOnly] = useState(false);
  const [paused, setPaused] = useState(false);
  const [finding, setFinding] = useState(false);
  const [notice, setNotice] = useState("");
  const [now, setNow] = useState(performance.now());
  const [, redraw] = useState(0);
  const feed = useRef(null);
  const help = useRef(null);
  const build = useRef("");
  const frozen = useRef(false);
  frozen.current = paused;
  const chatted = useRef(false);
  chatted.current = chatted.current || view === "#/chat";

  useEffect(() => {
    feed.current = new Feed((next) => {
      if (frozen.current) return;
      setState(next);
      if (next.cluster && next.status === "live") setHistory((before) => remember(before, next.cluster));
    });
    feed.current.connect();
    const onHash = () => setView(viewOf());
    const onTheme = () => redraw((count) => count + 1);
    const onNotice = (event) => setNotice(event.detail);
    addEventListener("hashchange", onHash);
    addEventListener("baton-theme", onTheme);
    addEventListener("baton-notice", onNotice);
    const timer = setInterval(() => setNow(performance.now()), 1000);
    return () => { feed.current.stop(); clearInterval(timer); };
  }, []);

  const cluster = state.cluster;
  if (cluster && !build.current) build.current = cluster.build;
  const ids = cluster ? [...new Set([...cluster.requests.map((row) => requestOf(row[0])), ...cluster.recent.map((row) => row.id)])] : [];
  const isShown = useRef(false);
  const newest = useNewest(cluster?.recent || [], isShown.current);
  const shown = chosen || newest;
  const revision = cluster?.recent.findIndex((row) => row.id === shown) >= 0 ? 1 : 0;
  const [trace, message] = useTrace(cluster && view === "#/" ? shown : "", revision);
  isShown.current = !chosen && Boolean(trace || message);
  const move = (step) => {
    const at = ids.indexOf(shown);
    if (ids.length) setChosen(ids[Math.min(ids.length - 1, Math.max(0, at + step))]);
  };
  const go = (hash) => () => { location.hash = hash; };
  const openHelp = () => help.current.showModal();
  useKeys({
    "g l": go("#/"), "g c": go("#/chat"), "g r": go("#/requests"), j: () => move(1), k: () => move(-1), t: toggleTheme, "?": openHelp,
    p: () => setPaused((before) => !before), f: () => setFailuresOnly((before) => !before),
    // Keys ask the address, not `view`: a fast key comes before `hashchange` and the next drawing.
    Enter: () => { if (viewOf() === "#/" && shown) location.hash = `#/requests/${shown}`; },
    Escape: () => {
      if (viewOf() === "#/chat") dispatchEvent(new Event("baton-stop"));
      else if (viewOf().startsWith("#/requests/")) location.hash = "#/requests";
      else setChosen("");
      document.activeElement?.blur();
    },
    "/": () => { location.hash = "#/requests"; setFinding(true); },
  }, help);

  const locked = state.status === "locked";
  const stale = state.status !== "live" || now - state.heardAt > STALE_MS;
  const body = () => {
    if (locked) return html`<${KeyGate} wrong=${Boolean(apiKey())} onKey=${() => feed.current.restart()} />`;
    if (view === "#/chat") return null; // stays below, so that an answer goes on in the other views
    if (view.startsWith("#/requests/")) return html`<${OneRequest} id=${decodeURIComponent(view.slice(11))} />`;
    if (view === "#/requests") return html`<${Requests} revision=${cluster?.recent[0]?.id} finding=${finding} onFinding=${() => setFinding(false)} />`;
    if (!cluster) return html`<main><p class="empty mut">${state.message || "Connecting…"}</p></main>`;
    return html`<${Live} cluster=${cluster} history=${history} chosen=${shown} trace=${trace} message=${message} onPick=${setChosen} failuresOnly=${failuresOnly} setFailuresOnly=${setFailuresOnly} />`;
  };
  return html`<div class=${stale && cluster ? "stale" : ""}>
    <${Header} cluster=${cluster} view=${view}>
      <${News} state=${state} now=${now} paused=${paused} />
      ${apiKey() && html`<button onClick=${() => { setApiKey(""); feed.current.restart(); }}>Forget key</button>`}
      <button onClick=${toggleTheme} aria-label="Theme: light or dark">Theme</button>
      <button class="hide" onClick=${openHelp} aria-label="? Keyboard shortcuts">?</button>
    <//>
    ${state.status === "full" && html`<section class="notice bad" aria-label="No place">${state.message}</section>`}
    ${cluster?.degraded.map((name) => html`<section class="notice" key=${name} aria-label="Degraded"><p><b class="warn">▲ ${name} is away:</b> running requests go on, new ones are not durable.</p></section>`)}
    ${cluster?.routers[0].status === "draining" && html`<section class="notice" aria-label="Draining"><p><b class="warn">▲ This router drains.</b> The page goes to another one when it has left.</p></section>`}
    ${cluster && build.current && cluster.build !== build.current && html`<section class="notice" aria-label="Update"><b>The router was updated.</b><button class="small" onClick=${() => location.reload()}>Reload</button></section>`}
    ${notice && html`<section class="notice bad" aria-label="Refused"><span role="alert">${notice}</span><button class="small" onClick=${() => setNotice("")}>Close</button></section>`}
    ${body()}
    ${cluster && chatted.current && html`<div hidden=${view !== "#/chat"}><${Chat} model=${cluster.model} demo=${cluster.demo} revision=${cluster.workers.map((worker) => `${worker.id} ${worker.status}`).join()} /></div>`}
    <nav class="bottom" aria-label="Views, at the bottom">${VIEWS.map(([hash, name]) => html`<a key=${hash} href=${hash} aria-current=${here(view, hash) ? "page" : null}>${name}</a>`)}</nav>
    <dialog ref=${help} aria-labelledby="help-title"><h2 id="help-title">Keys</h2><dl>${KEYS.map(([keys, what]) => html`<dt key=${keys}><kbd>${keys}</kbd></dt><dd>${what}</dd>`)}</dl><form method="dialog"><button>Close</button></form></dialog>
  </div>`;
}

try { const theme = localStorage.getItem(THEME); if (theme === "dark" || theme === "light") setTheme(theme); } catch { /* private mode */ }
const root = document.getElementById("app");
root.textContent = "";
render(html`<${App} />`, root);
