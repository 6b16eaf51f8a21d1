/** The question for an API key, loaded when the server asks for one. */

import { ask, dialogWith } from './dialogs.js';
import { h } from './dom.js';

/** Resolves to whether people may sign in at a provider (OIDC). */
async function canSignIn() {
  try {
    const { ways } = await (await fetch('v1/sign-in', { signal: AbortSignal.timeout(2000) })).json();
    return ways.includes('oidc');
  } catch {
    return false; // a server of an earlier version, or none: the key is asked for as ever
  }
}

const NOTES = {
  wrong: 'The server did not accept that key. Please check it and try again.',
  withdrawn: 'Your key is not accepted any more. Enter another one. What you have written is kept.',
  ended: 'Sign in again in another window, or enter an API key. What you have written is kept.',
};

/**
 * Asks for an API key until one is given.
 *
 * @param {'wrong'|'withdrawn'|'ended'} [why]  one was refused, or was good until now; a sign-in without a key has ended
 * @returns {Promise<string>} the key; empty when the dialog was dismissed
 */
export async function askKey(why) {
  const input = h('input', { type: 'password', id: 'key', autocomplete: 'current-password', required: true,
    spellcheck: false, 'aria-describedby': 'key-note' });
  const dialog = dialogWith(why === 'ended' ? 'You are signed out' : 'This server asks for a key',
    h('p', { id: 'key-note' }, NOTES[why] ?? 'Enter the API key that you were given. It is kept in this browser only.'),
    h('form', { method: 'dialog', on: { submit: (event) => {
      event.preventDefault();
      dialog.close(input.value.trim());
    } } },
    h('label', { htmlFor: 'key' }, 'API key'), input,
    h('div', { class: 'dialog-buttons' }, await canSignIn() && h('a', { class: 'button', href: 'v1/sign-in/oidc' }, 'Sign in without a key'), h('button', { class: 'button primary' }, 'Continue'))));
  return ask(dialog);
}
