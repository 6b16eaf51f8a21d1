/** Documents of a message: which files the server reads, and what will be sent of them. Loaded with the first file. */

import { ask, dialogWith } from '../dialogs.js';
import { h } from '../dom.js';
import { count } from '../format.js';

// By the end of the name: systems often know no type for a file.
const TYPES = {
  pdf: 'application/pdf',
  docx: 'application/vnd.openxmlformats-officedocument.wordprocessingml.document',
  xlsx: 'application/vnd.openxmlformats-officedocument.spreadsheetml.sheet',
  xlsm: 'application/vnd.openxmlformats-officedocument.spreadsheetml.sheet',
  doc: 'application/msword', // which the server knows how to refuse
  xls: 'application/vnd.ms-excel',
  html: 'text/html', htm: 'text/html', xhtml: 'application/xhtml+xml',
};
const OF_BYTES = { csv: 'text/csv', tsv: 'text/tab-separated-values' }; // where their encoding is not the web's
const SHOWN_CHARS = 200000; // chosen: more would take long to lay out

/** The type of a document that the server is to read, undefined for another file. */
export function documentType(name, isBytes) {
  const end = name.match(/\.(\w+)$/)?.[1].toLowerCase();
  return TYPES[end] ?? (isBytes ? OF_BYTES[end] : undefined);
}

/** Has a document read; resolves to its text and pages, in words. Rejects with an Error that names the file. */
export async function documentOf(file, type, read) {
  try {
    const { text, kind, num_pages: num } = await read(new Blob([file], { type }));
    const unit = kind === 'xlsx' ? 'sheet' : 'page';
    return { text, pages: num === null ? '' : `${count(num)} ${unit}${num === 1 ? '' : 's'}` };
  } catch (error) {
    throw new Error(`${file.name} could not be added. ${error.message}`);
  }
}

/** Shows a text in a dialog. */
export function preview(name, text) {
  const cut = text.length > SHOWN_CHARS;
  const dialog = dialogWith(name,
    h('pre', { class: 'preview', tabIndex: 0, role: 'region', 'aria-label': `Text of ${name}`, dir: 'auto' }, text.slice(0, SHOWN_CHARS)),
    cut && h('p', {}, `The first ${count(SHOWN_CHARS)} of ${count(text.length)} characters; all of them are sent.`),
    h('div', { class: 'dialog-buttons' },
      h('button', { type: 'button', class: 'button quiet', autofocus: true, on: { click: () => dialog.close() } }, 'Close')));
  dialog.classList.add('wide');
  return ask(dialog);
}
