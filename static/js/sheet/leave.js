/** Who writes here: signing out, and another person at the same page. */

const KEY = 'overture.key'; // names in storage.js
const PERSON = 'overture.person';
const WRITTEN = ['overture.draft.', 'overture.unsent.'];
const AWAY = 'overture.away.';

/** The stored names that begin with one of these. */
const named = (...beginnings) => Object.keys(localStorage).filter((name) => beginnings.some((each) => name.startsWith(each)));

function move(name, target) {
  localStorage.setItem(target, localStorage.getItem(name));
  localStorage.removeItem(name);
}

/**
 * Puts aside what another person has written and not sent, until that one is here again, and takes out what this one had left.
 *
 * @param {string} owner  of the person who is signed in now
 */
export function changePerson(owner) {
  try {
    const before = localStorage.getItem(PERSON);
    if (before === owner) return;
    for (const name of named(...WRITTEN)) move(name, `${AWAY}${before}.${name}`);
    const own = `${AWAY}${owner}.`;
    for (const name of named(own)) move(name, name.slice(own.length));
    if (owner) localStorage.setItem(PERSON, owner);
    else localStorage.removeItem(PERSON);
  } catch {
    // Storage may be refused, and then nothing was kept.
  }
}

/** Forgets the key that was stored here. */
export function forgetKey() {
  try {
    localStorage.removeItem(KEY);
  } catch {
    // As above.
  }
}

/** Signs out: forgets who was here and what was not sent, and shows the page as somebody sees it who has no key. */
export async function leave() {
  await fetch('v1/sign-out', { method: 'POST' }).catch(() => null); // a browser that was signed in by a link
  forgetKey();
  try {
    for (const name of named(PERSON, ...WRITTEN)) localStorage.removeItem(name);
  } catch {
    // As above.
  }
  history.replaceState(null, '', './');
  reload();
}

/** Loads the page anew for whoever is here now, without asking: what was attached to a message is the one's who was here before. */
export function reload() {
  addEventListener('beforeunload', (event) => event.stopImmediatePropagation(), true);
  location.reload();
}
