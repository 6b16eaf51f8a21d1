/** An answer that grows: finished blocks are rendered once, only the open end is rendered again. */

import { h, morph, plainText } from './dom.js';

const MAX_BLOCK = 50000; // characters that are split at once; chosen: some take a tenth of a second. No longer block is rendered

let markdown = null; // the module, once it is there
let loading = null;
const waiting = new Set(); // views that show plain text until then

/** Loads what renders Markdown, with the first answer. Where that fails answers are plain text, and the next one tries again. */
export function loadMarkdown() {
  loading ??= import('./markdown.js').then((module) => {
    markdown = module;
    for (const view of waiting) view.showAgain();
    waiting.clear();
    document.dispatchEvent(new Event('typeset'));
  }, () => {
    loading = null;
  });
  return loading;
}

/** Shows one answer as Markdown. */
export class AnswerView {
  #given = [];
  #text = '';
  #settled = 0;
  #links = {};
  #tail = null;
  #isBroken = false;

  constructor() {
    this.element = h('div', { class: 'answer' });
  }

  /**
   * Shows `text`, whatever it is. Cheap when it continues what is shown already.
   *
   * @param {string} text  everything so far
   * @param {boolean} complete  nothing will follow
   */
  show(text, complete) {
    if (!markdown) {
      this.#given = [text, complete];
      this.element.replaceChildren(...(text ? [plainText(text)] : []));
      waiting.add(this);
      loadMarkdown();
      return;
    }
    const clean = text.replace(/\r\n?/g, '\n');
    if (this.#isBroken || !clean.startsWith(this.#text)) this.#clear();
    this.#text = clean;
    try {
      while (clean.length - this.#settled > MAX_BLOCK) if (!this.#settleSome(clean.slice(this.#settled))) return;
      const tokens = markdown.lex(clean.slice(this.#settled), this.#links);
      const open = complete ? tokens.length : openFrom(tokens);
      this.#settle(tokens.slice(0, open));
      this.#showTail(tokens.slice(open));
    } catch {
      this.#isBroken = true;
      this.element.replaceChildren(plainText(clean));
    }
  }

  /** Shows what was shown as plain text. */
  showAgain() {
    this.#clear();
    this.show(...this.#given);
  }

  /** Settles blocks at the beginning of a long text; returns whether there is more to do: false where one block is all and goes on. */
  #settleSome(rest) {
    const tokens = markdown.lex(rest.slice(0, MAX_BLOCK), this.#links);
    const settled = tokens.slice(0, openFrom(tokens));
    if (!settled.length) {
      const block = markdown.longBlock(rest, MAX_BLOCK);
      if (block.isOpen) {
        this.#showTail([block]);
        return false;
      }
      settled.push(block);
    }
    this.#settle(settled);
    return true;
  }

  #clear() {
    this.element.replaceChildren();
    this.#settled = 0;
    this.#links = {};
    this.#tail = null;
    this.#isBroken = false;
  }

  /** These blocks are done, the one that was open first: they keep their elements and are never looked at again. */
  #settle(tokens) {
    if (!tokens.length) return;
    for (const { raw } of tokens) this.#settled += raw.length;
    const nodes = markdown.renderTokens(tokens);
    if (!nodes.hasChildNodes()) return;
    this.#showNodes(nodes);
    this.#tail = null;
  }

  #showTail(tokens) {
    const nodes = markdown.renderTokens(tokens);
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
