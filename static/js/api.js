/** The REST side of the gateway. Every call rejects with an ApiError that is safe to show. */

/** A refused or failed request; `status` is 0 when the server could not be reached. */
export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** Calls the gateway, with the key when there is one. */
export class Api {
  /** @param {() => ?string} key */
  constructor(key) {
    this.key = key;
  }

  /** One page of sessions, newest first. */
  list({ q = '', before = null, limit = 100, origin = 'all' } = {}) {
    const query = new URLSearchParams({ limit: String(limit), origin });
    if (q) query.set('q', q);
    if (before !== null) query.set('before', before);
    return this.#call('GET', `api/sessions?${query}`);
  }

  /** Makes an empty session. */
  create(adapter, settings) {
    return this.#call('POST', 'api/sessions', { adapter, settings });
  }

  /** A session with its turns. */
  session(id) {
    return this.#call('GET', sessionPath(id));
  }

  /** Changes the title, the adapter or some of the settings. */
  patch(id, fields) {
    return this.#call('PATCH', sessionPath(id), fields);
  }

  /** Deletes a session; `restore` takes it back for a while. */
  remove(id) {
    return this.#call('DELETE', sessionPath(id));
  }

  /** Shows another version of a message; resolves to the session as it is shown then. */
  choose(id, turnId) {
    return this.#call('POST', `${sessionPath(id)}/choose`, { turn_id: turnId });
  }

  /** Undoes `remove`. */
  restore(id) {
    return this.#call('POST', `${sessionPath(id)}/restore`);
  }

  /** Every adapter with its rank and place; null while the engine has none to speak of. */
  async adapters() {
    const { adapters } = await this.#call('GET', 'v1/adapters');
    return adapters.length ? adapters : null;
  }

  /** What the engine is doing: `{status, stage, elapsed_s}`, whichever HTTP status it comes with. */
  async readiness() {
    const response = await this.#fetch('GET', 'readyz');
    return response.json();
  }

  async #call(method, path, body) {
    const response = await this.#fetch(method, path, body);
    if (response.status === 204) return null;
    const data = await response.json().catch(() => null);
    if (!response.ok) {
      throw new ApiError(response.status, data?.error?.message ?? `The server answered ${response.status}.`);
    }
    return data;
  }

  async #fetch(method, path, body) {
    const headers = {};
    if (body !== undefined) headers['Content-Type'] = 'application/json';
    if (this.key()) headers.Authorization = `Bearer ${this.key()}`;
    try {
      return await fetch(path, { method, headers, body: body && JSON.stringify(body), cache: 'no-store' });
    } catch {
      throw new ApiError(0, 'The server could not be reached.');
    }
  }
}

function sessionPath(id) {
  return `api/sessions/${encodeURIComponent(id)}`;
}
