/** The page that a sign-in link opens: it uses the link when the button is pressed, so that nothing that only looks at links uses it up. */

import { changePerson, forgetKey } from '../sheet/leave.js';

const WITHIN_MS = 30000; // as in api.js, of which nothing else would be used here
const button = document.getElementById('go');
const said = document.getElementById('said');

/** Uses the link; resolves to the status and the JSON of the reply, to 0 and null where there is none. */
async function signIn() {
  const request = {
    method: 'POST',
    headers: { 'Content-Type': 'application/json' },
    body: JSON.stringify({ token: location.hash.slice(1) }),
    signal: AbortSignal.timeout(WITHIN_MS),
  };
  try {
    const reply = await fetch('v1/sign-in', request);
    return { ok: reply.ok, status: reply.status, data: await reply.json() };
  } catch {
    return { ok: false, status: 0, data: null };
  }
}

button.addEventListener('click', async () => {
  button.disabled = true;
  const { ok, status, data } = await signIn();
  if (ok) {
    forgetKey(); // it would go before the cookie
    changePerson(data.owner);
    location.replace('./');
    return;
  }
  said.textContent = data?.error?.message ?? 'The server could not be reached.';
  button.hidden = status === 401; // a link that is used up stays so
  button.disabled = false;
});
