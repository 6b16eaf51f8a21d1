/** Where a conversation is scrolled to: a question that was just asked goes to the top once and stays there, or growing text is followed. Never pulls otherwise. */

const NEAR_PX = 32; // chosen: one line and a bit counts as the end

/** Watches one scrolling element. */
export class Follower {
  #lastTop = 0;
  #lastRest = 0; // px below what is seen
  #height = 0;

  /**
   * @param {HTMLElement} scroller
   * @param {HTMLElement} pill  shown when text arrives below what is being read
   */
  constructor(scroller, pill) {
    this.scroller = scroller;
    this.pill = pill;
    this.following = true;
    this.raised = null; // the turn whose question went to the top
    scroller.addEventListener('scroll', () => this.#onScroll(), { passive: true });
    pill.addEventListener('click', () => this.toEnd());
    // The height of a turn is guessed until it is laid out, some frames after the jump to the end.
    const resized = new ResizeObserver(() => this.following && this.#jump());
    for (const each of [scroller, ...scroller.children]) resized.observe(each);
  }

  /** To be called after the text has grown. */
  grown() {
    const { scrollHeight } = this.scroller;
    if (this.following) this.#jump();
    else if (this.#rest < NEAR_PX) this.pill.hidden = true;
    else if (scrollHeight > this.#height) this.pill.hidden = false;
    this.#height = scrollHeight;
  }

  /** Puts a turn at the top, with room below for its answer to grow, and stays there. */
  raise(element) {
    this.#lower();
    this.raised = element;
    element.classList.add('raised');
    this.show(element);
  }

  #lower() {
    this.raised?.classList.remove('raised');
    this.raised = null;
  }

  /** Goes to the end and follows from there. */
  toEnd() {
    this.#lower();
    this.following = true;
    this.pill.hidden = true;
    this.#jump();
  }

  /** Stays where the reader is, whatever grows, until they scroll to the end. What is there now is no new text. */
  hold() {
    this.following = false;
    this.pill.hidden = true;
    this.#height = this.scroller.scrollHeight;
  }

  /** Puts an element at the top, and stays there as `hold` does. */
  show(element) {
    const { scroller } = this;
    let [top, frames] = [scroller.scrollTop, 10];
    // What comes into sight is laid out with the next frames, and moves the element away.
    const place = () => {
      if (scroller.scrollTop !== top) return;
      scroller.scrollTop += element.getBoundingClientRect().top - scroller.getBoundingClientRect().top;
      top = scroller.scrollTop;
      if (frames--) requestAnimationFrame(place);
    };
    this.hold();
    place();
  }

  #onScroll() {
    const [{ scrollTop }, rest] = [this.scroller, this.#rest];
    // Where turns above turn out lower than was guessed, the browser scrolls up as well, but what is below stays as much.
    if (scrollTop < this.#lastTop && rest > Math.max(this.#lastRest, 2)) this.following = false;
    else if (rest < NEAR_PX && !this.raised) this.following = true;
    if (this.following) this.pill.hidden = true;
    [this.#lastTop, this.#lastRest] = [scrollTop, rest];
  }

  #jump() {
    this.scroller.scrollTop = this.scroller.scrollHeight;
    [this.#lastTop, this.#lastRest] = [this.scroller.scrollTop, this.#rest];
  }

  get #rest() {
    const { scrollHeight, scrollTop, clientHeight } = this.scroller;
    return scrollHeight - scrollTop - clientHeight;
  }
}
