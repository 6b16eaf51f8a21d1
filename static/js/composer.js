/** Where the user writes: text field, adapter picker, send and stop. */

import { fitHeight, isSend } from './dom.js';
import { count } from './format.js';
import { ModelPicker } from './picker.js';
import { readAhead, readDraft, writeAhead, writeDraft } from './storage.js';

const TYPING_EVERY_MS = 2000; // the most often that the server wants to hear of it
const DRAFT_EVERY_MS = 400; // the same, where it reads along
const BYTES_SPARE = 1024; // for the frame
const CHIP_FROM = 20000; // chosen: so long a paste is a file

/**
 * @typedef {object} ComposerActions
 * @property {(text: string, pictures: object[]) => void} send
 * @property {(file: Blob) => Promise<object>} upload  stores a picture
 * @property {(file: Blob) => Promise<object>} readDocument  its text
 * @property {() => void} stop
 * @property {(draft?: string) => void} typing
 * @property {(adapter: ?string) => void} pick
 * @property {() => Promise<?object[]>} adapters  how they are now, or null
 * @property {() => void} editLast
 * @property {() => void} sumUp  goes on in a new chat
 */

/** The composer at the bottom of the page. */
export class Composer {
  #attached = Promise.resolve();
  #maxImages = 0;
  #sessionId = null;
  #typedAt = -Infinity;
  /** What was typed before this script was there. */
  #early = '';
  #enabled = false;
  #running = false;
  #isSendable = false; // what is written, once the server is ready
  #waits = false; // it was sent, and goes once the server is ready and the answer before it is finished
  #draftTimer = 0;
  #queued = new Map(); // messages that wait in conversations that are not open

  /**
   * @param {HTMLFormElement} form
   * @param {ComposerActions} actions
   */
  constructor(form, actions) {
    this.form = form;
    this.actions = actions;
    this.area = form.querySelector('textarea');
    this.#early = this.area.value;
    this.sendButton = form.querySelector('#send');
    this.stopButton = form.querySelector('#stop');
    this.picker = new ModelPicker(form.querySelector('.picker'), document.getElementById('models'), actions);
    this.note = form.querySelector('#composer-note');
    this.warmth = form.querySelector('.warmth');
    this.fullness = form.querySelector('.fullness');
    this.sumUp = form.querySelector('.sum-up');
    this.offersAhead = false;
    this.maxBytes = Infinity;
    this.maxDocumentBytes = Infinity;
    this.maxTokens = Infinity;
    this.attach = form.querySelector('.attach');
    this.maxImages = 0;
    this.#listen();
  }

  #listen() {
    this.form.addEventListener('submit', (event) => {
      event.preventDefault();
      this.#submit();
    });
    this.sumUp.addEventListener('click', () => this.actions.sumUp());
    this.stopButton.addEventListener('click', () => this.actions.stop());
    this.area.addEventListener('input', () => this.#onInput());
    this.#listenForFiles();
    this.area.addEventListener('keydown', (event) => this.#onKey(event));
  }

  /** From the button, from the clipboard, or dropped anywhere on the page. */
  #listenForFiles() {
    const input = this.form.querySelector('#file');
    this.attach.addEventListener('click', () => input.click());
    input.addEventListener('change', () => {
      this.#attach([...input.files]);
      input.value = ''; // so that the same file can be chosen again
    });
    this.area.addEventListener('paste', (event) => this.#onPaste(event));
    document.addEventListener('drop', (event) => this.#onFiles(event, event.dataTransfer));
    document.addEventListener('dragover', (event) => {
      if (event.dataTransfer.types.includes('Files')) event.preventDefault();
    });
  }

  /** Files, and a text so long that it would be in the way. */
  #onPaste(event) {
    this.#onFiles(event, event.clipboardData);
    const text = event.clipboardData.getData('text/plain');
    if (event.defaultPrevented || text.length < CHIP_FROM) return;
    event.preventDefault();
    this.#attach([new File([text], 'Pasted text.txt', { type: 'text/plain' })]);
  }

  #onFiles(event, { files, types }) {
    if (!files.length || types.includes('text/html') && types.includes('text/plain')) return;
    event.preventDefault();
    this.#attach([...files]);
  }

