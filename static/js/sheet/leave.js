/** Signing out. */

const PERSONAL = ['overture.key', 'overture.draft.', 'overture.person', 'overture.unsent.']; // names in storage.js

/** Forgets who was signed in here: the key, and what was written and not sent. */
export function forgetPerson() {
  try {
    for (const name of Object.keys(localStorage)) {
      if (PERSONAL.some((beginning) => name.startsWith(beginning))) localStorage.removeItem(name);
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
