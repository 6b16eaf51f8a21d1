/** The rail: a drawer over the conversation on narrow screens; beside it on wide ones, where it can be put away. */

import { readRailClosed, writeRailClosed } from './storage.js';

/** Opens and closes the rail. */
export class Drawer {
  #isClosed = readRailClosed(); // on wide screens

  /**
   * @param {HTMLElement} rail
   * @param {{open: HTMLButtonElement, close: HTMLButtonElement}} buttons
   * @param {HTMLElement} backdrop
   * @param {HTMLElement} rest  what lies behind the open drawer
   */
  constructor(rail, { open, close }, backdrop, rest) {
    Object.assign(this, { rail, button: open, closeButton: close, backdrop, rest });
    this.narrow = matchMedia('(max-width: 719.98px)');
    this.isOpen = false;
    this.narrow.addEventListener('change', () => this.#set(false));
    open.addEventListener('click', () => this.open());
    close.addEventListener('click', () => this.#putAway());
    backdrop.addEventListener('click', () => this.close());
    rail.addEventListener('keydown', (event) => {
      if (event.key !== 'Escape') return;
      if (this.isOpen || event.target.matches('input')) event.stopPropagation(); // it also stops an answer
      if (this.isOpen) this.close();
    });
    this.#set(false);
  }

  /** Shows the rail; the focus moves into it where that was asked by its button. */
  open() {
    if (this.narrow.matches) this.#set(true);
    else if (this.#isClosed) this.#keep(false);
    else return;
    this.closeButton.focus();
  }

  /** Closes the drawer; the focus goes back to where it was opened. */
  close() {
    if (!this.isOpen) return;
    this.#set(false);
    this.button.focus();
  }

  /** Shows the rail, or puts it away. */
  toggle() {
    if (this.narrow.matches ? this.isOpen : !this.#isClosed) this.#putAway();
    else this.open();
  }

  #putAway() {
    if (this.narrow.matches) return this.close();
    this.#keep(true);
    return this.button.focus();
  }

  #keep(isClosed) {
    this.#isClosed = isClosed;
    writeRailClosed(isClosed);
    this.#set(false);
  }

  #set(isOpen) {
    const isNarrow = this.narrow.matches;
    const isShown = isNarrow ? isOpen : !this.#isClosed;
    this.isOpen = isOpen;
    this.rail.inert = !isShown;
    this.rest.inert = isOpen;
    this.backdrop.hidden = !isOpen;
    this.button.hidden = isShown && !isNarrow;
    this.button.setAttribute('aria-expanded', String(isShown));
    document.body.classList.toggle('drawer-open', isOpen);
    document.body.classList.toggle('rail-closed', !isNarrow && this.#isClosed);
  }
}
