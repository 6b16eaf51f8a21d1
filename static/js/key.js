/** The question for an API key, loaded when the server asks for one. */

import { ask, dialogWith } from './dialogs.js';
import { h } from './dom.js';

/**
 * Asks for an API key until one is given.
 *
 * @param {boolean} wasWrong  one was tried and refused
 * @returns {Promise<string>} the key; empty when the dialog was dismissed
 */
export async function askKey(wasWrong) {
  const input = h('input', { type: 'password', id: 'key', autocomplete: 'current-password', required: true,
    spellcheck: false, 'aria-describedby': 'key-note' });
  const dialog = dialogWith('This server asks for a key',
    h('p', { id: 'key-note' }, wasWrong
      ? 'The server did not accept that key. Please check it and try again.'
      : 'Enter the API key that you were given. It is kept in this browser only.'),
    h('form', { method: 'dialog', on: { submit: (event) => {
      event.preventDefault();
      dialog.close(input.value.trim());
    } } },
    h('label', { htmlFor: 'key' }, 'API key'), input,
    h('div', { class: 'dialog-buttons' }, h('button', { class: 'button primary' }, 'Continue'))));
  return ask(dialog);
}
