/**
 * The client half of the chat protocol (docs/protocol.md): a state machine without I/O, clock or DOM.
 *
 * Feed it what happened (`opened`, `receive`, `closed`, `ask` …) and call `drain()` afterwards: it
 * returns the frames to send and the events that views may want to react to.
 */

import { hasTextBehindCalls, isLive, messageFrame, newTurn, refreshed } from './turn.js';

const BACKOFF_MS = [300, 1000, 2000, 4000, 8000, 15000, 30000]; // chosen: a blip is never noticed
const CROWDED_MS = 15000; // chosen: other sockets have to close first
const MAX_SENDS = 4; // chosen: a message that kills its socket every time is given up

const NOT_READY = new Set(['starting', 'draining', 'engine_failed']);

const CLOSE = { TOO_BIG: 1009, UNAUTHORIZED: 4401, TOO_MANY: 4429 };

/** Milliseconds to wait before connection attempt number `attempt` (1 is the first retry). */
export function backoffMs(attempt, closeCode) {
  const wait = BACKOFF_MS[Math.min(attempt, BACKOFF_MS.length) - 1];
  return closeCode === CLOSE.TOO_MANY ? Math.max(wait, CROWDED_MS) : wait;
}

/** Everything the page knows about the server, its sessions and their turns. */
export class ChatCore {
  #frames = [];
  #events = [];
  #isGreeted = false; // on this connection
  #hellos = []; // those that were not answered, each as the session that it opens, null without one
  #handlers = {
    ready: (frame) => this.#onReady(frame),
    accepted: (frame) => this.#onAccepted(frame),
    delta: (frame) => this.#onDelta(frame),
    done: (frame) => this.#onDone(frame),
    error: (frame) => this.#onError(frame),
    advisory: (frame) => this.#onAdvisory(frame),
    shown: (frame) => this.#onShown(frame),
    listed: (frame) => this.#onListFrame(frame),
  };

  constructor() {
    /** @type {'connecting'|'offline'|'starting'|'ready'|'locked'} */
    this.phase = 'connecting';
    this.apiKey = null;
    this.user = null; // {owner, name, role, can_sign_out}
    this.lastOwner = null; // of the person who used this page before, with whose name nothing unsent may go on
    this.isAnother = false;
    this.attempt = 0;
    this.retryAt = 0;
    this.closeCode = 0;
    this.models = [];
    this.server = null;
    this.current = null;
    this.advisoriesOff = false;
    /** @type {?{since: number, leaveAt: ?number}} since when the server says nothing, and when its connection is given up */
    this.silence = null;
    /** Sessions whose KV is on the device, as far as the server has told. */
    this.warm = new Set();
    this.sessions = new Map();
    this.turns = new Map();
  }

  /** Hands over, and forgets, the frames to send and the events that came up. */
  drain() {
    const drained = { frames: this.#frames, events: this.#events };
    this.#frames = [];
    this.#events = [];
    return drained;
  }

  // ---------------------------------------------------------------- the socket

  /** A connection attempt begins. */
  connecting() {
    this.#setPhase('connecting');
  }

  /** Whether an answer of the server is waited for, so that its silence matters. */
  get isWaiting() {
    if (this.phase === 'connecting') return true;
    return this.phase === 'ready' && (this.#hellos.length > 0 || [...this.turns.values()].some(isLive));
  }

  /** Whether a message waits to be acknowledged. */
  get hasUnsent() {
    return [...this.turns.values()].some((turn) => isLive(turn) && turn.request);
  }

  /** The server says nothing since a moment (null: it does); returns whether that is news. */
  hush(since, leaveAt) {
    if (since === (this.silence?.since ?? null) && (!this.silence || leaveAt === this.silence.leaveAt)) return false;
    this.silence = since === null ? null : { since, leaveAt };
    this.#emit('silence', {});
    return true;
  }

  /** The socket is open, or a server that was starting says that it is ready: say hello. */
  opened() {
    this.#isGreeted = false;
    this.#hellos = [];
    this.#greet(this.current);
  }

  /** The first hello on a connection, with the turns that go on there; it opens a session, or none. */
  #greet(sessionId) {
    const resume = [...this.turns.values()]
      .filter((turn) => isLive(turn) && !turn.request)
      .map(({ id, seq }) => ({ id, seq }));
    const hello = {};
    if (sessionId) hello.session_id = sessionId;
    if (resume.length) hello.resume = resume;
    if (this.apiKey) hello.api_key = this.apiKey;
    this.#hello(hello);
  }

  /** The socket closed. Sets `retryAt`, unless a key is needed first. */
  closed(code, now) {
    this.closeCode = code;
    this.advisoriesOff = false;
    this.#hellos = [];
    if (code === CLOSE.TOO_BIG) this.#giveUpUnaccepted('The message is too large for this server.');
    if (code === CLOSE.UNAUTHORIZED || this.phase === 'locked') {
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

  // ---------------------------------------------------------------- what the user does

  /** Looks at a session (null: a new chat). Its history follows with `ready`. */
  open(sessionId) {
    this.current = sessionId;
    this.#emit('current', { sessionId });
    if (sessionId && this.phase === 'ready') this.#hello({ session_id: sessionId });
  }

  /** Reads a session again whose copy here has fallen behind; without a connection, as soon as there is one. */
  reread(sessionId) {
    this.#session(sessionId).isStale = true;
    if (this.phase === 'ready') this.#hello({ session_id: sessionId });
  }

  /**
   * Asks in a session that the server knows.
   *
   * @param {{id: string, sessionId: string, content: string, adapter: ?string, after?: ?string, pictures?: object[]}} ask
   *   `after` is the last turn to keep (null: none); left out, the turn is appended.
   * @returns {Turn}
   */
  ask({ id, sessionId, content, adapter, after, pictures = [] }) {
    const request = messageFrame({ id, sessionId, content, adapter, pictures });
    if (after !== undefined) request.after = after;
    const turn = newTurn({ id, content, adapter, pictures, status: 'sending' }, sessionId);
    this.turns.set(id, turn);
    this.#owe(turn, request);
    this.#place(turn);
    this.#transmit(turn);
    return turn;
  }

  /**
   * Takes over messages of an earlier visit that the server has not acknowledged; they are sent once it is there. Those that it refused
   * wait to be sent again or dismissed.
   *
   * @param {object[]} requests  their `message` frames, with the `error` of a refusal
   */
  keep(requests) {
    for (const { error = null, ...request } of requests) {
      const { id, session_id: sessionId, content, adapter } = request;
      if (this.turns.has(id)) continue;
      const pictures = (request.pictures ?? []).map((name) => ({ id: name }));
      const turn = newTurn({ id, content, adapter, pictures, status: error ? 'failed' : 'sending' }, sessionId);
      Object.assign(turn, { request, error, goesOn: request.continues });
      this.turns.set(id, turn);
      if (error) this.#session(sessionId).turns.push(turn);
      else this.#place(turn);
    }
  }

  /** Asks a failed turn again, under the same id. */
  retry(id, adapter) {
    const turn = this.turns.get(id);
    if (!turn || isLive(turn)) return;
    const request = turn.request ?? messageFrame(turn);
    Object.assign(turn, { adapter, answer: '', reasoning: '', calls: [], seq: 0, status: 'sending', error: null, sends: 0,
      stopRequested: false });
    this.#owe(turn, { ...request, adapter });
    this.#detach(turn);
    this.#place(turn);
    this.#transmit(turn);
  }

  /** Lets a cut answer go on, behind what is there of it. */
  goOn(id) {
    const turn = this.turns.get(id);
    if (!turn || isLive(turn)) return;
    // The server sends the answer from its beginning.
    Object.assign(turn, { answer: '', reasoning: '', calls: [], seq: 0, status: 'sending', sends: 0, stopRequested: false, goesOn: true });
    this.#owe(turn, { ...messageFrame(turn), continues: true });
    this.#emit('turn', { turn });
    this.#transmit(turn);
  }

  /** Whether a turn's answer was cut and can go on: it is the last one, and the model's context has room. */
  canGoOn(turn) {
    const { usage, status, finishReason } = turn;
    const isCut = (status === 'done' && finishReason === 'length') || status === 'stopped';
    const used = usage ? usage.prompt_tokens + usage.completion_tokens : 0;
    const isLast = this.sessions.get(turn.sessionId)?.turns.at(-1) === turn;
    return isCut && isLast && hasTextBehindCalls(turn) && used < (this.server?.max_model_len || Infinity);
  }

  /** Takes away a failed turn that the server never stored. */
  discard(id) {
    const turn = this.turns.get(id);
    if (!turn || isLive(turn)) return;
    this.#detach(turn);
    this.#drop(turn);
    this.#emit('session', { sessionId: turn.sessionId });
  }

  /** Ends a turn; if the socket is down, as soon as it is back. */
  stop(id) {
    const turn = this.turns.get(id);
    if (!turn || !isLive(turn)) return;
    turn.stopRequested = true;
    if (!turn.request) this.#sendIfReady({ type: 'stop', id });
    this.#emit('turn', { turn });
  }

  /** Says whether a call of a tool may be made: 'once', 'always' in this conversation, or 'never'. */
  allow(turn, call, answer) {
    if (answer === 'always') turn.allowedCall = call.id;
    this.#sendIfReady({ type: 'allow', id: turn.id, call: call.id, answer });
  }

  /** Tells the server that a question is being typed. The text goes along only where `draft` is given. */
  typing(sessionId, adapter, draft) {
    if (!this.advisoriesOff) this.#sendIfReady({ type: 'typing', session_id: sessionId, adapter, draft });
  }

  #onAdvisory(frame) {
    if (frame.state === 'off') this.advisoriesOff = true;
    if (frame.state === 'warm') this.warm.add(frame.session_id);
    else this.warm.delete(frame.session_id);
    this.#emit('warmth', { sessionId: frame.session_id });
  }

  /** Another version of a message was chosen, on this page or another one. */
  #onShown({ session_id: sessionId, turn_id: turnId, is_changed: isChanged }) {
    const session = this.sessions.get(sessionId);
    if (session?.loaded && (isChanged || !session.turns.some((turn) => turn.id === turnId))) this.#emit('stale', { sessionId });
  }

  /** A conversation is new, changed or gone. */
  #onListFrame({ session_id: sessionId, session }) {
    this.#retitle(sessionId, session?.title);
    this.#emit('relisted', { sessionId, session });
  }

  /** Brings a session in line with the server's copy and follows turns that run there. */
  load(raw) {
    const session = this.#session(raw.id);
    const unstored = session.turns.filter((turn) => turn.request);
    const before = session.turns;
    const followed = new Set(before.filter(isLive));
    Object.assign(session, { title: raw.title, adapter: raw.adapter, settings: raw.settings, loaded: true, isStale: false });
    session.turns = raw.turns.map((rawTurn) => this.#mergeTurn(rawTurn, raw.id));
    for (const turn of before) if (!session.turns.includes(turn) && !turn.request) this.turns.delete(turn.id);
    for (const turn of unstored) this.#putBack(turn);
    this.#emit('session', { sessionId: raw.id });
    this.#emit('listed', { sessionId: raw.id, title: raw.title, adapter: raw.adapter,
      updatedAt: raw.updated_at });
    this.#follow(session, followed);
  }

  /** A session has another title. */
  rename(sessionId, title) {
    this.#retitle(sessionId, title);
    this.#emit('listed', { sessionId, title, updatedAt: 0 });
  }

  /** Forgets a deleted session. */
  forget(sessionId) {
    for (const turn of this.sessions.get(sessionId)?.turns ?? []) this.#drop(turn);
    this.sessions.delete(sessionId);
  }

  // ---------------------------------------------------------------- questions

  /** Whether other versions of a session's messages may be shown: nothing is being answered, and nothing waits to be sent again. */
  canSwitch(sessionId) {
    return !this.sessions.get(sessionId)?.turns.some((turn) => isLive(turn) || turn.request);
  }

  /** The turn under way in a session, if there is one. */
  liveTurn(sessionId) {
    return this.sessions.get(sessionId)?.turns.find(isLive);
  }

  /** The turn before this one that the server has, null for the first. */
  turnBefore(turn) {
    const { turns } = this.sessions.get(turn.sessionId);
    return turns.slice(0, turns.indexOf(turn)).findLast((other) => !other.request) ?? null;
  }

  // ---------------------------------------------------------------- frames from the server

  #onReady({ session, models, server, user = null }) {
    this.models = models;
    this.server = server;
    this.isAnother = this.lastOwner !== null && this.lastOwner !== (user?.owner ?? null);
    this.lastOwner = user?.owner ?? null;
    this.user = user;
    if (this.isAnother) return this.#setPhase('connecting'); // sends nothing that another person wrote
    this.attempt = 0;
    this.#hellos.shift();
    const wasGreeted = this.#isGreeted;
    this.#isGreeted = true;
    this.#setPhase('ready');
    this.#emit('models', {});
    if (session) this.load(session);
    if (wasGreeted) return;
    this.#send({ type: 'watch_list' });
    if (this.current && this.current !== session?.id) this.open(this.current);
    this.#catchUp();
    for (const { id, isStale } of this.sessions.values()) if (isStale && id !== this.current) this.reread(id);
  }

  /** After a new connection: sends what was never acknowledged, and the stops that had to wait. */
  #catchUp() {
    for (const turn of this.turns.values()) {
      if (!isLive(turn)) continue;
      if (turn.request) this.#transmit(turn);
      else if (turn.stopRequested) this.#send({ type: 'stop', id: turn.id });
    }
  }

  #onAccepted({ id, session_id: sessionId, title, versions }) {
    const turn = this.turns.get(id);
    if (!turn || !isLive(turn)) return;
    turn.status = 'running';
    turn.versions = versions ?? [];
    this.#owe(turn, null);
    for (const old of turn.replaced) this.turns.delete(old.id);
    turn.replaced = [];
    this.#retitle(sessionId, title);
    this.#emit('turn', { turn });
    this.#emit('listed', { sessionId, title });
    if (turn.stopRequested) this.#send({ type: 'stop', id });
  }

  #onDelta({ id, seq, text, reasoning = '', calls = [] }) {
    const turn = this.turns.get(id);
    if (!turn || !isLive(turn) || seq <= turn.seq) return;
    turn.seq = seq;
    turn.answer += text;
    turn.reasoning += reasoning;
    this.#emit('text', { turn });
    if (calls.length) this.#onCalls(turn, calls);
  }

  /** Calls of tools that are new or stand differently now. What was allowed for good is among the settings by now. */
  #onCalls(turn, calls) {
    const isAllowed = calls.some((call) => call.state === 'running' && call.id === turn.allowedCall);
    turn.calls = [...new Map([...turn.calls, ...calls].map((call) => [call.id, call])).values()];
    this.#emit('calls', { turn, calls });
    if (isAllowed) this.#emit('stale', { sessionId: turn.sessionId });
  }

  #onDone(frame) {
    const turn = this.turns.get(frame.id);
    this.#retitle(frame.session_id, frame.title);
    if (turn && isLive(turn)) {
      const stopped = frame.finish_reason === 'stopped';
      Object.assign(turn, { status: stopped ? 'stopped' : 'done', usage: frame.usage,
        timings: frame.timings, advisory: frame.advisory, finishReason: frame.finish_reason, goesOn: false });
      this.#owe(turn, null);
      this.#emit('turn', { turn });
      if (frame.seq > turn.seq) this.#emit('stale', { sessionId: frame.session_id });
    }
    this.#emit('listed', { sessionId: frame.session_id, title: frame.title });
  }

  #onError(frame) {
    if (frame.id !== undefined && frame.id !== null) {
      this.#onTurnError(frame);
      return;
    }
    const sessionId = this.#hellos.length ? this.#hellos.shift() : this.current; // frames are answered in their order
    if (frame.code === 'unauthorized') this.#setPhase('locked');
    else if (NOT_READY.has(frame.code) && this.phase !== 'ready') this.#setPhase('starting');
    else if (frame.code === 'not_found') this.#onSessionGone(sessionId);
    else if (this.phase !== 'ready' && sessionId) this.#greet(null); // all but that session may be well; it is opened again behind this
    else this.#emit('problem', { message: frame.message, code: frame.code, sessionId });
  }

  /** A session in `hello` does not exist: leave it, and greet again where that was the first one. */
  #onSessionGone(sessionId) {
    if (sessionId === this.current) this.open(null);
    this.#emit('gone', { sessionId });
    if (this.phase !== 'ready') this.opened();
  }

  #onTurnError({ id, code, message, retryable }) {
    const turn = this.turns.get(id);
    if (!turn || !isLive(turn)) return;
    if (code === 'not_found' && !turn.request) {
      turn.status = 'lost';
      this.#emit('stale', { sessionId: turn.sessionId });
      return;
    }
    if (code === 'not_found' && !this.sessions.get(turn.sessionId)?.loaded) {
      this.#detach(turn);
      this.#drop(turn);
      this.#emit('homeless', { turn });
      return;
    }
    this.#fail(turn, { code, message, retryable });
  }

  // ---------------------------------------------------------------- turns and sessions

  #fail(turn, error) {
    const { sessionId, goesOn } = turn;
    if (goesOn) { // it stays as it was
      turn.status = 'lost';
      this.#owe(turn, null);
      this.#emit('problem', { ...error, sessionId });
      this.#emit('stale', { sessionId });
      return;
    }
    turn.status = 'failed';
    turn.error = error;
    this.#owe(turn, turn.request);
    if (turn.replaced.length) {
      const { turns } = this.sessions.get(sessionId);
      turns.splice(turns.indexOf(turn), 0, ...turn.replaced);
      turn.replaced = [];
    }
    this.#emit('session', { sessionId });
    this.#emit('turn', { turn });
  }

  #giveUpUnaccepted(message) {
    for (const turn of this.turns.values()) {
      if (isLive(turn) && turn.request) {
        this.#fail(turn, { code: 'frame_too_large', message, retryable: false });
      }
    }
  }

  #transmit(turn) {
    if (this.phase !== 'ready') return;
    turn.sends += 1;
    if (turn.sends > MAX_SENDS) {
      const message = 'The connection was lost each time this message was sent.';
      this.#fail(turn, { code: 'internal', message, retryable: true });
      return;
    }
    this.#send({ ...turn.request });
  }

  /** What the server has yet to acknowledge of a turn, null: nothing. The page keeps it for its next visit. */
  #owe(turn, request) {
    turn.request = request;
    this.#emit('unsent', { turn });
  }

  /** Forgets a turn that is shown no more. */
  #drop(turn) {
    this.turns.delete(turn.id);
    if (turn.request) this.#owe(turn, null);
  }

  /** Puts an unaccepted turn into its session, where `after` says. */
  #place(turn) {
    const session = this.#session(turn.sessionId);
    const { after } = turn.request;
    if (after !== undefined) {
      const keep = after === null ? 0 : session.turns.findIndex((other) => other.id === after) + 1;
      turn.replaced = session.turns.splice(keep);
    }
    session.turns.push(turn);
    this.#emit('session', { sessionId: turn.sessionId });
  }

  #detach(turn) {
    const { turns } = this.sessions.get(turn.sessionId);
    turns.splice(turns.indexOf(turn), 1);
  }

  #session(id) {
    if (!this.sessions.has(id)) {
      this.sessions.set(id, { id, title: null, adapter: null, turns: [], loaded: false });
    }
    return this.sessions.get(id);
  }

  /** Keeps a turn that the server has not acknowledged across a merge. */
  #putBack(turn) {
    if (this.turns.has(turn.id) && this.turns.get(turn.id) !== turn) return;
    const { turns } = this.sessions.get(turn.sessionId);
    if (turns.includes(turn)) return;
    this.turns.set(turn.id, turn);
    if (isLive(turn)) this.#place(turn);
    else turns.push(turn);
  }

  /** A live turn stays as it is, since its frames are on their way; a dead one is the server's. */
  #mergeTurn(raw, sessionId) {
    const mine = this.turns.get(raw.id);
    if (mine && isLive(mine) && raw.status !== 'failed') return mine;
    const turn = mine ? Object.assign(mine, refreshed(raw)) : newTurn(raw, sessionId);
    if (turn.request) this.#owe(turn, null);
    this.turns.set(raw.id, turn);
    return turn;
  }

  #follow(session, followed) {
    const resume = session.turns
      .filter((turn) => turn.status === 'running' && !followed.has(turn))
      .map(({ id }) => ({ id, seq: 0 }));
    if (resume.length) this.#hello({ session_id: session.id, resume });
  }

  #retitle(sessionId, title) {
    const session = this.sessions.get(sessionId);
    if (session && title) session.title = title;
  }

  #setPhase(phase) {
    this.phase = phase;
    this.#emit('phase', { phase });
  }

  #sendIfReady(frame) {
    if (this.phase === 'ready') this.#send(frame);
  }

  #hello(fields) {
    this.#hellos.push(fields.session_id ?? null);
    this.#send({ type: 'hello', ...fields });
  }

  #send(frame) {
    this.#frames.push(frame);
  }

  #emit(type, detail) {
    this.#events.push({ type, ...detail });
  }
}
