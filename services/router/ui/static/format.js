// Numbers and names as the page writes them. Pure.

/** @param {number} value */
export const whole = (value) => Math.round(value).toLocaleString("en-US");

/** A duration in milliseconds, with the precision that its size deserves. @param {number} ms */
export function duration(ms) {
  if (ms >= 10000) return `${(ms / 1000).toFixed(1)} s`;
  if (ms >= 1000) return `${(ms / 1000).toFixed(2)} s`;
  return ms >= 10 ? `${ms.toFixed(0)} ms` : `${ms.toFixed(1)} ms`;
}

/** Milliseconds with thousands and one decimal, so that shown values add up. @param {number} us */
export const exactMs = (us) => `${(us / 1000).toLocaleString("en-US", { minimumFractionDigits: 1, maximumFractionDigits: 1 })} ms`;

/** 12345 -> 12.3k. @param {number} value */
export const short = (value) => (value >= 10000 ? `${(value / 1000).toFixed(1)}k` : value >= 1000 ? `${(value / 1000).toFixed(1)}k` : String(Math.round(value)));

/** @param {number} bytes */
export function size(bytes) {
  if (bytes >= 1e9) return `${(bytes / 1e9).toFixed(1)} GB`;
  if (bytes >= 1e6) return `${(bytes / 1e6).toFixed(1)} MB`;
  return `${(bytes / 1e3).toFixed(1)} kB`;
}

/** "nixl/ucx (cma)" -> "cma": how the bytes move, as far as it is known. @param {string} path */
export const pathName = (path) => /\((.+)\)$/.exec(path)?.[1] || path;

/** The last digits of a request's id; of a choice with its number. @param {string} id */
export function tag(id) {
  const [, hex = id, choice = ""] = /^[a-z]+-([0-9a-f]{8,})(-\d+)?$/.exec(id) || [];
  return `#${hex.slice(-3)}${choice}`;
}

/** The HTTP request that a sequence belongs to. @param {string} id */
export const requestOf = (id) => id.replace(/^([a-z]+-[0-9a-f]{8,})-\d+$/, "$1");

/** @param {number} ms */
export const clock = (ms) => new Date(ms).toLocaleTimeString("en-GB");

/** @param {number | null} value */
export const percent = (value, digits = 0) => (value === null ? "-" : `${(100 * value).toFixed(digits)} %`);
