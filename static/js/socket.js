/** The thin shell around ChatCore: a socket and its timers, and nothing else. */

const PING_EVERY_MS = 25000; // below the server's own 30 s
const OPEN_WITHIN_MS = 8000; // chosen: some proxies let it hang
const PONG_WITHIN_MS = 10000; // chosen: a dead link shows within half a minute

/** Connects a ChatCore to a server and keeps it connected. */
export class Connection {
  #socket = null;
  #Kind = WebSocket; // what got through last
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
    this.#use(this.#Kind, () => this.#useOther());
    this.changed();
    this.#schedulePing();
  }

  /** @param {() => void} neverOpened  called when it closes before it is open */
  #use(Kind, neverOpened) {
    const socket = (this.#socket = new Kind(this.url));
    let closed = neverOpened;
    socket.onopen = () => {
      clearTimeout(this.#openTimer);
      this.#Kind = Kind;
      closed = (code) => this.#onClose(code);
      this.#tell(socket, () => this.core.opened());
    };
    socket.onmessage = ({ data }) => this.#tell(socket, () => this.#receive(data));
    socket.onclose = ({ code }) => this.#tell(socket, () => closed(code));
    this.#openTimer = setTimeout(() => this.#tell(socket, () => closed(1006)), OPEN_WITHIN_MS);
  }

  /** Where a proxy keeps websockets back, events get through. */
  async #useOther() {
    const blocked = this.#socket;
    const events = await import('./events.js').catch(() => null);
    if (blocked !== this.#socket) return;
    const failed = () => this.#onClose(1006);
    if (!events) return this.#tell(blocked, failed);
    clearTimeout(this.#openTimer);
    this.#use(blocked instanceof WebSocket ? events.EventSocket : WebSocket, failed);
    blocked.close();
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
