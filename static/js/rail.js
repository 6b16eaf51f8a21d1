/** The left rail: sessions by day, search results, rename and delete. */

import { contained, h, iconButton, paintDot } from './dom.js';
import { fullTime, grouped, lastUsed } from './format.js';

const SEARCH_AFTER_MS = 150; // chosen: about one pause between words
const UNTITLED = 'New chat';

/**
 * @typedef {object} RailActions
 * @property {(id: string, turnId: ?string) => void} open  `turnId`: the turn that holds what was searched for
 * @property {(id: string, title: string) => void} rename
 * @property {(id: string) => void} remove
 * @property {(id: string, isPinned: boolean) => void} pin
 * @property {(id: string, format: 'json'|'markdown') => void} save
 * @property {(session: object) => void} file  asks for a folder
 * @property {(id: string) => void} share  shows a link to it
 * @property {(q: string) => Promise<object[]>} search  resolves to sessions
 * @property {() => void} more  the end of the list came into view
 */

/** Draws the list and keeps the search field. */
export class Rail {
  #rows = new Map();
  #results = null;
  #timer = 0;
  #searches = 0;
  #renaming = null;
  #numHolds = 0; // open menus, and a pressed pointer
  #isStale = false; // it is to be drawn anew
  #closed = new Set(); // folders

