/**
 * Markdown of an untrusted author as DOM nodes.
 *
 * Three fences stand between a model and the page: the parser knows no HTML (tags stay text), the
 * result is cut down to a short list of tags, and links lead to http, https, mailto and conversations only.
 *
 * Whatever the text is, it is shown: a block that is nested too deeply, is too long or cannot be
 * rendered is plain text, and the work for each block is bounded.
 */

import { Lexer, Marked, Tokenizer } from '../vendor/marked/marked.esm.js';
import DOMPurify from '../vendor/dompurify/purify.es.js';
import { extensions, mask, typeset } from './formulas.js';
import { highlight } from './highlight.js';
import { h, plainText } from './dom.js';

const MAX_DEPTH = 40; // chosen: of quotes, lists and emphasis inside each other; people write three or four
const MAX_WORK = 5e7; // chosen: marks in a run of text times its length, since each may look for its end. A fifth of a second
const MAX_CELLS = 20000; // chosen: of one table. Rows are filled up to the width of the head, so few characters may make millions
const MARKS = /[*_~`[\]<!$\\@]/g; // what begins something that may have its end elsewhere

const SAFE_LINK = /^(https?:|mailto:|#\/s\/)/i; // the last: a conversation

const SANITIZE = {
  ALLOWED_TAGS: ['a', 'blockquote', 'br', 'code', 'del', 'em', 'h3', 'h4', 'h5', 'h6', 'hr', 'li', 'ol',
    'p', 'pre', 'span', 'strong', 'table', 'tbody', 'td', 'th', 'thead', 'tr', 'ul'],
  ALLOWED_ATTR: ['align', 'class', 'href', 'rel', 'start', 'target'],
  ALLOWED_URI_REGEXP: SAFE_LINK,
  ADD_URI_SAFE_ATTR: ['align', 'rel', 'start', 'target'], // else their values would have to be links
  RETURN_DOM_FRAGMENT: true,
};

class PlainTokenizer extends Tokenizer {
  /** No block of HTML: `<div>` opens a paragraph like any other text. */
  html() {}

  /** No inline tag either. */
  tag() {}

  /** No table of more cells than a page can show: its text stays as it was written. */
  table(src) {
    const columns = count(src.slice(0, src.indexOf('\n') + 1), /\|/g);
    if (!columns) return undefined;
    const end = src.indexOf('\n\n');
    const rows = count(end < 0 ? src : src.slice(0, end), /\n/g);
    return columns * rows > MAX_CELLS ? undefined : super.table(src);
  }
}

/** Throws a RangeError for what is nested too deeply, long before the stack ends; shows a run of text with too many marks as it is. */
class BoundedLexer extends Lexer {
  #depth = 0;

  blockTokens(...given) {
    return this.#deeper(() => super.blockTokens(...given));
  }

  inlineTokens(src, tokens = []) {
    if (count(src, MARKS) * src.length <= MAX_WORK) return this.#deeper(() => super.inlineTokens(src, tokens));
    tokens.push({ type: 'text', raw: src, text: src });
    return tokens;
  }

  #deeper(lex) {
    if (this.#depth >= MAX_DEPTH) throw new RangeError('nested too deeply');
    this.#depth += 1;
    try {
      return lex();
    } finally {
      this.#depth -= 1;
    }
  }
}

const count = (text, pattern) => text.match(pattern)?.length ?? 0;

const renderer = {
  code({ text, lang }) {
    const language = (lang ?? '').match(/^[\w+#-]*/)[0].toLowerCase();
    const body = highlight(text, language) ?? escapeHtml(text);
    return `<pre><code class="language-${language}">${body}\n</code></pre>`;
  },
  heading({ tokens, depth }) {
    const level = Math.min(depth + 2, 6); // h1 and h2 belong to the page
    return `<h${level}>${this.parser.parseInline(tokens)}</h${level}>`;
  },
  link({ href, tokens }) {
    const text = this.parser.parseInline(tokens);
    return SAFE_LINK.test(href) ? anchor(href, text) : text;
  },
  image({ href, text }) {
    const label = escapeHtml(text || href);
    return SAFE_LINK.test(href) ? anchor(href, label) : label;
  },
  checkbox({ checked }) {
    return checked ? '☑ ' : '☐ ';
  },
  html({ text }) {
    return escapeHtml(text);
  },
};

const options = { gfm: true, tokenizer: new PlainTokenizer() };
const marked = new Marked({ ...options, renderer, extensions });

/**
 * Splits Markdown into top-level tokens. What cannot be split is a token `plain`.
 *
 * @param {string} text  with \n line ends
 * @param {object} links  reference definitions seen so far; extended
 * @returns {object[]} tokens whose `raw` strings, joined, are the text
 */
export function lex(text, links) {
  try {
    return tokensOf(text, links);
  } catch {
    return paragraphs(text).flatMap((part) => {
      try {
        return tokensOf(part, links);
      } catch {
        return plain(part);
      }
    });
  }
}

function tokensOf(text, links) {
  const lexer = new BoundedLexer({ ...marked.defaults, ...options, hooks: { emStrongMask: mask } });
  Object.assign(lexer.tokens.links, links);
  const tokens = lexer.lex(text);
  Object.assign(links, tokens.links);
  return tokens;
}

/** Splits a text behind its blank lines, save those in a fenced block. */
function paragraphs(text) {
  const parts = [''];
  let fence = null;
  for (const line of text.match(/[^\n]*\n|[^\n]+$/g) ?? []) {
    const mark = line.match(/^ {0,3}(`{3,}|~{3,})/)?.[1];
    if (!fence) fence = mark;
    else if (mark?.startsWith(fence)) fence = null;
    parts[parts.length - 1] += line;
    if (!fence && !line.trim()) parts.push('');
  }
  return parts.filter(Boolean);
}

