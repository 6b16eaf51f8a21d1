/** States, places and sizes as words. Pure. */

const UNITS = ['B', 'KiB', 'MiB', 'GiB', 'TiB'];

const REASONS = {
  lane_quota: 'its lane holds all its tokens',
  no_blocks: 'no free memory',
  adapter_memory: 'no memory for its adapter',
  behind_head: 'behind the first in line',
  no_slot: 'as many run as may run',
  grammar_compiling: 'its grammar is compiled',
  adapter_on_its_way: 'its adapter is loaded',
  just_came: 'it just came',
  kv_on_its_way: 'its memory is brought up',
  adapter_slots: 'no free slot for its adapter',
  behind_programs: 'agents at work fill the device',
  step_full: 'the step is full',
  queued: 'in the queue',
};

/** By state: how good it is, and what it means. */
const ADVISORY_STATES = {
  accepted: ['under-way', 'Taken; the engine looks for what it has'],
  staging: ['under-way', 'On its way up'],
  host: ['under-way', 'In host memory, where it waits'],
  warm: ['good', 'All that there is lies on the device'],
  hit: ['good', 'The request came and found all of it'],
  late: ['fair', 'The request came before all of it was there'],
  wasted: ['bad', 'Bytes were moved, and no such request came'],
  expired: ['plain', 'No request came; nothing was moved'],
  cancelled: ['plain', 'Taken back'],
  unknown: ['plain', 'Nothing is kept of this conversation'],
};

const NODE_STATES = {
  ready: 'good',
  starting: 'under-way',
  rebuilding: 'fair',
  asleep: 'plain',
  draining: 'fair',
  failed: 'bad',
  away: 'bad',
  quiet: 'fair',
  closed: 'plain',
};

const RUN_STATES = { asks: ['good', 'is answered'], tools: ['under-way', 'tools at work'], rests: ['plain', 'rests'] };
const PLACES = { slot: 'slot', host: 'host memory', cached: 'device cache' };
const SOURCES = { typing: 'typing', rest: 'an agent', hint: 'a hint', learned: 'learned', tool_pause: 'tools at work', computed: 'computed ahead' };

/** 1288490188 → "1.2 GiB". */
export function size(bytes) {
  let unit = 0;
  let value = bytes;
  while (value >= 1024 && unit < UNITS.length - 1) {
    value /= 1024;
    unit += 1;
  }
  return `${value < 10 && unit ? value.toFixed(1) : Math.round(value)} ${UNITS[unit]}`;
}

/** A rate with as many digits as tell something. */
export const perSecond = (rate) => (rate < 10 ? rate.toFixed(1) : String(Math.round(rate)));

/** Why requests wait, the most frequent reason first. */
export function reasons(numByReason) {
  return Object.entries(numByReason)
    .filter(([, num]) => num)
    .sort(([, one], [, other]) => other - one)
    .map(([reason, num]) => `${num}: ${REASONS[reason] ?? reason}`);
}

/** "12 min" of "745 s": one unit is enough to see at a glance. */
export function age(total) {
  if (total < 60) return `${Math.floor(total)} s`;
  if (total < 3600) return `${Math.floor(total / 60)} min`;
  if (total < 172800) return `${Math.floor(total / 3600)} h`;
  return `${Math.floor(total / 86400)} days`;
}

/** [how good, what it means] of an advisory's state. */
export const advisoryState = (state) => ADVISORY_STATES[state] ?? ['plain', state];

/** How good a node's state is. */
export const nodeState = (state) => NODE_STATES[state] ?? 'plain';

/** [how good, what it does] of an agent's run. */
export const runState = (state) => RUN_STATES[state] ?? ['plain', state];

export const place = (name) => PLACES[name] ?? name;

export const source = (name) => SOURCES[name] ?? name;
