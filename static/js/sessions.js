/** The list of sessions as data: pages from the server, kept up to date by socket events. */

/** Sessions by id, newest first when listed. */
export class SessionIndex {
  #byId = new Map();

  constructor() {
    this.next = null;
  }

  /** Takes one page of `GET /api/sessions`; the first page starts afresh, and brings what is pinned. */
  addPage({ sessions, next, pinned = [] }, isFirst) {
    if (isFirst) this.#byId.clear();
    for (const session of [...sessions, ...pinned]) this.put(session);
    this.next = next ?? null;
  }

  /** Takes one session as listed, but not the empty one that a refused first message leaves. */
  put(session) {
    if (session.title || session.num_turns !== 0) this.#byId.set(session.id, session);
  }

  /** Adds or changes one session; undefined fields are left as they are. */
  upsert({ id, title, adapter, updated_at: updatedAt }) {
    const known = this.#byId.get(id) ?? { id, title: null, adapter: null, updated_at: 0 };
    this.#byId.set(id, { ...known, title: title ?? known.title,
      adapter: adapter === undefined ? known.adapter : adapter,
      updated_at: Math.max(known.updated_at, updatedAt ?? 0) });
  }

  /** Takes a session out. */
  remove(id) {
    this.#byId.delete(id);
  }

  /** One session, or undefined. */
  get(id) {
    return this.#byId.get(id);
  }

  /** All of them, the latest first. */
  sorted() {
    return [...this.#byId.values()].sort((a, b) => b.updated_at - a.updated_at);
  }
}
