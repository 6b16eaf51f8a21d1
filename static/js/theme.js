/** The theme that was chosen in this browser. A classic script, run before the first paint: a module would run after it. */

'use strict';

{
  const PAPER = { light: '#faf8f4', dark: '#171716' }; // --paper of base.css
  const own = new Map();

  /** Applies what is stored: `light`, `dark`, or nothing for what the system says. */
  globalThis.applyTheme = () => {
    let theme = null;
    try {
      theme = localStorage.getItem('overture.theme');
    } catch {
      // Storage is refused: the system's theme it is.
    }
    if (theme in PAPER) document.documentElement.dataset.theme = theme;
    else delete document.documentElement.dataset.theme;
    for (const meta of document.querySelectorAll('meta[name="theme-color"]')) {
      if (!own.has(meta)) own.set(meta, meta.content);
      meta.content = PAPER[theme] ?? own.get(meta);
    }
  };
  globalThis.applyTheme();
}
