/** The arrows "‹ 2/3 ›" of a message that has several versions. */

import { h, iconButton } from './dom.js';

export const NOT_YET = 'To see other versions, wait for the answer, and send again or dismiss a message that failed.';

/**
 * Builds the arrows of a turn, null if there is no other version.
 *
 * An arrow that leads nowhere keeps its place and the focus.
 *
 * @param {{id: string, versions: string[]}} turn
 * @param {(versionId: string, way: 'previous'|'next') => void} choose
 */
export function versionArrows({ id, versions }, choose) {
  if (versions.length < 2) return null;
  const at = versions.indexOf(id);
  const arrow = (way, label, other) => {
    const button = iconButton(way, label, () => other && choose(other, way));
    if (!other) button.setAttribute('aria-disabled', 'true');
    button.dataset.way = way;
    return button;
  };
  return h('div', { class: 'versions', role: 'group', 'aria-label': `Version ${at + 1} of ${versions.length}` },
    arrow('previous', 'Previous version', versions[at - 1]),
    h('span', { class: 'version-count', 'aria-hidden': 'true' }, `${at + 1}/${versions.length}`),
    arrow('next', 'Next version', versions[at + 1]));
}

/** Focuses the arrow that goes this way; returns the arrows' element, undefined if the turn has none. */
export function focusVersions(turnElement, way) {
  const arrows = turnElement?.querySelector('.versions') ?? undefined;
  arrows?.querySelector(`[data-way="${way}"]`)?.focus({ preventScroll: true });
  return arrows;
}
