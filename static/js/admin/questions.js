/** The questions of the operators' page. */

import { copyFrom } from '../copy.js';
import { ask, dialogWith } from '../dialogs.js';
import { h } from '../dom.js';

/** Asks whom to add; resolves to `{name, role}`, or to null. */
export async function askPerson() {
  const name = h('input', { id: 'new-name', required: true, maxLength: 64, pattern: '[^:\\s]+', autocomplete: 'off', spellcheck: false,
    'aria-describedby': 'new-note' });
  const role = h('select', { id: 'new-role' }, h('option', { value: 'member' }, 'Member'), h('option', { value: 'operator' }, 'Operator'));
  const answer = await asked('Add a person', 'Add', [
    h('label', { htmlFor: 'new-name' }, 'Name'), name, h('p', { id: 'new-note' }, 'Without spaces and colons. It is shown in logs.'),
    h('label', { htmlFor: 'new-role' }, 'Role'), role]);
  return answer === 'yes' ? { name: name.value.trim(), role: role.value } : null;
}

const LIMITS = [
  ['requests_per_min', 'Requests a minute', 'API calls and chat messages.'],
  ['concurrent_requests', 'Requests at once', 'API calls and chat messages under way.'],
  ['stored_mib', 'Stored, in MiB', 'All conversations together.'],
  ['tokens_per_day', 'Tokens a day', 'Of prompts and answers, by UTC days.'],
];

/** Asks for the limits of a person; resolves to them, null for the server's own, or to null. */
export async function askLimits(name, limits) {
  const inputs = new Map();
  const fields = LIMITS.flatMap(([id, label, note]) => {
    const input = h('input', { id: `limit-${id}`, type: 'number', min: '0', max: '999999999999', step: '1', value: limits[id] ?? '',
      placeholder: 'as the server has it', 'aria-describedby': `limit-${id}-note` });
    inputs.set(id, input);
    return [h('label', { htmlFor: input.id }, label), input, h('p', { id: `limit-${id}-note` }, note)];
  });
  const note = h('p', {}, 'Empty: as the server’s settings have it for everybody. 0: no limit.');
  if (await asked(`Limits of ${name}`, 'Save', [note, ...fields]) !== 'yes') return null;
  return Object.fromEntries([...inputs].map(([id, input]) => [id, input.value === '' ? null : input.valueAsNumber]));
}

/** Asks whether to do something; resolves to whether it was confirmed. */
export async function confirm(title, text, label) {
  return await asked(title, label, [h('p', {}, text)]) === 'yes';
}

/** Asks for the name of the person who is to be erased; resolves to whether it was given. */
export async function confirmErasure(name) {
  const input = h('input', { id: 'erase-name', required: true, autocomplete: 'off', spellcheck: false, on: {
    input: () => input.setCustomValidity(input.value === name ? '' : `Write ${name} to confirm.`) } });
  input.setCustomValidity(`Write ${name} to confirm.`);
  return await asked(`Erase ${name} for ever?`, 'Erase', [
    h('p', {}, `All conversations, keys and usage of ${name} are removed at once. This cannot be undone. Export them first if they may be needed.`),
    h('label', { htmlFor: 'erase-name' }, `Write ${name} to confirm`), input]) === 'yes';
}

/** Shows a new key, which the server tells this once. */
export const showKey = (name, key) => showOnce(`Key for ${name}`, 'It is shown only now. Give it to nobody else.', 'API key', key);

/** Shows a new sign-in link, which the server tells this once. */
export const showLink = (name, link) => showOnce(`Sign-in link for ${name}`,
  'It is shown only now, and is good once and for a day. Whoever opens it is signed in.', 'Link', link);

function showOnce(title, note, label, text) {
  const field = h('input', { id: 'made', value: text, readOnly: true, 'aria-describedby': 'made-note', on: { focus: () => field.select() } });
  const copy = h('button', { type: 'button', class: 'button', on: { click: () => copyFrom(copy, text) } }, 'Copy');
  return ask(dialogWith(title, h('p', { id: 'made-note' }, note),
    h('form', { method: 'dialog' }, h('label', { htmlFor: 'made' }, label), h('div', { class: 'key-shown' }, field, copy),
      h('div', { class: 'dialog-buttons' }, h('button', { class: 'button primary' }, 'Done')))));
}

function asked(title, label, fields) {
  const dialog = dialogWith(title, h('form', { method: 'dialog', on: { submit: (event) => {
    event.preventDefault();
    dialog.close('yes');
  } } }, ...fields, h('div', { class: 'dialog-buttons' },
    h('button', { type: 'button', class: 'button', on: { click: () => dialog.close('') } }, 'Cancel'),
    h('button', { class: 'button primary' }, label))));
  return ask(dialog);
}
