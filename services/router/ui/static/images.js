// Images of the next message: chosen, pasted or dropped, and sent as data: URLs. What the router refuses, it explains.
import { json } from "./client.js";
import { html, useCallback, useEffect, useLayoutEffect, useRef, useState } from "./preact.js";

const TYPES = ["image/png", "image/jpeg", "image/webp"];
// As in the router, which counts those of the whole chat. What is beyond them is not read: its base64 would fill the memory.
const MAX_FILES = 16;
const MAX_FILE_BYTES = 10 * 1024 * 1024;
const MAX_BYTES = 32 * 1024 * 1024;

/**
 * Whether messages may have images now, and a function that asks again.
 * @param {string} revision asks again when it changes @returns {[boolean, () => void]}
 */
export function useImageSupport(revision) {
  const [takesImages, setTakesImages] = useState(false);
  const last = useRef(0);
  const ask = useCallback(() => {
    const own = (last.current += 1);
    json("v1/models").then(
      ({ data }) => { if (own === last.current) setTakesImages(data.some((model) => (model.modalities || []).includes("image"))); },
      () => {}, // the page says elsewhere that the router does not answer
    );
  }, []);
  useEffect(ask, [revision]);
  return [takesImages, ask];
}

/** Why a file is refused unread; "" if it is not. @param {File} file @param {{size: number}[]} before taken for the same message */
function refusalOf(file, before) {
  if (!TYPES.includes(file.type)) return `${file.name} is no PNG, JPEG or WebP`;
  if (file.size > MAX_FILE_BYTES) return `${file.name} has more than ${MAX_FILE_BYTES >> 20} MiB`;
  if (before.length >= MAX_FILES) return `${file.name} is left out: ${MAX_FILES} images are the most`;
  const sum = before.reduce((total, { size }) => total + size, file.size);
  return sum > MAX_BYTES ? `${file.name} is left out: all images together have more than ${MAX_BYTES >> 20} MiB` : "";
}

/** @param {File} file @returns {Promise<{file: File, name: string, url: string}>} */
function read(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve({ file, name: file.name || "image", url: /** @type {string} */ (reader.result) });
    reader.onerror = () => reject(new Error(`${file.name} cannot be read`));
    reader.readAsDataURL(file);
  });
}

/** The images that wait for a message, whether more are being read, why a file is none of them, and what changes the list. */
export function useImages() {
  const [images, setImages] = useState([]);
  const [problem, setProblem] = useState("");
  const [numReading, setNumReading] = useState(0);
  const taken = useRef([]); // files of `images` and those being read: a second drop comes before the first one is drawn
  const before = useRef(Promise.resolve()); // of files that came before: images keep their order, whichever is read first
  const leave = (file) => { taken.current = taken.current.filter((each) => each !== file); };
  const add = async (files) => {
    const chosen = [];
    setProblem("");
    for (const file of files) {
      const refusal = refusalOf(file, taken.current);
      if (refusal) { setProblem(refusal); continue; }
      taken.current.push(file);
      chosen.push(file);
    }
    setNumReading((before) => before + chosen.length);
    const earlier = before.current, reading = Promise.allSettled(chosen.map(read));
    before.current = earlier.then(() => reading);
    await earlier;
    const results = await reading;
    setNumReading((before) => before - chosen.length);
    for (const [index, result] of results.entries()) {
      if (result.status === "fulfilled") { setImages((before) => [...before, result.value]); continue; }
      leave(chosen[index]);
      setProblem(result.reason.message);
    }
  };
  const remove = (index) => {
    leave(images[index].file);
    setImages((before) => before.filter((_, at) => at !== index));
  };
  const clear = () => { taken.current = []; setImages([]); setProblem(""); };
  return { images, isReading: numReading > 0, problem, add, remove, clear };
}

const isOfFiles = (transfer) => Boolean(transfer) && [...transfer.types].includes("Files");

/** Keeps a file that is dropped elsewhere from taking the place of the page, and of the chat with it. */
function ignore(event) {
  if (event.defaultPrevented || !isOfFiles(event.dataTransfer)) return;
  event.preventDefault();
  event.dataTransfer.dropEffect = "none";
}

/** Handlers of the place where files are dropped; none while images are not served. */
export function useDrop(takesImages, add) {
  const [over, setOver] = useState(false);
  useLayoutEffect(() => { // from the first moment that the chat is seen
    const kinds = ["dragover", "drop"];
    for (const kind of kinds) addEventListener(kind, ignore);
    return () => { for (const kind of kinds) removeEventListener(kind, ignore); };
  }, []);
  if (!takesImages) return { over: false, handlers: {} };
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

/** Takes pasted images. Text is pasted as ever, also where an office program puts a picture of it beside it. */
export function pasteInto(add) {
  return (event) => {
    const { files, types } = event.clipboardData;
    if ([...types].includes("text/plain") || ![...files].some((file) => TYPES.includes(file.type))) return;
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
