/** Links to conversations: made, withdrawn and read. Loaded when one is asked for. */

import { AnswerView } from './answer.js';
import { copyFrom } from './copy.js';
import { ask, dialogWith } from './dialogs.js';
import { h } from './dom.js';
import { fullTime } from './format.js';
import { addStyle } from './sheet/style.js';
import { toast } from './toast.js';

const PLACE = '#/shared/';

/** The token in an address that names a shared conversation; undefined for others. */
export const tokenIn = (hash) => (hash.startsWith(PLACE) ? hash.slice(PLACE.length) : undefined);

const button = (label, look, act) => h('button', { type: 'button', class: `button ${look}`, on: { click: act } }, label);

/** Makes a conversation's link, and shows it. Rejects with an ApiError. */
export async function shareConversation(api, id) {
  const path = `api/sessions/${encodeURIComponent(id)}/link`;
  const { token } = await api.call('POST', path);
  const url = new URL(`${PLACE}${token}`, location.href.replace(/#.*/, '')).href;
  const field = h('input', { id: 'share-link', readOnly: true, value: url, on: { focus: () => field.select() } });
  const withdraw = async () => {
    await api.call('DELETE', path);
    dialog.close();
    toast('The link does not work any more.');
  };
  const copy = button('Copy link', 'primary', (event) => copyFrom(event.currentTarget, url));
  const dialog = dialogWith('Share with the team',
    h('p', {}, 'Whoever may use this server can read this conversation by this link, as it is at that moment, with its pictures: without your settings and system prompt.'),
    h('form', { method: 'dialog' }, h('label', { htmlFor: 'share-link' }, 'Link'), field,
      h('div', { class: 'dialog-buttons' }, button('Stop sharing', 'danger', () => withdraw().catch((error) => toast(error.message))),
        button('Close', 'quiet', () => dialog.close()), copy)));
  return ask(dialog);
}

/**
 * Shows a shared conversation, which can be copied.
 *
 * @returns {Promise<?object>} the reader's own copy, if one was made. Rejects with an ApiError
 */
export async function showShared(api, token) {
  const shared = await api.call('GET', `api/shared/${encodeURIComponent(token)}`);
  const [{ gallery }] = await Promise.all([import('./pictures.js'), addStyle('static/css/shared.css')]);
  const title = shared.title || 'New chat';
  let copied = null;
  const read = (id) => api.picture(id, token);
  const copy = async () => {
    copied = await importCopy(api, shared, read);
    dialog.close();
  };
  const place = h('div', { class: 'shared', tabIndex: 0, role: 'region', 'aria-label': 'Shared conversation' });
  place.append(...shared.turns.map((turn) => turnOf(turn, (pictures) => gallery(pictures, read, undefined, place))));
  const dialog = dialogWith(title, h('p', {}, `A shared conversation, last changed ${fullTime(shared.updated_at * 1000)}.`),
    place,
    h('div', { class: 'dialog-buttons' }, button('Close', 'quiet', () => dialog.close()),
      button('Go on in a copy', 'primary', () => copy().catch((error) => toast(error.message)))));
  dialog.classList.add('wide');
  await ask(dialog);
  return copied;
}

function turnOf({ content, answer, pictures }, galleryOf) {
  const view = new AnswerView();
  view.show(answer, true);
  const bubble = content && h('div', { class: 'bubble' }, content);
  return h('article', { class: 'turn' },
    h('div', { class: 'question' }, pictures.length ? h('div', { class: 'asked' }, galleryOf(pictures), bubble) : bubble),
    h('div', { class: 'reply' }, view.element));
}

/** Stores a copy with its pictures, or without where they are too large for one import. */
async function importCopy(api, shared, read) {
  const whole = new Map();
  for (const { id } of shared.turns.flatMap(({ pictures }) => pictures)) {
    if (!whole.has(id)) whole.set(id, await base64(await read(id)));
  }
  try {
    return await api.call('POST', 'api/sessions/import', archive(shared, whole));
  } catch (error) {
    if (error.status !== 413 || !whole.size) throw error;
    toast('The copy has no pictures: together they are too large.');
    return api.call('POST', 'api/sessions/import', archive(shared, new Map()));
  }
}

async function base64(blob) {
  const reader = new FileReader();
  const read = new Promise((resolve) => reader.addEventListener('loadend', resolve));
  reader.readAsDataURL(blob);
  await read;
  return reader.result.split(',')[1];
}

/** As imports take it. whole: pictures by id, in base64; others are left out. */
function archive({ title, adapter, turns }, whole) {
  return { format: 'overture-conversation', version: 1, title, adapter, turns: turns.map(({ content, answer, adapter: by, status, created_at: at, pictures }, index) => ({
    id: String(index), parent: index ? String(index - 1) : null, content, answer, adapter: by, status, created_at: at,
    pictures: pictures.filter(({ id }) => whole.has(id)).map(({ id, media_type: type }) => ({ media_type: type, data: whole.get(id) })) })) };
}
