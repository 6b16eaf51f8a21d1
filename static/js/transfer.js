/** Conversations as files, loaded when one is exported or imported. */

import { toast } from './toast.js';
import { h } from './dom.js';

/**
 * Saves a conversation as a file of the browser's.
 *
 * @param {import('./api.js').Api} api
 * @param {string} id
 * @param {'json'|'markdown'} format
 */
export function exportSession(api, id, format) {
  return save(api, `api/sessions/${encodeURIComponent(id)}/export?format=${format}`, 'conversation');
}

/** Saves what a route gives as a file of the browser's, under the name that the server gives it or `instead`. */
export async function save(api, path, instead) {
  const response = await ask(api, path);
  if (!response) return;
  const name = response.headers.get('Content-Disposition')?.match(/filename\*=UTF-8''([^;]+)/)?.[1];
  const link = h('a', { href: URL.createObjectURL(await response.blob()), download: decodeURIComponent(name ?? instead) });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60000); // long enough for any download from memory to begin
}

/**
 * Stores the conversation in a file; resolves to it, or to null where that failed, which is said.
 *
 * @param {import('./api.js').Api} api
 * @param {File} file
 */
export async function importSession(api, file) {
  const response = await ask(api, 'api/sessions/import', { method: 'POST', body: file, type: 'application/json' });
  return response ? response.json() : null;
}

async function ask(api, path, { type, ...options } = {}) {
  const headers = type ? { 'Content-Type': type } : {};
  if (api.key()) headers.Authorization = `Bearer ${api.key()}`;
  const response = await fetch(path, { ...options, headers, cache: 'no-store' }).catch(() => null);
  if (response?.ok) return response;
  const said = await response?.json().catch(() => null);
  toast(said?.error?.message ?? 'The server could not be reached.');
  return null;
}
