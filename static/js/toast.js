/** Short messages that need no answer. One replaces another, but none with a button. */

import { h } from './dom.js';

const shelf = document.getElementById('toasts');

/** Moves the messages into the dialog that was opened last, since all else is covered and cannot be pressed. */
function place() {
  const home = [...document.querySelectorAll(':modal')].at(-1) ?? document.body;
  if (shelf.parentNode !== home) home.append(shelf);
}

for (const kind of ['toggle', 'close']) document.addEventListener(kind, place, true); // before a closed dialog is removed

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
  place();
  shelf.append(note);
  setTimeout(remove, ms);
}
