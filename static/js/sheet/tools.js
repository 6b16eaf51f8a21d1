/** Which MCP servers' tools the conversation may use: a switch for each, off until somebody turns it on. */

import { h } from '../dom.js';
import { toast } from '../toast.js';

const MAX_NAMES = 8; // of tools in a note; chosen: two lines

/** The tools of the side sheet; takes no room where the server names no MCP servers. */
export class Tools {
  #boxes = new Map();
  #off = null;
  /** Resolves when the server has what was switched, or has refused it. */
  saved = Promise.resolve();

  /** @param {import('../settings.js').Settings} settings */
  constructor(settings) {
    this.settings = settings;
    this.rows = h('div', { class: 'sheet-tools' });
    this.note = h('p', { class: 'note' });
    this.allowed = h('p', { class: 'note' });
    this.again = h('button', { type: 'button', class: 'button', on: { click: () => this.#change({ allowed_tools: null }) } }, 'Ask again before each');
    this.element = h('div', { class: 'sheet-field', role: 'group', 'aria-labelledby': 'sheet-tools', hidden: true },
      h('p', { id: 'sheet-tools', class: 'sheet-label' }, 'Tools'), this.rows, this.note, this.allowed, this.again);
  }

  /** Asks the server which there are; what could not be asked stays as it was. */
  async read() {
    const { servers, off } = await this.settings.api.call('GET', 'api/tools').catch(() => ({}));
    if (!servers) return;
    this.#off = off;
    this.#boxes = new Map(servers.map(({ name }) => [name, h('input', { type: 'checkbox', id: `sheet-tool-${name}`,
      'aria-describedby': `sheet-tool-${name}-note`, on: { change: () => this.#toggle() } })]));
    this.rows.replaceChildren(...servers.map((server) => h('div', { class: 'sheet-check' }, this.#boxes.get(server.name),
      h('label', { htmlFor: `sheet-tool-${server.name}` }, server.name), h('p', { id: `sheet-tool-${server.name}-note`, class: 'note' }, noteOf(server)))));
    this.element.hidden = !servers.length;
    this.note.textContent = off ?? 'You are asked before a tool is used. What it says goes to the model as text.';
    this.follow();
  }

  /** Shows what the open conversation, or the new chat, has. */
  follow() {
    const { tools, allowed_tools: allowed } = this.settings.current;
    for (const [name, box] of this.#boxes) {
      box.checked = Boolean(tools?.includes(name));
      box.disabled = this.#off !== null && !box.checked;
    }
    const names = (allowed ?? []).map((key) => key.replace(/#.*/, '').replace('/', ': '));
    this.allowed.hidden = this.again.hidden = !names.length;
    this.allowed.textContent = `Used without asking: ${names.join(', ')}.`;
  }

  #toggle() {
    this.#change({ tools: [...this.#boxes].filter(([, box]) => box.checked).map(([name]) => name) });
  }

  #change(changes) {
    const { current } = this.settings.core;
    this.saved = this.saved.then(() => this.settings.change(current, changes))
      .catch((error) => toast(`The tools were not changed. ${error.message}`)).then(() => this.follow());
  }
}

function noteOf({ tools, problem }) {
  const names = tools.slice(0, MAX_NAMES).map(({ name }) => name).join(', ');
  const more = tools.length > MAX_NAMES ? ` and ${(tools.length - MAX_NAMES).toLocaleString('en')} more` : '';
  return [names && `${names}${more}.`, problem].filter(Boolean).join(' ') || 'It has no tools.';
}
