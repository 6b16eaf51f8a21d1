/** The list of sessions as data: pages from the server, kept up to date by socket events. */

/** Sessions by id, newest first when listed. */
export class SessionIndex {
  #byId = new Map();
  #changedAt = new Map(); // id → the number of its last change

  constructor() {
    this.next = null;
    /** A page that was asked for at this number knows of no later change. */
    this.numChanges = 0;
  }

  /** Takes one page of `GET /api/sessions`, asked for at a number of changes; the first one starts afresh, and brings what is pinned. */
  addPage({ sessions, next, pinned = [] }, isFirst, askedAt) {
    const isOlder = (id) => (this.#changedAt.get(id) ?? 0) <= askedAt;
    if (isFirst) for (const id of this.#byId.keys()) if (isOlder(id)) this.#byId.delete(id);
    for (const session of [...sessions, ...pinned]) {
      const known = this.#byId.get(session.id);
      if (isOlder(session.id)) this.#take(session);
      else if (known) this.#byId.set(session.id, { ...session, ...known, title: known.title ?? session.title });
    }
    this.next = next ?? null;
  }

  /** Takes one session as listed, but not the empty one that a refused first message leaves. */
  put(session) {
    this.#note(session.id);
    this.#take(session);
  }

  #take(session) {
    if (session.title || session.num_turns !== 0) this.#byId.set(session.id, session);
  }

  #note(id) {
    this.#changedAt.set(id, this.numChanges += 1);
  }

  /** Adds or changes one session; undefined fields are left as they are. */
  upsert({ id, title, adapter, updated_at: updatedAt }) {
    this.#note(id);
    const known = this.#byId.get(id) ?? { id, title: null, adapter: null, updated_at: 0 };
    this.#byId.set(id, { ...known, title: title ?? known.title,
      adapter: adapter === undefined ? known.adapter : adapter,
      updated_at: Math.max(known.updated_at, updatedAt ?? 0) });
  }

  /** Takes a session out. */
  remove(id) {
    this.#note(id);
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
