/** Bars and lines. Each one stands beside the words that say the same, so screen readers pass it over. */

const SVG = 'http://www.w3.org/2000/svg';

/** An SVG element. */
function draw(tag, attributes, ...children) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

/** How full something is. */
export function bar(part, whole) {
  const width = whole > 0 ? Math.min(100, (100 * part) / whole) : 0;
  return draw('svg', { class: 'bar', 'aria-hidden': 'true', preserveAspectRatio: 'none' },
    draw('rect', { class: 'bar-used', width: `${width.toFixed(2)}%`, height: '100%' }));
}

/** The last minute of a figure, the newest at the right. */
export function sparkline(values, num) {
  const most = Math.max(...values, 1e-9);
  const from = num - values.length;
  const points = values.map((value, at) => `${from + at},${(27 - (25 * value) / most).toFixed(1)}`);
  return draw('svg', { class: 'spark', viewBox: `0 0 ${num - 1} 28`, 'aria-hidden': 'true', preserveAspectRatio: 'none' },
    draw('polyline', { points: points.join(' ') }));
}
