// Links between the cards of prefill and decode workers, as curves over the lanes.
import { pathName } from "./format.js";
import { html, useLayoutEffect, useState } from "./preact.js";

const MAX_LINES = 32;
const MAX_WORST = 10;
const SLOW = new Set(["tcp"]);
const WORDS = { open: "✕ resting", half_open: "on trial", broken: "✕ broken" };

/** What a link says: its speed and path, or that it does not work. */
export function linkLabel(link) {
  if (link.state !== "up") return WORDS[link.state] || link.state;
  const speed = link.gib_s ?? link.probe_gib_s;
  const path = pathName(link.path);
  return `${speed === null ? "" : `${speed >= 0.1 ? speed.toFixed(1) : speed.toFixed(2)} `}${path}${SLOW.has(path) ? " ▲" : ""}`;
}

/** Positions of the cards, measured after each render. */
function measure(flow) {
  const box = flow.getBoundingClientRect();
  const cards = {};
  for (const card of flow.querySelectorAll("[data-worker]")) {
    const at = card.getBoundingClientRect();
    if (at.width) cards[card.dataset.worker] = { left: at.left - box.left, right: at.right - box.left, top: at.top - box.top, height: at.height };
  }
  return { width: box.width, height: box.height, cards };
}

function lines(links, { cards }) {
  const there = links.filter((link) => cards[link.from] && cards[link.to]);
  const shown = there.length > MAX_LINES ? there.slice(0, MAX_WORST) : there; // those in trouble come first
  const ordered = [...shown].sort((a, b) => a.to.localeCompare(b.to) || a.from.localeCompare(b.from));
  const offset = (link, end) => {
    const beside = ordered.filter((each) => each[end] === link[end]);
    return (beside.indexOf(link) - (beside.length - 1) / 2) * 17;
  };
  return ordered.map((link) => {
    const from = cards[link.from];
    const to = cards[link.to];
    const x0 = from.right + 2;
    const x1 = to.left - 4;
    const y0 = from.top + Math.min(46, from.height / 2) + offset(link, "from");
    const y1 = to.top + Math.min(46, to.height / 2) + offset(link, "to");
    return { link, x0, x1, y0, y1, middle: (x0 + x1) / 2 };
  });
}

export function LinkLines({ flow, links, moving }) {
  const [at, setAt] = useState(null);
  const remeasure = () => {
    if (!flow.current) return;
    const next = measure(flow.current);
    setAt((before) => (JSON.stringify(before) === JSON.stringify(next) ? before : next));
  };
  useLayoutEffect(remeasure);
  useLayoutEffect(() => {
    addEventListener("resize", remeasure);
    return () => removeEventListener("resize", remeasure);
  }, []);
  if (!at || !links.length) return null;
  const drawn = lines(links, at);
  const label = `${links.length} ${links.length === 1 ? "link" : "links"}: ${links.slice(0, MAX_WORST).map((link) => `${link.from} to ${link.to} ${linkLabel(link)}`).join(", ")}`;
  return html`<svg class="links" width=${at.width} height=${at.height} role="img" aria-label=${label}>
    ${drawn.map(({ link, x0, x1, y0, y1, middle }) => html`<path key=${link.from + link.to} data-link=${`${link.from}>${link.to}`} class=${link.state !== "up" ? link.state : SLOW.has(pathName(link.path)) ? "slow" : ""} d=${`M${x0} ${y0}C${middle} ${y0} ${middle} ${y1} ${x1} ${y1}`} />`)}
    ${drawn.map(({ link, x0, x1, y0, y1 }) => moving.filter((each) => each.prefill === link.from && each.decode === link.to).slice(0, 3).map((each, index) => {
      const part = 0.35 + 0.12 * index;
      return html`<circle key=${each.id} cx=${x0 + (x1 - x0) * part} cy=${y0 + (y1 - y0) * part} r="5" />`;
    }))}
    ${drawn.map(({ link, x1, y1 }) => html`<g key=${`l${link.from}${link.to}`}><rect x=${x1 - 100} y=${y1 - 8} width="92" height="16" rx="4" /><text x=${x1 - 54} y=${y1 + 4}>${linkLabel(link)}</text></g>`)}
  </svg>`;
}
