/** All conversations at once: imported from a file, exported to one, and deleted. Loaded when that is asked for. */

import { ApiError } from '../api.js';
import { ask, dialogWith } from '../dialogs.js';
import { h } from '../dom.js';
import { count } from '../format.js';
import { toast } from '../toast.js';
import { saveBlob } from '../transfer.js';
import { conversationsOf } from './foreign.js';
import { textInZip } from './zip.js';

const UNDO_MS = 20000; // the server restores for 30 s

/**
 * Stores the conversations of a file, one after the other; says what could not be stored.
 *
 * @returns {Promise<?object>} the only one or the last one; null where none was stored
 */
export async function importFile(api, file) {
  let found;
  try {
    found = conversationsOf(JSON.parse(await textInZip(file, 'conversations.json') ?? await file.text()));
  } catch {
    toast('This file cannot be imported: it is neither JSON nor an archive with a file conversations.json, or it is broken.');
    return null;
  }
  const items = found.filter((item) => item?.turns?.length !== 0);
  const empty = found.length > items.length ? ` ${count(found.length - items.length)} without messages left out.` : '';
  let last = null;
  const { done, problem } = await forEach('Importing conversations', items, async (item) => {
    last = await api.call('POST', 'api/sessions/import', written(item));
  });
  if (problem) toast(items.length > 1 ? `${count(done)} of ${count(items.length)} conversations were imported. ${problem}${empty}` : problem, { ms: 10000 });
  else if (items.length > 1) toast(`${count(done)} conversations imported.${empty}`);
  else if (last) toast(`“${last.title || 'New chat'}” imported.${empty}`);
  else toast('There is no conversation in this file.');
  return last;
}

/** A conversation as it is sent. */
function written(item) {
  try {
    return new Blob([JSON.stringify(item)], { type: 'application/json' });
  } catch { // browsers differ in how deep and how long it may be
    throw new ApiError(-1, 'A conversation is nested too deeply, or is too long.');
  }
}

/** Saves all conversations as one file, which can be imported. */
export async function exportAll(api) {
  const ids = await allIds(api);
  const parts = [];
  const { problem } = await forEach('Exporting conversations', ids, async (id) => {
    parts.push(JSON.stringify(await api.call('GET', `api/sessions/${encodeURIComponent(id)}/export?format=json`)));
  });
  if (problem) toast(problem, { ms: 10000 });
  if (parts.length) saveBlob(new Blob([`[${parts.join(',\n')}]\n`], { type: 'application/json' }), 'conversations.json');
  else if (!problem) toast('There is no conversation to export.');
}

/** Deletes all conversations after a question; resolves to whether that was begun. */
export async function deleteAll(api) {
  const ids = await allIds(api);
  if (!ids.length) {
    toast('There is no conversation to delete.');
    return false;
  }
  const many = ids.length === 1 ? 'one conversation' : `all ${count(ids.length)} conversations`;
  const dialog = dialogWith(`Delete ${many}?`, h('p', {}, 'Those of API calls, too. They can be brought back for some seconds only: export them first if they may be needed.'),
    h('div', { class: 'dialog-buttons' },
      h('button', { type: 'button', class: 'button quiet', autofocus: true, on: { click: () => dialog.close() } }, 'Cancel'),
      h('button', { type: 'button', class: 'button danger', on: { click: () => dialog.close('yes') } }, 'Delete')));
  if (await ask(dialog) !== 'yes') return false;
  const deleted = [];
  const { problem } = await forEach('Deleting conversations', ids, async (id) => {
    await api.remove(id);
    deleted.push(id);
  });
  toast(problem || `${count(deleted.length)} deleted.`, { label: 'Undo', ms: UNDO_MS, act: () => restore(api, deleted.reverse()) });
  return true;
}

/** Brings deleted conversations back, those deleted last first: they are there for the longest. */
async function restore(api, ids) {
  const { done, problem } = await forEach('Bringing conversations back', ids, (id) => api.restore(id));
  toast(done === ids.length ? `${count(done)} brought back.` : `${count(done)} of ${count(ids.length)} brought back. ${problem}`, { ms: 10000 });
}

async function allIds(api) {
  const ids = [];
  let before = null;
  do {
    const page = await api.list({ before });
    ids.push(...page.sessions.map(({ id }) => id), ...(before === null ? page.pinned ?? [] : []).map(({ id }) => id));
    before = page.next ?? null;
  } while (before !== null);
  return [...new Set(ids)];
}

/** Does something with each item while a dialog says how far it is; what the server refuses is counted, and the rest is done. */
async function forEach(title, items, act) {
  const said = h('p', { role: 'status' });
  const bar = h('progress', { max: items.length, value: 0, 'aria-label': title });
  const dialog = dialogWith(title, bar, said,
    h('div', { class: 'dialog-buttons' }, h('button', { type: 'button', class: 'button quiet', on: { click: () => dialog.close() } }, 'Stop')));
  let isOpen = items.length > 1;
  if (isOpen) ask(dialog).then(() => { isOpen = false; });
  let [done, problem] = [0, ''];
  for (const [index, item] of items.entries()) {
    if (items.length > 1 && !isOpen) break;
    bar.value = index;
    said.textContent = `${count(index + 1)} of ${count(items.length)}`;
    try {
      await act(item);
      done += 1;
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      problem = error.message;
      if (error.status === 0) break;
    }
  }
  if (isOpen) dialog.close();
  return { done, problem };
}
