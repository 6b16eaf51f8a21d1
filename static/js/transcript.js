/** The conversation in the centre column. */

import { AnswerView } from './answer.js';
import { contained, h, iconButton } from './dom.js';
import { summary } from './format.js';
import { ReasoningView } from './reasoning.js';
import { toast } from './toast.js';
import { focusVersions, versionArrows } from './versions.js';
import { isLive } from './turn.js';

const WAITING = { sending: 'Sending', running: 'Thinking' };
const FAILED = {
  prompt_too_long: 'This conversation is longer than the model can read. Go on in a new chat, or shorten an earlier message.',
  null: 'The server stopped before this answer was finished.',
};

/**
 * @typedef {object} TranscriptActions
 * @property {(id: string) => Promise<Blob>} picture  reads one
 * @property {(turn: object) => boolean} canGoOn
 * @property {(turn: object) => void} goOn  lets a cut answer go on
 * @property {(turn: object) => void} regenerate
 * @property {(turn: object, text: string) => void} edit
 * @property {(turn: object) => void} retry
 * @property {(turn: object) => void} discard
 * @property {() => boolean} canCompare  whether there is another model to ask
 * @property {(turn: object) => void} compare  asks another model the same, and shows both answers
 * @property {() => void} sumUp  goes on in a new chat
 * @property {(turn: object, versionId: string, way: string) => void} choose  shows another version of a message
 * @property {() => void} grown  called after text was added
 * @property {(turn: object, call: object, answer: string) => void} allow  says whether a tool may be used
 */

const copyFrom = async (...given) => (await import('./copy.js')).copyFrom(...given);

/** One question with its answer. */
class TurnView {
  #editor = null;
  #footOf = ''; // what the foot was drawn for
  #steps = null; // shows text and calls of tools in turn, where there are any

  /** @param {Map<string, string>} edits  by turn, what was written in place of a question and not sent */
  constructor(turn, actions, edits) {
    Object.assign(this, { turn, actions, edits });
    this.answer = new AnswerView();
    this.reasoning = new ReasoningView(actions);
    this.question = h('div', { class: 'question' });
    this.status = h('div', { class: 'waiting' });
    this.foot = h('div', { class: 'foot' });
    this.element = h('article', { class: 'turn', 'data-turn': turn.id },
      h('h2', { class: 'sr-only' }, 'You asked'), this.question,
      h('h2', { class: 'sr-only' }, 'Answer'),
      h('div', { class: 'reply' }, this.reasoning.element, this.answer.element, this.status, this.foot));
    this.showQuestion();
  }

  showQuestion() {
    this.#editor = null;
    const { content, pictures } = this.turn;
    const bubble = h('div', { class: 'bubble' }, content);
    this.editButton = iconButton('edit', 'Edit message', () => this.edit());
    const asked = pictures.length ? h('div', { class: 'asked' }, content && bubble) : bubble;
    this.question.replaceChildren(this.editButton, asked);
    this.question.classList.remove('editing');
    if (content.includes(':\n```')) import('./files/blocks.js').then(({ fold }) => fold(bubble, content));
    if (pictures.length) {
      import('./pictures.js').then(({ gallery }) => {
        asked.prepend(gallery(pictures, this.actions.picture, this.actions.grown));
      });
    }
  }

