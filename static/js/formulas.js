/** Formulas in Markdown: `$…$` and `\(…\)` in a line, `$$…$$` and `\[…\]` displayed. KaTeX is loaded with the first formula. */

// No blank line within, as in TeX: so what is never closed ends with its paragraph.
const DISPLAYED = /^ {0,3}(?:\$\$(?:(?!\n[ \t]*\n|\$\$)[^])+\$\$|\\\[(?:(?!\n[ \t]*\n|\\\])[^])+\\\])[ \t]*(?:\n+|$)/;
// Pandoc's rule for single dollars: no blank inside of them, no digit behind. "$5 and $6" is none.
const INLINE = /^(?:\$\$(?:\\[^]|[^\\$])+?\$\$|\\\([^]+?\\\)|\\\[[^]+?\\\]|\$(?![\s$])(?:\\[^]|[^\\$`])+?(?<!\s)\$(?![\d$]))/;
const INLINE_START = /(?<![\w\\$])\$|(?<!\\)\\[([]/;
const TEX_MARK = /[\\^_={}]/; // without one of these, words between dollars are words: "from $5 up to US$"
const TWO_WORDS = /\s[a-z]{2,}|[a-z]{2,}\s/i;

const MAX_SET = 300; // formulas of one block; chosen: typesetting more takes a noticeable time, and they are kept for the next frame

let typesetter = null;
let isLoading = false;

function inline(src) {
  const raw = src.match(INLINE)?.[0];
  if (!raw || (/^\$[^$]/.test(raw) && !TEX_MARK.test(raw) && TWO_WORDS.test(raw))) return undefined;
  return { type: 'formula', raw };
}

/** Marked's extensions. What they make is the source in a marked element, until `typeset` replaces it. */
export const extensions = [
  {
    name: 'displayed',
    level: 'block',
    start: (src) => src.search(/\n {0,3}(?:\$\$|\\\[)/),
    tokenizer(src) {
      const raw = src.match(DISPLAYED)?.[0];
      return raw && { type: 'displayed', raw };
    },
    renderer: ({ raw }) => `<p>${marked(raw)}</p>`,
  },
  { name: 'formula', level: 'inline', start: (src) => src.search(INLINE_START), tokenizer: inline, renderer: ({ raw }) => marked(raw) },
];

function marked(raw) {
  const source = raw.trim().replace(/[&<>]/g, (char) => ({ '&': '&amp;', '<': '&lt;', '>': '&gt;' })[char]);
  return `<span class="${/^(\$\$|\\\[)/.test(source) ? 'formula displayed' : 'formula'}">${source}</span>`;
}

/** Text of the same length in which no formula has a `*` or `_` that could be taken for emphasis. */
export function mask(src) {
  let masked = '';
  for (let rest = src; rest;) {
    const start = rest.search(INLINE_START);
    if (start < 0) return masked + rest;
    const length = inline(rest.slice(start))?.raw.length;
    masked += rest.slice(0, start) + (length ? 'a'.repeat(length) : rest[start]);
    rest = rest.slice(start + (length ?? 1));
  }
  return masked;
}

/** Sets the formulas of these blocks; all on the page, once the code for that was loaded. */
export function typeset(blocks) {
  for (const block of blocks) {
    const formulas = [...block.querySelectorAll('.formula')].slice(0, MAX_SET).filter((each) => !each.classList.contains('set'));
    if (!formulas.length) continue;
    if (!typesetter) return load();
    formulas.forEach(typesetter);
  }
  return undefined;
}

async function load() {
  if (isLoading) return;
  isLoading = true;
  try {
    ({ set: typesetter } = await import('./maths/katex.js'));
    typeset(document.querySelectorAll('.block > *'));
    document.dispatchEvent(new Event('typeset'));
  } catch {
    isLoading = false; // the sources stay; the next formula tries again
  }
}
