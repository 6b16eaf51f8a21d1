/** Style that comes with code which is loaded later. */

import { h } from '../dom.js';

const AGAIN_MS = 2000; // chosen
const added = new Map();

/** Adds a style sheet once; resolves when it applies, or could not be loaded and is tried again. */
export function addStyle(href) {
  if (!added.has(href)) {
    added.set(href, new Promise((resolve) => {
      const add = () => document.head.append(link);
      const link = h('link', { rel: 'stylesheet', href, on: { load: resolve, error: () => resolve(setTimeout(add, AGAIN_MS)) } });
      add();
    }));
  }
  return added.get(href);
}
