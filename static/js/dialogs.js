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
