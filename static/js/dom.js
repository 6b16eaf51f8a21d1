/** Small helpers that build elements. Text is always set as text. */

import { hue } from './format.js';

const SVG = 'http://www.w3.org/2000/svg';

const PATHS = {
  copy: 'M8 8V5a1.5 1.5 0 0 1 1.5-1.5h9A1.5 1.5 0 0 1 20 5v9a1.5 1.5 0 0 1-1.5 1.5H16M5.5 8.5h9A1.5 1.5 0 0 1 16 10v9a1.5 1.5 0 0 1-1.5 1.5h-9A1.5 1.5 0 0 1 4 19v-9a1.5 1.5 0 0 1 1.5-1.5Z',
  close: 'M6 6l12 12M18 6 6 18',
  check: 'm5 12.5 4.5 4.5L19 7.5',
  redo: 'M19.5 12a7.5 7.5 0 1 1-2.2-5.3L19.5 9M19.5 4v5h-5',
  beside: 'M4 5h6.5v14H4V5ZM13.5 5H20v14h-6.5V5Z',
  edit: 'm4 20 1-4L16.5 4.5l3 3L8 19l-4 1ZM14 7l3 3',
  more: 'M6 12h.01M12 12h.01M18 12h.01',
  previous: 'm14.5 6-6 6 6 6',
  next: 'm9.5 6 6 6-6 6',
  pin: 'M9 4h6l-.8 6 3.3 3.5h-11L9.8 10 9 4ZM12 13.5V20',
};

/**
 * Builds an element.
 *
 * @param {string} tag
 * @param {object} [props]  properties; `class`, `role`, `aria-*`, `data-*` and the like become
 *   attributes, `on` maps event names to listeners; false, null and undefined are left out
 * @param {...(Node|string|null|undefined|false)} children
 */
export function h(tag, props = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (value === undefined || value === null || value === false) continue;
    if (name === 'on') {
      for (const [event, listener] of Object.entries(value)) element.addEventListener(event, listener);
    } else if (name in element && !name.includes('-')) {
      element[name] = value;
    } else {
      element.setAttribute(name, value === true ? '' : value);
    }
  }
  element.append(...children.filter((child) => child || child === 0));
  return element;
}

/** A line icon, hidden from screen readers. */
export function icon(name) {
  const svg = document.createElementNS(SVG, 'svg');
  svg.setAttribute('viewBox', '0 0 24 24');
  svg.setAttribute('aria-hidden', 'true');
  svg.classList.add('icon');
  const path = document.createElementNS(SVG, 'path');
  path.setAttribute('d', PATHS[name]);
  svg.append(path);
  return svg;
}

/** Gives a dot the colour of an adapter; a ring stands for the base model. */
export function paintDot(dot, adapter) {
  dot.classList.toggle('base', !adapter);
  dot.style.setProperty('--hue', adapter ? hue(adapter) : 0);
}

/** A button that shows only an icon; the label is its name and its tooltip. */
export function iconButton(name, label, onClick) {
  return h('button', { type: 'button', class: 'icon-button', title: label, 'aria-label': label,
    on: { click: onClick } }, icon(name));
}

/** Text as it was written. */
export function plainText(text) {
  return h('p', { class: 'plain' }, text.trim());
}

/**
 * Does something for one part of the page: what goes wrong there is reported and ends there.
 *
 * @param {() => any} act
 * @param {() => any} [instead]  what to do where it failed
 */
export function contained(act, instead = () => undefined) {
  try {
    return act();
  } catch (error) {
    reportError(error);
    return instead();
  }
}

/** Makes `target` look like `source` while keeping every node that did not change. */
export function morph(target, source) {
  const next = [...source.childNodes];
  next.forEach((node, index) => morphChild(target, target.childNodes[index], node));
  while (target.childNodes.length > next.length) target.lastChild.remove();
}

function morphChild(parent, old, node) {
  if (!old) {
    parent.append(node);
  } else if (old.nodeType === Node.TEXT_NODE && node.nodeType === Node.TEXT_NODE) {
    if (old.data !== node.data) old.data = node.data;
  } else if (old.isEqualNode(node)) {
    // Untouched, so that a selection in it survives.
  } else if (old.cloneNode(false).isEqualNode(node.cloneNode(false))) {
    morph(old, node);
  } else {
    old.replaceWith(node);
  }
}

const FITS_BY_ITSELF = CSS.supports('field-sizing', 'content');

/** Makes a textarea as high as its text, where the browser does not; the style sheet limits it. */
export function fitHeight(area) {
  if (FITS_BY_ITSELF) return;
  area.style.height = 'auto';
  area.style.height = `${area.scrollHeight}px`;
}

/** Whether this key press means "send": Enter alone, and not to confirm an input method's word. */
export function isSend(event) {
  return event.key === 'Enter' && !event.shiftKey && !event.isComposing && event.keyCode !== 229;
}
