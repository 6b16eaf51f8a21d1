/** The parts of the engine room: a frame in, elements out. */

import { h, paintDot } from '../dom.js';
import { count, duration } from '../format.js';
import { bar, sparkline } from './draw.js';
import { advisoryState, age, nodeState, perSecond, place, reasons, runState, size, source } from './words.js';

const HISTORY = 120;
const MAX_DOTS = 12; // chosen: more are a number, not a picture
const MAX_SHOWN = 12; // of agents and of advisories. Chosen: what happened in the last seconds

// ---------------------------------------------------------------------------------------------------------- small parts

/** A table. `columns`: [heading, class?] each; `rows`: arrays of what their cells hold. */
function table(caption, columns, rows) {
  return h('table', {},
    h('caption', { class: 'sr-only' }, caption),
    h('thead', {}, h('tr', {}, ...columns.map(([name, kind]) => h('th', { scope: 'col', class: kind }, name)))),
    h('tbody', {}, ...rows.map((cells) => h('tr', {}, ...cells.map((cell, at) =>
      h(at ? 'td' : 'th', { class: columns[at][1], scope: at ? null : 'row' }, ...[cell].flat()))))));
}

function mark(kind, text, title) {
  return h('span', { class: `mark ${kind}`, title }, text);
}

const empty = (text) => h('p', { class: 'empty' }, text);

/** Requests as dots; the number stands beside them. */
function dots(num, kind) {
  return [h('span', { class: `dots ${kind}`, 'aria-hidden': 'true' },
    ...Array.from({ length: Math.min(num, MAX_DOTS) }, () => h('i'))), count(num)];
}

function meter(part, whole, words) {
  return h('span', { class: 'meter' }, bar(part, whole), h('span', { class: 'meter-words' }, words));
}

// -------------------------------------------------------------------------------------------------------------- parts

/** What all nodes do together, as four numbers. */
export function figures({ totals }, rates) {
  const all = rates.get('') ?? [];
  const now = all.at(-1);
  const figure = (name, value, below) => h('div', { class: 'figure' },
    h('p', { class: 'figure-name' }, name), h('p', { class: 'figure-value' }, value), below);
  const spark = (name) => sparkline(all.map((rate) => rate[name]), HISTORY);
  const used = Math.max(0, totals.num_kv_blocks - totals.num_free_kv_blocks - totals.num_nodes);
  const share = totals.num_kv_blocks ? `${Math.ceil((100 * used) / totals.num_kv_blocks)}%` : '–';
  return [
    figure('Tokens a second', now ? perSecond(now.tokens) : '–', spark('tokens')),
    figure('Steps a second', now ? perSecond(now.steps) : '–', spark('steps')),
    figure('Answers under way', count(totals.num_running), h('p', { class: 'note' }, `${count(totals.num_waiting)} waiting`)),
    figure('Device memory in use', share, h('p', { class: 'note' }, openOf(totals))),
  ];
}

function openOf({ num_open: open, num_nodes: all }) {
  if (all === 1) return open ? 'takes requests' : 'takes no requests now';
  return `${count(open)} of ${count(all)} nodes take requests`;
}

/** Every node, one a row. */
export function nodes({ nodes: list }, rates) {
  if (!list.length) return empty('No node has joined yet.');
  const columns = [['Node'], ['State'], ['Running', 'number'], ['Waiting', 'number'], ['On the device', 'bar-cell roomy'],
    ['Tokens/s', 'number roomy'], ['Steps/s', 'number roomy'], ['For', 'number roomy']];
  return table('Nodes and what each one does', columns, list.map((node) => {
    const rate = rates.get(node.id)?.at(-1);
    return [h('span', { class: 'node-name', title: node.model }, node.id), stateOf(node),
      node.load ? dots(node.load.num_running, 'run') : '–', node.load ? dots(node.load.num_waiting, 'wait') : '–',
      node.load ? deviceOf(node.load) : '–',
      rate && node.load ? perSecond(rate.tokens) : '–', rate && node.load ? perSecond(rate.steps) : '–', age(node.elapsed_s)];
  }));
}

function stateOf(node) {
  const isOnItsWay = node.state === 'starting' || node.state === 'rebuilding';
  return [mark(nodeState(node.state), node.state), node.num_ranks > 1 && h('span', { class: 'aside below' }, `on ${node.num_ranks} ranks`), isOnItsWay && h('span', { class: 'aside below' }, node.stage),
    node.left_out.length > 0 && h('span', { class: 'aside below' }, `without ${node.left_out.map(({ mechanism }) => mechanism).join(', ')}`),
    node.error && h('span', { class: 'aside below wrong' }, node.error)].filter(Boolean);
}