  #attach(files) {
    const sessionId = this.#sessionId;
    const read = () => this.#read(files, sessionId);
    this.#attached = this.#attached.then(read, read);
  }

  async #read(files, sessionId) {
    const { Files } = await import('./files/files.js');
    this.files ??= new Files(this.form.querySelector('.composer-box'), this.#sessionId, {
      changed: () => this.#onInput(), focus: () => this.area.focus(), maxBytes: () => this.maxBytes - BYTES_SPARE,
      maxTokens: () => this.maxTokens, maxDocumentBytes: () => this.maxDocumentBytes, maxImages: () => this.maxImages, upload: this.actions.upload,
      readDocument: this.actions.readDocument });
    await this.files.add(files, sessionId);
  }

  /** What would be sent: the files, then the text. */
  get #content() {
    return (this.files?.text ?? '') + this.area.value;
  }

  /** The most pictures that a message may have; 0: the model reads none. */
  set maxImages(most) {
    this.#maxImages = most;
    this.attach.title = most ? 'Add pictures, documents or texts' : 'Add documents or texts';
    this.attach.setAttribute('aria-label', this.attach.title);
  }

  get maxImages() {
    return this.#maxImages;
  }

  /** The adapter in the picker, null for the base model. */
  get adapter() {
    return this.picker.adapter;
  }

  set adapter(adapter) {
    this.picker.adapter = adapter;
  }

  /** Picks an adapter, as if it had been picked in the list. */
  choose(adapter) {
    this.adapter = adapter;
    this.actions.pick(adapter);
  }

  /** Offers these models and keeps the choice. */
  offer(models) {
    this.picker.offer(models);
  }

  /** Changes to the draft of another session. */
  open(sessionId) {
    if (this.#waits && this.#sessionId) {
      this.#queued.set(this.#sessionId, { content: this.#content.trim(), pictures: this.files?.pictures, adapter: this.adapter });
    }
    this.#sessionId = sessionId;
    this.#typedAt = -Infinity;
    const draft = readDraft(sessionId);
    this.write(draft.endsWith(this.#early) ? draft : draft + this.#early);
    this.#early = '';
    this.files?.open(sessionId);
    this.#waits = this.#queued.delete(sessionId);
    this.#changed();
  }

  /** Takes the messages whose time has come, as `[sessionId, message]`: they are no drafts any more. */
  takeQueued(isDue) {
    const due = [...this.#queued].filter(([sessionId]) => isDue(sessionId));
    for (const [sessionId] of due) {
      this.#queued.delete(sessionId);
      writeDraft(sessionId, '');
      this.files?.drop(sessionId);
    }
    return due;
  }

  /** Replaces the text, as if it had been typed. */
  write(text) {
    this.#waits = false;
    this.area.value = text;
    writeDraft(this.#sessionId, text);
    this.#changed();
  }

  /**
   * Takes the text away that was sent, but not what was written meanwhile.
   *
   * @param {string} text
   * @param {?string} [sessionId]  the conversation that a new chat has become: what is left is its draft
   */
  sent(text, sessionId = this.#sessionId) {
    clearTimeout(this.#draftTimer);
    this.#typedAt = -Infinity; // the next message is another one to announce
    const left = this.#content.trim() === text ? '' : this.area.value;
    this.write('');
    writeDraft(sessionId, left);
    if (left && sessionId === this.#sessionId) this.write(left);
    this.files?.drop(this.#sessionId);
  }

  /** What could not be sent goes once the server is there, if nothing is changed. */
  hold() {
    this.#waits = true;
    this.#changed();
  }

  /** Takes text that has no other place to be, unless something is written. */
  rescue(text) {
    if (!this.area.value) this.write(text);
  }

  /**
   * @param {boolean} enabled  a message could be sent now
   * @param {boolean} running  an answer is being written in this session
   */
  setState(enabled, running) {
    this.#enabled = enabled;
    this.#running = running;
    const shown = running ? this.stopButton : this.sendButton;
    const other = running ? this.sendButton : this.stopButton;
    const hadFocus = other === document.activeElement;
    shown.hidden = false;
    other.hidden = true;
    if (hadFocus) this.focus();
    if (enabled && !running && this.#waits) this.#submit();
    this.#changed();
  }

  /** Puts the caret into the text, unless that would open a keyboard on a touch screen. */
  focus() {
    if (matchMedia('(hover: hover)').matches) this.area.focus();
  }

  /** Sends what there is, once files are read, the server is ready and no answer is being written. */
  async #submit() {
    const sessionId = this.#sessionId;
    await Promise.allSettled([this.#attached]);
    if (sessionId !== this.#sessionId) return; // another conversation was opened meanwhile, and its draft is not meant
    const canGo = this.#enabled && !this.#running;
    this.#waits = this.#isSendable && !canGo;
    if (this.#isSendable && canGo) this.actions.send(this.#content.trim(), this.files?.pictures ?? []);
    else this.#changed();
  }

  #onInput() {
    this.#waits = false;
    writeDraft(this.#sessionId, this.area.value);
    this.#changed();
    if (!this.#content.trim()) return;
    if (this.#readsAlong) this.#sendDraftSoon();
    else this.#announce(TYPING_EVERY_MS);
  }

  /** Whether the user lets the server read a question while it is typed. */
  get ahead() {
    return readAhead();
  }

  set ahead(isAllowed) {
    writeAhead(isAllowed);
    this.#onInput();
  }

  get #readsAlong() {
    return this.offersAhead && this.ahead;
  }

  #announce(everyMs, draft) {
    if (performance.now() - this.#typedAt < everyMs) return;
    this.#typedAt = performance.now();
    this.actions.typing(draft);
  }

  /** The last words of a burst count too, so what comes too soon is sent a little later. */
  #sendDraftSoon() {
    clearTimeout(this.#draftTimer);
    const wait = Math.max(0, this.#typedAt + DRAFT_EVERY_MS - performance.now());
    this.#draftTimer = setTimeout(() => {
      if (this.#content.trim() && this.#readsAlong) this.#announce(0, this.#content);
    }, wait);
  }

  /** Says, quietly, that the conversation is ready on the device. */
  showWarmth(isWarm) {
    this.warmth.hidden = !isWarm;
  }

  /** Says, quietly, how full the context is (null: there is much room). */
  showFullness(full, maxTokens) {
    this.fullness.hidden = !full;
    this.sumUp.hidden = !full;
    if (!full) return;
    this.fullness.textContent = `${Math.round(full.share * 100)}% full`;
    this.fullness.title = `This conversation has ${count(full.used)} of the ${count(maxTokens)} tokens that the model reads`;
  }

  #onKey(event) {
    if (isSend(event)) {
      event.preventDefault();
      this.#submit();
    } else if (event.key === 'ArrowUp' && this.area.value === '' && !this.#running) {
      event.preventDefault();
      this.actions.editLast();
    }
  }

  #changed() {
    fitHeight(this.area);
    const content = this.#content;
    const isTooLong = isLonger(content, this.maxBytes - BYTES_SPARE);
    this.#isSendable = !isTooLong && (content.trim() !== '' || this.files?.pictures.length > 0);
    this.note.hidden = !isTooLong && !this.#waits;
    this.note.textContent = isTooLong ? 'This message is too long for the server. Please shorten it.'
      : !this.#waits ? '' : this.#running ? 'Queued until this answer is finished. Edit it to hold it back.'
        : 'This will be sent as soon as the server is ready.';
    this.note.classList.toggle('is-calm', this.#waits);
    this.sendButton.disabled = !this.#enabled || !this.#isSendable;
  }
}

/** Whether a text has more bytes than these in UTF-8, which is counted only where it is not plain. */
function isLonger(text, maxBytes) {
  if (text.length > maxBytes) return true;
  return text.length * 3 > maxBytes && new TextEncoder().encode(text).length > maxBytes;
}
