/** The operators' page: people, keys made and withdrawn, use and storage, export and erasure. */

import { Api } from '../api.js';
import { h } from '../dom.js';
import { askKey } from '../key.js';
import { openMenu } from '../menu.js';
import { leaveWithOthers, readKey, writeKey } from '../storage.js';
import { toast } from '../toast.js';
import * as questions from './questions.js';
import * as views from './views.js';

const PEOPLE = 'v1/admin/people';
const NUM_DAYS = 30;
const byId = (id) => document.getElementById(id);

/** The page. */
export class Admin {
  #key = readKey();
  #usage = null;

  constructor() {
    this.api = new Api(() => this.#key);
    leaveWithOthers();
    byId('add').addEventListener('click', () => this.#add());
    byId('of').addEventListener('change', () => this.#showUsage());
  }

  /** Asks for everything and shows it, after a key where one is needed. */
  async start() {
    try {
      const [list, usage] = [await this.api.call('GET', PEOPLE), await this.api.call('GET', `v1/usage?days=${NUM_DAYS}`)];
      this.#usage = usage;
      this.#show(list);
    } catch (error) {
      await this.#onProblem(error);
    }
  }

  #show({ me, people }) {
    const byOwner = new Map(this.#usage.people.map((person) => [person.owner, person]));
    byId('problem').hidden = true;
    byId('add').hidden = false;
    byId('who').textContent = `Signed in as ${people.find(({ owner }) => owner === me)?.name ?? 'an operator'}`;
    byId('who').classList.add('on');
    byId('people').replaceChildren(views.people(people, byOwner, me, (button, person) => this.#openMenu(button, person, person.owner === me)));
    const [everybody] = byId('of').options;
    const chosen = byId('of').value;
    byId('of').replaceChildren(everybody, ...this.#usage.people.map(({ owner, name }) => h('option', { value: owner }, name || owner)));
    byId('of').value = byOwner.has(chosen) ? chosen : '';
    this.#showUsage();
  }

  #showUsage() {
    if (this.#usage) byId('usage').replaceChildren(views.usage(this.#usage, byId('of').value));
  }

  async #onProblem(error) {
    if (error.status === 401) {
      const key = await askKey(this.#key ? 'wrong' : undefined);
      if (key) {
        this.#key = key;
        writeKey(key);
        await this.start();
        return;
      }
    }
    byId('add').hidden = true;
    byId('people').replaceChildren();
    byId('usage').replaceChildren();
    const isKey = error.status === 401 || error.status === 403;
    byId('problem').replaceChildren(h('p', { class: 'empty' }, error.message), h('button', { type: 'button', class: 'button',
      on: { click: () => (isKey ? this.#useAnother() : this.start()) } }, isKey ? 'Use another key' : 'Try again'));
    byId('problem').hidden = false;
  }

  async #useAnother() {
    const key = await askKey();
    if (!key) return;
    this.#key = key;
    writeKey(key);
    await this.start();
  }

  // ---------------------------------------------------------------- what can be done

  #openMenu(button, person, isMe) {
    const path = `${PEOPLE}/${encodeURIComponent(person.owner ?? person.name)}`;
    const entries = [['New key', () => this.#makeKey(person.name, `${path}/keys`)]];
    for (const { id } of person.keys) {
      const key = `${path}/keys/${encodeURIComponent(id)}`;
      entries.push([`Replace ${id}`, () => this.#replace(person.name, id, key)], [`Withdraw ${id}`, () => this.#withdraw(person.name, id, key), 'danger']);
    }
    if (person.owner) {
      if (person.state === 'active') entries.push(['Sign-in link', () => this.#makeLink(person.name, `${path}/sign-in-link`)]);
      entries.push(['Sign out everywhere', () => this.#endSignIns(person.name, `${path}/sign-ins`)], ['Export', () => this.#export(path)]);
    }
    entries.push(['Limits', () => this.#limit(person, path)]);
    if (!isMe) {
      const isActive = person.state === 'active';
      entries.push([isActive ? 'Disable' : 'Enable', () => this.#setState(path, isActive ? 'disabled' : 'active')]);
      if (person.owner) entries.push(['Erase', () => this.#erase(person, path), 'danger']);
    }
    openMenu(button, entries);
  }

  async #add() {
    const wanted = await questions.askPerson();
    if (wanted) await this.#makeKey(wanted.name, PEOPLE, wanted);
  }

  async #replace(name, id, path) {
    if (await questions.confirm(`Replace ${id}?`, `The key of ${name} stops working at once. What ${name} has stays.`, 'Replace')) {
      await this.#makeKey(name, `${path}/replace`);
    }
  }

  async #makeKey(name, path, body) {
    const made = await this.#do('POST', path, body);
    if (made) await questions.showKey(name, made.key);
  }

  async #makeLink(name, path) {
    const made = await this.#do('POST', path);
    if (made) await questions.showLink(name, new URL(made.path, location.href).href);
  }

  async #endSignIns(name, path) {
    if (await this.#do('DELETE', path)) toast(`${name} is signed in in no browser. Keys go on working.`);
  }

  async #withdraw(name, id, path) {
    if (await questions.confirm(`Withdraw ${id}?`, `The key of ${name} stops working at once. What ${name} has stays.`, 'Withdraw')) {
      await this.#do('DELETE', path);
    }
  }

  async #limit(person, path) {
    const limits = await questions.askLimits(person.name, person.limits);
    if (limits && await this.#do('PATCH', path, { limits })) toast(`The limits of ${person.name} are saved.`);
  }

  #setState(path, state) {
    return this.#do('PATCH', path, { state });
  }

  async #export(path) {
    const { save } = await import('../transfer.js');
    await save(this.api, `${path}/export`, 'person.zip');
  }

  async #erase(person, path) {
    if (!await questions.confirmErasure(person.name)) return;
    const status = byId('erasing');
    let erased;
    do {
      erased = await this.#do('DELETE', path);
      const left = erased?.num_left_sessions;
      status.textContent = left === undefined ? '' : `Erasing ${person.name}. Conversations: ${left}.`;
    } while (status.textContent);
    if (erased) toast(`${person.name} is erased. Conversations: ${erased.num_sessions}.`);
  }

  /** Changes something and shows how it is then; resolves to the reply, or to null where it failed, which is said. */
  async #do(method, path, body) {
    try {
      return await this.api.call(method, path, body) ?? {};
    } catch (error) {
      toast(error.message);
      return null;
    } finally {
      await this.start();
    }
  }
}
