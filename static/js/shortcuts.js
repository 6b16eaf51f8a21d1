/** The list of keyboard shortcuts, loaded when it is asked for. */

import { ask, dialogWith } from './dialogs.js';
import { h } from './dom.js';

const SHORTCUTS = [
  ['Send', 'Enter'],
  ['New line', 'Shift + Enter'],
  ['Stop the answer', 'Esc'],
  ['Edit your last message', '↑ in an empty field'],
  ['Search conversations', 'Ctrl or ⌘ + K'],
  ['New chat', 'Ctrl or ⌘ + Shift + O'],
  ['Show or hide conversations', 'Ctrl or ⌘ + B'],
  ['Move in the list, to a menu', '↑ ↓, →'],
  ['Rename, pin, delete in the list', 'F2, P, Delete'],
  ['Settings', 'Ctrl or ⌘ + ,'],
  ['Engine room', 'Ctrl or ⌘ + Shift + E'],
  ['Show this list', '?'],
];

/** Shows the keyboard shortcuts. */
export function showShortcuts() {
  const dialog = dialogWith('Keyboard shortcuts',
    h('dl', { class: 'shortcuts' }, ...SHORTCUTS.flatMap(([name, keys]) => [
      h('dt', {}, name), h('dd', {}, h('kbd', {}, keys))])),
    h('div', { class: 'dialog-buttons' },
      h('button', { type: 'button', class: 'button quiet', autofocus: true, on: { click: () => dialog.close() } }, 'Close')));
  return ask(dialog);
}