  /**
   * Turns the question into a text field; one that is open keeps what was written in it.
   *
   * @param {string} [text]  what was written before the conversation was left
   */
  async edit(text) {
    const { editor } = await import('./editor.js');
    if (this.#editor) return this.#editor.focus();
    const close = () => {
      this.edits.delete(this.turn.id);
      this.showQuestion();
      this.editButton.focus();
    };
    const form = editor(text ?? this.turn.content, {
      changed: (written) => this.edits.set(this.turn.id, written),
      mayBeEmpty: this.turn.pictures.length > 0,
      send: (text) => {
        if (this.element.parentNode.querySelector('[aria-busy="true"]')) return toast('Wait for the answer, or stop it.');
        this.edits.delete(this.turn.id);
        this.showQuestion();
        this.actions.edit(this.turn, text);
      },
      cancel: close,
    });
    this.#editor = form;
    this.question.classList.add('editing');
    this.question.replaceChildren(form.element);
    return text === undefined && form.focus();
  }

  /** Brings text, status and buttons up to date. */
  update() {
    const { turn } = this;
    const live = isLive(turn);
    this.element.dataset.status = turn.status;
    this.element.setAttribute('aria-busy', String(live));
    if (this.editButton) this.editButton.disabled = live;
    this.reasoning.show(turn.reasoning, !live || turn.answer !== '');
    this.#showAnswer(!live);
    this.#showWaiting(live);
    this.#updateFoot(live);
  }

  /** Draws the foot where it has changed: what is open in it, and the focus, stay. */
  #updateFoot(live) {
    const { status, answer, finishReason, usage, timings, versions, error, request } = this.turn;
    const footOf = live ? '' : JSON.stringify([this.actions.canGoOn(this.turn), status, answer !== '', finishReason, usage, timings, versions, error, Boolean(request)]);
    if (footOf === this.#footOf) return;
    this.#footOf = footOf;
    if (live) this.foot.replaceChildren();
    else this.#showFoot();
  }

  /** Only the text has grown. */
  grow() {
    this.reasoning.show(this.turn.reasoning, this.turn.answer !== '');
    this.#showAnswer(false);
    this.#showWaiting(true);
  }

  #showAnswer(complete) {
    const { turn } = this;
    if (this.#steps) this.#steps.show(complete);
    else if (turn.calls.length) this.#loadSteps();
    else this.answer.show(turn.answer, complete);
  }

  async #loadSteps() {
    const { Steps } = await import('./calls.js');
    if (this.#steps) return;
    this.#steps = new Steps(this.turn, this.actions, this.answer);
    this.answer.element.replaceWith(this.#steps.element);
    this.#steps.show(!isLive(this.turn));
    this.actions.grown();
  }

  #showWaiting(live) {
    this.status.hidden = !live;
    if (!live) return;
    const { state, tool } = this.turn.calls.at(-1) ?? {};
    const step = { asking: 'Waiting for you', running: `Using ${tool}` }[state];
    const word = this.turn.stopRequested ? 'Stopping' : step ?? WAITING[this.turn.status];
    const started = this.turn.answer !== '';
    this.status.classList.toggle('started', started);
    const label = started && !this.turn.stopRequested && !step ? '' : word;
    if (this.status.firstChild) this.status.lastChild.textContent = label;
    else this.status.append(h('span', { class: 'hairpin' }), h('span', { class: 'waiting-word' }, label));
  }

  #showFoot() {
    const { turn, actions } = this;
    const parts = [];
    if (turn.status === 'failed') parts.push(this.#failure());
    if (turn.status === 'stopped') parts.push(h('p', { class: 'note' }, 'Stopped. What was written is kept. ', this.#goOnButton()));
    if (turn.usage?.left_out_messages) {
      parts.push(h('p', { class: 'note' }, `The conversation is longer than the model reads: its ${turn.usage.left_out_messages} oldest messages were left out.`));
    }
    if (turn.finishReason === 'length') {
      parts.push(h('p', { class: 'note' }, 'The answer reached the length limit. ', this.#goOnButton()));
    }
    const tools = h('div', { class: 'foot-tools' }, versionArrows(turn, (versionId, way) => actions.choose(turn, versionId, way)));
    if (turn.status !== 'failed') {
      tools.append(h('div', { class: 'actions' },
        turn.answer && iconButton('copy', 'Copy answer', (event) => copyFrom(event.currentTarget, turn.answer)),
        actions.canCompare() && iconButton('beside', 'Compare with another model', () => actions.compare(turn)),
        iconButton('redo', 'Answer again', () => actions.regenerate(turn))));
    }
    const focused = this.foot.contains(document.activeElement) && document.activeElement.dataset.way;
    this.foot.replaceChildren(...parts,
      h('div', { class: 'foot-row' }, turn.timings && timingsLine(turn, actions.grown), tools));
    if (focused) focusVersions(this.element, focused);
  }

  #goOnButton() {
    const { turn, actions } = this;
    return actions.canGoOn(turn) && h('button', { type: 'button', class: 'button quiet', on: { click: () => actions.goOn(turn) } }, 'Continue');
  }

  #failure() {
    const { turn, actions } = this;
    const code = turn.error?.code ?? turn.finishReason;
    const tooLong = code === 'prompt_too_long';
    return h('div', { class: 'failure', role: 'alert' },
      h('p', {}, turn.error?.message ?? FAILED[code] ?? 'This answer could not be finished.'),
      h('div', { class: 'failure-buttons' },
        !tooLong && h('button', { type: 'button', class: 'button retry', on: { click: () => actions.retry(turn) } }, 'Try again'),
        tooLong && h('button', { type: 'button', class: 'button', on: { click: () => actions.sumUp() } }, 'New chat with a summary'),
        h('button', { type: 'button', class: 'button quiet', on: { click: () => actions.discard(turn) } }, 'Dismiss')));
  }
}

function timingsLine(turn, grown) {
  const rows = h('dl', {});
  const fill = async () => {
    if (!rows.hasChildNodes()) rows.append(...(await import('./timings.js')).timingEntries(turn));
    grown();
  };
  return h('details', { class: 'timings', on: { toggle: fill } }, h('summary', { title: 'Show all timings' }, summary(turn)), rows);
}

/** Shows the turns of one session and redraws what changed, at most once a frame. */
export class Transcript {
  #views = new Map();
  #edits = new Map(); // they outlive their views: an unfinished edit is there when one comes back
  #grown = new Set();
  #frame = 0;

  /**
   * @param {HTMLElement} root
   * @param {TranscriptActions} actions
   */
  constructor(root, actions) {
    this.root = root;
    this.actions = actions;
    root.addEventListener('click', (event) => this.#onClick(event));
  }

  /** Shows these turns, keeping the elements of those that are shown already. */
  show(turns) {
    const views = turns.map((turn) => this.#view(turn));
    const wanted = new Set(turns.map((turn) => turn.id));
    for (const [id, view] of this.#views) {
      if (wanted.has(id)) continue;
      view.element.remove();
      this.#views.delete(id);
    }
    views.forEach((view, index) => {
      if (this.root.children[index] !== view.element) {
        this.root.insertBefore(view.element, this.root.children[index] ?? null);
      }
      contained(() => view.update());
    });
    this.actions.grown();
  }

  /** A turn began, ended or failed. */
  update(turn) {
    this.#grown.delete(turn.id);
    contained(() => this.#views.get(turn.id)?.update());
    this.actions.grown();
  }

  /** A turn has more text; drawn with the next frame. */
  grow(turn) {
    this.#grown.add(turn.id);
    this.#frame ||= requestAnimationFrame(() => this.#draw());
  }

  /** The element of a turn, undefined if it is not shown. */
  elementOf(id) {
    return this.#views.get(id)?.element;
  }

  /** Puts the focus on an arrow of a turn's versions; returns their element, undefined where there is none. */
  focusVersions(id, way) {
    return focusVersions(this.#views.get(id)?.element, way);
  }

  /** Opens the question of a turn for editing. */
  edit(turn) {
    this.#views.get(turn.id)?.edit();
  }

  #draw() {
    this.#frame = 0;
    for (const id of this.#grown) contained(() => this.#views.get(id)?.grow());
    this.#grown.clear();
    this.actions.grown();
  }

  #view(turn) {
    const known = this.#views.get(turn.id);
    if (known?.turn === turn) return known;
    known?.element.remove();
    const view = new TurnView(turn, this.actions, this.#edits);
    this.#views.set(turn.id, view);
    if (this.#edits.has(turn.id)) view.edit(this.#edits.get(turn.id));
    return view;
  }

  async #onClick({ target }) {
    const preview = target.closest('.code-preview');
    if (preview) (await import('./preview.js')).togglePreview(preview);
    const button = target.closest('.code-copy');
    if (button) copyFrom(button, button.closest('.code').querySelector('pre').textContent.replace(/\n$/, ''));
  }
}
