/** Numbers, times and groups as words. Pure. */

const COUNT = new Intl.NumberFormat('en');
const MONTH = new Intl.DateTimeFormat('en', { month: 'long', year: 'numeric' });
const TIERS = ['device', 'host', 'disk'];
const DAY_MS = 86400000;
const PLACES = {
  slot: ['ready', 'In a slot of the device: it answers at once'],
  host: ['ready', 'In memory: it answers at once'],
  cached: ['ready', 'Kept in free memory of the device: it answers at once'],
  disk: ['on disk', 'On disk: it is loaded when it is asked'],
};
const HUE_STEP = 183; // chosen: the adapters of the demo lie at least 39° apart

/** 1984 → "1,984". */
export const count = (number) => COUNT.format(number);

/** 84.4 → "84 ms", 2140 → "2.1 s". */
export function duration(ms) {
  if (ms < 10) return `${ms.toFixed(1)} ms`;
  return ms < 1000 ? `${Math.round(ms)} ms` : `${(ms / 1000).toFixed(1)} s`;
}

/** The decode rate from the time per token; empty for a single token. */
export function rate(tpotMs) {
  if (!tpotMs) return '';
  const perSecond = 1000 / tpotMs;
  return `${perSecond < 10 ? perSecond.toFixed(1) : count(Math.round(perSecond))} tok/s`;
}

/** What the word that a question would come was worth. */
function readiness({ state, lead_ms: lead, late_ms: late }) {
  if (state === 'hit') return `in time, ${duration(lead)} ahead`;
  if (state === 'late') return `in part: ${duration(late)} too short`;
  return 'for nothing';
}

/** The grey line under an answer. What was reused stands in the details behind it. */
export function summary({ adapter, timings }) {
  if (!timings) return adapter ?? '';
  const first = timings.ttft_ms == null ? '' : `first word ${duration(timings.ttft_ms)}`;
  return [adapter, first, rate(timings.tpot_ms)].filter(Boolean).join(' · ');
}

/** All timings as [name, value] rows. */
export function timingRows({ adapter, timings, usage, advisory, finishReason }) {
  const { kv } = timings;
  const ms = (value) => (value == null ? '–' : duration(value));
  const rows = [
    ['Adapter', adapter ?? 'none (base model)'],
    ['Waited in the queue', ms(timings.queue_ms)],
    ['First word after', ms(timings.ttft_ms)],
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

/** Seconds as a person would say them: "12 s", "1 min 5 s". */
export function seconds(total) {
  const whole = Math.max(0, Math.round(total));
  return whole < 60 ? `${whole} s` : `${Math.floor(whole / 60)} min ${whole % 60} s`;
}

/** The heading under which a session of this day stands. Both times in milliseconds. */
export function dayLabel(time, now) {
  const days = Math.round((midnight(now) - midnight(time)) / DAY_MS);
  if (days <= 0) return 'Today';
  if (days === 1) return 'Yesterday';
  if (days < 7) return 'This week';
  return days < 31 ? 'This month' : MONTH.format(time);
}

/** Sessions, newest first, as [heading, sessions] pairs. */
export function groupByDay(sessions, now) {
  const groups = new Map();
  for (const session of sessions) {
    const label = dayLabel(session.updated_at * 1000, now);
    if (!groups.has(label)) groups.set(label, []);
    groups.get(label).push(session);
  }
  return [...groups];
}

/** Whether an adapter is ready, as a word and a sentence; both empty while nobody knows. */
export function adapterState(place) {
  return PLACES[place] ?? ['', ''];
}

/** The models whose names hold every word of the query. */
export function matching(models, query) {
  const words = query.toLowerCase().split(/\s+/);
  return models.filter(({ id }) => words.every((word) => id.toLowerCase().includes(word)));
}

/** A colour angle for an adapter name, always the same one. */
export function hue(name) {
  let angle = 0;
  for (const char of name) angle = (angle * HUE_STEP + char.codePointAt(0)) % 360;
  return angle;
}

function midnight(time) {
  return new Date(time).setHours(0, 0, 0, 0);
}
