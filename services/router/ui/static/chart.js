// Output and load of the last minutes, drawn by uPlot (a global of its own script).
import { html, useEffect, useRef } from "./preact.js";

const KEPT_S = 180;

/** Adds one second to the history: [times, tok/s, running, waiting]. */
export function remember(history, cluster) {
  const at = Math.floor(cluster.now_ms / 1000);
  const [times, ...series] = history;
  if (times.length && at <= times[times.length - 1]) return history;
  const waiting = (cluster.counts.queued || 0) + (cluster.counts.received || 0) + (cluster.counts.interrupted || 0);
  const all = Object.values(cluster.counts).reduce((sum, count) => sum + count, 0);
  const values = [cluster.window.output_tok_s, all - waiting, waiting];
  const from = Math.max(0, times.length + 1 - KEPT_S);
  return [[...times, at].slice(from), ...series.map((kept, index) => [...kept, values[index]].slice(from))];
}

export const noHistory = () => [[], [], [], []];

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

function options(width) {
  const axis = { stroke: colour("muted"), grid: { stroke: colour("soft"), width: 1 }, ticks: { stroke: colour("soft"), width: 1 }, font: '11px system-ui, "DejaVu Sans", sans-serif' };
  const points = { show: false };
  return {
    width, height: 170, cursor: { drag: { x: false, y: false } },
    scales: { x: { time: true }, tok: { range: (plot, low, high) => [0, Math.max(10, high * 1.1)] }, n: { range: (plot, low, high) => [0, Math.max(4, high * 1.2)] } },
    axes: [axis, { ...axis, scale: "tok", values: (plot, ticks) => ticks.map((tick) => `${tick} tok/s`), size: 78 }, { ...axis, scale: "n", side: 1, size: 40, grid: { show: false } }],
    series: [
      { value: "{HH}:{mm}:{ss}" },
      { label: "output tok/s", scale: "tok", stroke: colour("decode"), fill: `${colour("decode")}22`, width: 2, points },
      { label: "running", scale: "n", stroke: colour("prefill"), width: 2, points },
      { label: "waiting", scale: "n", stroke: colour("queue"), width: 2, dash: [6, 4], points },
    ],
  };
}

export function Chart({ history }) {
  const place = useRef(null);
  const plot = useRef(null);
  const theme = document.documentElement.dataset.theme || "";
  const enough = history[0].length > 1;
  useEffect(() => {
    if (!enough || !window.uPlot) return undefined;
    const made = (plot.current = new window.uPlot(options(place.current.clientWidth), history, place.current));
    const watcher = new ResizeObserver(() => made.setSize({ width: place.current.clientWidth, height: 170 }));
    watcher.observe(place.current);
    return () => { watcher.disconnect(); made.destroy(); plot.current = null; };
  }, [theme, enough]);
  useEffect(() => { if (plot.current) plot.current.setData(history); }, [history]);
  const last = history[1][history[1].length - 1] || 0;
  return html`<section class="panel" aria-label="Output and load"><h2>Output and load <span class="mut">last ${KEPT_S / 60} minutes</span></h2>
    <div class="chart" ref=${place} role="img" aria-label=${`Output, running and waiting requests over time; now ${Math.round(last)} tokens a second`}></div></section>`;
}
