/** Code highlighting. The code for a language is loaded when one is shown. */

// Each grammar's names in Markdown beside its own.
const LANGUAGES = {
  bash: 'sh zsh shell console', c: 'h', cpp: 'cc c++ hpp h++', css: '', diff: 'patch', go: 'golang', ini: 'toml', java: 'jsp',
  javascript: 'js jsx mjs cjs typescript ts tsx', json: 'jsonc json5', python: 'py gyp ipython', rust: 'rs', sql: '',
  xml: 'html xhtml rss atom svg', yaml: 'yml',
};
const LONGEST = 20000; // characters; chosen: a longer block would take more than one frame

const names = new Map(Object.entries(LANGUAGES).flatMap(([name, others]) => [name, ...others.split(' ').filter(Boolean)].map((each) => [each, name])));
const loading = new Map();
let hljs = null;

/** Highlighted HTML of some code; null where the language is unknown, its code still to come, or the text too long. */
export function highlight(code, language) {
  const name = names.get(language?.toLowerCase());
  if (!name || code.length > LONGEST) return null;
  if (hljs?.getLanguage(name)) return hljs.highlight(code, { language: name, ignoreIllegals: true }).value;
  if (!loading.has(name)) loading.set(name, load(name).catch(() => loading.delete(name)));
  return null;
}

/** Loads a grammar, for pages those of their parts, and highlights what is plain. */
async function load(name) {
  const parts = name === 'xml' ? ['css', 'javascript', name] : [name];
  const [core, ...grammars] = await Promise.all([import('../vendor/highlight/core.min.js'),
    ...parts.map((each) => import(`../vendor/highlight/languages/${each}.min.js`))]);
  hljs = core.default;
  parts.forEach((each, index) => hljs.registerLanguage(each, grammars[index].default));
  for (const code of document.querySelectorAll('pre > code[class^="language-"]')) {
    const html = names.get(code.className.slice('language-'.length)) === name ? highlight(code.textContent, name) : null;
    if (html !== null) code.innerHTML = html;
  }
}
