/** The list above the model picker's button, which says where each adapter is; loaded once there is something to choose. */

import { h, icon, paintDot } from './dom.js';
import { count } from './format.js';

const FILTER_FROM = 13; // chosen: more than one takes in at a glance
const GAP_PX = 6;
const EDGE_PX = 8;
const WIDTH_PX = 360;
const PAGE = 8;
const STEPS = { ArrowDown: 1, ArrowUp: -1, PageDown: PAGE, PageUp: -PAGE };
const PINNED = 'Pinned: it stays in memory';
const PLACES = {
  slot: ['ready', 'In a slot of the device: it answers at once'],
  host: ['ready', 'In memory: it answers at once'],
  cached: ['ready', 'Kept in free memory of the device: it answers at once'],
  disk: ['on disk', 'On disk: it is loaded when it is asked'],
};

/**
 * @typedef {object} Model
 * @property {string} id
 * @property {boolean} adapter  false for the base model, which comes first
 * @property {number} [rank]
 * @property {'slot'|'host'|'cached'|'disk'} [place]
 * @property {boolean} [is_pinned]
 */

/** The list of one picker. */
export class ModelList {
  #shown = [];
  #active = null;

  /** @param {import('./picker.js').ModelPicker} picker */
  constructor(picker) {
    this.picker = picker;
    this.popover = picker.popover;
    this.head = this.popover.querySelector('.models-head');
    this.filter = this.head.querySelector('input');
    this.list = this.popover.querySelector('[role=listbox]');
    this.count = this.head.querySelector('[role=status]');
    this.popover.addEventListener('keydown', (event) => this.#onKey(event));
    this.popover.addEventListener('focusout', ({ relatedTarget }) => {
      if (relatedTarget && !this.popover.contains(relatedTarget)) this.popover.hidePopover();
    });
    this.filter.addEventListener('input', () => this.draw(true));
    this.list.addEventListener('pointermove', ({ target }) => this.#activate(rowName(target)));
    this.list.addEventListener('click', ({ target }) => this.#pick(rowName(target)));
  }

  get #hasFilter() {
    return this.picker.models.length >= FILTER_FROM;
  }

  /** Draws it where it belongs, and takes the focus once it is there. */
  open() {
    this.#place();
    this.filter.value = '';
    this.#active = this.picker.adapter ?? this.picker.models[0].id;
    this.draw();
    this.#refresh();
    if (this.popover.matches(':popover-open')) this.#focus();
    else this.popover.addEventListener('toggle', ({ newState }) => newState === 'open' && this.#focus(), { once: true });
  }

  /** Above the button, and left of it where there is too little room to the right. */
  #place() {
    const { left, top } = this.picker.button.getBoundingClientRect();
    const room = innerWidth - WIDTH_PX - EDGE_PX;
    this.popover.style.setProperty('--left', `${Math.max(EDGE_PX, Math.min(left, room))}px`);
    this.popover.style.setProperty('--bottom', `${innerHeight - top + GAP_PX}px`);
  }

  /** Into the filter, unless that would open a keyboard on a touch screen. */
  #focus() {
    const canType = this.#hasFilter && matchMedia('(hover: hover)').matches;
    (canType ? this.filter : this.list).focus();
    this.#scroll();
  }

  async #refresh() {
    const adapters = await this.picker.actions.adapters();
    if (!adapters) return;
    this.picker.offer([this.picker.models[0], ...adapters.map((adapter) => ({ ...adapter, id: adapter.name, adapter: true }))]);
  }

  /** @param {boolean} [isTyped]  the filter has changed */
  draw(isTyped = false) {
    const query = this.filter.value.trim();
    const isOther = this.head.hidden === this.#hasFilter; // adapters came or went since it was last open
    this.head.hidden = !this.#hasFilter;
    this.#shown = matching(this.picker.models, query);
    const isGone = !this.#shown.some(({ id }) => id === this.#active);
    if (isTyped || isGone) this.#active = this.#shown[0]?.id ?? null;
    this.list.replaceChildren(...this.#shown.map((model, index) => row(model, index, this.#isChosen(model))));
    this.count.textContent = this.#countText(query);
    this.#mark();
    if (isTyped) this.#scroll();
    if (isOther && this.popover.matches(':popover-open')) this.#focus();
  }

  #countText(query) {
    const total = count(this.picker.models.length);
    return query ? `${this.#shown.length ? count(this.#shown.length) : 'none'} of ${total}` : `${total} models`;
  }

