/** The rail on narrow screens: a drawer that opens over the conversation. */

/** Opens and closes the rail; on wide screens it is always there. */
export class Drawer {
  /**
   * @param {HTMLElement} rail
   * @param {HTMLButtonElement} button
   * @param {HTMLElement} backdrop
   * @param {HTMLElement} rest  what lies behind the open drawer
   */
  constructor(rail, button, backdrop, rest) {
    Object.assign(this, { rail, button, backdrop, rest });
    this.narrow = matchMedia('(max-width: 719.98px)');
    this.isOpen = false;
    this.narrow.addEventListener('change', () => this.#set(false));
    button.addEventListener('click', () => this.open());
    backdrop.addEventListener('click', () => this.close());
    rail.addEventListener('keydown', (event) => {
      if (event.key === 'Escape' && this.isOpen) {
        event.stopPropagation();
        this.close();
      }
    });
    this.#set(false);
  }

  /** Opens the drawer and moves the focus into it. */
  open() {
    if (!this.narrow.matches) return;
    this.#set(true);
    this.rail.querySelector('button, a').focus();
  }

  /** Closes the drawer; the focus goes back to where it was opened. */
  close() {
    if (!this.isOpen) return;
    this.#set(false);
    this.button.focus();
  }

  #set(isOpen) {
    this.isOpen = isOpen;
    this.rail.inert = this.narrow.matches && !isOpen;
    this.rest.inert = isOpen;
    this.backdrop.hidden = !isOpen;
    this.button.setAttribute('aria-expanded', String(isOpen));
    document.body.classList.toggle('drawer-open', isOpen);
  }
}
