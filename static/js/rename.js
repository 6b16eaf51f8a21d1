/** The field for a conversation's new title, loaded when it is asked for. */

import { h, isSend } from './dom.js';

/**
 * Puts the field in the place of a row's content.
 *
 * @param {HTMLElement} row
 * @param {string} title
 * @param {(title: ?string) => void} done  called once, with null when the user thought better of it
 */
export function titleField(row, title, done) {
  const input = h('input', { class: 'rename', value: title, 'aria-label': 'New title', maxLength: 200 });
  let isOver = false;
  const finish = (wanted) => {
    if (isOver) return;
    isOver = true;
    done(wanted);
  };
  input.addEventListener('blur', () => finish(input.value.trim()));
  input.addEventListener('keydown', (event) => {
    if (isSend(event)) finish(input.value.trim());
    if (event.key === 'Escape' && !event.isComposing) finish(null);
    event.stopPropagation();
  });
  row.replaceChildren(input);
  input.select();
}
