/** Ties the state machine, the REST calls and the views together. */

import { Announcer } from './announcer.js';
import { loadMarkdown } from './answer.js';
import { Api } from './api.js';
import { Composer } from './composer.js';
import { contained } from './dom.js';
import { Drawer } from './drawer.js';
import { Follower } from './follow.js';
import { fullness } from './format.js';
import { ChatCore } from './protocol.js';
import { Rail } from './rail.js';
import { SessionIndex } from './sessions.js';
import { Settings } from './settings.js';
import { Connection } from './socket.js';
import { StatusBanner } from './status.js';
import { onElsewhere, readCalls, readDraft, readFollow, readKey, readPerson, readUnsent, writeCalls, writeDraft, writeKey, writePerson, writeUnsent } from './storage.js';
import { toast } from './toast.js';
import { Transcript } from './transcript.js';
import { isLive, newId } from './turn.js';
import { NOT_YET } from './versions.js';

const showShortcuts = async () => (await import('./shortcuts.js')).showShortcuts();

const UNDO_MS = 10000; // the page's promise; the server keeps a deleted session for 30 s
const NAME = 'Overture';
const byId = (id) => document.getElementById(id);

/** The page. */
export class App {
  #keyAsked = false;
  #lists = 0; // only the last one's answer is shown
  #isListing = false;
  #creating = false;
  #removing = new Set(); // conversations that are deleted on this page
  #sought = null; // the turn that a search found, until it has been shown
  #events = {
    phase: () => this.#onPhase(),
    models: () => this.#onModels(),
    current: () => this.#onCurrent(),
    session: ({ sessionId }) => {
      this.#onSession(sessionId);
      this.#showSought();
    },
    turn: ({ turn }) => this.#onTurn(turn),
    text: ({ turn }) => this.#onText(turn),
    calls: ({ turn, calls }) => this.#onCalls(turn, calls),
    listed: (event) => this.#onListed(event),
    relisted: (event) => this.#onRelisted(event),
    gone: ({ sessionId }) => this.#onGone(sessionId),
    stale: ({ sessionId }) => this.#act(() => this.core.reread(sessionId)),
    problem: (event) => this.#onProblem(event),
    silence: () => this.banner.update(),
    unsent: ({ turn: { id, request, error } }) => writeUnsent(id, request && { ...request, error }),
    homeless: ({ turn }) => this.#onHomeless(turn),
    warmth: () => this.#onWarmth(),
  };

  constructor() {
    this.core = new ChatCore();
    this.core.apiKey = readKey();
    this.connection = new Connection(this.core, socketUrl(), () => this.#flush());
    this.api = new Api(() => this.core.apiKey, (call) => this.connection.during(call));
    this.index = new SessionIndex();
    this.#makeViews();
    this.#listen();
  }

  /** Opens the session of the address bar and connects. */
  start() {
    this.core.lastOwner = readPerson();
    this.core.keep(readUnsent());
    this.core.open(sessionFromHash());
    this.connection.connect();
    this.composer.focus();
  }

  #makeViews() {
    this.announcer = new Announcer(byId('announcer'));
    this.follower = new Follower(byId('scroller'), byId('new-text'));
    this.transcript = new Transcript(byId('transcript'), {
      picture: (id) => this.api.picture(id),
      canGoOn: (turn) => this.core.canGoOn(turn),
      goOn: (turn) => this.#act(() => this.core.goOn(turn.id)),
      regenerate: (turn) => this.#replace(turn, turn.content),
      edit: (turn, text) => this.#replace(turn, text),
      retry: (turn) => this.#retry(turn),
      discard: (turn) => this.#discard(turn),
      canCompare: () => this.core.models.length > 1,
      compare: async (turn) => (await import('./compare.js')).compare(turn, this.core, (ask) => this.#ask(ask), (kept) => this.#goOn(kept)),
      sumUp: () => this.#sumUp(),
      choose: (turn, versionId, way) => this.#choose(turn, versionId, way),
      grown: () => this.follower.grown(),
      allow: (turn, call, answer) => this.#act(() => this.core.allow(turn, call, answer)),
      opened: () => this.follower.hold(),
    });
    this.composer = new Composer(byId('composer'), {
      send: (text, pictures) => this.#send(text, pictures),
      upload: (file) => this.api.storePicture(file),
      readDocument: (file) => this.api.readDocument(file),
      stop: () => this.#stop(),
      typing: (draft) => this.#typing(draft),
      pick: (adapter) => this.#pick(adapter),
      // What is known of them stays when the server cannot be asked.
      adapters: () => this.api.adapters().catch(() => null),
      editLast: () => this.#editLast(),
      sumUp: () => this.#sumUp(),
    });
    this.rail = new Rail({ list: byId('session-list'), search: byId('search'), status: byId('list-status') }, {
      open: (sessionId, turnId) => this.#openFound(sessionId, turnId),
      rename: (id, title) => this.#rename(id, title),
      remove: (id) => this.#remove(id),
      pin: (id, isPinned) => this.#pin(id, isPinned),
      file: (session) => this.#file(session),
      share: async (id) => this.#tell((await import('./shared.js')).shareConversation(this.api, id)),
      save: async (id, format) => (await import('./transfer.js')).exportSession(this.api, id, format),
      search: async (q) => (await this.#tell(this.api.list({ q, origin: this.#origin() })))?.sessions ?? [],
      more: () => this.#list(false),
    }, () => ({ sessions: this.index.sorted(), hasMore: this.index.next !== null, current: this.core.current,
      isRunning: (id) => Boolean(this.core.liveTurn(id)), isWarm: (id) => this.core.warm.has(id) }));
    this.settings = new Settings(byId('settings-button'), this.core, this.api, this.composer);
    this.drawer = new Drawer(byId('rail'), { open: byId('menu-button'), close: byId('rail-close') }, byId('backdrop'), byId('main'));
    this.banner = new StatusBanner(byId('banner'), this.core, {
      retry: () => this.connection.retryNow(),
      greet: () => this.#act(() => this.core.opened()),
      unlock: () => this.#unlock(),
      readiness: () => this.api.readiness(),
    });
  }

  #listen() {
    document.addEventListener('typeset', () => this.follower.grown());
    addEventListener('unhandledrejection', () => toast('The server could not be reached.'));
    addEventListener('hashchange', () => {
      this.#openSession(sessionFromHash());
      this.#showShared();
    });
    onElsewhere((key) => this.#takeKey(key), (owner) => this.#followPerson(owner));
    document.addEventListener('visibilitychange', () => this.#lookAgain());
    document.addEventListener('keydown', (event) => this.#onKey(event));
    byId('shortcuts-button').addEventListener('click', showShortcuts);
    byId('calls-button').addEventListener('click', () => this.#showCalls(!readCalls()));
    byId('calls-button').setAttribute('aria-pressed', String(readCalls()));
    for (const button of document.querySelectorAll('.new-chat')) {
      button.addEventListener('click', () => this.#newChat());
    }
  }

  // ---------------------------------------------------------------- what the user does

  async #send(text, pictures) {
    if (this.#creating) return;
    this.#creating = true;
    const { current } = this.core;
    await this.settings.saved();
    const sessionId = this.core.current === current && (current ?? await this.#createSession(text));
    this.#creating = false;
    if (!sessionId) return;
    if (current) this.composer.sent(text);
    this.#ask({ sessionId, content: text, pictures });
  }

  /** Makes the session first, so that a repeated message can never open a second one. */
  async #createSession(text) {
    const session = await this.#tell(this.api.create(this.composer.adapter, this.settings.current));
    if (!session && (this.core.silence || this.core.phase !== 'ready')) this.composer.hold();
    if (!session || this.core.current) return null; // gone elsewhere: it stays a draft
    this.composer.sent(text, session.id);
    this.settings.startAfresh();
    this.core.load({ ...session, turns: session.turns ?? [] });
    this.core.open(session.id);
    setHash(session.id);
    this.#flush();
    return session.id;
  }

  /** Sends what waited in conversations that are not open for an answer or the server. */
  async #sendQueued() {
    await this.settings.saved();
    for (const [sessionId, message] of this.composer.takeQueued((id) => this.core.sessions.get(id)?.loaded && !this.core.liveTurn(id))) {
      this.#act(() => this.core.ask({ id: newId(), sessionId, ...message }));
    }
  }

  #ask({ sessionId, content, pictures, after, adapter = this.composer.adapter }) {
    const ask = { id: newId(), sessionId, content, pictures, adapter };
    if (after !== undefined) ask.after = after;
    this.index.upsert({ id: sessionId, adapter: ask.adapter });
    this.#act(() => this.core.ask(ask));
    const asked = this.transcript.elementOf(ask.id);
    if (readFollow() || !asked) this.follower.toEnd();
    else this.follower.raise(asked);
    return this.core.turns.get(ask.id);
  }

  /** Asks again in the place of a turn, which is kept as another version, with what follows it. */
  async #replace(turn, content) {
    await this.settings.saved();
    if (this.core.liveTurn(turn.sessionId)) return this.composer.rescue(content);
    const { sessionId, pictures } = turn;
    this.#ask({ sessionId, content, pictures, after: this.core.turnBefore(turn)?.id ?? null });
    return this.composer.focus();
  }

  /** Shows another version of a message; its arrows stay under the pointer and keep the focus. */
  async #choose(turn, versionId, way) {
    if (!this.core.canSwitch(turn.sessionId)) return toast(NOT_YET);
    const arrows = this.transcript.focusVersions(turn.id, way);
    const session = await this.#tell(this.api.choose(turn.sessionId, versionId));
    if (!session) return;
    this.follower.hold();
    const before = arrows?.getBoundingClientRect().top;
    this.#act(() => this.core.load(session));
    if (turn.sessionId !== this.core.current) return;
    this.follower.hold();
    const shown = this.transcript.focusVersions(versionId, way);
    if (!shown || before === undefined) return;
    byId('scroller').scrollTop += shown.getBoundingClientRect().top - before;
    this.announcer.say(shown.getAttribute('aria-label'));
  }

  /** Goes on behind one of two compared answers, with the model that gave it; where none was kept, with the model that is picked. */
  async #goOn(kept) {
    if (kept) this.composer.adapter = kept.adapter;
    await this.#pick(this.composer.adapter);
    if (kept && !this.#session().turns.some(({ id }) => id === kept.id)) this.#choose(kept, kept.id);
  }

  async #retry(turn) {
    await this.settings.saved();
    this.#act(() => this.core.retry(turn.id, this.composer.adapter));
  }

  /** Goes on in a new chat that begins with a summary of the open one. */
  async #sumUp() {
    const { chatWithSummary } = await import('./summary.js');
    const { models, server } = this.core;
    const model = this.composer.adapter ?? models[0].id;
    const made = await chatWithSummary(this.api, this.#session(), { model, maxTokens: server.max_model_len });
    if (made) location.hash = `#/s/${encodeURIComponent(made.id)}`;
  }

  /** Takes away a message that was not accepted or whose answer failed, and with the first one its empty conversation. */
  async #discard(turn) {
    if (turn.request) this.#act(() => this.core.discard(turn.id));
    else {
      const stored = await this.#tell(this.api.discard(turn.sessionId, turn.id));
      if (!stored) return;
      this.#act(() => this.core.load(stored));
    }
    const session = this.core.sessions.get(turn.sessionId);
    if (!session?.loaded || session.turns.length) return;
    if (this.#forget(turn.sessionId)) this.composer.write(turn.content);
    this.#tell(this.api.remove(turn.sessionId));
  }

  #stop() {
    const turn = this.core.liveTurn(this.core.current);
    if (turn) this.#act(() => this.core.stop(turn.id));
    return Boolean(turn);
  }

  /** @param {string} [draft]  what is typed, where the user lets the server read along */
  #typing(draft) {
    const { current } = this.core;
    // What is computed for a chat that has no id yet knows no system prompt, so it would not fit.
    if (current || (draft !== undefined && !this.settings.current.system_prompt)) this.#act(() => this.core.typing(current ?? undefined, this.composer.adapter, draft));
  }

  #onWarmth() {
    this.rail.mark();
    this.composer.showWarmth(this.core.warm.has(this.core.current));
  }

  async #pick(adapter) {
    const { current } = this.core;
    if (!current) return;
    this.index.upsert({ id: current, adapter });
    this.rail.draw();
    this.#typing();
    await this.#tell(this.api.patch(current, { adapter }));
  }

  #editLast() {
    const turn = this.#session()?.turns.at(-1);
    if (turn && !isLive(turn)) this.transcript.edit(turn);
  }

  #newChat() {
    this.drawer.close();
    if (location.hash) setHash(null);
    this.#openSession(null);
    this.composer.focus();
  }

  #openSession(sessionId) {
    if (sessionId === this.core.current) return;
    this.#act(() => this.core.open(sessionId));
    this.follower.toEnd();
    this.composer.focus();
  }

  /** A conversation was picked in the list, perhaps for a turn that a search found. The address opens it. */
  #openFound(sessionId, turnId) {
    this.drawer.close();
    this.#sought = turnId ? { sessionId, turnId } : null;
    if (sessionId === this.core.current) this.#showSought();
  }

  /** Shows the shared conversation that the address names, if it names one, and then the reader's copy. */
  async #showShared() {
    if (!location.hash.startsWith('#/shared/') || this.core.phase !== 'ready') return;
    const { showShared, tokenIn } = await import('./shared.js');
    const token = tokenIn(location.hash);
    if (!token) return; // it is being shown already
    history.replaceState(null, '', location.pathname);
    const copy = await this.#tell(showShared(this.api, token));
    if (copy) location.hash = `#/s/${encodeURIComponent(copy.id)}`;
  }

  /** Brings what a search found into view once the conversation is there, as another version if it must be. */
  async #showSought() {
    const { sessionId, turnId } = this.#sought ?? {};
    if (!sessionId || sessionId !== this.core.current || !this.#session()?.loaded) return;
    this.#sought = null;
    let element = this.transcript.elementOf(turnId);
    if (!element && this.core.canSwitch(sessionId)) {
      const session = await this.#tell(this.api.choose(sessionId, turnId));
      if (session) this.#act(() => this.core.load(session));
      element = this.transcript.elementOf(turnId);
    }
    if (element) this.follower.show(element);
  }

  async #rename(id, title) {
    const before = this.index.get(id)?.title;
    this.#act(() => this.core.rename(id, title));
    const isStored = await this.#tell(this.api.patch(id, { title }));
    // Again: where that took long, what the server told meanwhile was from before. It may have been deleted, too.
    if (this.index.get(id)) this.#act(() => this.core.rename(id, isStored ? title : before));
    this.rail.refreshSearch();
  }

  async #pin(id, isPinned) {
    if (!await this.#tell(this.api.patch(id, { is_pinned: isPinned }))) return;
    this.rail.refreshSearch();
    this.announcer.say(isPinned ? 'Pinned.' : 'No longer pinned.');
  }

  async #file({ id, folder }) {
    const { askFolder } = await import('./folder.js');
    const known = [...new Set(this.index.sorted().map((session) => session.folder).filter(Boolean))].sort();
    const wanted = await askFolder(folder, known);
    if (wanted !== undefined && wanted !== folder) await this.#tell(this.api.patch(id, { folder: wanted }));
  }

  async #remove(id) {
    const title = this.index.get(id)?.title || 'New chat';
    this.#removing.add(id);
    const removed = await this.#tell(this.api.remove(id));
    this.#removing.delete(id);
    if (removed === undefined) return;
    const wasOpen = this.#forget(id);
    toast(`“${title}” deleted.`, { label: 'Undo', ms: UNDO_MS, act: () => this.#restore(id, wasOpen) });
    this.announcer.say('Conversation deleted. Undo is available for ten seconds.');
  }

  #forget(id) {
    this.index.remove(id);
    const wasOpen = id === this.core.current;
    this.core.forget(id);
    if (wasOpen) this.#newChat();
    this.rail.refreshSearch();
    return wasOpen;
  }

  async #restore(id, wasOpen) {
    if (await this.#tell(this.api.restore(id)) === undefined) return;
    this.rail.refreshSearch();
    if (!wasOpen) return;
    setHash(id);
    this.#openSession(id);
  }

  #onKey(event) {
    const key = event.key.toLowerCase();
    const chord = event.ctrlKey || event.metaKey;
    if (chord && key === 'k') {
      event.preventDefault();
      this.drawer.open();
      byId('search').select();
    } else if (chord && event.shiftKey && key === 'o') {
      event.preventDefault();
      this.#newChat();
    } else if (chord && event.shiftKey && key === 'e') {
      event.preventDefault();
      byId('engine-link').click();
    } else if (chord && !event.shiftKey && key === 'b') {
      event.preventDefault();
      this.drawer.toggle();
    } else if (chord && key === ',') {
      event.preventDefault();
      this.settings.toggle();
    } else if (key === 'escape') {
      this.#stop();
    } else if (key === '?' && !event.target.closest('input, textarea, select')) {
      showShortcuts();
    }
  }

  // ---------------------------------------------------------------- what the core reports

  /** Gives the core an input and passes on what came of it. */
  #act(input) {
    input();
    this.#flush();
  }

  #flush() {
    const { frames, events } = this.core.drain();
    for (const frame of frames) this.connection.send(frame);
    for (const event of events) contained(() => this.#events[event.type](event));
  }

  #onPhase() {
    const { phase, isAnother } = this.core;
    if (isAnother) return this.#startAnew();
    this.banner.update();
    this.#showState();
    // It stays hidden until it is known who has come, whatever key is tried.
    if (phase === 'locked' || phase === 'ready' || this.core.lastOwner === null) document.body.classList.toggle('locked', phase === 'locked');
    if (phase === 'locked') document.title = NAME;
    if (this.core.phase === 'offline') this.api.abandon();
    if (phase === 'starting' && !this.#lists) this.#list(true); // it is there before the engine is
    if (this.core.phase === 'ready') {
      this.#keyAsked = false;
      byId('key')?.closest('dialog').close();
      writePerson(this.core.user?.owner);
      this.api.resume();
      this.#list(true);
      this.#showShared();
      this.#sendQueued();
    } else if (this.core.phase === 'locked' && !this.#keyAsked) {
      this.#unlock();
    }
  }

  /** Shows the page to another person, without what the one before saw and wrote. */
  async #startAnew() {
    const { changePerson, reload } = await import('./sheet/leave.js');
    changePerson(this.core.user?.owner ?? '');
    reload();
  }

  /** Somebody has signed in or out in another window. */
  async #followPerson(owner) {
    const { lastOwner } = this.core;
    if (lastOwner === null) this.#lookAgain();
    else if (owner !== lastOwner) (await import('./sheet/leave.js')).reload();
  }

  /** Somebody comes back to this window, and may have signed in without a key in another one. */
  #lookAgain() {
    if (!document.hidden && this.core.phase === 'locked' && !this.core.apiKey) this.connection.connect();
  }

  /** Uses the key that was entered in another window. */
  #takeKey(key) {
    this.core.apiKey = key;
    const asked = byId('key')?.closest('dialog');
    if (asked && key) asked.close(key);
    else this.connection.connect(); // also where all is well: it may be another person's
  }

  async #unlock() {
    this.#keyAsked = true;
    const { askKey } = await import('./key.js');
    const { apiKey, user } = this.core;
    const key = await askKey(apiKey ? user ? 'withdrawn' : 'wrong' : user ? 'ended' : undefined);
    if (!key) return;
    Object.assign(this.core, { apiKey: key, user: null });
    writeKey(key);
    this.#keyAsked = false;
    this.connection.connect();
    this.composer.focus();
  }

  #onModels() {
    const { models, server } = this.core;
    loadMarkdown(); // behind the first screen, before the first answer
    this.composer.maxBytes = server.max_message_bytes ?? Infinity;
    this.composer.maxDocumentBytes = server.max_document_bytes ?? Infinity;
    this.composer.maxImages = server.max_images ?? 0;
    this.composer.maxTokens = server.max_model_len || Infinity;
    this.composer.offersAhead = Boolean(server.drafts);
    this.composer.offer(models);
    Object.assign(byId('server'), { textContent: server.model.split('/').at(-1), title: `${server.model} · ${NAME} ${server.version}` });
    import('./welcome.js').then(({ showExamples }) => showExamples(byId('examples'), models, ({ text, adapter }) => {
      this.composer.adapter = adapter ?? null;
      this.composer.write(text);
      this.composer.area.focus();
    }));
  }

  #onCurrent() {
    this.composer.open(this.core.current);
    this.composer.adapter = this.#session()?.adapter ?? this.index.get(this.core.current)?.adapter ?? null;
    this.#onSession(this.core.current);
    this.#onWarmth();
  }

  #onSession(sessionId) {
    if (sessionId !== this.core.current) return;
    const session = this.#session();
    const empty = !session?.turns.length;
    this.settings.follow();
    byId('welcome').hidden = !empty || Boolean(sessionId && !session?.loaded);
    this.transcript.show(session?.turns ?? []);
    this.#showTitle();
    this.#showState();
  }

  #onTurn(turn) {
    this.rail.mark();
    document.dispatchEvent(new CustomEvent('answering', { detail: turn }));
    if (!isLive(turn)) this.#sendQueued();
    if (turn.sessionId !== this.core.current) return;
    this.transcript.update(turn);
    if (!isLive(turn)) this.announcer.follow(turn, true);
    this.#showState();
  }

  #onText(turn) {
    document.dispatchEvent(new CustomEvent('answering', { detail: turn }));
    if (turn.sessionId !== this.core.current) return;
    this.transcript.grow(turn);
    this.announcer.follow(turn, false);
  }

  #onCalls({ sessionId }, calls) {
    const asked = calls.findLast(({ state }) => state === 'asking');
    if (asked && sessionId === this.core.current) this.announcer.say(`The answer would use ${asked.tool} of ${asked.server}. May it?`);
  }

  #onListed({ sessionId, title, adapter, updatedAt }) {
    this.index.upsert({ id: sessionId, title, adapter, updated_at: updatedAt ?? Date.now() / 1000 });
    if (sessionId === this.core.current) {
      if (adapter !== undefined) this.composer.adapter = adapter;
      this.#showTitle();
    }
    this.rail.draw();
  }

  #onRelisted({ sessionId, session }) {
    const isShown = session?.is_pinned || session?.origin === 'chat' || readCalls();
    if (!session && !this.#removing.has(sessionId)) this.#leaveDeleted(sessionId);
    if (session && isShown) this.index.put(session);
    else this.index.remove(sessionId);
    this.#showTitle();
    this.rail.draw();
  }

  /** A conversation was deleted elsewhere: what it is not told any more becomes a draft. */
  #leaveDeleted(sessionId) {
    const unsent = this.core.sessions.get(sessionId)?.turns.filter(({ request }) => request) ?? [];
    this.core.forget(sessionId);
    if (sessionId === this.core.current) {
      this.#act(() => this.core.open(null));
      this.#onGone(sessionId);
    }
    unsent.forEach((turn) => this.#onHomeless(turn));
  }

  /** The server refused something that is no message; if it was to open a conversation, that can be tried again. */
  #onProblem({ message, sessionId }) {
    const isOpening = sessionId && sessionId === this.core.current && !this.#session()?.loaded;
    toast(message, isOpening ? { label: 'Try again', act: () => this.#act(() => this.core.open(sessionId)) } : {});
  }

  /** A message of an earlier visit, whose conversation is gone: it becomes the draft of a new chat, or its end. */
  #onHomeless({ content }) {
    const text = [readDraft(null), content].filter(Boolean).join('\n\n');
    if (this.core.current === null) this.composer.write(text);
    else writeDraft(null, text);
    toast('A message could not be sent, as its conversation is gone. It stands in the text field of a new chat.', { ms: 15000 });
  }

  #onGone(sessionId) {
    if (sessionId === sessionFromHash()) setHash(null);
    toast('This conversation does not exist any more.');
    this.index.remove(sessionId);
    this.rail.draw();
  }

  // ---------------------------------------------------------------- showing it

  #session() {
    return this.core.sessions.get(this.core.current);
  }

  #showTitle() {
    const title = this.#session()?.title ?? this.index.get(this.core.current)?.title;
    byId('title').textContent = title || 'New chat';
    document.title = title ? `${title} – ${NAME}` : NAME;
  }

  #showState() {
    const running = Boolean(this.core.liveTurn(this.core.current));
    this.composer.setState(this.core.phase === 'ready', running);
    const maxTokens = this.core.server?.max_model_len;
    this.composer.showFullness(fullness(this.#session()?.turns, maxTokens), maxTokens);
  }

  async #list(isFirst) {
    if (!isFirst && (this.#isListing || this.index.next === null)) return;
    const number = this.#lists += 1;
    this.#isListing = true;
    const askedAt = this.index.numChanges;
    const page = await this.#tell(this.api.list({ before: isFirst ? null : this.index.next, origin: this.#origin() }));
    if (number !== this.#lists) return;
    this.#isListing = false;
    if (!page) return;
    this.index.addPage(page, isFirst, askedAt);
    this.rail.draw();
  }

  /** Calls of the APIs would bury one's own chats: they are listed when asked for. */
  #origin() {
    return readCalls() ? 'all' : 'chat';
  }

  #showCalls(shown) {
    writeCalls(shown);
    byId('calls-button').setAttribute('aria-pressed', String(shown));
    this.#list(true);
    this.rail.refreshSearch();
  }

  /** Waits for a REST call; says so when it fails, and resolves to undefined. */
  async #tell(call) {
    try {
      return await call;
    } catch (error) {
      toast(error.message);
      return undefined;
    }
  }
}

function socketUrl() {
  const url = new URL('ws', location.href);
  url.protocol = url.protocol.replace('http', 'ws');
  return url.href;
}

function sessionFromHash() {
  const [, id] = location.hash.match(/^#\/s\/(.+)$/) ?? [];
  try {
    return id ? decodeURIComponent(id) : null;
  } catch {
    return id; // of no conversation, which is then said
  }
}

/** Changes the address without a second event: whoever calls this opens the session itself. */
function setHash(sessionId) {
  const hash = sessionId ? `#/s/${encodeURIComponent(sessionId)}` : location.pathname;
  history.pushState(null, '', hash);
}
