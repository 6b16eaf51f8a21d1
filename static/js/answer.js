/** An answer that grows: finished blocks are rendered once, only the open end is rendered again. */

import { lex, renderTokens } from './markdown.js';
import { h, morph } from './dom.js';

/** Shows one answer as Markdown. */
export class AnswerView {
  #text = '';
  #settled = 0;
  #links = {};
  #tail = null;

  constructor() {
    this.element = h('div', { class: 'answer' });
  }

  /**
   * Shows `text`. Cheap when it continues what is shown already.
   *
   * @param {string} text  everything so far
   * @param {boolean} complete  nothing will follow
   */
  show(text, complete) {
    const clean = text.replace(/\r\n?/g, '\n');
    if (!clean.startsWith(this.#text)) this.#clear();
    this.#text = clean;
    const tokens = lex(clean.slice(this.#settled), this.#links);
    const open = complete ? tokens.length : openFrom(tokens);
    for (const token of tokens.slice(0, open)) this.#settle(token);
    this.#showTail(tokens.slice(open));
  }

  #clear() {
    this.element.replaceChildren();
    this.#settled = 0;
    this.#links = {};
    this.#tail = null;
  }

  /** The open block is done: it keeps its element and is never looked at again. */
  #settle(token) {
    this.#settled += token.raw.length;
    const nodes = renderTokens([token]);
    if (!nodes.hasChildNodes()) return;
    this.#showNodes(nodes);
    this.#tail = null;
  }

  #showTail(tokens) {
    const nodes = renderTokens(tokens);
    if (nodes.hasChildNodes()) this.#showNodes(nodes);
    else this.#dropTail();
  }

  #showNodes(nodes) {
    if (!this.#tail) {
      this.#tail = h('div', { class: 'block' });
      this.element.append(this.#tail);
    }
    morph(this.#tail, nodes);
  }

  #dropTail() {
    this.#tail?.remove();
    this.#tail = null;
  }
}

/** Index of the first token that more text could still change: the last one that is not blank. */
function openFrom(tokens) {
  let last = tokens.length - 1;
  while (last > 0 && tokens[last].type === 'space') last -= 1;
  return Math.max(0, last);
}
