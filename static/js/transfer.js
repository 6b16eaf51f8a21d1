/** Conversations as files, loaded when one is exported. */

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
  saveBlob(await response.blob(), decodeURIComponent(name ?? instead));
}

/** Saves bytes as a file of the browser's. */
export function saveBlob(blob, name) {
  const link = h('a', { href: URL.createObjectURL(blob), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60000); // long enough for any download from memory to begin
}

async function ask(api, path) {
  const headers = api.key() ? { Authorization: `Bearer ${api.key()}` } : {};
  const response = await fetch(path, { headers, cache: 'no-store' }).catch(() => null);
  if (response?.ok) return response;
  const said = await response?.json().catch(() => null);
  toast(said?.error?.message ?? 'The server could not be reached.');
  return null;
}
