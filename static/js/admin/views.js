/** The tables of the operators' page. */

import { h } from '../dom.js';
import { size } from '../engine/words.js';
import { count } from '../format.js';

/**
 * The table of people.
 *
 * @param {Array<object>} people  as `GET /v1/admin/people` gives them
 * @param {Map<string, object>} usage  by owner, as `GET /v1/usage` gives it
 * @param {string} me  the operator's owner id
 * @param {(button: HTMLButtonElement, person: object) => void} manage
 */
export function people(people, usage, me, manage) {
  const head = ['Name', 'Role', 'State', 'Keys', 'Tokens today', '30 days', 'Conversations', 'Stored', ''];
  return table(head, people.map((person) => h('tr', {},
    h('th', { scope: 'row' }, person.name, person.owner === me && h('span', { class: 'aside' }, 'you')),
    h('td', {}, person.role),
    h('td', {}, h('span', { class: `mark ${person.state === 'active' ? 'good' : 'bad'}` }, person.state)),
    h('td', {}, keys(person.keys)),
    ...[person.tokens_today, sumOf(usage.get(person.owner)), person.num_sessions].map((number) => h('td', { class: 'number' }, counted(number))),
    h('td', { class: 'number' }, person.num_stored_bytes === null ? '–' : size(person.num_stored_bytes)),
    h('td', { class: 'number' }, manageButton(person, manage)))));
}

function keys(list) {
  if (!list.length) return 'none';
  return h('ul', { class: 'keys' }, ...list.map(({ id, state }) => h('li', {}, h('code', {}, id), state === 'disabled' && h('span', { class: 'aside' }, 'disabled'))));
}

function manageButton(person, manage) {
  const button = h('button', { type: 'button', class: 'button', title: `Manage ${person.name}`, 'aria-haspopup': 'menu', 'aria-expanded': 'false',
    'aria-label': `Manage ${person.name}`, on: { click: () => manage(button, person) } }, 'Manage');
  return button;
}

/**
 * The table of tokens by day.
 *
 * @param {object} report  as `GET /v1/usage` gives it
 * @param {string} owner  '' for everybody
 */
export function usage(report, owner) {
  const days = new Map();
  for (const person of report.people) {
    if (owner && person.owner !== owner) continue;
    for (const { day, ...numbers } of person.days) {
      const sum = days.get(day) ?? { num_requests: 0, prompt_tokens: 0, answer_tokens: 0 };
      for (const name of Object.keys(sum)) sum[name] += numbers[name];
      days.set(day, sum);
    }
  }
  if (!days.size) return h('p', { class: 'empty' }, 'Nothing was used in the last 30 days.');
  const limit = report.max_tokens_per_day;
  const rows = [...days].sort(([one], [other]) => other.localeCompare(one)).map(([day, sum]) => h('tr', {}, h('th', { scope: 'row', class: 'node-name' }, day),
    ...[sum.num_requests, sum.prompt_tokens, sum.answer_tokens, sum.prompt_tokens + sum.answer_tokens].map((number) => h('td', { class: 'number' }, count(number)))));
  const note = limit ? `Each person may use ${count(limit)} tokens a day. Days are UTC days.` : 'No limit is set (--max-tokens-per-day). Days are UTC days.';
  return h('div', {}, table(['Day', 'Requests', 'Prompt tokens', 'Answer tokens', 'Together'], rows), h('p', { class: 'note' }, note));
}

function table(head, rows) {
  const cells = head.map((name, index) => h('th', { scope: 'col', class: isNumber(rows, index) ? 'number' : '' },
    name || h('span', { class: 'sr-only' }, 'Actions')));
  return h('table', {}, h('thead', {}, h('tr', {}, ...cells)), h('tbody', {}, ...rows));
}

const isNumber = (rows, index) => rows[0]?.children[index]?.classList.contains('number');

const counted = (number) => (number === null || number === undefined ? '–' : count(number));

function sumOf(person) {
  return person ? person.days.reduce((sum, { prompt_tokens: prompt, answer_tokens: answer }) => sum + prompt + answer, 0) : null;
}
