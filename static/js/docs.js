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
    plugins: [references],
  });
}

/**
 * The part of Swagger UI that follows references, for a document whose references all lead into itself. Its own reads the whole document
 * again for each operation that is opened, and first of all: seconds of a core.
 */
function references() {
  const resolveSubtree = async (whole, path) => ({ spec: resolved(whole, at(whole, path), []), errors: [] });
  return { fn: { resolveSubtree } };
}

function at(whole, path) {
  return path.reduce((node, name) => node?.[name], whole);
}

/** A copy of this node with what its references name in their places. `inside`: references that led here, which are not followed again. */
function resolved(whole, node, inside) {
  if (Array.isArray(node)) return node.map((each) => resolved(whole, each, inside));
  if (node === null || typeof node !== 'object') return node;
  const { $ref, ...beside } = node;
  if (typeof $ref === 'string' && !inside.includes($ref)) {
    const target = at(whole, $ref.slice('#/'.length).split('/'));
    return resolved(whole, { ...target, ...beside }, [...inside, $ref]);
  }
  return Object.fromEntries(Object.entries(node).map(([name, each]) => [name, resolved(whole, each, inside)]));
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
