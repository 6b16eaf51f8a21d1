/** What goes along with a message, shown as chips above the text field: files of text, read here in the browser, documents, which the server reads, and pictures, which it keeps. */

import { toast } from '../toast.js';
import { h, iconButton } from '../dom.js';
import { count } from '../format.js';
import { addStyle } from '../sheet/style.js';
import { written } from './blocks.js';

const CHARS_PER_TOKEN = 4; // of English, roughly
const SURELY = 2; // chosen: a text of so many times the model's tokens is too long, however its characters are spelled
const PASTED = 'Pasted text.txt'; // as the composer names what is pasted
const UTF_16 = { 255: ['utf-16le', 254], 254: ['utf-16be', 255] }; // first byte → encoding and second byte of its mark

/** The files of each conversation's unsent message; they are kept until the page is left, which the browser asks about then. */
export class Files {
  #bySession = new Map();
  #sessionId;
  #reading = null; // a document's name and conversation

  /**
   * @param {HTMLElement} box  where the chips go, first
   * @param {?string} sessionId  the open conversation, null for a new chat
   * @param {{changed: () => void, focus: () => void, maxBytes: () => number, maxTokens: () => number,
   *   maxDocumentBytes: () => number, maxImages: () => number,
   *   upload: (file: Blob) => Promise<object>, readDocument: (file: Blob) => Promise<object>}} composer
   */
  constructor(box, sessionId, composer) {
    this.#sessionId = sessionId;
    this.composer = composer;
    this.list = h('ul', { class: 'files', 'aria-label': 'Files', 'aria-live': 'polite', hidden: true });
    box.prepend(this.list);
    this.styled = addStyle('static/css/files.css');
    addEventListener('beforeunload', (event) => [...this.#bySession.values()].flat().length && event.preventDefault()); // the browser asks
  }

  get #files() {
    return this.#bySession.get(this.#sessionId) ?? [];
  }

  /** What stands before the message: each file with its name, in a fenced block. */
  get text() {
    return this.#files.map((file) => file.written ?? '').join('');
  }

  /** The pictures of the message, as the server keeps them. */
  get pictures() {
    return this.#files.filter((file) => file.picture).map((file) => file.picture);
  }

  /** Changes to another conversation. */
  open(sessionId) {
    this.#sessionId = sessionId;
    this.#draw();
  }

  /** Takes the files of a conversation away: they were sent. */
  drop(sessionId) {
    this.#bySession.delete(sessionId);
    this.#draw();
  }

  /** Reads files and adds them to the message of a conversation; says of each that cannot be added why. */
  async add(files, sessionId) {
    const problems = [];
    for (const file of files) {
      try {
        const before = () => this.#bySession.get(sessionId) ?? [];
        const name = file.name === PASTED ? unused(before()) : file.name;
        const read = isPicture(file) ? await this.#store(file, before()) : await this.#read(file, name, sessionId);
        const added = { name, size: file.size, ...read };
        this.#bySession.set(sessionId, [...before().filter((other) => !isReplacedBy(other, added)), added]);
      } catch (error) {
        problems.push(error.message);
      }
    }
    await this.styled;
    this.#draw();
    if (problems.length) toast(problems.join(' '), { ms: 10000 });
    this.composer.focus();
  }

  async #store(file, others) {
    const most = this.composer.maxImages();
    if (!most) throw new Error(`${file.name} cannot be sent: the model of this server reads no pictures.`);
    if (others.filter((other) => other.picture).length >= most) {
      throw new Error(`${file.name} was left out: a message may have ${most} pictures.`);
    }
    const { forServer } = await import('../pictures.js');
    try {
      const picture = await this.composer.upload(await forServer(file));
      return { picture, url: URL.createObjectURL(file) };
    } catch (error) {
      throw new Error(`${file.name} could not be added. ${error.message}`);
    }
  }

