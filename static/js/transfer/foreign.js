/** Conversations as other programs export them, in the form that the server imports. Pure. */

const FORMAT = { format: 'overture-conversation', version: 1 };
const MAX_TITLE = 200; // the server's

/**
 * The conversations of a file: one or many of this server's, of ChatGPT's or Claude's `conversations.json`, of Open WebUI's export, or messages in
 * OpenAI's format.
 *
 * @param {object|object[]} data
 * @returns {object[]} each as `POST /api/sessions/import` takes it; what is not understood is left to the server to refuse
 */
export function conversationsOf(data) {
  const list = Array.isArray(data) ? data : [data];
  return list.map((item) => understood(item) ?? item);
}

/** A conversation whose form is not the one that it seems to have is left as it is. */
function understood(item) {
  try {
    return converted(item);
  } catch {
    return null;
  }
}

function converted(item) {
  if (!item || typeof item !== 'object' || item.format === FORMAT.format) return null;
  if (item.mapping && typeof item.mapping === 'object') return fromChatGpt(item);
  if (Array.isArray(item.chat_messages)) return fromClaude(item);
  if (item.chat && typeof item.chat === 'object') return fromOpenWebUi(item);
  return null;
}

/** A tree of messages, of which the branch that was shown last is taken. */
function fromChatGpt({ title, mapping, current_node: last, create_time: createdAt, update_time: updatedAt }) {
  const messages = branch((id) => mapping[id], mapping[last] ? last : lastOf(mapping)).map(({ message }) => message).filter(Boolean);
  return archive(title, createdAt, updatedAt, messages.map((message) => ({ role: message.author?.role, text: textOf(message.content?.parts), at: message.create_time })));
}

function fromClaude({ name, chat_messages: messages, created_at: createdAt, updated_at: updatedAt }) {
  return archive(name, seconds(createdAt), seconds(updatedAt), messages.filter(Boolean).map((message) => ({ role: message.sender === 'human' ? 'user' : message.sender,
    text: textOf(message.content?.map?.((part) => part?.text)) || message.text, at: seconds(message.created_at) })));
}

function fromOpenWebUi({ title, chat, created_at: createdAt, updated_at: updatedAt }) {
  const { history, messages } = chat;
  const shown = history?.messages && history.currentId ? branch((id) => history.messages[id], history.currentId, 'parentId') : messages ?? [];
  return archive(title ?? chat.title, createdAt, updatedAt, shown.filter(Boolean).map((message) => ({ role: message.role, text: message.content, at: message.timestamp })));
}

/** From a node up to the root, in the order of reading. A circle ends where it closes. */
function branch(nodeOf, id, parent = 'parent') {
  const found = [];
  const seen = new Set();
  for (let node = nodeOf(id); node && !seen.has(node); node = nodeOf(node[parent])) {
    seen.add(node);
    found.push(node);
  }
  return found.reverse();
}

const lastOf = (mapping) => Object.keys(mapping).findLast((id) => mapping[id]?.message);

/** Questions with the answers that follow them; words of tools and systems are left out. */
function archive(title, createdAt, updatedAt, messages) {
  const turns = [];
  let answers = false;
  for (const { role, text: raw, at } of messages) {
    if (typeof raw !== 'string' || !raw.trim()) continue;
    const text = raw.toWellFormed(); // half a character, as of an emoji that was cut, is no JSON to the server
    const last = turns.at(-1);
    if (role === 'assistant' && last) {
      Object.assign(last, { answer: last.answer ? `${last.answer}\n\n${text}` : text, status: 'done' });
      answers = true;
    } else if (role === 'user') {
      if (last && !answers) last.content += `\n\n${text}`;
      else turns.push({ id: String(turns.length), parent: last?.id ?? null, content: text, answer: '', status: 'stopped', created_at: moment(at) });
      answers = false;
    }
  }
  return { ...FORMAT, title: String(title ?? '').slice(0, MAX_TITLE).toWellFormed() || null, created_at: moment(createdAt), updated_at: moment(updatedAt), turns };
}

const textOf = (parts) => (Array.isArray(parts) ? parts.filter((part) => typeof part === 'string' && part).join('\n\n') : '');

const seconds = (iso) => Date.parse(iso ?? '') / 1000;

const moment = (at) => (Number.isFinite(at) ? at : 0);
