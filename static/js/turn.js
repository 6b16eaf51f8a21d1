/** A message with its answer, as the page keeps it: data without a DOM. */

/**
 * @typedef {object} Call
 * @property {string} id
 * @property {string} server
 * @property {string} tool     '' for a notice that tools of the server are missing
 * @property {string} arguments
 * @property {number} round    calls of one round were made together
 * @property {number} at       characters (code points) of the answer that stand before it
 * @property {'asking'|'running'|'done'|'failed'|'refused'|'stopped'|'missing'} state
 * @property {string} result   text from anywhere
 */

/**
 * @typedef {object} Turn
 * @property {string} id
 * @property {string} sessionId
 * @property {string} content
 * @property {{id: string, width?: number, height?: number}[]} pictures  of the message, as the server keeps them
 * @property {string} answer
 * @property {boolean} goesOn      its answer was cut
 * @property {Call[]} calls        tools that the answer called, in order
 * @property {string} reasoning    what the model thought before its answer
 * @property {number} seq          last piece seen, 0: none
 * @property {'sending'|'running'|'done'|'stopped'|'failed'|'lost'} status
 * @property {?string} adapter
 * @property {string[]} versions   ids of the versions of this message, its own among them
 * @property {?object} usage
 * @property {?object} timings
 * @property {?string} finishReason
 * @property {?{code: string, message: string, retryable: boolean}} error
 * @property {?object} request     the `message` frame, kept until `accepted`
 * @property {Turn[]} replaced     turns that an edit hides and that come back if it is refused
 */

/** Whether frames about this turn are still expected. */
export function isLive(turn) {
  return turn.status === 'sending' || turn.status === 'running';
}

/** The `message` frame of a turn. */
export function messageFrame({ id, sessionId, content, adapter, pictures }) {
  const frame = { type: 'message', id, session_id: sessionId, content, adapter };
  if (pictures.length) frame.pictures = pictures.map((picture) => picture.id);
  return frame;
}

/** The fields of a turn that the server owns, under the page's names. */
export function refreshed(raw) {
  return {
    content: raw.content,
    pictures: raw.pictures ?? [],
    answer: raw.status === 'running' ? '' : raw.answer ?? '',
    reasoning: raw.status === 'running' ? '' : raw.reasoning ?? '',
    calls: raw.status === 'running' ? [] : raw.calls ?? [],
    seq: 0,
    status: raw.status,
    adapter: raw.adapter ?? null,
    versions: raw.versions ?? [],
    usage: raw.usage ?? null,
    timings: raw.timings ?? null,
    finishReason: raw.finish_reason ?? null,
    error: null,
    goesOn: false,
  };
}

/** A turn as the page keeps it. */
export function newTurn(raw, sessionId) {
  return { id: raw.id, sessionId, ...refreshed(raw), request: null, replaced: [], sends: 0,
    stopRequested: false };
}

/** Where in a text its first `at` code points end, in the units that JavaScript counts. */
export function unitsAt(text, at) {
  let units = 0;
  for (let left = at; left > 0 && units < text.length; left -= 1) units += text.codePointAt(units) > 0xffff ? 2 : 1;
  return units;
}

/** Whether an answer has text behind its last call, from which it could go on. */
export function hasTextBehindCalls({ answer, calls }) {
  return unitsAt(answer, calls.at(-1)?.at ?? 0) < answer.length;
}

/** A random id. `crypto.randomUUID` exists in secure contexts only. */
export function newId() {
  const bytes = crypto.getRandomValues(new Uint8Array(16));
  return Array.from(bytes, (byte) => byte.toString(16).padStart(2, '0')).join('');
}
