// Images of the next message: chosen, pasted or dropped, and sent as data: URLs. What the router refuses, it explains.
import { json } from "./client.js";
import { html, useCallback, useEffect, useRef, useState } from "./preact.js";

const TYPES = ["image/png", "image/jpeg", "image/webp"];
const MAX_BYTES = 10 * 1024 * 1024; // of a file, as in the router

/**
 * Whether messages may have images now, and a function that asks again.
 * @param {string} pulse asks again when it changes @returns {[boolean, () => void]}
 */
export function useSees(pulse) {
  const [sees, setSees] = useState(false);
  const last = useRef(0);
  const ask = useCallback(() => {
    const own = (last.current += 1);
    json("v1/models").then(
      ({ data }) => { if (own === last.current) setSees(data.some((model) => (model.modalities || []).includes("image"))); },
      () => {}, // the page says elsewhere that the router does not answer
    );
  }, []);
  useEffect(ask, [pulse]);
  return [sees, ask];
}

/** @param {File} file @returns {Promise<{name: string, url: string}>} */
function read(file) {
  return new Promise((resolve, reject) => {
    if (!TYPES.includes(file.type)) { reject(new Error(`${file.name} is no PNG, JPEG or WebP`)); return; }
    if (file.size > MAX_BYTES) { reject(new Error(`${file.name} has more than ${MAX_BYTES >> 20} MiB`)); return; }
    const reader = new FileReader();
    reader.onload = () => resolve({ name: file.name || "image", url: /** @type {string} */ (reader.result) });
    reader.onerror = () => reject(new Error(`${file.name} cannot be read`));
    reader.readAsDataURL(file);
  });
}

/** The images that wait for a message, why a file is none of them, and what takes files and empties the list. */
export function useImages() {
  const [images, setImages] = useState([]);
  const [problem, setProblem] = useState("");
  const add = async (files) => {
    setProblem("");
    for (const result of await Promise.allSettled([...files].map(read))) {
      if (result.status === "fulfilled") setImages((before) => [...before, result.value]);
      else setProblem(result.reason.message);
    }
  };
  const remove = (index) => setImages((before) => before.filter((_, at) => at !== index));
  const clear = () => { setImages([]); setProblem(""); };
  return { images, problem, add, remove, clear };
}

const isOfFiles = (transfer) => Boolean(transfer) && [...transfer.types].includes("Files");

/** Handlers of the place where files are dropped; none while images are not served. */
export function useDrop(sees, add) {
  const [over, setOver] = useState(false);
  if (!sees) return { over: false, handlers: {} };
  const handlers = {
    onDragOver: (event) => { if (isOfFiles(event.dataTransfer)) { event.preventDefault(); setOver(true); } },
    onDragLeave: (event) => { if (!event.currentTarget.contains(event.relatedTarget)) setOver(false); },
    onDrop: (event) => {
      setOver(false);
      if (!isOfFiles(event.dataTransfer)) return;
      event.preventDefault();
      add(event.dataTransfer.files);
    },
  };
  return { over, handlers };
}

/** Takes pasted files; text is pasted as ever. */
export function pasteInto(add) {
  return (event) => {
    const files = event.clipboardData?.files || [];
    if (!files.length) return;
    event.preventDefault();
    add(files);
  };
}

export function AddButton({ add }) {
  const input = useRef(null);
  const onChange = (event) => { add(event.target.files); event.target.value = ""; };
  return html`<button type="button" onClick=${() => input.current.click()}>Add images</button>
    <input ref=${input} type="file" hidden multiple accept=${TYPES.join(",")} onChange=${onChange} data-images />`;
}

/** Those of a message; with `remove` each has a button. */
export function Pictures({ images, remove }) {
  if (!images?.length) return null;
  return html`<ul class="pictures" aria-label="Images">${images.map((image, index) => html`<li key=${index}>
    <img src=${image.url} alt=${image.name} />
    ${remove && html`<button type="button" class="small" aria-label=${`Remove ${image.name}`} onClick=${() => remove(index)}>×</button>`}
  </li>`)}</ul>`;
}
