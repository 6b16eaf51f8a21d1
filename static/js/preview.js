/** HTML, SVG and Mermaid diagrams of an answer, shown in a frame that has no origin, no storage and no network. Loaded when one is shown. */

import { h } from './dom.js';
import { toast } from './toast.js';

const FRAME = 'sandbox'; // the server sends it with a policy of its own: gateway/doors/pages/serving.py
const MERMAID = new URL('../vendor/mermaid/mermaid.tiny.js', import.meta.url);
const NAMES = { html: 'HTML', svg: 'SVG', mermaid: 'the diagram' };

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
  const element = h('iframe', { class: 'preview-frame', sandbox: 'allow-scripts', title: `Preview of ${NAMES[kind]}`, src: FRAME });
  const onMessage = ({ source, data }) => {
    if (source !== element.contentWindow || data !== 'ready') return;
    removeEventListener('message', onMessage);
    const show = (text) => source.postMessage(text, '*'); // the frame has no origin to name
    if (kind === 'mermaid') showDiagram(code, show);
    else show(kind === 'svg' ? svgPage(code) : code);
  };
  addEventListener('message', onMessage);
  return element;
}

function svgPage(code) {
  return `<!doctype html><style>body { display: grid; min-height: 100vh; margin: 0; place-items: center } svg { max-width: 100%; max-height: 100vh }</style>${code}`;
}

/** The frame cannot load anything, so what draws the diagram is handed to it. */
async function showDiagram(code, show) {
  const response = await fetch(MERMAID).catch(() => null);
  if (!response?.ok) return toast('The diagram could not be drawn: the server could not be reached.');
  show(diagramPage(code));
  return show(await response.text());
}

function diagramPage(code) {
  const shown = code.replace(/&/g, '&amp;').replace(/</g, '&lt;');
  return `<!doctype html><meta charset="utf-8"><title>Diagram</title><style>body { display: grid; min-height: 95vh; margin: 0; place-items: center;
    font-family: sans-serif } pre { white-space: pre-wrap } @media (prefers-color-scheme: dark) { body { background: #1d1b18; color: #eee } }</style>
    <body><pre>${shown}</pre><script>(${draw})()</script>`;
}

/** Runs in the frame. Mermaid’s strict level takes what could run out of a diagram’s labels. */
function draw() {
  addEventListener('message', async ({ data, source }) => {
    if (source !== parent) return;
    const library = document.createElement('script');
    library.textContent = data;
    document.head.append(library);
    const { mermaid } = window;
    const shown = document.querySelector('pre');
    mermaid.initialize({ startOnLoad: false, securityLevel: 'strict', theme: matchMedia('(prefers-color-scheme: dark)').matches ? 'dark' : 'neutral' });
    try {
      const { svg } = await mermaid.render('diagram', shown.textContent);
      shown.outerHTML = svg;
    } catch (error) {
      document.querySelectorAll('body > :not(pre)').forEach((left) => left.remove());
      shown.setAttribute('role', 'alert');
      shown.textContent = `This is no diagram that Mermaid can draw.\n${error.message}`;
    }
  }, { once: true });
}
