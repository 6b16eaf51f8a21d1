/** Calls of tools in an answer. Loaded with the first one. What tools say is shown as it was written, never as HTML or Markdown. */

import { AnswerView } from './answer.js';
import { h } from './dom.js';
import { addStyle } from './sheet/style.js';
import { unitsAt } from './turn.js';

const STATES = { asking: 'May it be used?', running: 'Running …', done: 'Done', failed: 'Failed', refused: 'Not allowed', stopped: 'Stopped' };
const ANSWERS = [['once', 'Allow once', ''], ['always', 'Always in this conversation', ''], ['never', 'Don’t', 'quiet']];

/** One call, folded away; open while the person is asked. */
class CallView {
  #shown = null;

  constructor(turn, actions) {
    Object.assign(this, { turn, actions });
    this.name = h('span', { class: 'call-name' });
    this.state = h('span', { class: 'call-state' });
    this.body = h('div', { class: 'call-body' });
    this.element = h('details', { class: 'call', on: { toggle: () => this.element.open && actions.opened() } },
      h('summary', {}, this.name, this.state), this.body);
  }

  show(call) {
    if (this.#shown === call) return;
    const wasAsking = this.#shown?.state === 'asking';
    const hadFocus = this.body.contains(document.activeElement);
    this.#shown = call;
    this.element.dataset.state = call.state;
    this.name.replaceChildren(h('b', {}, call.tool), call.server && ` of ${call.server}`);
    this.state.textContent = STATES[call.state];
    this.body.replaceChildren(...[text('It is given', given(call.arguments)), call.result && text('It says', call.result), call.state === 'asking' && this.#question(call)].filter(Boolean));
    if (call.state === 'asking') this.element.open = true;
    else if (wasAsking) this.element.open = false;
    if (hadFocus) this.element.firstChild.focus();
  }

  #question(call) {
    const buttons = ANSWERS.map(([answer, label, look]) => h('button', { type: 'button', class: `button ${look}`,
      on: { click: () => this.actions.allow(this.turn, call, answer) } }, label));
    return h('div', { class: 'call-question', role: 'group', 'aria-label': `May ${call.tool} of ${call.server} be used?` }, ...buttons,
      h('p', { class: 'note' }, 'It gets what stands above. Without an answer within two minutes it is not used.'));
  }
}

function text(label, content) {
  return h('div', {}, h('p', { class: 'call-label' }, label), h('pre', { tabIndex: 0, 'aria-label': label }, content));
}

/** Arguments in lines, where they are JSON. */
function given(json) {
  try {
    return JSON.stringify(JSON.parse(json), null, 2);
  } catch {
    return json;
  }
}

/** An answer with its calls: the text of each round, what was called behind it, and the text behind the last call. */
export class Steps {
  #texts;
  #calls = new Map();

  /** @param {AnswerView} first  shows the text before the first call */
  constructor(turn, actions, first) {
    Object.assign(this, { turn, actions });
    this.#texts = [first];
    this.element = h('div', { class: 'steps' });
    addStyle('static/css/calls.css').then(actions.grown);
  }

  /** @param {boolean} complete  nothing will follow */
  show(complete) {
    const { answer, calls } = this.turn;
    const parts = [];
    let [start, at, numTexts] = [0, 0, 0];
    const write = (end, isWhole) => {
      if (end === start && numTexts) return;
      const view = (this.#texts[numTexts] ??= new AnswerView());
      view.show(answer.slice(start, end), isWhole);
      numTexts += 1;
      start = end;
      parts.push(view.element);
    };
    for (const call of calls) {
      if (call.state !== 'missing') {
        write(start + unitsAt(answer.slice(start), call.at - at), true);
        at = call.at;
      }
      parts.push(this.#element(call));
    }
    write(answer.length, complete);
    parts.forEach((part, index) => {
      if (this.element.children[index] !== part) this.element.insertBefore(part, this.element.children[index] ?? null);
    });
    while (this.element.children.length > parts.length) this.element.lastChild.remove();
  }

  #element(call) {
    if (call.state === 'missing') {
      if (!this.#calls.has(call.id)) this.#calls.set(call.id, { element: h('p', { class: 'note call-missing' }, call.result) });
    } else {
      if (!this.#calls.has(call.id)) this.#calls.set(call.id, new CallView(this.turn, this.actions));
      this.#calls.get(call.id).show(call);
    }
    return this.#calls.get(call.id).element;
  }
}