  #isChosen({ id, adapter }) {
    return this.picker.adapter === (adapter ? id : null);
  }

  #mark() {
    const index = this.#shown.findIndex(({ id }) => id === this.#active);
    this.list.querySelector('.active')?.classList.remove('active');
    this.list.children[index]?.classList.add('active');
    for (const element of [this.filter, this.list]) {
      if (index < 0) element.removeAttribute('aria-activedescendant');
      else element.setAttribute('aria-activedescendant', rowId(index));
    }
  }

  #activate(name) {
    if (!name || name === this.#active) return;
    this.#active = name;
    this.#mark();
  }

  #scroll() {
    this.list.querySelector('.active')?.scrollIntoView({ block: 'nearest' });
  }

  #onKey(event) {
    if (event.ctrlKey || event.metaKey || event.isComposing) return;
    event.stopPropagation(); // the keys of the page rest meanwhile
    if (event.key === 'Tab') {
      this.popover.hidePopover();
    } else if (event.key === 'Enter') {
      event.preventDefault();
      this.#pick(this.#active);
    } else if (event.key in STEPS) {
      event.preventDefault();
      this.#move(STEPS[event.key]);
    } else if (event.target === this.list) {
      this.#onListKey(event);
    }
  }

  /** Keys that belong to the text where there is a filter, and to the list where there is none. */
  #onListKey(event) {
    const edges = { Home: -Infinity, End: Infinity };
    if (event.key in edges) this.#move(edges[event.key]);
    else if (event.key === ' ') this.#pick(this.#active);
    else if (event.key.length > 1) return;
    else if (this.#hasFilter) return void this.filter.focus(); // the letter follows the focus
    else this.#jump(event.key.toLowerCase());
    event.preventDefault();
  }

  /** To the next name that begins with a letter. */
  #jump(letter) {
    const at = this.#shown.findIndex(({ id }) => id === this.#active) + 1;
    const following = [...this.#shown.slice(at), ...this.#shown.slice(0, at)];
    this.#activate(following.find(({ id }) => id.toLowerCase().startsWith(letter))?.id);
    this.#scroll();
  }

  #move(step) {
    if (!this.#shown.length) return;
    const at = this.#shown.findIndex(({ id }) => id === this.#active);
    this.#activate(this.#shown[Math.max(0, Math.min(at + step, this.#shown.length - 1))].id);
    this.#scroll();
  }

  #pick(name) {
    const model = this.#shown.find(({ id }) => id === name);
    if (!model) return;
    this.popover.hidePopover();
    if (this.#isChosen(model)) return;
    this.picker.adapter = model.adapter ? model.id : null;
    this.picker.actions.pick(this.picker.adapter);
  }
}

const rowId = (index) => `model-${index}`;

/** The model whose row an element lies in. */
function rowName(element) {
  return element.closest('[role=option]')?.dataset.name;
}

function row(model, index, isChosen) {
  const dot = h('span', { class: 'dot' });
  paintDot(dot, model.adapter ? model.id : null);
  return h('li', { id: rowId(index), class: 'model', role: 'option', 'data-name': model.id,
    'aria-selected': String(isChosen) },
  dot, h('span', { class: 'model-name', title: model.id }, model.id), model.is_pinned && pinMark(), ...facts(model));
}

function pinMark() {
  return h('span', { class: 'model-pin', title: PINNED }, icon('pin'), h('span', { class: 'sr-only' }, ', pinned'));
}

/** Its rank, and whether it is ready: a word, and a mark that is filled or hollow. */
function facts(model) {
  const comma = () => h('span', { class: 'sr-only' }, ', ');
  if (!model.adapter) return [comma(), h('span', { class: 'model-rank' }, 'base model')];
  const [word, detail] = PLACES[model.place] ?? ['', '']; // nobody knows yet
  return [
    comma(), h('span', { class: 'model-rank' }, model.rank ? `rank ${model.rank}` : ''),
    comma(), h('span', { class: `model-state ${model.place ?? ''}`, title: detail }, word),
  ];
}

/** The models whose names hold every word of the query. */
function matching(models, query) {
  const words = query.toLowerCase().split(/\s+/);
  return models.filter(({ id }) => words.every((word) => id.toLowerCase().includes(word)));
}
