/** The question into which folder a conversation goes. Loaded when it is asked. */

import { ask, dialogWith } from './dialogs.js';
import { h } from './dom.js';

/**
 * Asks for a folder.
 *
 * @param {?string} now  where the conversation lies
 * @param {string[]} known  the folders that there are
 * @returns {Promise<?string|undefined>} its name, null for none, undefined where nothing is to change
 */
export async function askFolder(now, known) {
  const name = h('input', { id: 'folder-name', required: true, maxLength: 60, autocomplete: 'off', value: now ?? '' });
  name.setAttribute('list', 'folder-names');
  const dialog = dialogWith('Move to a folder', h('form', { method: 'dialog' },
    h('label', { htmlFor: 'folder-name' }, 'Folder'), name,
    h('datalist', { id: 'folder-names' }, ...known.map((each) => h('option', { value: each }))),
    h('div', { class: 'dialog-buttons' },
      now && h('button', { type: 'button', class: 'button', on: { click: () => dialog.close('none') } }, 'Take out'),
      h('button', { type: 'button', class: 'button quiet', on: { click: () => dialog.close() } }, 'Cancel'),
      h('button', { class: 'button primary', value: 'yes' }, 'Move'))));
  const answer = await ask(dialog);
  if (answer === 'none') return null;
  return answer === 'yes' && name.value.trim() ? name.value.trim() : undefined;
}
