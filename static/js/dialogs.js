/** Questions that need an answer, and short messages that do not. */

import { h } from './dom.js';

/**
 * Opens a modal dialog.
 *
 * @param {HTMLDialogElement} dialog  removed from the page when it closes
 * @returns {Promise<string>} its `returnValue`
 */
export function ask(dialog) {
  document.body.append(dialog);
  return new Promise((resolve) => {
    dialog.addEventListener('keydown', (event) => event.stopPropagation());
    dialog.addEventListener('close', () => {
      dialog.remove();
      resolve(dialog.returnValue);
    });
    dialog.showModal();
  });
}

/** A dialog with a heading. */
export function dialogWith(title, ...children) {
  return h('dialog', { 'aria-labelledby': 'dialog-title' }, h('h2', { id: 'dialog-title' }, title), ...children);
}

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

/**
 * Shows a message at the bottom for a while.
 *
 * @param {string} text
 * @param {{label?: string, act?: () => void, ms?: number}} [options]  one button
 */
export function toast(text, { label, act, ms = 6000 } = {}) {
  const shelf = document.getElementById('toasts');
  const note = h('div', { class: 'toast' }, h('span', {}, text));
  const remove = () => note.remove();
  if (label) {
    note.append(h('button', { type: 'button', class: 'button link', on: { click: () => {
      remove();
      act();
    } } }, label));
  }
  shelf.replaceChildren(note);
  setTimeout(remove, ms);
}
