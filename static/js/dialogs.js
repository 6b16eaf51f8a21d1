/** Questions that need an answer, loaded when one is asked. */

import { h } from './dom.js';

/** Opens a modal dialog, which is removed when it closes; resolves to its `returnValue`. */
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
  return h('dialog', { 'aria-label': title }, h('h2', {}, title), ...children);
}
