/** The small form that edits a question; loaded when one is edited. */

import { fitHeight, h, isSend } from './dom.js';

/**
 * A form with a growing text field.
 *
 * @param {string} text
 * @param {{send: (text: string) => void, cancel: () => void, changed: (text: string) => void, mayBeEmpty?: boolean}} actions  `send` gets trimmed text
 */
export function editor(text, { send, cancel, changed, mayBeEmpty = false }) {
  const area = h('textarea', { value: text, rows: 1, 'aria-label': 'Edit message',
    on: { input: () => { fitHeight(area); changed(area.value); }, keydown: onKey } });
  const submit = () => {
    if (area.value.trim() || mayBeEmpty) send(area.value.trim());
  };
  function onKey(event) {
    if (isSend(event)) {
      event.preventDefault();
      submit();
    } else if (event.key === 'Escape') {
      event.stopPropagation();
      cancel();
    }
  }
  const element = h('div', { class: 'editor' }, area,
    h('p', { class: 'note' }, 'The message as it was is kept, with what followed it.'),
    h('div', { class: 'editor-buttons' },
      h('button', { type: 'button', class: 'button quiet', on: { click: cancel } }, 'Cancel'),
      h('button', { type: 'button', class: 'button primary', on: { click: submit } }, 'Send')));
  return {
    element,
    focus() {
      fitHeight(area);
      area.focus();
      area.setSelectionRange(area.value.length, area.value.length);
    },
  };
}
