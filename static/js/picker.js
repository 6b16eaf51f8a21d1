/** Which model answers: the button. The list above it is loaded once there is something to choose. */

import { paintDot } from './dom.js';

const KEYS = new Set(['ArrowDown', 'ArrowUp', 'PageDown', 'PageUp']);

/** The choice between the base model and its adapters. */
export class ModelPicker {
  #chosen = null;
  #list = null;

  /**
   * @param {HTMLButtonElement} button
   * @param {HTMLElement} popover
   * @param {{pick: (adapter: ?string) => void, adapters: () => Promise<?object[]>}} actions  `adapters` reads how
   *   they are now, or null
   */
  constructor(button, popover, actions) {
    Object.assign(this, { button, popover, actions });
    /** @type {import('./models.js').Model[]} */
    this.models = [];
    this.dot = button.querySelector('.dot');
    this.name = button.querySelector('.picker-name');
    button.addEventListener('keydown', (event) => {
      if (!KEYS.has(event.key)) return;
      event.preventDefault();
      button.click();
    });
    popover.addEventListener('beforetoggle', ({ newState }) => {
      button.setAttribute('aria-expanded', String(newState === 'open'));
      if (newState === 'open') this.#open();
    });
  }

  async #open() {
    await this.#load();
    this.#list.open();
  }

  async #load() {
    const { ModelList } = await import('./models.js');
    this.#list ??= new ModelList(this);
  }

  /** The adapter that was picked, null for the base model. One that is not offered stays: the server says so when asked. */
  get adapter() {
    return this.#chosen;
  }

  set adapter(adapter) {
    this.#chosen = adapter;
    paintDot(this.dot, adapter);
    this.name.textContent = adapter ?? (this.models.length ? `${this.models[0].id} (base)` : '');
  }

  /** Offers these models, the base model first, and keeps the choice. */
  offer(models) {
    const known = new Map(this.models.map((model) => [model.id, model]));
    this.models = models.map((model) => ({ ...known.get(model.id), ...model }));
    this.button.disabled = false;
    this.#load().catch(() => {}); // behind the first screen; where it failed, opening tries again
    this.adapter = this.#chosen;
    if (this.popover.matches(':popover-open')) this.#list?.draw();
  }
}
