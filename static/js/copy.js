/** Copying to the clipboard, loaded when something is copied. */

import { h, icon } from './dom.js';

/** Copies text and shows a tick on the button for a moment. */
export async function copyFrom(button, text) {
  await writeClipboard(text);
  const [original] = button.childNodes;
  if (button.classList.contains('copied')) return;
  const done = button.classList.contains('icon-button') ? icon('check') : 'Copied';
  button.classList.add('copied');
  button.replaceChildren(done);
  setTimeout(() => {
    button.classList.remove('copied');
    button.replaceChildren(original);
  }, 1400);
}

/** The asynchronous clipboard needs a secure context and may be refused; then the old way has to do. */
async function writeClipboard(text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    copyBySelection(text);
  }
}

function copyBySelection(text) {
  const focused = document.activeElement;
  const holder = h('textarea', { value: text, class: 'sr-only' });
  document.body.append(holder);
  holder.select();
  document.execCommand('copy');
  holder.remove();
  focused?.focus();
}