const plain = (raw) => ({ type: 'plain', raw });

/**
 * The first block of a text as a token, where it is too long for `lex`: code if it is a fenced block, else plain text.
 *
 * @param {string} text  with \n line ends
 * @param {number} most  characters of plain text that has no blank line
 * @returns {object} a token; `isOpen`: its end has not been seen
 */
export function longBlock(text, most) {
  const [head, fence, language] = text.match(/^\s*? {0,3}(`{3,}|~{3,})([^\n]*)\n/) ?? [];
  if (!fence) {
    const end = text.indexOf('\n\n', 1);
    return plain(text.slice(0, end < 0 ? text.lastIndexOf('\n', most) + 1 || most : end + 2));
  }
  const close = new RegExp(`\\n {0,3}${fence}+[ \\t]*(?:\\n|$)`).exec(text.slice(head.length - 1));
  const end = head.length + (close ? close.index : text.length);
  const raw = text.slice(0, close ? end - 1 + close[0].length : end);
  return { type: 'code', raw, lang: language.trim(), text: text.slice(head.length, Math.max(head.length, end - 1)), isOpen: !close };
}

/** Tokens of blocks as safe nodes. A block that cannot be rendered is plain text. */
export function renderTokens(tokens) {
  try {
    return rendered(tokens); // all at once, since cleaning takes a millisecond each time
  } catch {
    const fragment = document.createDocumentFragment();
    fragment.append(...tokens.map(renderedAlone));
    return fragment;
  }
}

function renderedAlone(token) {
  try {
    return rendered([token]);
  } catch {
    return plainText(token.raw);
  }
}

function rendered(tokens) {
  if (tokens.some(({ type }) => type === 'plain')) throw new RangeError('not all of it can be rendered');
  const fragment = DOMPurify.sanitize(marked.parser(tokens), SANITIZE);
  for (const part of fragment.querySelectorAll('ul, ol, blockquote')) part.dir = 'auto'; // as its first letters are written
  for (const pre of fragment.querySelectorAll('pre')) frameCode(pre);
  for (const table of fragment.querySelectorAll('table')) frameTable(table);
  typeset(fragment.children);
  return fragment;
}

/** Gives a code block a head with its language and a copy button. */
function frameCode(pre) {
  const language = pre.firstElementChild?.className.replace('language-', '') ?? '';
  pre.tabIndex = 0;
  pre.setAttribute('role', 'region');
  pre.setAttribute('aria-label', language ? `Code, ${language}` : 'Code');
  const kind = shownAs(language, pre.textContent);
  const head = h('div', { class: 'code-head' },
    h('span', {}, language || 'text'),
    kind && h('button', { type: 'button', class: 'code-preview', 'data-kind': kind }, 'Preview'),
    h('button', { type: 'button', class: 'code-copy' }, 'Copy'));
  const frame = h('div', { class: 'code' }, head);
  pre.replaceWith(frame);
  frame.append(pre);
}

/** As what code can be shown in a frame; undefined: as nothing but code. */
function shownAs(language, code) {
  if (language === 'html' || language === 'mermaid') return language;
  return language === 'svg' || (language === 'xml' && /^\s*(<\?xml[^>]*>\s*)?<svg[\s>]/.test(code)) ? 'svg' : undefined;
}

/** Lets a wide table scroll inside itself. */
function frameTable(table) {
  const frame = h('div', { class: 'table', dir: 'auto', tabIndex: 0, role: 'region', 'aria-label': 'Table' });
  table.replaceWith(frame);
  frame.append(table);
}

function anchor(href, html) {
  if (href.startsWith('#')) return `<a href="${escapeHtml(href)}">${html}</a>`;
  return `<a href="${escapeHtml(href)}" target="_blank" rel="noopener noreferrer">${html}</a>`;
}

function escapeHtml(text) {
  const entities = { '&': '&amp;', '<': '&lt;', '>': '&gt;', '"': '&quot;', "'": '&#39;' };
  return text.replace(/[&<>"']/g, (char) => entities[char]);
}
