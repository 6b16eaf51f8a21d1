/**
 * Whether the server is still there: when it is asked, when its silence is said, and when its connection is given up.
 *
 * A state machine without clock or I/O: every `now` is in milliseconds, on one clock.
 */

const ASK_AFTER_MS = 3000; // chosen: an acknowledgement mostly takes milliseconds
const SAY_AFTER_MS = 5000; // chosen: so long people wait without a word
const ASK_IDLE_AFTER_MS = 25000; // below the server's own 30 s
const ANSWER_WITHIN_MS = 10000; // chosen: a dead link is left within a quarter of a minute
const MAX_ANSWER_WITHIN_MS = 60000; // after connections that brought nothing: a large frame on a slow line comes late

/** Counts the silence of one server over all connections to it. */
export class Pulse {
  #heardAt = -Infinity;
  #waitsSince = null;
  #askedAt = null;
  #silentSince = null;

  /** Something came from the server, or went to it. */
  heard(now) {
    this.#heardAt = now;
    this.#askedAt = null;
    this.#silentSince = null;
  }

  /** The server was asked for a sign of life. */
  asked(now) {
    this.#askedAt ??= now;
  }

  /** The connection is left. The silence goes on until something is heard on another one. */
  left() {
    this.#askedAt = null;
  }

  /**
   * What is due.
   *
   * @param {number} now
   * @param {{isOpen: boolean, isWaiting: boolean, attempt: number}} facts  whether the connection is open; whether an answer of
   *   the server is waited for; the number of connections before this one that brought nothing
   * @returns {{act: ?('ask'|'leave'), silentSince: ?number, leaveAt: ?number, lookAt: number}} `lookAt`: when to look again
   */
  look(now, { isOpen, isWaiting, attempt }) {
    const waits = isWaiting || this.#askedAt !== null;
    this.#waitsSince = waits ? this.#waitsSince ?? now : null;
    const quietSince = Math.max(this.#heardAt, this.#waitsSince ?? -Infinity);
    if (waits && now >= quietSince + SAY_AFTER_MS) this.#silentSince ??= quietSince;
    const within = Math.min(MAX_ANSWER_WITHIN_MS, ANSWER_WITHIN_MS * 2 ** attempt);
    const leaveAt = isOpen && this.#askedAt !== null ? this.#askedAt + within : null;
    const askAt = isOpen && this.#askedAt === null ? quietSince + (waits ? ASK_AFTER_MS : ASK_IDLE_AFTER_MS) : null;
    const sayAt = waits && this.#silentSince === null ? quietSince + SAY_AFTER_MS : null;
    const lookAt = Math.min(...[leaveAt, askAt, sayAt].map((at) => at ?? Infinity));
    const act = leaveAt !== null && now >= leaveAt ? 'leave' : askAt !== null && now >= askAt ? 'ask' : null;
    return { act, silentSince: this.#silentSince, leaveAt, lookAt };
  }
}
