/** The side sheet: settings of the conversation and of this browser. Beside the conversation where there is room, else over it. */

import { toast } from '../toast.js';
import { h, iconButton } from '../dom.js';
import { readFollow, readTheme, writeFollow, writeTheme } from '../storage.js';
import { leave } from './leave.js';
import { Presets } from './presets.js';
import { addStyle } from './style.js';
import { Tools } from './tools.js';

const SAVE_AFTER_MS = 600; // chosen: a pause in typing
const NARROW = matchMedia('(max-width: 719.98px)');
const MAX_PROMPT_CHARS = 32000; // docs/protocol.md, "Settings"
const THEMES = [['', 'System'], ['light', 'Light'], ['dark', 'Dark']];
const NAMES = ['system_prompt', 'temperature', 'max_tokens', 'top_p', 'stop', 'seed'];
const MAX_STOPS = 8;
const DEFAULT = 'Server’s default';

/** The sheet. It saves what is typed after a pause, and at once when it closes or a message is sent. */
export class Sheet {
  #sessionId = null;
  #changes = {};
  #saving = Promise.resolve();
  #numSaving = 0;
  #timer = 0;
  #opener = null;

  /** @param {import('../settings.js').Settings} settings */
  constructor(settings) {
    this.settings = settings;
    this.element = this.#build();
    document.body.append(this.element);
    this.styled = addStyle('static/css/sheet.css');
    NARROW.addEventListener('change', () => this.#close());
  }

  // ---------------------------------------------------------------- what it is made of

  #build() {
    this.status = h('p', { class: 'sheet-status', role: 'status' });
    this.again = h('button', { type: 'button', class: 'button', hidden: true, on: { click: () => this.save() } }, 'Try again');
    this.defaults = h('button', { type: 'button', class: 'button', on: { click: () => this.#toggleForNew() } });
    this.closeButton = iconButton('close', 'Close settings', () => this.#close());
    return h('dialog', { class: 'sheet', 'aria-labelledby': 'sheet-title', on: {
      keydown: (event) => this.#onKey(event), close: () => this.#onClose() } },
    h('div', { class: 'sheet-head' }, h('h2', { id: 'sheet-title' }, 'Settings'), this.closeButton),
    h('section', { 'aria-labelledby': 'sheet-chat' }, h('h3', { id: 'sheet-chat' }, 'This conversation'),
      this.#presets(), ...this.#fields(), (this.tools = new Tools(this.settings)).element, h('div', { class: 'sheet-saved' }, this.status, this.again), this.defaults),
    h('section', { 'aria-labelledby': 'sheet-browser' }, h('h3', { id: 'sheet-browser' }, 'This browser'),
      themePicker(), followBox(), this.#ahead()),
    h('section', { 'aria-labelledby': 'sheet-files' }, h('h3', { id: 'sheet-files' }, 'Conversations'), ...this.#importing()),
    this.#account());
  }

  #fields() {
    const on = { input: ({ target }) => this.#onInput(target) };
    const number = { type: 'number', placeholder: DEFAULT, on };
    this.fields = {
      system_prompt: h('textarea', { rows: 4, maxLength: MAX_PROMPT_CHARS, placeholder: 'None', on }),
      temperature: h('input', { ...number, inputMode: 'decimal', min: 0, max: 2, step: 'any' }),
      max_tokens: h('input', { ...number, inputMode: 'numeric', min: 1, max: 1000000, step: 1 }),
      top_p: h('input', { ...number, inputMode: 'decimal', min: 0.001, max: 1, step: 'any' }),
      stop: h('textarea', { rows: 2, maxLength: 807, placeholder: 'None', spellcheck: false, on }),
      seed: h('input', { ...number, inputMode: 'numeric', min: Number.MIN_SAFE_INTEGER, max: Number.MAX_SAFE_INTEGER, step: 1 }),
    };
    const { system_prompt: prompt, temperature, max_tokens: length, top_p: topP, stop, seed } = this.fields;
    return [
      field('system-prompt', 'System prompt', prompt, 'What the model should know and how it should answer. It reads this before every message.'),
      field('temperature', 'Temperature', temperature, 'From 0 (always the likeliest words) to 2 (the most varied).'),
      field('max-tokens', 'Longest answer, in tokens', length, 'A token is about three quarters of an English word.'),
      h('details', { class: 'sheet-more' }, h('summary', {}, 'More about sampling'),
        field('top-p', 'Top p', topP, 'Only the likeliest tokens that have this probability together are chosen from; 1: all.'),
        field('stop', 'Stop at', stop, 'One text a line: an answer ends before it.'),
        field('seed', 'Seed', seed, 'The same seed and the same messages give the same answer, mostly.')),
    ];
  }

  #presets() {
    const { settings } = this;
    this.presets = new Presets(settings, {
      now: async () => {
        await this.save();
        return { adapter: settings.composer.adapter, settings: Object.fromEntries(NAMES.map((name) => [name, settings.current[name] ?? null])) };
      },
      use: async (preset) => {
        const { current } = settings.core;
        const known = settings.core.models.some(({ id }) => id === preset.adapter);
        settings.composer.choose(known ? preset.adapter : null);
        await this.save();
        this.#changes = Object.fromEntries(NAMES.map((name) => [name, preset.settings[name] ?? null]));
        await this.save();
        if (current === settings.core.current) this.follow(current);
      },
    });
    return this.presets.element;
  }

  #importing() {
    const input = h('input', { type: 'file', accept: '.json,.zip,application/json,application/zip', hidden: true, 'aria-label': 'File to import',
      on: { change: () => this.#import(input) } });
    const button = (label, act, look = '') => h('button', { type: 'button', class: `button ${look}`, on: { click: act } }, label);
    const all = () => import('../transfer/all.js');
    return [input, h('div', { class: 'sheet-buttons' }, button('Import', () => input.click()),
      button('Export all', async () => (await all()).exportAll(this.settings.api)),
      button('Delete all', async () => { if (await (await all()).deleteAll(this.settings.api)) location.hash = ''; }, 'danger')),
    h('p', { class: 'note' }, 'Import takes what was exported here, exports of ChatGPT and Claude (the archive, or conversations.json in it) and of Open WebUI, and messages in OpenAI’s format. '
      + 'To export one conversation, open its menu in the list.')];
  }

  async #import(input) {
    const [file] = input.files;
    input.value = '';
    if (!file) return;
    const session = await (await import('../transfer/all.js')).importFile(this.settings.api, file);
    if (!session) return;
    if (NARROW.matches) this.#close();
    location.hash = `#/s/${encodeURIComponent(session.id)}`;
  }

  #account() {
    this.name = h('p', { class: 'sheet-name' });
    this.toPeople = h('p', { class: 'note' }, h('a', { href: 'admin' }, 'People of this server'));
    this.account = h('section', { 'aria-labelledby': 'sheet-account' }, h('h3', { id: 'sheet-account' }, 'You'), this.name,
      this.signOut = h('button', { type: 'button', class: 'button', on: { click: leave } }, 'Sign out'), this.toPeople);
    return this.account;
  }

  #ahead() {
    const { composer } = this.settings;
    this.aheadBox = h('input', { type: 'checkbox', id: 'sheet-ahead', 'aria-describedby': 'sheet-ahead-note',
      on: { change: ({ target }) => { composer.ahead = target.checked; } } });
    this.ahead = h('div', { class: 'sheet-check' }, this.aheadBox, h('label', { htmlFor: 'sheet-ahead' }, 'Prepare as I type'),
      h('p', { id: 'sheet-ahead-note', class: 'note' },
        'Sends what you type while you type it, so that the answer starts sooner. It is never stored or logged.'));
    return this.ahead;
  }

  // ---------------------------------------------------------------- open and closed

  /** Opens it, or closes it. */
  toggle() {
    if (this.element.open) this.#close();
    else this.#open();
  }

  #open() {
    this.#opener = document.activeElement;
    this.follow(this.settings.core.current);
    this.presets.read();
    this.tools.read();
    this.ahead.hidden = !this.settings.composer.offersAhead;
    this.aheadBox.checked = this.settings.composer.ahead;
    const { user } = this.settings.core;
    this.account.hidden = !user;
    this.name.textContent = user ? `Signed in as ${user.name}` : '';
    this.signOut.hidden = user?.can_sign_out === false;
    this.toPeople.hidden = user?.role !== 'operator';
    if (NARROW.matches) this.element.showModal();
    else this.element.show();
    this.settings.button.setAttribute('aria-expanded', 'true');
    (NARROW.matches ? this.closeButton : this.fields.system_prompt).focus();
  }

  #close() {
    if (this.element.open) this.element.close();
  }

  #onClose() {
    this.settings.button.setAttribute('aria-expanded', 'false');
    this.save();
    const opener = this.#opener?.isConnected ? this.#opener : this.settings.button;
    if (this.element.contains(document.activeElement) || document.activeElement === document.body) opener.focus();
  }

  #onKey(event) {
    if (event.key !== 'Escape') return;
    event.preventDefault();
    event.stopPropagation(); // Escape also stops an answer
    this.#close();
  }

  // ---------------------------------------------------------------- values

  /** Shows the settings of this conversation (null: of a new chat), unless they are just being changed. */
  follow(sessionId) {
    this.tools.follow();
    if (sessionId !== this.#sessionId) {
      this.save();
      this.#changes = {};
      this.#sessionId = sessionId;
      this.#say('');
    } else if (this.#isDirty || this.#numSaving) {
      return;
    }
    const { current } = this.settings;
    for (const name of NAMES) {
      const value = name === 'stop' ? (current.stop ?? []).join('\n') : String(current[name] ?? '');
      if (this.fields[name].value !== value) this.fields[name].value = value;
    }
    this.#showForNew();
  }

  get #isDirty() {
    return Object.keys(this.#changes).length > 0;
  }

  #onInput(target) {
    clearTimeout(this.#timer);
    const name = NAMES.find((key) => this.fields[key] === target);
    if (name === 'stop') target.setCustomValidity(linesOf(target.value).length > MAX_STOPS ? `There may be ${MAX_STOPS} texts.` : '');
    if (!target.validity.valid) {
      delete this.#changes[name];
      this.#say(`Not saved: ${target.validationMessage}`, true);
      return;
    }
    this.#changes[name] = target.value.trim() ? valueOf(name, target) : null;
    this.#say('');
    this.#timer = setTimeout(() => this.save(), SAVE_AFTER_MS);
  }

  /** Stores what was changed, one request after the other. Resolves when all is stored or has failed, which the sheet then says. */
  save() {
    clearTimeout(this.#timer);
    if (this.#isDirty) {
      const [sessionId, changes] = [this.#sessionId, this.#changes];
      this.#changes = {};
      this.#numSaving += 1;
      this.#saving = this.#saving.then(() => this.#store(sessionId, changes));
    }
    return Promise.all([this.#saving, this.tools.saved]);
  }

  async #store(sessionId, changes) {
    try {
      await this.settings.change(sessionId, changes);
      if (sessionId === this.#sessionId) this.#say(sessionId ? 'Saved' : 'Kept for this new chat');
    } catch (error) {
      if (sessionId !== this.#sessionId) {
        toast(`The settings were not saved. ${error.message}`);
        return;
      }
      this.#changes = { ...changes, ...this.#changes };
      this.#say(`Not saved. ${error.message}`, true);
      this.again.hidden = false;
    } finally {
      this.#numSaving -= 1;
      this.#showForNew();
    }
  }

  #say(text, isProblem = false) {
    this.status.textContent = text;
    this.status.classList.toggle('problem', isProblem);
    this.again.hidden = true;
  }

  // ---------------------------------------------------------------- for new conversations

  get #isForNew() {
    const { current, forNew } = this.settings;
    return NAMES.some((name) => current[name] != null) && NAMES.every((name) => String(current[name] ?? '') === String(forNew[name] ?? ''));
  }

  #showForNew() {
    this.defaults.textContent = this.#isForNew ? 'Stop using these for new conversations' : 'Use for new conversations';
  }

  async #toggleForNew() {
    await this.save();
    const isForNew = this.#isForNew;
    this.settings.forNew = isForNew ? {} : Object.fromEntries(NAMES.map((name) => [name, this.settings.current[name] ?? null]));
    this.#say(isForNew ? 'New conversations begin with the server’s defaults.' : 'New conversations begin with these settings.');
    this.#showForNew();
  }
}

function field(id, label, input, note) {
  input.id = `sheet-${id}`;
  input.setAttribute('aria-describedby', `${input.id}-note`);
  return h('div', { class: 'sheet-field' }, h('label', { htmlFor: input.id }, label), input,
    h('p', { id: `${input.id}-note`, class: 'note' }, note));
}

const linesOf = (text) => text.split('\n').filter((line) => line);

/** What is typed into a field, as the server takes it. */
function valueOf(name, target) {
  if (name === 'system_prompt') return target.value;
  return name === 'stop' ? linesOf(target.value) : target.valueAsNumber;
}

function followBox() {
  const box = h('input', { type: 'checkbox', id: 'sheet-follow', checked: readFollow(), 'aria-describedby': 'sheet-follow-note',
    on: { change: ({ target }) => writeFollow(target.checked) } });
  return h('div', { class: 'sheet-check' }, box, h('label', { htmlFor: 'sheet-follow' }, 'Follow answers'),
    h('p', { id: 'sheet-follow-note', class: 'note' }, 'Scrolls along while an answer is written. Otherwise your question goes to the top and stays there.'));
}

function themePicker() {
  const chosen = readTheme();
  return h('fieldset', { class: 'sheet-themes' }, h('legend', {}, 'Theme'), ...THEMES.map(([theme, label]) => h('label', {},
    h('input', { type: 'radio', name: 'theme', value: theme, checked: theme === chosen, on: { change: () => {
      writeTheme(theme);
      globalThis.applyTheme();
    } } }), h('span', {}, label))));
}
