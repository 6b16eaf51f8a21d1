/** The thin shell around ChatCore: a socket and its timers, and nothing else. */

import { contained } from './dom.js';
import { Pulse } from './pulse.js';

const OPEN_WITHIN_MS = 8000; // chosen: some proxies let it hang
const MAX_WAIT_MS = 2 ** 31 - 1; // what a timer can hold

/** Connects a ChatCore to a server and keeps it connected. */
export class Connection {
  #socket = null;
  #Kind = WebSocket; // what got through last
  #pulse = new Pulse();
  #numCalls = 0;
  #buffered = 0;
  #retryTimer = 0;
  #openTimer = 0;
  #pulseTimer = 0;

  /**
   * @param {import('./protocol.js').ChatCore} core
   * @param {string} url  ws:// or wss://
   * @param {() => void} changed  called after every input to the core; must drain it
   */
  constructor(core, url, changed) {
    this.core = core;
    this.url = url;
    this.changed = changed;
    addEventListener('online', () => this.retryNow());
    document.addEventListener('visibilitychange', () => this.#onVisible());
  }

  /** Opens a socket, dropping an older one. */
  connect() {
    clearTimeout(this.#retryTimer);
    this.#drop();
    this.core.connecting();
    this.#use(this.#Kind, () => this.#useOther());
    this.changed();
    this.#look();
  }

  /** @param {() => void} neverOpened  called when it closes before it is open */
  #use(Kind, neverOpened) {
    const socket = (this.#socket = new Kind(this.url));
    this.#buffered = 0;
    let closed = neverOpened;
    socket.onopen = () => {
      clearTimeout(this.#openTimer);
      this.#Kind = Kind;
      closed = (code) => this.#onClose(code);
      this.#tell(socket, () => this.#hear(() => this.core.opened()));
    };
    socket.onmessage = ({ data }) => this.#tell(socket, () => this.#hear(() => this.core.receive(JSON.parse(data))));
    socket.onclose = ({ code }) => this.#tell(socket, () => closed(code));
    this.#openWithin(socket, () => closed(1006));
  }

  #openWithin(socket, failed) {
    clearTimeout(this.#openTimer);
    this.#openTimer = setTimeout(() => this.#tell(socket, failed), OPEN_WITHIN_MS);
  }

  /** Where a proxy keeps websockets back, events get through. A socket that opens after all while their code is fetched is kept. */
  async #useOther() {
    const blocked = this.#socket;
    const failed = () => this.#onClose(1006);
    this.#openWithin(blocked, failed);
    const events = await import('./events.js').catch(() => null);
    if (blocked !== this.#socket || blocked.readyState === WebSocket.OPEN) return;
    if (!events) return this.#tell(blocked, failed);
    this.#use(blocked instanceof WebSocket ? events.EventSocket : WebSocket, failed);
    blocked.close();
  }

  /** Skips the rest of the countdown. Does nothing while connected. */
  retryNow() {
    if (this.core.phase === 'offline') this.connect();
  }

  /** Sends one frame; silently dropped when the socket is not open, since resuming covers it. */
  send(frame) {
    if (this.#socket?.readyState !== WebSocket.OPEN) return;
    this.#socket.send(JSON.stringify(frame));
    this.#buffered = this.#socket.bufferedAmount ?? 0;
    this.#look();
  }

  /** Waits for a request to the same server, which is asked whether it is there when that takes long. */
  async during(call) {
    this.#numCalls += 1;
    this.#look();
    try {
      return await call;
    } finally {
      this.#numCalls -= 1;
      this.#look();
    }
  }

  /** Passes on events of the present socket only: an abandoned one has nothing to say. */
  #tell(socket, act) {
    if (socket !== this.#socket) return;
    act();
    this.changed();
    this.#look();
  }

  #hear(act) {
    this.#pulse.heard(performance.now());
    contained(act);
  }

  #onClose(code) {
    this.#drop();
    this.core.closed(code, performance.now());
    if (this.core.phase !== 'offline') return;
    const wait = this.core.retryAt - performance.now();
    this.#retryTimer = setTimeout(() => this.connect(), Math.max(0, wait));
  }

  #drop() {
    clearTimeout(this.#pulseTimer);
    clearTimeout(this.#openTimer);
    this.#pulse.left();
    const socket = this.#socket;
    this.#socket = null;
    socket?.close();
  }

  /** Does what is due for a server that says nothing, and looks again when the next is. */
  #look() {
    clearTimeout(this.#pulseTimer);
    const socket = this.#socket;
    if (!socket) return;
    const now = performance.now();
    this.#watchUpload(socket, now);
    const isWaiting = this.core.isWaiting || this.#numCalls > 0;
    const isOpen = socket.readyState === WebSocket.OPEN;
    const { act, silentSince, leaveAt, lookAt } = this.#pulse.look(now, { isOpen, isWaiting, attempt: this.core.attempt });
    if (this.core.hush(silentSince, leaveAt)) this.changed();
    if (act === 'leave') this.#tell(socket, () => this.#onClose(1006));
    else if (act === 'ask') this.#ask();
    else if (socket === this.#socket) this.#lookIn(lookAt - now);
  }

  #lookIn(ms) {
    clearTimeout(this.#pulseTimer);
    this.#pulseTimer = setTimeout(() => this.#look(), Math.min(MAX_WAIT_MS, ms));
  }

  /** A long message on a slow line: while its bytes go out, the server is not silent. The last ones may only have gone as far as this machine. */
  #watchUpload(socket, now) {
    const { bufferedAmount = 0 } = socket;
    if (bufferedAmount > 0 && bufferedAmount < this.#buffered) this.#pulse.heard(now);
    this.#buffered = bufferedAmount;
  }

  #ask() {
    this.#pulse.asked(performance.now());
    this.send({ type: 'ping', t: Date.now() });
  }

  /** A page that comes back to the front finds out at once whether its socket survived. */
  #onVisible() {
    if (document.hidden) return;
    if (this.core.phase === 'ready') this.#ask();
    else this.retryNow();
  }
}