  /**
   * @param {{list: HTMLElement, search: HTMLInputElement, status: HTMLElement}} parts
   * @param {RailActions} actions
   * @param {() => {sessions: object[], hasMore: boolean, current: ?string, isRunning: (id: string) => boolean, isWarm: (id: string) => boolean}} state
   */
  constructor({ list, search, status }, actions, state) {
    Object.assign(this, { list, search, status, actions, state, scroller: list.closest('.rail-list') });
    this.sentinel = h('div', { class: 'sentinel' });
    new IntersectionObserver(([entry]) => entry.isIntersecting && actions.more()).observe(this.sentinel);
    document.addEventListener('visibilitychange', () => this.draw()); // the day may be another one by now
    search.addEventListener('input', () => this.#searchSoon());
    search.addEventListener('keydown', (event) => this.#onSearchKey(event));
    list.addEventListener('pointerdown', () => this.#hold(pressed()));
    list.addEventListener('keydown', (event) => this.#onArrow(event));
    list.addEventListener('focusin', ({ target }) => this.#stopAt(target.closest('.session')));
  }

  /** Draws everything anew, except while a title is being typed, a menu is open or a row is pressed, which would miss its click. */
  draw() {
    this.#isStale = Boolean(this.#renaming || this.#numHolds);
    if (this.#isStale) return;
    const { sessions, hasMore } = this.state();
    const focused = this.#focusedRow();
    const seen = this.scroller.scrollTop && !this.#results ? this.#seenRows() : [];
    this.#rows.clear();
    const groups = this.#results ? [['Results', this.#results]] : grouped(sessions, Date.now());
    this.list.replaceChildren(...groups.flatMap((group) => this.#group(group)));
    if (hasMore && !this.#results) this.list.append(this.sentinel);
    this.#stopAt(this.list.querySelector('.session[aria-current]') ?? this.list.querySelector('.session'));
    this.#showStatus(sessions);
    if (focused) this.#focusAgain(focused);
    this.#keepInSight(seen);
  }

  /** The first rows in sight, and where they are. */
  #seenRows() {
    const { top } = this.scroller.getBoundingClientRect();
    const places = [...this.#rows].map(([id, row]) => [id, row.getBoundingClientRect().top]);
    return places.filter(([, at]) => at >= top).slice(0, 3);
  }

  /** What is read or pointed at stays in its place when rows come and go above it: all but those that have moved themselves. */
  #keepInSight(seen) {
    const moves = seen.filter(([id]) => this.#rows.has(id)).map(([id, at]) => this.#rows.get(id).getBoundingClientRect().top - at);
    if (moves.length) this.scroller.scrollTop += moves.sort((one, other) => Math.abs(one) - Math.abs(other))[0];
  }

  /** The row that had the focus, or, where it is gone, the one in its place; without any row, the search. */
  #focusAgain({ id, at, part }) {
    const row = this.#rows.get(id) ?? [...this.#rows.values()].at(at) ?? [...this.#rows.values()].at(-1);
    (row?.querySelector(part) ?? this.search).focus();
  }

  /** Brings marks up to date without redrawing. */
  mark() {
    for (const [id, row] of this.#rows) this.#markRow(id, row);
  }

  /** The list is one stop of the Tab key: at this conversation. Arrows lead to the others, and to their menus. */
  #stopAt(link) {
    if (!link) return;
    this.list.querySelector('.session[tabindex="0"]')?.setAttribute('tabindex', '-1');
    link.setAttribute('tabindex', '0');
  }

  #onArrow(event) {
    const row = event.target.closest('.session-row');
    if (!row || event.ctrlKey || event.metaKey || event.altKey || !event.target.matches('.session, .icon-button')) return;
    const links = [...this.list.querySelectorAll('.session')].filter((each) => each.checkVisibility());
    const at = links.indexOf(row.querySelector('.session'));
    const [link, menu] = [links[at], row.querySelector('.icon-button')];
    const to = { ArrowDown: links[at + 1], ArrowUp: links[at - 1] ?? this.search, Home: links[0], End: links.at(-1), ArrowRight: menu, ArrowLeft: link }[event.key];
    if (!to) return;
    event.preventDefault();
    to.focus();
  }

  #group([label, sessions, folder]) {
    if (!sessions.length) return [];
    const list = h('ul', { class: 'sessions' }, ...sessions.map((session) => contained(() => this.#row(session), () => unusable(session))));
    const head = h('h2', { class: 'day' }, label);
    if (!folder) return [head, list];
    const isOpen = !this.#closed.has(folder);
    const toggle = ({ target }) => this.#closed[target.open ? 'delete' : 'add'](folder);
    return [h('details', { class: 'folder', open: isOpen, on: { toggle } }, h('summary', {}, head), list)];
  }

  #row(session) {
    const title = session.title || UNTITLED;
    const dot = h('span', { class: 'dot' });
    paintDot(dot, session.adapter);
    const when = lastUsed(session);
    const link = h('a', { class: 'session', tabIndex: -1, href: `#/s/${encodeURIComponent(session.id)}`, title: when ? `${title}\n${fullTime(when)}` : title },
      dot, h('span', { class: 'session-title' }, title, session.excerpt && excerptOf(session.excerpt)),
      session.origin === 'api' && h('span', { class: 'origin' }, 'API'),
      h('span', { class: 'running' }, h('span', { class: 'sr-only' }, '(answering)')),
      h('span', { class: 'sr-only warm-note' }, '(ready)'));
    if (session.adapter) link.append(h('span', { class: 'sr-only' }, `, ${session.adapter}`));
    const more = iconButton('more', `Options for ${title}`, () => this.#menu(session, more));
    more.setAttribute('aria-haspopup', 'menu');
    more.tabIndex = -1;
    const row = h('li', { class: 'session-row' }, link, more);
    link.addEventListener('click', () => this.actions.open(session.id, session.found_in));
    link.addEventListener('keydown', (event) => {
      if (event.key === 'F2') this.rename(session.id);
      if (event.key === 'Delete') this.actions.remove(session.id);
      if (event.key === 'p' && !event.ctrlKey && !event.metaKey) this.actions.pin(session.id, !session.is_pinned);
    });
    this.#rows.set(session.id, row);
    this.#markRow(session.id, row);
    return row;
  }

  #markRow(id, row) {
    const { current, isRunning, isWarm } = this.state();
    const link = row.querySelector('.session');
    if (!link) return;
    if (id === current) link.setAttribute('aria-current', 'page');
    else link.removeAttribute('aria-current');
    row.querySelector('.running').hidden = !isRunning(id);
    link.classList.toggle('warm', isWarm(id));
    row.querySelector('.warm-note').hidden = !isWarm(id);
  }

  /** The list stays as it is until something is over. */
  async #hold(work) {
    this.#numHolds += 1;
    try {
      await work;
    } finally {
      this.#numHolds -= 1;
      if (this.#isStale) this.draw();
    }
  }

  /** The menu lies beside the row that it is for, so that stays where it is. */
  #menu(session, button) {
    return this.#hold(import('./menu.js').then(({ openMenu }) => openMenu(button, [
      session.is_pinned ? ['Unpin', () => this.actions.pin(session.id, false)] : ['Pin', () => this.actions.pin(session.id, true)],
      ['Rename', () => this.rename(session.id)],
      ['Export as Markdown', () => this.actions.save(session.id, 'markdown')],
      ['Export as JSON', () => this.actions.save(session.id, 'json')],
      ['Move to a folder', () => this.actions.file(session)],
      ['Share with the team', () => this.actions.share(session.id)],
      ['Delete', () => this.actions.remove(session.id), 'danger'],
    ])));
  }

  /** Turns a title into a text field. */
  async rename(id) {
    const { titleField } = await import('./rename.js');
    const row = this.#rows.get(id);
    if (!row || this.#renaming) return;
    this.#renaming = id;
    const title = row.querySelector('.session-title').firstChild.textContent;
    titleField(row, title, (wanted) => {
      this.#renaming = null;
      if (wanted && wanted !== title) this.actions.rename(id, wanted);
      this.draw();
    });
  }

  #searchSoon() {
    clearTimeout(this.#timer);
    this.#timer = setTimeout(() => this.refreshSearch(), SEARCH_AFTER_MS);
  }

  /** Runs the search in the field again; an older one that comes late is ignored. */
  async refreshSearch() {
    const q = this.search.value.trim();
    const number = this.#searches += 1;
    const results = q ? await this.actions.search(q) : null;
    if (number !== this.#searches) return;
    this.#results = results;
    this.draw();
  }

  #onSearchKey(event) {
    if (event.key === 'Escape' && this.search.value) {
      event.stopPropagation();
      event.preventDefault();
      this.search.value = '';
      this.refreshSearch();
    }
    if (event.key === 'Enter' || event.key === 'ArrowDown') {
      event.preventDefault();
      this.list.querySelector('.session')?.focus();
    }
  }

  #showStatus(sessions) {
    if (this.#results) {
      const found = this.#results.length;
      this.status.textContent = found ? `${found} found` : 'Nothing found.';
      this.status.classList.toggle('sr-only', found > 0);
    } else {
      this.status.textContent = sessions.length ? '' : 'Your conversations will be kept here.';
      this.status.classList.remove('sr-only');
    }
  }

  #focusedRow() {
    const at = [...this.#rows.values()].findIndex((row) => row.contains(document.activeElement));
    if (at < 0) return null;
    return { id: [...this.#rows.keys()][at], at, part: document.activeElement.matches('button') ? '.icon-button' : '.session' };
  }
}

/** Resolves once the pointer is up and its click has come. */
const pressed = () => new Promise((resolve) => {
  for (const type of ['pointerup', 'pointercancel']) addEventListener(type, () => setTimeout(resolve), { once: true });
});

/** The row of a conversation that cannot be drawn: the others can. */
const unusable = ({ title }) => h('li', { class: 'session-row' }, h('span', { class: 'session' }, title || UNTITLED));

/** The words around what a search found, which is marked. */
function excerptOf({ before, match, after }) {
  return h('span', { class: 'excerpt' }, before, h('mark', {}, match), after);
}
