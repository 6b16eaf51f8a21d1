/** How a file stands in a message: its name, a colon, and its text in a fenced block. Written so for models, and shown folded. */

import { h } from '../dom.js';
import { addStyle } from '../sheet/style.js';

const BLOCK = /^([^\n]{1,255}):\n(`{3,})[^\n`]*\n([^]*?)\n\2(?:\n\n|$)/;

/** A file as a part of a message. The fence is longer than any in the text. */
export function written(name, text) {
  const longest = Math.max(2, ...(text.match(/`+/g) ?? []).map((run) => run.length));
  const fence = '`'.repeat(longest + 1);
  const language = name.match(/\.([\w+#-]{1,16})$/)?.[1] ?? '';
  return `${name.replace(/\s+/g, ' ')}:\n${fence}${language}\n${text.replace(/\n$/, '')}\n${fence}`;
}

/** Shows the files at the beginning of a message by their names; each opens where it stands. */
export function fold(bubble, content) {
  const parts = [];
  let rest = content;
  for (let match; (match = rest.match(BLOCK)); rest = rest.slice(match[0].length)) {
    const [, name, , text] = match;
    parts.push(h('details', { class: 'folded' }, h('summary', {}, name), h('pre', { tabIndex: 0, role: 'region', 'aria-label': name }, text)));
  }
  if (!parts.length) return;
  addStyle('static/css/files.css');
  bubble.replaceChildren(...parts, rest);
}
