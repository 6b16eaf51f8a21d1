/** Two answers to one question side by side: the one that is there, and another model's. Loaded when it is asked for. */

import { AnswerView } from './answer.js';
import { ask, dialogWith } from './dialogs.js';
import { h, paintDot } from './dom.js';
import { summary } from './format.js';
import { addStyle } from './sheet/style.js';
import { isLive } from './turn.js';
import { toast } from './toast.js';
import { NOT_YET } from './versions.js';

/**
 * Compares an answer with that of another model, which is asked and becomes another version of the message.
 *
 * @param {object} turn
 * @param {import('./protocol.js').ChatCore} core
 * @param {(ask: object) => object} askAgain  asks, and returns the new turn
 * @param {(kept?: object) => void} goOn  is told which of both was kept, if one was, once another model was asked
 */
export async function compare(turn, core, askAgain, goOn) {
  await addStyle('static/css/compared.css');
  const { models } = core;
  const nameOf = (adapter) => adapter ?? `${models[0].id} (base)`;
  const after = core.turnBefore(turn)?.id ?? null; // later the turn may be shown no more
  const others = models.map(({ id, adapter }) => (adapter ? id : null)).filter((adapter) => adapter !== turn.adapter);

  const column = (label, { adapter }) => {
    const view = new AnswerView();
    const dot = h('span', { class: 'dot' });
    paintDot(dot, adapter);
    const waiting = h('p', { class: 'waiting', role: 'status' });
    const foot = h('div', { class: 'compared-foot' });
    const element = h('section', { 'aria-label': label },
      h('h3', {}, dot, nameOf(adapter)), h('div', { class: 'compared-text', tabindex: '0', role: 'region', 'aria-label': `${label}: its text` }, view.element, waiting), foot);
    const draw = (shown) => {
      const live = isLive(shown);
      view.show(shown.answer, !live);
      waiting.hidden = !live && shown.status !== 'failed';
      const isAsking = shown.calls?.some(({ state }) => state === 'asking');
      const step = isAsking ? 'It would like to use a tool: close this window to say whether it may.' : 'Thinking';
      waiting.textContent = live ? step : shown.error?.message ?? 'This answer could not be finished.';
      const isThere = !live && shown.status !== 'failed';
      foot.replaceChildren(...(isThere ? [h('span', {}, summary({ ...shown, adapter: null })),
        h('button', { type: 'button', class: 'button quiet', on: { click: () => dialog.close(shown.id) } }, 'Keep this answer')] : []));
    };
    return { element, draw };
  };

  const first = column('The answer that is there', turn);
  first.draw(turn);
  const choice = h('select', { id: 'compare-with', autofocus: true },
    ...others.map((adapter) => h('option', { value: adapter ?? '' }, nameOf(adapter))));
  const begin = h('form', { class: 'compare-with', on: { submit: (event) => {
    event.preventDefault();
    const { sessionId, content, pictures } = turn;
    if (!core.canSwitch(sessionId)) return toast(NOT_YET);
    const asked = askAgain({ sessionId, content, pictures, after, adapter: choice.value || null });
    const second = column('The other answer', asked);
    shown.set(asked.id, { turn: asked, draw: second.draw });
    second.draw(asked);
    begin.replaceWith(second.element);
  } } },
  h('label', { for: 'compare-with' }, 'Compare with'), choice, h('button', { type: 'submit', class: 'button' }, 'Ask'));
  const shown = new Map([[turn.id, { turn, draw: first.draw }]]);
  const dialog = dialogWith('Two answers', h('p', {}, 'The other model answers the same question in the same conversation. Both answers are kept, as versions of the message.'),
    h('div', { class: 'compared' }, first.element, begin),
    h('div', { class: 'dialog-buttons' }, h('button', { type: 'button', class: 'button quiet', on: { click: () => dialog.close() } }, 'Close')));
  dialog.classList.add('comparing');

  const follow = ({ detail }) => shown.get(detail.id)?.draw(detail);
  document.addEventListener('answering', follow);
  const kept = shown.get(await ask(dialog));
  document.removeEventListener('answering', follow);
  if (shown.size > 1 && turn.sessionId === core.current) goOn(kept?.turn);
}
