/** The page of the API: waits until the server has its OpenAPI document, then has Swagger UI show it. */

import { h } from './dom.js';

const RETRY_MS = 2000; // while the engine starts there is no document yet

const status = document.querySelector('#status');

followTheme();
start();

async function start() {
  const spec = await read();
  status.remove();
  globalThis.SwaggerUIBundle({
    spec,
    dom_id: '#content',
    deepLinking: true,
    docExpansion: 'list',
    defaultModelsExpandDepth: -1, // each operation shows its own schemas
    requestSnippetsEnabled: true,
    validatorUrl: null, // nothing is sent to other servers
  });
}

/** The document, as soon as there is one. */
async function read() {
  for (;;) {
    try {
      const response = await fetch('openapi.json');
      const body = await response.json();
      if (response.ok) return body;
      say(body.error?.message ?? `The server answered ${response.status}.`);
    } catch {
      say('The server could not be reached. Trying again…');
    }
    await new Promise((resolved) => setTimeout(resolved, RETRY_MS));
  }
}

function say(text) {
  status.replaceChildren(h('span', { class: 'hairpin', 'aria-hidden': 'true' }), ` ${text}`);
}

/** Swagger UI has a dark theme of its own, which a class switches on. */
function followTheme() {
  const system = matchMedia('(prefers-color-scheme: dark)');
  const root = document.documentElement;
  const apply = () => root.classList.toggle('dark-mode', root.dataset.theme ? root.dataset.theme === 'dark' : system.matches);
  system.addEventListener('change', apply);
  apply();
}
