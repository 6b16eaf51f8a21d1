/** A stand-in for a WebSocket where none gets through: events from the server, and a request for each frame to it. */

/** Has of a WebSocket what `Connection` uses. */
export class EventSocket {
  #source;
  #path = null;
  #sending = Promise.resolve();
  #closing = new AbortController(); // a request that hangs would keep one of the browser's few connections

  /** @param {string} address  of the server's websockets */
  constructor(address) {
    const url = address.replace(/^ws/, 'http').replace(/ws$/, 'sse');
    this.readyState = WebSocket.CONNECTING;
    this.#source = new EventSource(url);
    this.#source.addEventListener('stream', ({ data }) => {
      this.#path = `${url}/${JSON.parse(data).id}`;
      this.readyState = WebSocket.OPEN;
      this.onopen();
    });
    this.#source.addEventListener('message', ({ data }) => this.onmessage({ data }));
    this.#source.addEventListener('close', ({ data }) => this.#end(JSON.parse(data).code));
    // It would connect again by itself, to a stream that knows nothing of this one.
    this.#source.addEventListener('error', () => this.#end(1006));
  }

  /** Sends one frame after all before it. */
  send(text) {
    this.#sending = this.#sending.then(() => this.#post(text));
  }

  close() {
    this.readyState = WebSocket.CLOSED;
    this.#source.close();
    this.#closing.abort();
  }

  async #post(body) {
    if (this.readyState !== WebSocket.OPEN) return;
    const response = await fetch(this.#path, { method: 'POST', body, signal: this.#closing.signal }).catch(() => null);
    if (!response?.ok) this.#end(1006);
  }

  #end(code) {
    if (this.readyState === WebSocket.CLOSED) return;
    this.close();
    this.onclose({ code });
  }
}