function deviceOf({ num_kv_blocks: all, num_free_kv_blocks: free, block_size: tokens }) {
  const num = all - 1; // vLLM uses one block for nothing
  return meter(num - free, num, `${count((num - free) * tokens)} of ${count(num * tokens)} tokens`);
}

/** Where the memory of conversations lies, tier by tier. */
export function tiers({ nodes: list, advisory_counts: sums }) {
  const isOperator = sums !== null;
  const parts = list.filter((node) => node.load).map((node) => {
    const rows = [['Device', deviceOf(node.load), '']];
    if (node.kv) {
      rows.push(['Host memory', tierOf(node.kv.host), used(node.kv.host)]);
      rows.push(node.kv.disk ? ['Disk', tierOf(node.kv.disk), used(node.kv.disk)] : ['Disk', h('span', { class: 'aside' }, 'off'), '']);
    }
    if (node.kv?.peers) rows.push(['Other nodes', peersOf(node.kv.peers), count(node.kv.peers.num_fetched)]);
    const columns = [['Tier'], ['In use', 'bar-cell'], ['Blocks found', 'number']];
    return h('div', { class: 'part' }, list.length > 1 && h('h3', {}, node.id),
      table(`Memory of ${node.id}, by tier`, columns, rows), node.kv?.problem && h('p', { class: 'aside below wrong' }, node.kv.problem),
      !node.kv && isOperator && h('p', { class: 'note' }, `This node keeps no KV behind the device (${whyWithout(node, 'KV tiers') ?? '--kv-host-gib 0'}).`));
  });
  if (!parts.length) return [empty('There is no engine yet.')];
  if (!isOperator) parts.push(h('p', { class: 'note' }, 'Host memory and disk hold everybody’s conversations: an operator’s key shows them.'));
  return parts;
}

const whyWithout = (node, what) => node.left_out.find(({ mechanism }) => mechanism === what)?.why;
const peersOf = ({ bytes_fetched: fetched, bytes_lent: lent }) => h('span', { class: 'meter-words' }, `${size(fetched)} fetched, ${size(lent)} lent`);
const tierOf = ({ bytes, capacity_bytes: most }) => meter(bytes, most, `${size(bytes)} of ${size(most)}`);
const used = ({ num_hits: num }) => count(num);

/** Who waits where, and what each lane's requests hold. */
export function lanes({ nodes: list }) {
  const parts = list.filter((node) => node.load).map((node) => {
    const { lanes: own, policy, num_by_reason: why } = node.load;
    const waiting = reasons(why);
    return h('div', { class: 'part' }, list.length > 1 && h('h3', {}, node.id),
      own ? lanesOf(node.id, own) : h('p', { class: 'note' }, `One queue, without lanes (--scheduling-policy ${policy}).`),
      h('p', { class: 'note' }, waiting.length ? `They wait because: ${waiting.join('; ')}.` : 'No request is waiting.'));
  });
  return parts.length ? parts : [empty('There is no engine yet.')];
}

function lanesOf(id, own) {
  const last = own.num_waiting.length - 1;
  const name = (at) => `${at + 1}${last && at === 0 ? ', smallest' : last && at === last ? ', largest' : ''}`;
  return table(`Lanes of ${id}, by size of their requests`, [['Lane'], ['Waiting', 'number'], ['Tokens of its quota', 'bar-cell']],
    own.num_waiting.map((num, at) => [name(at), dots(num, 'wait'),
      meter(own.used_tokens[at], own.quota_tokens[at], `${count(own.used_tokens[at])} of ${count(own.quota_tokens[at])}`)]));
}

/** Which adapters are in memory, and where. */
export function adapters({ nodes: list }) {
  const found = new Map();
  for (const node of list) {
    for (const { name, place: where, is_pinned: isPinned } of node.adapters.resident) {
      if (!found.has(name)) found.set(name, { isPinned, places: new Map() });
      found.get(name).places.set(node.id, where);
    }
  }
  const failed = list.flatMap(({ id, adapters: { failed: own } }) => Object.entries(own).map(([name, why]) =>
    h('p', { class: 'aside below wrong' }, `${name}${list.length > 1 ? ` on ${id}` : ''}: ${why}`)));
  const onDisk = Math.max(0, ...list.map((node) => node.adapters.num_by_place.disk ?? 0));
  const rest = onDisk ? `${count(onDisk)} on disk only: each is loaded when it is asked.` : '';
  const isWithout = list.length > 0 && list.every(({ left_out: without }) => without.some(({ mechanism }) => mechanism === 'adapters'));
  if (isWithout) return [empty(`The base model answers here, without adapters${whyWithout(list[0], 'adapters') ? `: ${whyWithout(list[0], 'adapters')}` : ''}.`)];
  if (!found.size) return [empty(['No adapter is in memory.', rest].filter(Boolean).join(' ')), ...failed];
  const several = list.length > 1;
  const rows = [...found].sort(([one], [other]) => one.localeCompare(other)).map(([name, { isPinned, places }]) =>
    [[dotOf(name), ` ${name}`, isPinned && h('span', { class: 'aside' }, ' pinned')].filter(Boolean),
      ...list.map(({ id }) => (places.has(id) ? mark(places.get(id) === 'slot' ? 'good' : 'under-way', place(places.get(id))) : '–'))]);
  return [table('Adapters in memory, and where', [['Adapter'], ...list.map(({ id }) => [several ? id : 'Where'])], rows),
    rest && h('p', { class: 'note' }, rest), ...failed].filter(Boolean);
}

