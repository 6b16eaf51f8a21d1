/** The engine room: ties the state machine, the socket and the views together. */

import { Api } from '../api.js';
import { toast } from '../toast.js';
import { askKey } from '../key.js';
import { contained, h, morph } from '../dom.js';
import { Connection } from '../socket.js';
import { StatusBanner } from '../status.js';
import { leaveWithOthers, readKey, writeKey } from '../storage.js';
import { RoomCore } from './core.js';
import * as views from './views.js';

const ASK_TITLES_EVERY_MS = 10000; // chosen: a new chat gets its name soon enough
const LIVE = { ready: 'live', connecting: 'connecting', offline: 'not connected', starting: 'waiting for the engine', locked: 'a key is needed' };
const byId = (id) => document.getElementById(id);

/** The page. */
export class Room {
  #keyAsked = false;
  #titles = new Map();
  #titlesAsked = -Infinity;

  constructor() {
    this.core = new RoomCore();
    this.core.apiKey = readKey();
    this.core.isLooking = !document.hidden;
    leaveWithOthers();
    this.api = new Api(() => this.core.apiKey);
    this.connection = new Connection(this.core, socketUrl(), () => this.#flush());
    this.banner = new StatusBanner(byId('banner'), this.core, {
      retry: () => this.connection.retryNow(),
      greet: () => this.#act(() => this.core.opened()),
      unlock: () => this.#unlock(),
      readiness: () => this.api.readiness(),
    });
    document.addEventListener('visibilitychange', () => this.#act(() => this.core.look(!document.hidden)));
    document.addEventListener('keydown', (event) => onKey(event));
  }

  /** Connects. */
  start() {
    this.connection.connect();
  }

  #act(input) {
    input();
    this.#flush();
  }

  #flush() {
    const { frames, events } = this.core.drain();
    for (const frame of frames) this.connection.send(frame);
    for (const { type, message } of events) {
      if (type === 'engine') this.#show();
      else if (type === 'phase') this.#onPhase();
      else if (type === 'silence') this.banner.update();
      else toast(message);
    }
  }

  #onPhase() {
    const { phase } = this.core;
    this.banner.update();
    byId('live').textContent = LIVE[phase];
    byId('live').classList.toggle('on', phase === 'ready');
    byId('content').classList.toggle('stale', phase !== 'ready');
    if (phase === 'locked' && !this.#keyAsked) this.#unlock();
  }

  async #unlock() {
    this.#keyAsked = true;
    const key = await askKey(this.core.apiKey ? 'wrong' : undefined);
    if (!key) return;
    this.core.apiKey = key;
    writeKey(key);
    this.#keyAsked = false;
    this.connection.connect();
  }

  #show() {
    const { frame, rates } = this.core;
    put('figures', () => views.figures(frame, rates));
    put('nodes', () => views.nodes(frame, rates));
    put('tiers', () => views.tiers(frame));
    put('lanes', () => views.lanes(frame));
    put('adapters', () => views.adapters(frame));
    put('runs', () => views.runs(frame, this.#titles));
    put('advisories', () => views.advisories(frame, this.#titles));
    if ([...frame.advisories, ...frame.runs].some(({ session_id: id }) => !this.#titles.has(id))) this.#askTitles();
  }

  /** Names of conversations, for the lists of agents and advisories. Sessions of agents that are not stored have none. */
  async #askTitles() {
    if (performance.now() - this.#titlesAsked < ASK_TITLES_EVERY_MS) return;
    this.#titlesAsked = performance.now();
    const page = await this.api.list().catch(() => null);
    for (const { id, title } of page?.sessions ?? []) this.#titles.set(id, title);
  }
}

/** Shows what `make` gives there, and touches only what changed. A part that cannot be shown leaves the others alone. */
function put(id, make) {
  const children = contained(make, () => h('p', { class: 'empty' }, 'This part could not be shown.'));
  morph(byId(id), h('div', {}, ...[children].flat()));
}

function onKey(event) {
  if ((event.ctrlKey || event.metaKey) && event.shiftKey && event.key.toLowerCase() === 'e') {
    event.preventDefault();
    location.assign('./');
  }
}

function socketUrl() {
  const url = new URL('ws', location.href);
  url.protocol = url.protocol.replace('http', 'ws');
  url.hash = '';
  return url.href;
}
