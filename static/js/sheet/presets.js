/** Presets: names for an adapter with settings and a system prompt, one's own and the team's. */

import { ask, dialogWith } from '../dialogs.js';
import { h } from '../dom.js';
import { toast } from '../toast.js';

/** The presets of the side sheet. */
export class Presets {
  #known = [];

  /**
   * @param {{api: import('../api.js').Api, core: object}} page
   * @param {{now: () => Promise<{adapter: ?string, settings: object}>, use: (preset: object) => Promise<void>}} actions  what the open chat has, and how it gets another
   */
  constructor({ api, core }, actions) {
    Object.assign(this, { api, core, actions });
    this.list = h('select', { id: 'sheet-preset', on: { change: () => this.#use() } });
    this.save = h('button', { type: 'button', class: 'button', on: { click: () => this.#save() } }, 'Save as preset');
    this.drop = h('button', { type: 'button', class: 'button quiet', hidden: true, on: { click: () => this.#drop() } }, 'Delete preset');
    this.element = h('div', { class: 'sheet-field' }, h('label', { htmlFor: 'sheet-preset' }, 'Preset'), this.list,
      h('div', { class: 'sheet-buttons' }, this.save, this.drop));
  }

  /** Reads the list; says what failed. */
  async read(chosen = '') {
    try {
      this.#known = (await this.api.call('GET', 'api/presets')).presets;
    } catch (error) {
      toast(error.message);
    }
    const option = (preset, index) => h('option', { value: String(index) }, preset.name);
    const group = (label, of) => {
      const options = this.#known.map((preset, index) => [preset, index]).filter(([preset]) => preset.is_shared === of);
      return options.length > 0 && h('optgroup', { label }, ...options.map((each) => option(...each)));
    };
    this.list.replaceChildren(...[h('option', { value: '' }, this.#known.length ? 'Choose one' : 'None yet'), group('Yours', false), group('The team’s', true)].filter(Boolean));
    this.list.disabled = !this.#known.length;
    this.list.value = String(this.#known.findIndex(({ id }) => id === chosen));
    if (this.list.selectedIndex < 0) this.list.value = '';
    this.#showDrop();
  }

  get #chosen() {
    return this.#known[this.list.value || -1];
  }

  #showDrop() {
    this.drop.hidden = !this.#chosen?.is_own;
  }

  async #use() {
    this.#showDrop();
    const { adapter } = this.#chosen ?? {};
    if (!this.#chosen) return;
    if (adapter && !this.core.models.some(({ id }) => id === adapter)) toast(`${adapter} is not served now, so the base model answers.`);
    await this.actions.use(this.#chosen);
  }

  async #save() {
    const { adapter, settings } = await this.actions.now();
    const name = h('input', { id: 'preset-name', required: true, maxLength: 100, autocomplete: 'off', value: this.#chosen?.is_own ? this.#chosen.name : '' });
    const isShared = h('input', { type: 'checkbox', id: 'preset-shared', checked: Boolean(this.#chosen?.is_own && this.#chosen.is_shared) });
    const mayShare = !this.core.user || this.core.user.role === 'operator';
    const dialog = dialogWith('Save as preset', h('form', { method: 'dialog' }, h('label', { htmlFor: 'preset-name' }, 'Name'), name,
      mayShare && h('div', { class: 'sheet-check' }, isShared, h('label', { htmlFor: 'preset-shared' }, 'Share with the team')),
      h('div', { class: 'dialog-buttons' }, h('button', { type: 'button', class: 'button quiet', on: { click: () => dialog.close() } }, 'Cancel'),
        h('button', { class: 'button primary', value: 'yes' }, 'Save'))));
    if (await ask(dialog) !== 'yes') return;
    const named = this.#known.find((preset) => preset.is_own && preset.name === name.value.trim());
    const id = named?.id ?? `preset-${Date.now().toString(36)}`;
    try {
      await this.api.call('PUT', `api/presets/${id}`, { name: name.value.trim(), adapter, settings, is_shared: isShared.checked });
      await this.read(id);
      toast(`Preset “${name.value.trim()}” saved.`);
    } catch (error) {
      toast(error.message);
    }
  }

  async #drop() {
    const { id, name } = this.#chosen;
    try {
      await this.api.call('DELETE', `api/presets/${encodeURIComponent(id)}`);
      toast(`Preset “${name}” deleted.`);
    } catch (error) {
      toast(error.message);
    }
    await this.read();
  }
}
