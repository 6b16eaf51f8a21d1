/** The first screen of a new chat: a greeting and a few things worth trying. */

import { h, paintDot } from './dom.js';

const EXAMPLES = [
  { text: 'My secret word is marzipan.', why: 'Tell it a word, then ask for it later' },
  { text: 'Tell me a long story.', why: 'Watch a longer answer arrive, or stop it' },
  { text: 'Make a table of planets.', why: 'Tables, lists and code' },
  { text: 'Who are you?', why: 'the same model in another voice', adapter: 'pirate' },
];

// The examples are what the demo model can do; another one is not made to look foolish by them.
const DEMO_MODEL = 'overture-demo';

/**
 * Fills the example list: for the demo model only, without those whose adapter the server does not have. The invitation above it goes with it.
 *
 * @param {HTMLElement} list
 * @param {object[]} models
 * @param {(example: {text: string, adapter?: string}) => void} choose
 */
export function showExamples(list, models, choose) {
  const known = new Set(models.map((model) => model.id));
  const offered = known.has(DEMO_MODEL) ? EXAMPLES.filter(({ adapter }) => !adapter || known.has(adapter)) : [];
  list.previousElementSibling.hidden = !offered.length;
  list.replaceChildren(...offered.map((example) => h('li', {}, card(example, choose))));
}

function card(example, choose) {
  const why = h('span', { class: 'why' });
  if (example.adapter) {
    const dot = h('span', { class: 'dot' });
    paintDot(dot, example.adapter);
    why.append(dot, `${example.adapter} · `);
  }
  why.append(example.why);
  return h('button', { type: 'button', class: 'example', on: { click: () => choose(example) } },
    h('span', { class: 'example-text' }, example.text), why);
}
