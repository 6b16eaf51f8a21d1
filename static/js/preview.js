/** HTML and SVG of an answer, shown in a frame that has no origin, no storage and no network. Loaded when one is shown. */

import { h } from './dom.js';

const FRAME = 'sandbox'; // the server sends it with a policy of its own: gateway/doors/pages/serving.py

/** Shows the preview of a block of code in its place, or the code again. */
export function togglePreview(button) {
  const block = button.closest('.code');
  const pre = block.querySelector('pre');
  const shown = block.querySelector('.preview-frame');
  if (shown) shown.remove();
  else pre.after(frame(pre.textContent, button.dataset.kind));
  pre.hidden = !shown;
  button.textContent = shown ? 'Preview' : 'Code';
}

function frame(code, kind) {
  const element = h('iframe', { class: 'preview-frame', sandbox: 'allow-scripts', title: `Preview of ${kind.toUpperCase()}`, src: FRAME });
  const onMessage = ({ source, data }) => {
    if (source !== element.contentWindow || data !== 'ready') return;
    removeEventListener('message', onMessage);
    source.postMessage(kind === 'svg' ? svgPage(code) : code, '*'); // the frame has no origin to name
  };
  addEventListener('message', onMessage);
  return element;
}

function svgPage(code) {
  return `<!doctype html><style>body { display: grid; min-height: 100vh; margin: 0; place-items: center } svg { max-width: 100%; max-height: 100vh }</style>${code}`;
}
