/** Reads JSON Schemas of an OpenAPI document: pure functions, no DOM. */

// Values, and alternatives, that are named in a type; chosen: more are no longer read.
const MOST_VALUES = 8;
const MOST_KINDS = 3;

/** What a `{"$ref": "#/components/…"}` names, or the schema itself. */
export function resolve(document, schema) {
  let found = schema;
  const seen = new Set();
  while (found?.$ref && !seen.has(found.$ref)) {
    seen.add(found.$ref);
    const keys = found.$ref.replace('#/', '').split('/').map((key) => key.replaceAll('~1', '/').replaceAll('~0', '~'));
    found = keys.reduce((value, key) => value?.[key], document);
  }
  return found ?? {};
}

/** The alternatives of a schema without null, and whether null is one of them. */
export function alternatives(document, schema) {
  const options = schema.anyOf ?? schema.oneOf ?? (schema.allOf?.length === 1 ? schema.allOf : [schema]);
  const isNull = (option) => option.type === 'null';
  return { options: options.filter((option) => !isNull(option)), isNullable: options.some(isNull) };
}

/** A few words for what a value may be, such as "list of strings" or "integer, 0 to 1000". */
export function typeText(document, schema) {
  const { options } = alternatives(document, schema);
  const texts = [...new Set(options.map((option) => oneType(document, option)))];
  if (texts.length > MOST_KINDS) return `one of ${texts.length} kinds`;
  return texts.join(' or ') || 'null';
}

function oneType(document, schema) {
  if (schema.anyOf ?? schema.oneOf ?? schema.allOf) return typeText(document, schema);
  if (schema.$ref) {
    const target = resolve(document, schema);
    const isObject = target.type === 'object' || target.properties;
    return isObject ? shortName(schema.$ref) : oneType(document, target);
  }
  if ('const' in schema) return JSON.stringify(schema.const);
  if (schema.enum) return values(schema.enum);
  if (schema.type === 'array') return `list of ${plural(typeText(document, schema.items ?? {}))}`.replace('list of one of', 'list of');
  if (schema.type === 'object' && !schema.properties && typeof schema.additionalProperties === 'object') {
    return `object of ${plural(typeText(document, schema.additionalProperties))}`;
  }
  return `${schema.type ?? 'any value'}${bounds(schema)}`;
}

function values(list) {
  const shown = list.slice(0, MOST_VALUES).map((value) => JSON.stringify(value));
  return shown.join(' | ') + (list.length > MOST_VALUES ? ' | …' : '');
}

/** vLLM's longer names say from which Python module they come. */
function shortName(reference) {
  return reference.split('/').at(-1).split('__').at(-1);
}

function plural(text) {
  return /^(string|integer|number|boolean|object)$/.test(text) ? `${text}s` : text;
}

function bounds(schema) {
  const low = schema.minimum ?? schema.exclusiveMinimum;
  const high = schema.maximum ?? schema.exclusiveMaximum;
  const isHuge = (value) => value !== undefined && Math.abs(value) > 1e15; // the limits of 64 bits say nothing to a reader
  if (low !== undefined && !isHuge(low)) {
    if (high !== undefined && !isHuge(high)) return `, ${low} to ${high}`;
    return schema.minimum === undefined ? `, above ${low}` : `, ${low} or more`;
  }
  if (schema.maxLength) return `, at most ${schema.maxLength} characters`;
  return '';
}

/** The objects that a value holds or is, whose fields can be shown below it. */
export function objectsIn(document, schema) {
  const found = [];
  for (const option of alternatives(document, schema).options) {
    const target = resolve(document, option);
    if (target.properties) found.push({ name: option.$ref ? shortName(option.$ref) : '', schema: target });
    else if (target.type === 'array' && target.items) found.push(...objectsIn(document, target.items));
    else if (target.anyOf ?? target.oneOf) found.push(...objectsIn(document, target));
    else if (typeof target.additionalProperties === 'object') found.push(...objectsIn(document, target.additionalProperties));
  }
  return found;
}

/** The fields of an object: needed ones first, then as the schema has them, deprecated ones last. */
export function fieldsOf(document, schema) {
  const required = new Set(schema.required ?? []);
  const fields = Object.entries(schema.properties ?? {}).map(([name, field]) => {
    const target = resolve(document, field);
    return {
      name,
      schema: field,
      type: typeText(document, field),
      isRequired: required.has(name),
      isNullable: alternatives(document, field).isNullable,
      isDeprecated: Boolean(field.deprecated),
      default: field.default,
      description: field.description ?? (field.$ref ? '' : target.description) ?? '',
    };
  });
  const rank = (field) => (field.isRequired ? 0 : field.isDeprecated ? 2 : 1);
  return fields.sort((a, b) => rank(a) - rank(b));
}

/** Every operation of the document by its tag, in the order of the tags. */
export function operationsByTag(document) {
  const groups = new Map(document.tags.map((tag) => [tag.name, { ...tag, operations: [] }]));
  for (const [path, item] of Object.entries(document.paths)) {
    for (const [method, operation] of Object.entries(item)) {
      groups.get(operation.tags[0])?.operations.push({ method, path, ...operation });
    }
  }
  return [...groups.values()].filter((group) => group.operations.length);
}

/** A command for a shell that calls the operation. `origin`: of the server, without a slash at the end. */
export function curlOf(operation, origin) {
  const path = operation.path.replace(/\{(\w+)\}/g, (_, name) => name.toUpperCase());
  const parts = [`curl ${origin}${path}`];
  if (operation.method !== 'get' && !(operation.method === 'post' && operation.requestBody)) {
    parts[0] = `curl -X ${operation.method.toUpperCase()} ${origin}${path}`;
  }
  const needsKey = operation.security?.length && !operation.security.some((kind) => !Object.keys(kind).length);
  if (needsKey) parts.push('-H "Authorization: Bearer $KEY"');
  const example = operation.requestBody?.content?.['application/json']?.example;
  if (example !== undefined) {
    parts.push("-H 'Content-Type: application/json'", `-d '${JSON.stringify(example, null, 2).replaceAll("'", "'\\''")}'`);
  }
  return parts.join(' \\\n  ');
}
