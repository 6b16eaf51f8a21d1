/** What a person sets for a conversation. The side sheet that shows it is loaded when it is first opened. */

import { readSettings, writeSettings } from './storage.js';

/** Keeps the settings of the open conversation, and those of a new chat until it is stored. */
export class Settings {
  #sheet = null;
  #draft = readSettings();

  /**
   * @param {HTMLButtonElement} button  opens and closes the sheet
   * @param {import('./protocol.js').ChatCore} core
   * @param {import('./api.js').Api} api
   * @param {import('./composer.js').Composer} composer
   */
  constructor(button, core, api, composer) {
    Object.assign(this, { button, core, api, composer });
    button.addEventListener('click', () => this.toggle());
  }

  /** Those of the open conversation, or of the new chat. */
  get current() {
    const { current, sessions } = this.core;
    return current ? sessions.get(current)?.settings ?? {} : this.#draft;
  }

  /** What new chats begin with. */
  get forNew() {
    return readSettings();
  }

  set forNew(settings) {
    writeSettings(settings);
  }

  /** Opens the sheet, or closes it. */
  async toggle() {
    if (!this.#sheet) {
      const { Sheet } = await import('./sheet/sheet.js');
      this.#sheet ??= new Sheet(this);
      await this.#sheet.styled;
    }
    this.#sheet.toggle();
  }

  /** Another conversation was opened, or the open one was read again. */
  follow() {
    this.#sheet?.follow(this.core.current);
  }

  /** A new chat was opened, or the last one has become a conversation. */
  startAfresh() {
    this.#draft = readSettings();
  }

  /** Waits until the server has what was typed. Never rejects: the sheet says what failed. */
  async saved() {
    await this.#sheet?.save();
  }

  /** Stores changes. Rejects with an ApiError. */
  async change(sessionId, changes) {
    if (sessionId) {
      await this.api.patch(sessionId, { settings: changes });
      const session = this.core.sessions.get(sessionId);
      if (session) session.settings = { ...session.settings, ...changes };
    } else {
      this.#draft = { ...this.#draft, ...changes };
    }
  }
}
