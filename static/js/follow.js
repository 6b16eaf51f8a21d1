/** Where a conversation is scrolled to: a question that was just asked goes to the top once and stays there, or growing text is followed. Never pulls otherwise. */

const NEAR_PX = 32; // chosen: one line and a bit counts as the end

/** Watches one scrolling element. */
export class Follower {
  #lastTop = 0;
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
    new ResizeObserver(() => this.following && this.#jump()).observe(scroller);
  }

  /** To be called after the text has grown. */
  grown() {
    const { scrollHeight } = this.scroller;
    if (this.following) this.#jump();
    else if (this.#atEnd()) this.pill.hidden = true;
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
    const { scrollTop } = this.scroller;
    if (scrollTop < this.#lastTop && !this.#atEnd(2)) this.following = false;
    else if (this.#atEnd() && !this.raised) this.following = true;
    if (this.following) this.pill.hidden = true;
    this.#lastTop = scrollTop;
  }

  #jump() {
    this.scroller.scrollTop = this.scroller.scrollHeight;
    this.#lastTop = this.scroller.scrollTop;
  }

  #atEnd(near = NEAR_PX) {
    const { scrollHeight, scrollTop, clientHeight } = this.scroller;
    return scrollHeight - scrollTop - clientHeight < near;
  }
}
