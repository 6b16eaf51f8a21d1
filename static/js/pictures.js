/** Pictures of messages: in the form that the server takes, and shown above a question. */

import { h } from './dom.js';
import { addStyle } from './sheet/style.js';

const TAKEN = new Set(['image/png', 'image/jpeg', 'image/webp', 'image/gif']);
const urls = new Map(); // id → promise of an address of the picture in this page
const loads = new WeakMap(); // element → what loads its picture, once it is almost in sight
const sights = new WeakMap(); // what scrolls → what sees that a picture is almost in sight there
const page = document.getElementById('scroller');

function sightOf(root) {
  const seen = (entries, sight) => {
    for (const { isIntersecting, target } of entries) {
      if (!isIntersecting) continue;
      sight.unobserve(target);
      loads.get(target)();
    }
  };
  if (!sights.has(root)) sights.set(root, new IntersectionObserver(seen, { root, rootMargin: '100%' }));
  return sights.get(root);
}

/** A picture as the server takes it; other kinds that this browser can show become PNG. */
export async function forServer(file) {
  if (TAKEN.has(file.type)) return file;
  const bitmap = await createImageBitmap(file).catch(() => {
    throw new Error('This browser cannot read it. PNG, JPEG, WebP and GIF can be sent.');
  });
  const canvas = new OffscreenCanvas(bitmap.width, bitmap.height);
  canvas.getContext('2d').drawImage(bitmap, 0, 0);
  return canvas.convertToBlob();
}

/**
 * The pictures of a question, each a link to itself.
 *
 * @param {{id: string, width?: number, height?: number}[]} pictures
 * @param {(id: string) => Promise<Blob>} read
 * @param {() => void} [grown]  called when one was drawn
 * @param {HTMLElement} [root]  what scrolls around them
 */
export function gallery(pictures, read, grown = () => {}, root = page) {
  addStyle('static/css/files.css');
  const items = pictures.map(({ id, width, height }, index) => {
    const label = `Picture ${index + 1}${width ? `, ${width} × ${height} pixels` : ''}`;
    const image = h('img', { alt: label, width, height, on: { load: grown } });
    const link = h('a', { target: '_blank', rel: 'noopener', title: 'Open the picture' }, image);
    const item = h('li', {}, link);
    loads.set(item, () => address(id, read).then((url) => Object.assign(image, { src: url }) && Object.assign(link, { href: url }),
      () => link.replaceWith(h('span', { class: 'note' }, `${label} could not be loaded.`))));
    sightOf(root).observe(item);
    return item;
  });
  return h('ul', { class: 'pictures', 'aria-label': 'Pictures' }, ...items);
}

function address(id, read) {
  if (!urls.has(id)) {
    const made = read(id).then((blob) => URL.createObjectURL(blob));
    made.catch(() => urls.delete(id));
    urls.set(id, made);
  }
  return urls.get(id);
}