function dotOf(adapter) {
  const dot = h('span', { class: 'dot', 'aria-hidden': 'true' });
  paintDot(dot, adapter);
  return dot;
}

/** One's own agents: conversations that call tools, and what became of their prompts' KV from turn to turn. */
export function runs({ runs: list }, titles) {
  if (!list.length) return [empty('None of yours yet. A conversation is shown here once an answer of it has called a tool.')];
  const columns = [['Conversation', 'name-cell'], ['Now', 'roomy'], ['Turns', 'number roomy'], ['Tool pauses', 'number roomy'], ['Stayed', 'number'],
    ['Came back', 'number'], ['Twice', 'number'], ['New', 'number roomy'], ['Ago', 'number roomy']];
  const rows = list.slice(0, MAX_SHOWN).map((run) => [[...nameOf(run, titles), ...callerOf(run, titles)], mark(...runState(run.state)), count(run.num_turns), toolsOf(run),
    ...['stayed', 'restored', 'recomputed', 'new'].map((outcome) => count(run.tokens[outcome])), age(run.quiet_s)]);
  return [table('Your last agents, the newest first', columns, rows),
    h('p', { class: 'note' }, 'Tokens of all their prompts: KV that stayed on the device since the turn before, came back from elsewhere, or was computed twice, and what was new.')];
}

const callerOf = ({ caller }, titles) => (caller ? [h('span', { class: 'aside below' }, 'for ', ...nameOf({ session_id: caller }, titles))] : []);

const toolsOf = ({ num_pauses: num, pause_s: total }) => (num ? [count(num), ' ', h('span', { class: 'aside' }, duration(total * 1000))] : '–');

/** One's own last advisories, each with the states that it went through. */
export function advisories({ advisories: list, advisory_counts: sums, at_s: now }, titles) {
  const parts = [];
  if (!list.length) {
    parts.push(empty('None of yours yet. The page sends one when you begin to type in a conversation; agents send them for what comes next.'));
  } else {
    const columns = [['Conversation', 'name-cell'], ['From', 'roomy'], ['States'], ['Ahead', 'number'], ['Tokens ready', 'number roomy'], ['Ago', 'number']];
    parts.push(table('Your last advisories, the newest first', columns, list.slice(0, MAX_SHOWN).map((each) => [
      nameOf(each, titles), source(each.source), h('ol', { class: 'trail' }, ...statesOf(each).map(stateItem)), aheadOf(each.outcome),
      readyOf(each.outcome), age(Math.max(0, now - each.began_s))])));
  }
  if (sums) parts.push(h('p', { class: 'note' }, `Of everybody: ${sumsOf(sums)}.`));
  return parts;
}

function nameOf({ session_id: id, model }, titles) {
  const title = titles.get(id);
  const name = title === undefined
    ? h('code', { title: id }, id)
    : h('a', { href: `./#/s/${encodeURIComponent(id)}` }, title || 'New chat');
  return [model ? dotOf(model) : null, model ? ' ' : null, name].filter(Boolean);
}

const statesOf = ({ states }) => (states.length ? states : [{ state: 'accepted', after_s: 0 }]);

function stateItem({ state, after_s: after }) {
  const [kind, meaning] = advisoryState(state);
  return h('li', {}, mark(kind, state, `${meaning}, ${duration(after * 1000)} after it came`));
}

function aheadOf({ lead_ms: lead, late_ms: late }) {
  if (lead == null) return '–';
  return late ? [duration(lead), h('span', { class: 'aside below' }, `${duration(late)} too short`)] : duration(lead);
}

const readyOf = ({ num_tokens: num, device_tokens: ready }) => (num ? `${count(ready)} of ${count(num)}` : '–');

function sumsOf(sums) {
  const words = { live: 'under way', hit: 'in time', late: 'late', wasted: 'for nothing', expired: 'expired', cancelled: 'taken back', unknown: 'of nothing kept' };
  return Object.entries(words).filter(([state]) => sums[state] || state === 'live').map(([state, word]) => `${count(sums[state] ?? 0)} ${word}`).join(', ');
}
