/** The page that a sign-in link opens: it uses the link when the button is pressed, so that nothing that only looks at links uses it up. */

import { Api } from '../api.js';
import { changePerson, forgetKey } from '../sheet/leave.js';

const button = document.getElementById('go');
const said = document.getElementById('said');
const api = new Api(() => null);

button.addEventListener('click', async () => {
  button.disabled = true;
  try {
    const { owner } = await api.call('POST', 'v1/sign-in', { token: location.hash.slice(1) });
    forgetKey(); // it would go before the cookie
    changePerson(owner);
    location.replace('./');
  } catch (error) {
    said.textContent = error.message;
    button.hidden = error.status === 401; // a link that is used up stays so
    button.disabled = false;
  }
});
