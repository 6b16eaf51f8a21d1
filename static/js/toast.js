/** Short messages that need no answer. One replaces another, but none with a button. */

import { h } from './dom.js';

const shelf = document.getElementById('toasts');

/**
 * Shows a message at the bottom for a while.
 *
 * @param {string} text
 * @param {{label?: string, act?: () => void, ms?: number}} [options]  one button
 */
export function toast(text, { label, act, ms = 6000 } = {}) {
  const note = h('div', { class: 'toast' }, h('span', {}, text));
  const remove = () => note.remove();
  if (label) {
    note.append(h('button', { type: 'button', class: 'button link', on: { click: () => {
      remove();
      act();
    } } }, label));
  }
  shelf.querySelector('.toast:not(:has(button))')?.remove();
  (document.querySelector(':modal') ?? document.body).append(shelf);
  shelf.append(note);
  setTimeout(remove, ms);
}
