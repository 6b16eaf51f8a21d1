/** What a model thought before its answer: folded away until someone wants to read it. */

import { AnswerView } from './answer.js';
import { h } from './dom.js';

/** Shows one turn's reasoning; takes no room where there is none. */
export class ReasoningView {
  #text = '';
  #complete = false;
  #view = new AnswerView();

  /** @param {{opened: () => void, grown: () => void}} actions  called when the block is opened, or closed */
  constructor(actions) {
    this.element = h('details', { class: 'reasoning', hidden: true, on: { toggle: () => this.#toggled(actions) } },
      h('summary', {}, 'Reasoning'));
  }

  /**
   * @param {string} text  everything so far
   * @param {boolean} complete  nothing will follow
   */
  show(text, complete) {
    this.element.hidden = text === '';
    this.#text = text;
    this.#complete = complete;
    this.#render();
  }

  #toggled({ opened, grown }) {
    this.#render();
    (this.element.open ? opened : grown)();
  }

  /** What is folded away is not rendered: reasoning is often longer than its answer. */
  #render() {
    if (!this.element.open) return;
    if (!this.#view.element.parentNode) this.element.append(this.#view.element);
    this.#view.show(this.#text, this.#complete);
  }
}
