/** "New chat with a summary": the model sums a conversation up, and a new one begins with that. Loaded when it is asked for. */

import { ask, dialogWith } from './dialogs.js';
import { h } from './dom.js';

const REQUEST = 'Summarise our conversation so far, so that somebody who has not read it can go on from there: what was asked, what was found or decided,'
  + ' the names, numbers and code that are still needed, and what is open. Write the summary alone.';
const SHARE = 4; // chosen: a summary has at most a fourth of what the model reads
const MAX_TOKENS = 1500; // of a summary; chosen: about two pages
const SPARE_TOKENS = 300; // for the request and the chat's own marks
const CHARS_PER_TOKEN = 3; // where no answer says how many tokens there are

/**
 * Has a conversation summed up, and stores a new one that begins with the summary and links to the old one.
 *
 * @param {import('./api.js').Api} api
 * @param {object} session  as the core keeps it
 * @param {{model: string, maxTokens: number}} server  what answers, and how much it reads
 * @returns {Promise<?object>} the new conversation; null where it was given up
 */
export async function chatWithSummary(api, session, { model, maxTokens }) {
  const title = session.title || 'New chat';
  const work = new AbortController();
  const said = h('p', { role: 'status' }, `The model sums up “${title}”. The conversation itself stays as it is.`);
  const hairpin = h('span', { class: 'hairpin' });
  const button = h('button', { type: 'button', class: 'button quiet', autofocus: true, on: { click: () => dialog.close() } }, 'Cancel');
  const dialog = dialogWith('New chat with a summary', said, hairpin, h('div', { class: 'dialog-buttons' }, button));
  const closed = ask(dialog);
  closed.then(() => work.abort());
  try {
    const summary = await summaryOf(api, session, { model, maxTokens }, work.signal);
    const made = await api.call('POST', 'api/sessions/import', archive(session, title, summary));
    dialog.close();
    return made;
  } catch (error) {
    if (work.signal.aborted) return null;
    hairpin.remove();
    said.setAttribute('role', 'alert');
    said.textContent = `No summary could be written. ${error.message}`;
    button.textContent = 'Close';
    await closed;
    return null;
  }
}

async function summaryOf(api, session, { model, maxTokens }, signal) {
  const most = Math.min(MAX_TOKENS, Math.floor(maxTokens / SHARE));
  const { system_prompt: prompt } = session.settings ?? {};
  const messages = [
    ...(prompt ? [{ role: 'system', content: prompt }] : []),
    ...latest(session.turns, maxTokens - most - SPARE_TOKENS).flatMap(({ content, answer }) => [
      { role: 'user', content }, { role: 'assistant', content: answer }]),
    { role: 'user', content: REQUEST }];
  const { choices: [{ message: { content } }] } = await api.complete({ model, messages, max_tokens: most }, signal);
  if (!content?.trim()) throw new Error('The model’s answer was empty.');
  return content.trim();
}

/** The latest turns that fit into so many tokens, as far as can be told from what the last one took. */
function latest(turns, numTokens) {
  const answered = turns.filter(({ status, answer }) => status !== 'failed' && answer);
  const usage = answered.findLast((turn) => turn.usage)?.usage;
  const numChars = answered.reduce((sum, turn) => sum + length(turn), 0);
  const used = usage && !usage.left_out_messages ? usage.prompt_tokens + usage.completion_tokens : numChars / CHARS_PER_TOKEN;
  let left = numTokens * numChars / Math.max(used, 1);
  const first = answered.findLastIndex((turn) => (left -= length(turn)) < 0);
  return answered.slice(first + 1);
}

const length = ({ content, answer }) => content.length + answer.length;

/** The new conversation as a file. */
function archive({ id, adapter, settings }, title, summary) {
  const link = `[${title.replace(/[[\]\\]/g, ' ')}](#/s/${encodeURIComponent(id)})`;
  const turn = { id: '0', content: `Summarise “${title}”, so that we can go on from it.`, answer: `Summary of ${link}:\n\n${summary}`,
    adapter, status: 'done' };
  return { format: 'overture-conversation', version: 1, title: `${title.slice(0, 180)} (continued)`, adapter, settings: settings ?? {}, turns: [turn] };
}
