/** What an answer took and reused, loaded when it is asked for. */

import { h } from './dom.js';
import { count, duration } from './format.js';

const TIERS = ['device', 'host', 'disk'];

/** All timings of a turn as the entries of a `dl`. */
export function timingEntries(turn) {
  return timingRows(turn).flatMap(([name, value]) => [h('dt', {}, name), h('dd', {}, value)]);
}

/** What the word that a question would come was worth. */
function readiness({ state, lead_ms: lead, late_ms: late }) {
  if (state === 'hit') return `in time, ${duration(lead)} ahead`;
  if (state === 'late') return `in part: ${duration(late)} too short`;
  return 'for nothing';
}

function timingRows({ adapter, timings, reasoning, usage, advisory, finishReason }) {
  const { kv } = timings;
  const ms = (value) => (value == null ? '–' : duration(value));
  const rows = [
    ['Adapter', adapter ?? 'none (base model)'],
    ['Waited in the queue', ms(timings.queue_ms)],
    [`First ${reasoning ? 'thought' : 'word'} after`, ms(timings.ttft_ms)],
    ['Per token after that', ms(timings.tpot_ms)],
    ['In all', ms(timings.e2e_ms)],
    ['Ended by', { stop: 'the model', length: 'the length limit', stopped: 'you' }[finishReason]],
  ];
  if (usage) rows.push(['Tokens', `${count(usage.prompt_tokens)} in, ${count(usage.completion_tokens)} out`]);
  if (kv) {
    for (const tier of TIERS) rows.push([`Reused from ${tier}`, count(kv[tier])]);
    if (kv.peer) rows.push(['Fetched from another node', count(kv.peer)]);
    rows.push(['Computed anew', count(kv.recomputed)]);
  }
  if (advisory) rows.push(['Made ready while you typed', readiness(advisory)]);
  return rows.filter(([, value]) => value !== undefined);
}
