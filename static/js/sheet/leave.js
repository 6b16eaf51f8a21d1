/** Signing out. */

const KEY = 'overture.key'; // names in storage.js
const PERSON = 'overture.person';
const PERSONAL = [KEY, PERSON, 'overture.draft.', 'overture.unsent.'];

/**
 * Forgets who was signed in here: the key, and what was written and not sent.
 *
 * @param {string} [owner]  of the person who is signed in now: what that person wrote is kept
 */
export function forgetPerson(owner) {
  try {
    const forgotten = owner !== undefined && localStorage.getItem(PERSON) === owner ? [KEY] : PERSONAL;
    for (const name of Object.keys(localStorage)) {
      if (forgotten.some((beginning) => name.startsWith(beginning))) localStorage.removeItem(name);
    }
  } catch {
    // Storage may be refused, and then nothing was kept.
  }
}

/** Signs out, and shows the page as somebody sees it who has no key. */
export async function leave() {
  await fetch('v1/sign-out', { method: 'POST' }).catch(() => null); // a browser that was signed in by a link
  forgetPerson();
  history.replaceState(null, '', './');
  location.reload();
}
