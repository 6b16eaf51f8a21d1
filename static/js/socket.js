/** The thin shell around ChatCore: a WebSocket, or what stands in for one, its timers, and nothing else. */

const PING_EVERY_MS = 25000; // below the server's own 30 s
const OPEN_WITHIN_MS = 8000; // chosen: some proxies let it hang
const PONG_WITHIN_MS = 10000; // chosen: a dead link shows within half a minute

/** Connects a ChatCore to a server and keeps it connected. */
export class Connection {
  #socket = null;
  #retryTimer = 0;
  #openTimer = 0;
  #pingTimer = 0;
  #pongTimer = 0;

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
    // Where a proxy keeps websockets back, events get through.
    this.#use(new WebSocket(this.url), () => this.#connectByEvents());
    this.changed();
    this.#schedulePing();
  }

  /** @param {() => void} neverOpened  what to do when it closes before it is open */
  #use(socket, neverOpened) {
    let closed = () => neverOpened();
    this.#socket = socket;
    socket.onopen = () => {
      clearTimeout(this.#openTimer);
      closed = (code) => this.#onClose(code);
      this.#tell(socket, () => this.core.opened());
    };
    socket.onmessage = ({ data }) => this.#tell(socket, () => this.#receive(data));
    socket.onclose = ({ code }) => this.#tell(socket, () => closed(code));
    this.#openTimer = setTimeout(() => this.#tell(socket, () => closed(1006)), OPEN_WITHIN_MS);
  }

  async #connectByEvents() {
    const blocked = this.#socket;
    const events = await import('./events.js').catch(() => null);
    if (blocked !== this.#socket) return;
    const failed = () => this.#tell(this.#socket, () => this.#onClose(1006));
    if (events) {
      clearTimeout(this.#openTimer);
      this.#use(new events.EventSocket(this.url.replace(/^ws/, 'http').replace(/ws$/, 'sse')), failed);
      blocked.close();
    } else failed();
  }

  /** Skips the rest of the countdown. Does nothing while connected. */
  retryNow() {
    if (this.core.phase === 'offline') this.connect();
  }

  /** Sends one frame; silently dropped when the socket is not open, since resuming covers it. */
  send(frame) {
    if (this.#socket?.readyState === WebSocket.OPEN) this.#socket.send(JSON.stringify(frame));
  }

  /** Passes on events of the present socket only: an abandoned one has nothing to say. */
  #tell(socket, act) {
    if (socket !== this.#socket) return;
    act();
    this.changed();
  }

  #receive(data) {
    clearTimeout(this.#pongTimer);
    this.core.receive(JSON.parse(data));
  }

  #onClose(code) {
    this.#drop();
    this.core.closed(code, performance.now());
    if (this.core.phase !== 'offline') return;
    const wait = this.core.retryAt - performance.now();
    this.#retryTimer = setTimeout(() => this.connect(), Math.max(0, wait));
  }

  #drop() {
    clearTimeout(this.#pingTimer);
    clearTimeout(this.#pongTimer);
    clearTimeout(this.#openTimer);
    const socket = this.#socket;
    this.#socket = null;
    socket?.close();
  }

  #schedulePing() {
    clearTimeout(this.#pingTimer);
    this.#pingTimer = setTimeout(() => this.#ping(), PING_EVERY_MS);
  }

  #ping() {
    const socket = this.#socket;
    this.send({ type: 'ping', t: Date.now() });
    clearTimeout(this.#pongTimer);
    this.#pongTimer = setTimeout(() => this.#tell(socket, () => this.#onClose(1006)), PONG_WITHIN_MS);
    this.#schedulePing();
  }

  /** A page that comes back to the front finds out at once whether its socket survived. */
  #onVisible() {
    if (document.hidden) return;
    if (this.core.phase === 'ready') this.#ping();
    else this.retryNow();
  }
}
