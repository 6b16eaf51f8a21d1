/** Numbers, times and groups as words. Pure. */

const COUNT = new Intl.NumberFormat('en');
const MONTH = new Intl.DateTimeFormat('en', { month: 'long', year: 'numeric' });
const MOMENT = new Intl.DateTimeFormat(undefined, { dateStyle: 'full', timeStyle: 'short' });
const DAY_MS = 86400000;
const LAST_MS = 8.64e15; // what a Date can hold
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

/** The grey line under an answer. What was reused stands in the details behind it. */
export function summary({ adapter, timings, reasoning }) {
  if (!timings) return adapter ?? '';
  const first = timings.ttft_ms == null ? '' : `first ${reasoning ? 'thought' : 'word'} ${duration(timings.ttft_ms)}`;
  return [adapter, first, rate(timings.tpot_ms)].filter(Boolean).join(' · ');
}

const FULL_FROM = 0.75; // chosen

/** How full the context is behind these turns, as {share, used}; null where there is much room. */
export function fullness(turns, maxTokens) {
  const usage = turns?.findLast((turn) => turn.usage)?.usage;
  const used = usage ? usage.prompt_tokens + usage.completion_tokens : 0;
  return maxTokens && used >= FULL_FROM * maxTokens ? { share: Math.min(used / maxTokens, 1), used } : null;
}

/** Seconds as a person would say them: "12 s", "1 min 5 s". */
export function seconds(total) {
  const whole = Math.max(0, Math.round(total));
  return whole < 60 ? `${whole} s` : `${Math.floor(whole / 60)} min ${whole % 60} s`;
}

/** The heading under which a session of this day stands. Both times in milliseconds. */
export function dayLabel(time, now) {
  const days = daysBetween(time, now);
  if (days <= 0) return 'Today';
  if (days === 1) return 'Yesterday';
  if (days < 7) return 'This week';
  return days < 31 ? 'This month' : MONTH.format(time);
}

/** A moment in full. */
export const fullTime = (time) => MOMENT.format(time);

/** When a session was last used, in milliseconds; 0 where that is no time. */
export const lastUsed = ({ updated_at: atS }) => (Math.abs(atS * 1000) <= LAST_MS ? atS * 1000 : 0);

/** Sessions, newest first, as [heading, sessions, folder] triples; what is pinned comes first, then folders by name. */
export function grouped(sessions, now) {
  const groups = new Map();
  const put = (key, label, session, folder = null) => {
    if (!groups.has(key)) groups.set(key, [label, [], folder]);
    groups.get(key)[1].push(session);
  };
  for (const session of sessions.filter((each) => each.is_pinned)) put('pinned', 'Pinned', session);
  const filed = sessions.filter((each) => each.folder && !each.is_pinned).sort((a, b) => a.folder.localeCompare(b.folder));
  for (const session of filed) put(`in ${session.folder}`, session.folder, session, session.folder);
  for (const session of sessions.filter((each) => !each.is_pinned && !each.folder)) {
    const label = dayLabel(lastUsed(session), now);
    put(label, label, session);
  }
  return [...groups.values()];
}

/** A colour angle for an adapter name, always the same one. */
export function hue(name) {
  let angle = 0;
  for (const char of name) angle = (angle * HUE_STEP + char.codePointAt(0)) % 360;
  return angle;
}

function daysBetween(time, now) {
  const midnight = (moment) => new Date(moment).setHours(0, 0, 0, 0);
  return Math.round((midnight(now) - midnight(time)) / DAY_MS);
}
