/** The REST side of the gateway. Every call rejects with an ApiError that is safe to show. */

/** A refused or failed request; `status` is 0 when the server could not be reached. */
export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

const ANSWER_WITHIN_MS = 30000; // chosen: no call takes so long, save where the server is stuck or the line is dead
const GENERATED_WITHIN_MS = 600000; // chosen: a summary waits behind other answers
const REPEATABLE = new Set(['GET', 'PATCH', 'DELETE']); // twice is as good as once

/** Calls the gateway, with the key when there is one. */
export class Api {
  #underWay = new Set();
  #back = null; // while the line is dead: resolves once it is not

  /**
   * @param {() => ?string} key
   * @param {(call: Promise<object>) => Promise<object>} [during]  is handed each call, and waits for it
   */
  constructor(key, during = (call) => call) {
    this.key = key;
    this.during = during;
  }

  /** The line is dead: ends what is under way on it. What can be repeated is, once the server is back. */
  abandon() {
    this.#back ??= Promise.withResolvers();
    for (const call of this.#underWay) call.abort();
  }

  /** The server is back. */
  resume() {
    this.#back?.resolve();
    this.#back = null;
  }

  /** One page of sessions, newest first. */
  list({ q = '', before = null, limit = 100, origin = 'all' } = {}) {
    const query = new URLSearchParams({ limit: String(limit), origin });
    if (q) query.set('q', q);
    if (before !== null) query.set('before', before);
    return this.call('GET', `api/sessions?${query}`);
  }

  /** Makes an empty session. */
  create(adapter, settings) {
    return this.call('POST', 'api/sessions', { adapter, settings });
  }

  /** Changes the title, the adapter or some of the settings. */
  patch(id, fields) {
    return this.call('PATCH', sessionPath(id), fields);
  }

  /** Deletes a session; `restore` takes it back for a while. One that is gone already is as good as deleted. */
  async remove(id) {
    try {
      return await this.call('DELETE', sessionPath(id));
    } catch (error) {
      if (error.status === 404) return null;
      throw error;
    }
  }

  /** Shows another version of a message; resolves to the session as it is shown then. */
  choose(id, turnId) {
    return this.call('POST', `${sessionPath(id)}/choose`, { turn_id: turnId });
  }

  /** Removes a message whose answer failed; resolves to the session as it is shown then. */
  discard(id, turnId) {
    return this.call('DELETE', `${sessionPath(id)}/turns/${encodeURIComponent(turnId)}`);
  }

  /** Undoes `remove`. */
  restore(id) {
    return this.call('POST', `${sessionPath(id)}/restore`);
  }

  /** Stores a picture; resolves to its id and size. */
  storePicture(file) {
    return this.call('POST', 'api/pictures', file);
  }

  /** Has a document read; resolves to `{kind, text, num_pages}`. Nothing is stored. */
  readDocument(file) {
    return this.call('POST', 'api/documents', file);
  }

  /** A stored picture, as a Blob. token: of the link to the shared conversation that shows it, where it is not the caller's own. */
  async picture(id, token = null) {
    const place = token === null ? 'api' : `api/shared/${encodeURIComponent(token)}`;
    const response = await this.#fetch('GET', `${place}/pictures/${id}`);
    if (!response.ok) throw new ApiError(response.status, 'The picture is gone.');
    return response.blob();
  }

  /** Every adapter with its rank and place; null while the engine has none to speak of. */
  async adapters() {
    const { adapters } = await this.call('GET', 'v1/adapters');
    return adapters.length ? adapters : null;
  }

  /** What the engine is doing: `{status, stage, elapsed_s}`, whichever HTTP status it comes with. */
  async readiness() {
    const response = await this.#fetch('GET', 'readyz');
    return response.json();
  }

  /** Has the model answer messages that belong to no conversation, in OpenAI's format. Rejects also when `signal` says so. */
  complete(body, signal) {
    return this.call('POST', 'v1/chat/completions', body, { withinMs: GENERATED_WITHIN_MS, signal });
  }

  /** Calls a route; resolves to its JSON, or to null. */
  async call(method, path, body, how) {
    const response = await this.#fetch(method, path, body, how);
    if (response.status === 204) return null;
    const data = await response.json().catch(() => null);
    if (!response.ok) {
      throw new ApiError(response.status, data?.error?.message ?? `The server answered ${response.status}.`);
    }
    return data;
  }

  async #fetch(method, path, body, how) {
    const headers = {};
    const isFile = body instanceof Blob;
    if (isFile) headers['Content-Type'] = body.type;
    else if (body !== undefined) headers['Content-Type'] = 'application/json';
    if (this.key()) headers.Authorization = `Bearer ${this.key()}`;
    const request = { method, headers, body: isFile ? body : body && JSON.stringify(body), cache: 'no-store' };
    const once = () => this.during(this.#send(path, request, how));
    const wasDead = this.#back;
    try {
      return await once();
    } catch (error) {
      if (!REPEATABLE.has(method) || wasDead) throw error;
      await this.#back?.promise;
      return once();
    }
  }

  async #send(path, request, { withinMs = ANSWER_WITHIN_MS, signal } = {}) {
    const call = new AbortController();
    const timer = setTimeout(() => call.abort(), withinMs);
    signal?.addEventListener('abort', () => call.abort());
    this.#underWay.add(call);
    try {
      return await fetch(path, { ...request, signal: call.signal });
    } catch {
      throw new ApiError(0, call.signal.aborted ? 'The server has not answered.' : 'The server could not be reached.');
    } finally {
      clearTimeout(timer);
      this.#underWay.delete(call);
    }
  }
}

function sessionPath(id) {
  return `api/sessions/${encodeURIComponent(id)}`;
}
