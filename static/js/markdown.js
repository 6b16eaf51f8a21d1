/**
 * Markdown of an untrusted author as DOM nodes.
 *
 * Three fences stand between a model and the page: the parser knows no HTML (tags stay text), the
 * result is cut down to a short list of tags, and links lead to http, https and mailto only.
 */

import { Lexer, Marked, Tokenizer } from '../vendor/marked/marked.esm.js';
import DOMPurify from '../vendor/dompurify/purify.es.js';
import { extensions, mask, typeset } from './formulas.js';
import { highlight } from './highlight.js';
import { h } from './dom.js';

const SAFE_LINK = /^(https?:|mailto:)/i;

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
}

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
 * Splits Markdown into top-level tokens.
 *
 * @param {string} text  with \n line ends
 * @param {object} links  reference definitions seen so far; extended
 * @returns {object[]} tokens whose `raw` strings, joined, are the text
 */
export function lex(text, links) {
  const lexer = new Lexer({ ...marked.defaults, ...options, hooks: { emStrongMask: mask } });
  Object.assign(lexer.tokens.links, links);
  const tokens = lexer.lex(text);
  Object.assign(links, tokens.links);
  return tokens;
}

/** Tokens of one block as safe nodes. */
export function renderTokens(tokens) {
  const fragment = DOMPurify.sanitize(marked.parser(tokens), SANITIZE);
  for (const pre of fragment.querySelectorAll('pre')) frameCode(pre);
  for (const table of fragment.querySelectorAll('table')) frameTable(table);
  typeset(fragment);
  return fragment;
}

/** Gives a code block a head with its language and a copy button. */
function frameCode(pre) {
  const language = pre.firstElementChild?.className.replace('language-', '') ?? '';
  pre.tabIndex = 0;
  pre.setAttribute('role', 'region');
  pre.setAttribute('aria-label', language ? `Code, ${language}` : 'Code');
  const head = h('div', { class: 'code-head' },
    h('span', {}, language || 'text'),
    h('button', { type: 'button', class: 'code-copy' }, 'Copy'));
  const frame = h('div', { class: 'code' }, head);
  pre.replaceWith(frame);
  frame.append(pre);
}

/** Lets a wide table scroll inside itself. */
function frameTable(table) {
  const frame = h('div', { class: 'table', tabIndex: 0, role: 'region', 'aria-label': 'Table' });
  table.replaceWith(frame);
  frame.append(table);
}

function anchor(href, html) {
  return `<a href="${escapeHtml(href)}" target="_blank" rel="noopener noreferrer">${html}</a>`;
}

function escapeHtml(text) {
  const entities = { '&': '&amp;', '<': '&lt;', '>': '&gt;', '"': '&quot;', "'": '&#39;' };
  return text.replace(/[&<>"']/g, (char) => entities[char]);
}
