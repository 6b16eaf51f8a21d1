/** Style that comes with code which is loaded later. */

import { h } from '../dom.js';

const added = new Map();

/** Adds a style sheet once; resolves when it applies, also where it cannot be loaded. */
export function addStyle(href) {
  if (!added.has(href)) {
    added.set(href, new Promise((resolve) => {
      document.head.append(h('link', { rel: 'stylesheet', href, on: { load: resolve, error: resolve } }));
    }));
  }
  return added.get(href);
}
