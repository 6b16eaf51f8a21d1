/** The faces of a server that is not there yet, not there any more, or in trouble. */

import { h } from './dom.js';
import { seconds } from './format.js';

const POLL_EVERY_MS = 700; // chosen: the seconds on the screen should move
const QUIET_ATTEMPTS = 1; // a first quick retry mostly succeeds and needs no banner

const SAID_S = [5, 10, 20, 30, 45, 60, 120, 180, 300, 600]; // chosen: a screen reader says each of them

const TITLES = {
  starting: 'The engine is starting',
  draining: 'The server is restarting',
  failed: 'The engine did not start',
};
const CLOSE_REASONS = {
  1001: 'The server is restarting.',
  4408: 'The connection was too slow to keep up.',
  4429: 'Too many windows are connected to this server.',
};

/** A banner above the conversation. Hidden while all is well. */
export class StatusBanner {
  #timer = 0;
  #text = h('span', { role: 'status' });
  #time = h('span', { class: 'banner-time' });
  #mark = h('span', { class: 'hairpin' });
  #button = h('button', { type: 'button', class: 'button' });

  /**
   * @param {HTMLElement} root
   * @param {import('./protocol.js').ChatCore} core
   * @param {{retry: () => void, greet: () => void, unlock: () => void, readiness: () => Promise<object>}} actions
   */
  constructor(root, core, actions) {
    Object.assign(this, { root, core, actions });
    this.#button.addEventListener('click', () => this.press());
    root.append(this.#mark, this.#text, this.#time, this.#button);
  }

  /** Shows the state that the core is in now. */
  update() {
    clearTimeout(this.#timer);
    const { phase, silence, attempt } = this.core;
    if (phase === 'starting') this.#poll();
    else if (silence && phase !== 'locked' && !(phase === 'offline' && attempt > QUIET_ATTEMPTS)) this.#countSilence();
    else if (phase === 'offline') this.#countDown();
    else if (phase === 'locked') this.#show('This server asks for a key.', '', 'Enter key', () => this.actions.unlock());
    else if (phase === 'connecting' && this.core.attempt > QUIET_ATTEMPTS) this.#show('Reconnecting…', '', null);
    else this.root.hidden = true;
  }

  #countDown() {
    const left = (this.core.retryAt - performance.now()) / 1000;
    if (this.core.attempt > QUIET_ATTEMPTS) {
      const reason = CLOSE_REASONS[this.core.closeCode] ?? 'The connection to the server is lost.';
      this.#show(reason, `Next try in ${seconds(Math.ceil(left))}.`, 'Retry now', () => this.actions.retry());
    }
    this.#timer = setTimeout(() => this.#countDown(), 250);
  }

  /** For how long the server has said nothing, and what the page does about it. */
  #countSilence() {
    const { silence: { since, leaveAt }, phase, hasUnsent } = this.core;
    const now = performance.now();
    const forS = (now - since) / 1000;
    const said = SAID_S.findLast((step) => step <= forS) ?? SAID_S[0];
    const again = phase === 'ready' && leaveAt !== null ? `Connecting again in ${seconds(Math.ceil((leaveAt - now) / 1000))}` : 'Connecting again';
    this.#show(`The server has not answered for ${seconds(said)}.`, again + (hasUnsent ? '; your message is then sent again.' : '…'), null);
    this.#timer = setTimeout(() => this.#countSilence(), 250);
  }

  async #poll() {
    const state = await this.actions.readiness().catch(() => null);
    if (this.core.phase !== 'starting') return;
    if (state?.status === 'ready') {
      this.actions.greet(); // once: the answer to it goes on from here
      return;
    }
    if (state?.status === 'failed') {
      this.#show(TITLES.failed, state.stage ? `Stage: ${state.stage}.` : '', 'Try again', () => this.actions.greet());
    } else if (state) {
      this.#show(TITLES[state.status] ?? TITLES.starting, progress(state), null);
    }
    clearTimeout(this.#timer);
    this.#timer = setTimeout(() => this.#poll(), POLL_EVERY_MS);
  }

  #show(text, time, label, press = null) {
    this.root.hidden = false;
    if (this.#text.textContent !== text) this.#text.textContent = text;
    this.#time.textContent = time;
    this.#button.hidden = !label;
    this.#button.textContent = label ?? '';
    this.#mark.hidden = Boolean(label);
    this.press = press;
  }
}

function progress({ stage, elapsed_s: elapsed }) {
  const words = stage ? String(stage).replaceAll('_', ' ') : '';
  return [words, elapsed == null ? '' : seconds(elapsed)].filter(Boolean).join(' · ');
}
