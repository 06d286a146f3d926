// Model output as HTML. Raw HTML and images are shown as text: an image's address could send data away. What marked
// makes then passes DOMPurify, which keeps nothing that runs.
import { Marked } from "./marked.esm.js";
import "./purify.min.js";

const escape = (text) => text.replace(/[&<>"']/g, (sign) => `&#${sign.charCodeAt(0)};`);
const marked = new Marked({
  gfm: true,
  breaks: true,
  renderer: {
    html: ({ text }) => escape(text),
    image: ({ raw }) => escape(raw),
  },
});
const ALLOWED = {
  ALLOWED_TAGS: "p br strong em del code pre ul ol li blockquote h1 h2 h3 h4 h5 h6 table thead tbody tr th td hr a".split(" "),
  ALLOWED_ATTR: ["href", "start", "align"],
  ALLOWED_URI_REGEXP: /^https?:/i,
};

/** @param {string} text */
export function toHtml(text) {
  return globalThis.DOMPurify.sanitize(marked.parse(text), ALLOWED);
}

globalThis.DOMPurify.addHook("afterSanitizeAttributes", (node) => {
  if (node.tagName === "A") {
    node.setAttribute("target", "_blank");
    node.setAttribute("rel", "noopener noreferrer nofollow");
  }
});
