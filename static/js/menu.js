/** A small menu beside a button. */

import { h } from './dom.js';

const GAP_PX = 4;
const STEP = { ArrowDown: 1, ArrowUp: -1 };

/**
 * Opens a menu and gives the focus back to the button when it closes; resolves then.
 *
 * @param {HTMLButtonElement} button
 * @param {Array<[label: string, act: () => void, kind?: string]>} entries
 */
export function openMenu(button, entries) {
  const items = entries.map(([label, act, kind]) => h('button', { type: 'button', role: 'menuitem',
    class: kind ?? '', on: { click: () => close(act) } }, label));
  const menu = h('div', { class: 'menu', role: 'menu', popover: 'auto', 'aria-label': button.title }, ...items);

  const closed = Promise.withResolvers();

  function close(act) {
    menu.hidePopover();
    act();
  }
  menu.addEventListener('toggle', ({ newState }) => {
    button.setAttribute('aria-expanded', String(newState === 'open'));
    if (newState === 'open') return;
    if (menu.contains(document.activeElement) || document.activeElement === document.body) button.focus();
    menu.remove();
    closed.resolve();
  });
  menu.addEventListener('keydown', (event) => {
    const step = STEP[event.key];
    if (event.key === 'Escape') event.stopPropagation();
    if (event.key === 'Tab') menu.hidePopover();
    if (!step) return;
    event.preventDefault();
    const at = items.indexOf(document.activeElement);
    items[(at + step + items.length) % items.length].focus();
  });

  document.body.append(menu);
  menu.showPopover();
  place(menu, button);
  items[0].focus();
  return closed.promise;
}

/** Below the button if there is room, else above; always inside the window, over the button if it must be. */
function place(menu, button) {
  const box = button.getBoundingClientRect();
  const below = box.bottom + GAP_PX;
  const fits = below + menu.offsetHeight <= innerHeight;
  menu.style.top = `${fits ? below : Math.max(GAP_PX, box.top - GAP_PX - menu.offsetHeight)}px`;
  menu.style.left = `${Math.max(GAP_PX, Math.min(box.right - menu.offsetWidth, innerWidth - menu.offsetWidth - GAP_PX))}px`;
}
