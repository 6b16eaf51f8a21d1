/** Speaks an answer to screen readers in whole sentences, not in tokens. */

import { h } from './dom.js';

const SENTENCE_END = /[.!?…:][)"'”’]?(?=\s)|\n+/g;
const KEEP = 6; // lines left in the region; older ones have been read

/**
 * Where the last complete sentence ends.
 *
 * @param {string} text
 * @param {number} from  what was spoken already
 * @returns {number} `from` if no sentence was completed since
 */
export function sentenceEnd(text, from) {
  let end = from;
  SENTENCE_END.lastIndex = from;
  for (let match; (match = SENTENCE_END.exec(text));) end = match.index + match[0].length;
  return end;
}

/** Markdown without its marks, as it should be read aloud. Every search in it is bounded: a model may write any text. */
export function speakable(markdown) {
  return markdown
    .replace(/```\w*/g, ' ')
    .replace(/^[ \t]*([-*+]|\d+\.|#+|>)[ \t]+/gm, '')
    .replace(/\|?[ \t]{0,9}:?-{3,99}:?[ \t]{0,9}(?=\||$)/gm, ' ')
    .replace(/\[([^\][]{0,999})\]\([^()]{0,999}\)/g, '$1')
    .replace(/`|~~/g, '')
    // At an end of a word they are marks; in `max_tokens`, 5*3 and 5 * 3 they are meant.
    .replace(/(?<![\p{L}\p{N}_*])[*_]{1,3}(?=\S)|(?<=\S)[*_]{1,3}(?![\p{L}\p{N}_*])/gu, '')
    .replace(/\|/g, ' ')
    .replace(/\s+/g, ' ')
    .trim();
}

/** Fills one `aria-live` region. */
export class Announcer {
  #turnId = null;
  #spoken = 0;

  /** @param {HTMLElement} region */
  constructor(region) {
    this.region = region;
  }

  /** Says something that is not an answer. */
  say(text) {
    this.region.append(h('p', {}, text));
    while (this.region.children.length > KEEP) this.region.firstChild.remove();
  }

  /** Follows an answer; the rest of a finished one is spoken at once. */
  follow(turn, finished) {
    if (turn.id !== this.#turnId) {
      this.#turnId = turn.id;
      this.#spoken = 0;
    }
    const end = finished ? turn.answer.length : sentenceEnd(turn.answer, this.#spoken);
    const text = speakable(turn.answer.slice(this.#spoken, end));
    this.#spoken = end;
    if (text) this.say(text);
  }
}
