/** Formulas as MathML, which needs neither fonts nor inline styles. */

import '../../vendor/katex/katex.min.js'; // sets globalThis.katex
import DOMPurify from '../../vendor/dompurify/purify.es.js';

const OPTIONS = { output: 'mathml', throwOnError: true, strict: 'ignore', trust: false, maxExpand: 500, maxSize: 20 };
const SANITIZE = { USE_PROFILES: { mathMl: true }, ADD_TAGS: ['semantics', 'annotation'], FORBID_ATTR: ['style'], RETURN_DOM_FRAGMENT: true };
const MAX_CHARS = 10000; // chosen: longer ones take a noticeable time
const MAX_KEPT = 300; // chosen: a growing answer shows the same formulas again and again

const kept = new Map(); // source → MathML, null for what KaTeX does not understand

/** Puts MathML in the place of the source that stands in `element`. What KaTeX does not understand stays as it is. */
export function set(element) {
  const source = element.textContent;
  if (!kept.has(source)) {
    if (kept.size >= MAX_KEPT) kept.clear();
    kept.set(source, made(source));
  }
  const maths = kept.get(source);
  if (!maths) return;
  element.classList.add('set');
  if (element.classList.contains('displayed')) {
    Object.assign(element, { tabIndex: 0, role: 'region', ariaLabel: 'Formula' }); // it scrolls where it is too wide
  }
  element.replaceChildren(maths.cloneNode(true));
}

function made(source) {
  if (source.length > MAX_CHARS) return null;
  const width = source.startsWith('$') && !source.startsWith('$$') ? 1 : 2;
  const displayMode = /^(\$\$|\\\[)/.test(source);
  try {
    const html = globalThis.katex.renderToString(source.slice(width, -width), { ...OPTIONS, displayMode });
    return DOMPurify.sanitize(html, SANITIZE).querySelector('math');
  } catch {
    return null;
  }
}
