/** The page of the API: reads openapi.json and shows its routes. */

import { copyFrom } from '../copy.js';
import { contained, h } from '../dom.js';
import { curlOf, fieldsOf, objectsIn, operationsByTag, resolve, typeText } from './schema.js';

const RETRY_MS = 2000; // while the engine starts there is no document yet

const content = document.querySelector('#content');
const contents = document.querySelector('#contents');
const status = document.querySelector('#status');

start();

async function start() {
  const api = await read();
  const groups = operationsByTag(api);
  contents.replaceChildren(...groups.map(contentsOf));
  content.replaceChildren(introduction(api), ...groups.map((group) => section(api, group)));
  addEventListener('hashchange', openTarget);
  openTarget();
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

/** Opens the operation that the address names. */
function openTarget() {
  const target = location.hash && document.getElementById(location.hash.slice(1));
  if (!target) return;
  if (target instanceof HTMLDetailsElement) target.open = true;
  target.scrollIntoView({ block: 'start' });
  (target.querySelector('summary') ?? target).focus({ preventScroll: true });
}

// ---------------------------------------------------------------------------------------------------------- the parts

function introduction(api) {
  const asksForKey = Object.values(api.paths).some((item) =>
    Object.values(item).some((operation) => operation.security?.length && !operation.security.some((kind) => !Object.keys(kind).length)));
  return h('section', { class: 'docs-intro' },
    h('h1', {}, 'The API of this server'),
    h('p', {}, api.info.description),
    h('p', {}, asksForKey
      ? 'This server asks for a key: send it as “Authorization: Bearer KEY” or as “X-Api-Key: KEY”.'
      : 'This server asks for no key.'),
    h('p', { class: 'note' }, `Version ${api.info.version}. Errors are JSON, in the shape of the API that was called; the message says what to do.`));
}

function contentsOf(group) {
  return h('section', { class: 'contents-group' },
    h('h2', {}, h('a', { href: `#${slug(group.name)}` }, group.name)),
    h('ul', {}, ...group.operations.map((operation) =>
      h('li', {}, h('a', { href: `#${operation.operationId}` }, method(operation), h('span', { class: 'contents-path' }, operation.path))))));
}

function section(api, group) {
  return h('section', { class: 'group', 'aria-labelledby': slug(group.name) },
    h('h2', { id: slug(group.name), tabIndex: -1 }, group.name),
    h('p', { class: 'group-text' }, group.description),
    ...group.operations.map((operation) => contained(() => card(api, operation))));
}

function slug(name) {
  return `group-${name.toLowerCase().replaceAll(' ', '-')}`;
}

function method({ method: name }) {
  return h('span', { class: `method ${name}` }, name.toUpperCase());
}

function card(api, operation) {
  return lazily({ class: 'operation', id: operation.operationId },
    [method(operation), h('code', { class: 'path' }, ...breakable(operation.path)), h('span', { class: 'operation-summary' }, operation.summary)],
    () => [
      operation.description && h('p', {}, ...marked(operation.description)),
      ...parameters(api, operation),
      ...body(api, operation),
      ...replies(api, operation),
      h('h3', {}, 'Example'),
      code(curlOf(operation, serverUrl())),
    ]);
}

/** A `details` whose content is made when it is first opened. */
function lazily(props, summary, make) {
  const details = h('details', props, h('summary', {}, ...summary));
  details.addEventListener('toggle', () => {
    if (details.childElementCount === 1) details.append(h('div', { class: 'inside' }, ...contained(make, () => [h('p', {}, 'This part could not be shown.')])));
  });
  return details;
}

/** Where the server is, also behind a proxy that puts it under a path. */
function serverUrl() {
  return new URL('.', location.href).href.replace(/\/$/, '');
}

function parameters(api, operation) {
  if (!operation.parameters) return [];
  const places = { path: 'in the path', query: 'in the query', header: 'header' };
  return [h('h3', {}, 'Parameters'), h('dl', { class: 'fields' }, ...operation.parameters.flatMap((parameter) => [
    h('dt', {}, h('code', {}, parameter.name), need(parameter.required)),
    h('dd', {},
      h('p', { class: 'type' }, [places[parameter.in], typeText(api, parameter.schema), byDefault(parameter.schema.default)].filter(Boolean).join(' · ')),
      parameter.description && h('p', {}, ...marked(parameter.description))),
  ]))];
}

function body(api, operation) {
  const media = operation.requestBody?.content?.['application/json'];
  if (!media) return [];
  return [h('h3', {}, 'Body', h('span', { class: 'aside' }, operation.requestBody.required ? 'JSON' : 'JSON, may be left out')), ...shape(api, media.schema)];
}

function replies(api, operation) {
  const rows = Object.entries(operation.responses).map(([code_, reference]) => {
    const reply = resolve(api, reference);
    const media = Object.entries(reply.content ?? {});
    const json = reply.content?.['application/json']?.schema;
    const title = [
      h('span', { class: `status ${code_[0] === '2' || code_[0] === '1' ? 'good' : ''}` }, code_),
      h('span', { class: 'reply-text' }, ...marked(reply.description)),
    ];
    const types = media.map(([type]) => type).filter((type) => type !== '*/*').join(', ');
    if (!json || !objectsIn(api, json).length) return h('li', { class: 'reply plain' }, ...title, types && h('span', { class: 'type' }, types));
    return h('li', {}, lazily({ class: 'reply' }, title, () => [types && h('p', { class: 'type' }, types), ...shape(api, json, true)]));
  });
  return [h('h3', {}, 'Responses'), h('ul', { class: 'replies' }, ...rows)];
}

/** The fields of a body; where it may be one of several objects, each with its name. In a reply, nothing is said of what may be left out. */
function shape(api, schema, isReply = false) {
  const objects = objectsIn(api, schema);
  if (!objects.length) return [h('p', { class: 'type' }, typeText(api, schema))];
  if (objects.length === 1) return [fields(api, objects[0].schema, isReply)];
  return objects.map(({ name, schema: inner }) =>
    lazily({ class: 'nested' }, [h('code', {}, name || inner.title || 'object')], () => [about(inner), fields(api, inner, isReply)]));
}

function fields(api, schema, isReply) {
  const rows = fieldsOf(api, schema);
  if (!rows.length) return h('p', { class: 'type' }, 'any fields');
  return h('dl', { class: 'fields' }, ...rows.flatMap((field) => [
    h('dt', {}, h('code', {}, field.name), need(field.isRequired && !isReply), field.isDeprecated && h('span', { class: 'need' }, 'deprecated')),
    h('dd', {},
      h('p', { class: 'type' }, [field.type, field.isNullable && 'may be null', !isReply && byDefault(field.default)].filter(Boolean).join(' · ')),
      field.description && h('p', {}, ...marked(field.description)),
      ...inner(api, field, isReply)),
  ]));
}

/** What a field's objects hold, folded. */
function inner(api, field, isReply) {
  const objects = objectsIn(api, field.schema);
  if (!objects.length) return [];
  const label = objects.length === 1 ? `Fields of ${objects[0].name || 'it'}` : `What it may hold: ${objects.length} kinds`;
  return [lazily({ class: 'nested' }, [label], () =>
    (objects.length === 1 ? [about(objects[0].schema), fields(api, objects[0].schema, isReply)] : shape(api, field.schema, isReply)))];
}

function about(schema) {
  return schema.description && h('p', {}, ...marked(firstParagraph(schema.description)));
}

function firstParagraph(text) {
  return text.split(/\n\s*\n/)[0];
}

function need(isRequired) {
  return isRequired && h('span', { class: 'need required' }, 'needed');
}

function byDefault(value) {
  if (value === undefined || value === null || (Array.isArray(value) && !value.length)) return '';
  return `without: ${JSON.stringify(value)}`;
}

/** Text whose `code` is set as code. */
function marked(text) {
  return text.split(/(`+[^`]+`+)/).map((part) => (part.startsWith('`') ? h('code', {}, part.replaceAll('`', '')) : part));
}

/** Long paths may be broken behind a slash. */
function breakable(path) {
  return path.split(/(?<=\/)/).flatMap((part, index) => (index ? [h('wbr'), part] : [part]));
}

function code(text) {
  const button = h('button', { type: 'button', class: 'code-copy' }, 'Copy');
  button.addEventListener('click', () => copyFrom(button, text));
  return h('div', { class: 'code' },
    h('div', { class: 'code-head' }, h('span', {}, 'curl'), button),
    h('pre', { tabIndex: 0 }, h('code', {}, text)));
}