  async #read(file, name, sessionId) {
    const { documentType, documentOf } = await import('./documents.js');
    const mostBytes = this.composer.maxBytes();
    if (documentType(file.name, true)) refuseAbove(this.composer.maxDocumentBytes(), file, file.size, 'a document');
    else refuseAbove(mostBytes, file, file.size);
    const bytes = new Uint8Array(await file.arrayBuffer().catch(() => {
      throw new Error(`${file.name} could not be read.`); // a folder, or a file that is gone
    }));
    const text = decoded(bytes);
    const type = documentType(file.name, text === null);
    const found = type ? await this.#asDocument(file, type, documentOf, sessionId) : { text };
    if (found.text === null) throw new Error(`${file.name} is not a file of text, nor a document that can be read: PDF, DOCX, XLSX, HTML and CSV can.`);
    if (!found.text.trim()) throw new Error(`${file.name} is empty.`);
    const numTokens = Math.round(found.text.length / CHARS_PER_TOKEN);
    const most = this.composer.maxTokens();
    const about = `about ${count(numTokens)} token${numTokens === 1 ? '' : 's'}${numTokens > most ? `, the model reads ${count(most)}` : ''}`;
    if (numTokens > SURELY * most) throw new Error(`${file.name} has ${about}.`);
    refuseAbove(mostBytes, file, new Blob([found.text]).size);
    return { written: `${written(name, found.text)}\n\n`, text: found.text, about: [found.pages, about].filter(Boolean).join(' · ') };
  }

  async #asDocument(file, type, documentOf, sessionId) {
    this.#reading = { name: file.name, sessionId };
    this.#draw();
    try {
      return await documentOf(file, type, this.composer.readDocument);
    } finally {
      this.#reading = null;
    }
  }

  #draw() {
    const files = this.#files;
    const read = this.#reading?.sessionId === this.#sessionId && this.#reading;
    this.list.hidden = files.length === 0 && !read;
    this.list.replaceChildren(...files.map((file) => h('li', { class: 'file' },
      file.url && h('img', { src: file.url, alt: '', class: 'file-picture' }), nameOf(file),
      h('span', { class: 'file-size' }, file.about ?? size(file.size)), iconButton('close', `Remove ${file.name}`, () => this.#remove(file)))));
    if (read) this.list.append(h('li', { class: 'file is-read' }, h('span', { class: 'file-name' }, `Reading ${read.name}`)));
    this.composer.changed();
  }

  #remove(file) {
    this.#bySession.set(this.#sessionId, this.#files.filter((other) => other !== file));
    this.#draw();
    (this.list.querySelector('button') ?? { focus: this.composer.focus }).focus();
  }
}

/** Refuses a file with too many bytes. */
function refuseAbove(most, { name }, numBytes, what = 'a message') {
  if (numBytes > most) throw new Error(`${name} is too large: it has ${size(numBytes)}, and ${what} may have ${size(most)}.`);
}

/** The name on a chip; that of a text opens what will be sent of it. */
function nameOf({ name, text }) {
  if (text === undefined) return h('span', { class: 'file-name' }, name);
  const show = async () => (await import('./documents.js')).preview(name, text);
  return h('button', { type: 'button', class: 'file-name', title: 'Show the text that will be sent', on: { click: show } }, name);
}

/** A name for another text that was pasted. */
function unused(files) {
  const names = new Set(files.map(({ name }) => name));
  let number = 1;
  while (names.has(numbered(number))) number += 1;
  return numbered(number);
}

function numbered(number) {
  return number === 1 ? PASTED : PASTED.replace('.', ` ${number}.`);
}

/** Whether a file takes the place of another: a text of its name, or the same picture, as browsers name all that are pasted "image.png". */
function isReplacedBy(old, file) {
  return old.picture && file.picture ? old.picture.id === file.picture.id : old.name === file.name;
}

/** Whether a file is shown as a picture. A drawing in SVG is read as text. */
function isPicture({ type }) {
  return type.startsWith('image/') && type !== 'image/svg+xml';
}

/** Bytes as text with \n line ends; null if they are none. */
function decoded(bytes) {
  const [encoding, second] = UTF_16[bytes[0]] ?? [];
  try {
    const decoder = new TextDecoder(second !== undefined && bytes[1] === second ? encoding : 'utf-8', { fatal: true });
    const text = decoder.decode(bytes);
    return text.includes('\0') ? null : text.replace(/\r\n?/g, '\n');
  } catch {
    return null;
  }
}

function size(bytes) {
  if (bytes < 1000) return `${bytes} bytes`;
  return bytes < 1e6 ? `${Math.round(bytes / 1000)} kB` : `${(bytes / 1e6).toFixed(1)} MB`;
}
