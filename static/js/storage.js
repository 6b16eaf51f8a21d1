/** What the page remembers in this browser: the API key, the drafts and what is not sent yet. Storage may be refused. */

const KEY = 'overture.key';
const DRAFT = 'overture.draft.';
const NEW_CHAT = 'new';
const UNSENT = 'overture.unsent.';
const CALLS = 'overture.calls';
const AHEAD = 'overture.ahead';
const FOLLOW = 'overture.follow';
const RAIL = 'overture.rail';
const SETTINGS = 'overture.settings';
const PERSON = 'overture.person';
const THEME = 'overture.theme'; // theme.js reads it, too

function read(name) {
  try {
    return localStorage.getItem(name);
  } catch {
    return null;
  }
}

function write(name, value) {
  try {
    if (value) localStorage.setItem(name, value);
    else localStorage.removeItem(name);
  } catch {
    // Private windows and full disks: the page works, it only forgets.
  }
}

function parsed(text) {
  try {
    return JSON.parse(text);
  } catch {
    return null;
  }
}

/** The stored API key, or null. */
export const readKey = () => read(KEY);

/** Stores the API key; an empty one is removed. */
export const writeKey = (key) => write(KEY, key);

/** Calls back when another window of this browser has stored another key, or another person's id; null: removed it. */
export function onElsewhere(key, person) {
  addEventListener('storage', ({ key: name, newValue }) => ({ [KEY]: key, [PERSON]: person })[name]?.(newValue));
}

/** Loads the page anew when somebody signs out in another window. */
export function leaveWithOthers() {
  const look = (stored) => stored || location.reload();
  onElsewhere(look, look);
}

/** The unsent text of a session (null: of a new chat). */
export const readDraft = (sessionId) => read(DRAFT + (sessionId ?? NEW_CHAT)) ?? '';

/** Keeps the unsent text of a session; an empty one is removed. */
export const writeDraft = (sessionId, text) => write(DRAFT + (sessionId ?? NEW_CHAT), text);

/** The messages that the server has not acknowledged, as `ChatCore.keep` takes them. */
export function readUnsent() {
  const requests = [];
  try {
    for (const name of Object.keys(localStorage)) {
      if (!name.startsWith(UNSENT)) continue;
      const request = parsed(read(name));
      if (typeof request?.session_id === 'string' && typeof request.content === 'string') requests.push(request);
    }
  } catch {
    // As in `read`.
  }
  return requests;
}

/** Keeps such a message under its id; null: the server has it. */
export const writeUnsent = (id, request) => write(UNSENT + id, request && JSON.stringify(request));

/** Whether the list shows conversations of API calls, too. */
export const readCalls = () => read(CALLS) === 'yes';

/** Keeps that. */
export const writeCalls = (shown) => write(CALLS, shown ? 'yes' : '');

/** Whether the user lets the server read a question while it is typed. */
export const readAhead = () => read(AHEAD) === 'yes';

/** Keeps that choice. */
export const writeAhead = (isAllowed) => write(AHEAD, isAllowed ? 'yes' : '');

/** Whether the page follows an answer while it is written. */
export const readFollow = () => read(FOLLOW) === 'yes';

/** Keeps that choice. */
export const writeFollow = (follows) => write(FOLLOW, follows ? 'yes' : '');

/** Whether the list of conversations is put away on wide screens. */
export const readRailClosed = () => read(RAIL) === 'closed';

/** Keeps that choice. */
export const writeRailClosed = (isClosed) => write(RAIL, isClosed ? 'closed' : '');

/** What new conversations begin with: some of `system_prompt`, `temperature` and `max_tokens`. */
export const readSettings = () => parsed(read(SETTINGS)) ?? {};

/** Keeps that. */
export const writeSettings = (settings) => write(SETTINGS, JSON.stringify(settings));

/** The id of the person whose drafts are here, or null. */
export const readPerson = () => read(PERSON);

/** Keeps the id of the person whose drafts are here (leave.js). */
export const writePerson = (owner) => write(PERSON, owner);

/** The theme that was chosen, '' for the system's. */
export const readTheme = () => read(THEME) ?? '';

/** Keeps the theme. */
export const writeTheme = (theme) => write(THEME, theme);
