/**
 * The engine room's half of the protocol (docs/protocol.md, "The engine room"): a state machine without I/O, clock or DOM, driven as
 * ChatCore is. It keeps the last frame, and the rates that two frames tell.
 */

import { backoffMs } from '../protocol.js';

const NOT_READY = new Set(['starting', 'draining', 'engine_failed']);
const UNAUTHORIZED = 4401;
const HISTORY = 120; // a minute at two frames a second
const SMOOTH = 4; // frames that a rate is taken over. Chosen: two seconds; steps come in bursts

/** What the page knows of the server's nodes. */
export class RoomCore {
  #frames = [];
  #events = [];
  #recent = [];
  #handlers = {
    ready: () => this.#onReady(),
    engine: (frame) => this.#onEngine(frame),
    error: (frame) => this.#onError(frame),
  };

  constructor() {
    /** @type {'connecting'|'offline'|'starting'|'ready'|'locked'} */
    this.phase = 'connecting';
    this.apiKey = null;
    this.attempt = 0;
    this.retryAt = 0;
    this.closeCode = 0;
    this.isLooking = true;
    /** As ChatCore's. */
    this.silence = null;
    /** The last `engine` frame. */
    this.frame = null;
    /** By node, and of all together (''): `{steps, tokens}` a second, the newest last. */
    this.rates = new Map();
  }

  /** Hands over, and forgets, the frames to send and the events that came up. */
  drain() {
    const drained = { frames: this.#frames, events: this.#events };
    this.#frames = [];
    this.#events = [];
    return drained;
  }

  /** Whether a frame of the server is waited for: while one looks, they come twice a second. */
  get isWaiting() {
    return this.phase === 'connecting' || (this.phase === 'ready' && this.isLooking);
  }

  /** Always false: nothing is kept here that would be sent again. */
  get hasUnsent() {
    return false;
  }

  /** As ChatCore's. */
  hush(since, leaveAt) {
    if (since === (this.silence?.since ?? null) && (!this.silence || leaveAt === this.silence.leaveAt)) return false;
    this.silence = since === null ? null : { since, leaveAt };
    this.#events.push({ type: 'silence' });
    return true;
  }

  /** A connection attempt begins. */
  connecting() {
    this.#setPhase('connecting');
  }

  /** The socket is open, or a server that was starting says that it is ready: say hello. */
  opened() {
    const hello = { type: 'hello' };
    if (this.apiKey) hello.api_key = this.apiKey;
    this.#frames.push(hello);
  }

  /** The socket closed. Sets `retryAt`, unless a key is needed first. */
  closed(code, now) {
    this.closeCode = code;
    this.#recent = [];
    if (code === UNAUTHORIZED || this.phase === 'locked') {
      this.#setPhase('locked');
      return;
    }
    this.attempt += 1;
    this.retryAt = now + backoffMs(this.attempt, code);
    this.#setPhase('offline');
  }

  /** One frame from the server, already parsed. Unknown types are ignored. */
  receive(frame) {
    this.#handlers[frame.type]?.(frame);
  }

  /** Whether anybody looks at the page: the server sends nothing to a page in the background. */
  look(isLooking) {
    this.isLooking = isLooking;
    this.#recent = [];
    if (this.phase === 'ready') this.#watch();
  }

  #watch() {
    this.#frames.push({ type: 'watch_engine', on: this.isLooking });
  }

  #onReady() {
    this.attempt = 0;
    this.#setPhase('ready');
    this.#watch();
  }

  #onEngine(frame) {
    this.frame = frame;
    this.#recent.push(frame);
    if (this.#recent.length > SMOOTH + 1) this.#recent.shift();
    this.#rate();
    this.#events.push({ type: 'engine' });
  }

  /** Rates since some frames ago. A node whose engine began anew meanwhile counts from nothing. */
  #rate() {
    const before = this.#recent[0];
    const seconds = this.frame.at_s - before.at_s;
    if (seconds <= 0) return;
    const olds = new Map(before.nodes.map((node) => [node.id, node]));
    const sum = { steps: 0, tokens: 0 };
    for (const node of this.frame.nodes) {
      const rate = {
        steps: grown(olds.get(node.id), node, 'num_steps') / seconds,
        tokens: grown(olds.get(node.id), node, 'num_answer_tokens') / seconds,
      };
      this.#keep(node.id, rate);
      sum.steps += rate.steps;
      sum.tokens += rate.tokens;
    }
    this.#keep('', sum);
    for (const id of this.rates.keys()) {
      if (id && !this.frame.nodes.some((node) => node.id === id)) this.rates.delete(id);
    }
  }

  #keep(id, rate) {
    const kept = this.rates.get(id) ?? [];
    kept.push(rate);
    if (kept.length > HISTORY) kept.shift();
    this.rates.set(id, kept);
  }

  #onError(frame) {
    if (frame.code === 'unauthorized') this.#setPhase('locked');
    else if (NOT_READY.has(frame.code) && this.phase !== 'ready') this.#setPhase('starting');
    else this.#events.push({ type: 'problem', message: frame.message });
  }

  #setPhase(phase) {
    this.phase = phase;
    this.#events.push({ type: 'phase' });
  }
}

/** What was counted since; what began anew counts from nothing. */
function grown(old, now, name) {
  if (!now.load || !old?.load || old.incarnation !== now.incarnation) return 0;
  return Math.max(0, now.load[name] - old.load[name]);
}
